"""The generator, which maps latent vectors to images in [0, 1]."""

import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.models.procedural import SIDE

CONTRAST = (1.0, 6.0)
BRIGHTNESS = (-4.0, 2.0)


class UpConvolution(nn.Conv2d):
    """A 3x3 convolution without bias, applied to images that are first doubled in size.

    Each pixel is repeated four times, so neighbours share products. A single transposed convolution
    of the small images therefore computes the same result with 16 products instead of 36.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) to (B, outputs, 2 H, 2 W)."""
        weight = self.weight.flip(2, 3).transpose(0, 1)
        margins = ((left, 1 - left, top, 1 - top) for top in (0, 1) for left in (0, 1))
        kernel = torch.stack([functional.pad(weight, margin) for margin in margins]).sum(0)
        kernel = kernel.contiguous(memory_format=torch.channels_last)  # so that the output is, too
        return functional.conv_transpose2d(images, kernel, stride=2, padding=1)


class Generator(nn.Module):
    """Up-sampling generator for data-free distillation (as in Fast-Datafree and DENSE).

    The normalisation before the sigmoid provides contrast; without it, an untrained generator makes
    only grey images. Images of more than 32 pixels are made with 32 and enlarged, so the number of
    weights does not grow.

    Args:
        shape: (C, size, size) of the images; size is a multiple of 4.
        latent_size: length of a latent vector.
        width: number of channels before the last convolution.
        normalised: whether pixels are normalised before the sigmoid.

    Attributes:
        in_bfloat16: whether the convolutions compute in bfloat16.
    """

    in_bfloat16 = False

    def __init__(
        self, shape: tuple[int, ...], latent_size: int, width: int, normalised: bool = True
    ) -> None:
        super().__init__()
        channels, self.size, _ = shape
        size = min(self.size, SIDE)
        self.normalised = normalised
        self.project = nn.Linear(latent_size, 2 * width * (size // 4) ** 2)
        self.small = (2 * width, size // 4, size // 4)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            UpConvolution(2 * width, 2 * width),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            UpConvolution(2 * width, width),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            *[nn.BatchNorm2d(channels)] * normalised,
            nn.Sigmoid(),
        )

    def draw_levels(self, rng: torch.Generator) -> None:
        """Draw the contrast and the brightness of an untrained generator."""
        contrast, brightness = (
            (low + (high - low) * torch.rand((), generator=rng)).item()
            for low, high in (CONTRAST, BRIGHTNESS)
        )
        self.set_levels(contrast, brightness)

    def set_levels(self, contrast: float, brightness: float) -> None:
        """Set the standard deviation and the mean of the normalised pixels before the sigmoid."""
        norm = self.layers[-2]
        assert isinstance(norm, nn.BatchNorm2d)
        norm.weight.data.fill_(contrast)
        norm.bias.data.fill_(brightness)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Map (B, latent_size) to (B, C, H, W) in [0, 1]."""
        small = self.project(latents).unflatten(1, self.small)
        if self.in_bfloat16:
            with torch.autocast(latents.device.type, torch.bfloat16):
                values = self.layers[:8](small)
            images = self.layers[8:](values.float())  # bfloat16 has at most 8 bits for a pixel
        else:
            images = self.layers(small)
        if self.size == images.shape[-1]:
            return images
        return functional.interpolate(images, self.size, mode="bilinear")
