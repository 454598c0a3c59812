"""ResNet-9: eight convolutions, two residual blocks and a linear classifier.

This is the network of DAWNBench's fastest entries on CIFAR10 (github.com/davidcpage/cifar10-fast),
without its constant factor on the logits. The form with GroupNorm keeps no statistics of the data,
so DP-SGD can train it. The first convolution has a stride for images of 64 pixels or more, so the
other layers cost as much as on small images.
"""

import torch
from torch import nn

SIDE = 32  # of the first layer's maps, or up to 63
GROUPS = 8  # of GroupNorm, or fewer, so that the number divides the channels


class ResNet9(nn.Sequential):
    """The backbone, from (B, C, S, S) to (B, 8 * width) features; S >= 8.

    Args:
        shape: (C, S, S) of the images.
        width: number of channels of the first layer, >= 1.
        group_norm: whether to use GroupNorm instead of BatchNorm.
    """

    def __init__(self, shape: tuple[int, ...], width: int, group_norm: bool = False) -> None:
        # At width 1, the last maps may have one value per channel; a group needs several values.
        most = GROUPS if width > 1 else GROUPS // 2

        def layer(inputs: int, outputs: int, pool: bool = False, stride: int = 1) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, stride + 2, stride, padding=1, bias=False)
            if group_norm:
                norm: nn.Module = nn.GroupNorm(_groups(outputs, most), outputs)
            else:
                norm = nn.BatchNorm2d(outputs)
            # The two orders of pooling and ReLU are equal; this one has fewer values to compute.
            return nn.Sequential(convolution, norm, *[nn.MaxPool2d(2)] * pool, nn.ReLU())

        super().__init__(
            layer(shape[0], width, stride=max(1, shape[1] // SIDE)),
            layer(width, 2 * width, pool=True),
            Residual(layer(2 * width, 2 * width), layer(2 * width, 2 * width)),
            layer(2 * width, 4 * width, pool=True),
            layer(4 * width, 8 * width, pool=True),
            Residual(layer(8 * width, 8 * width), layer(8 * width, 8 * width)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )


class Residual(nn.Sequential):
    """Layers with a residual connection: the input is added to the output."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return (B, C, H, W) values plus the layers' output."""
        return values + super().forward(values)


def _groups(channels: int, most: int) -> int:
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)
