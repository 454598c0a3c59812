"""Small classifiers for teachers and students. Input (B, C, H, W) float in [0, 1]."""

from typing import ClassVar

import torch
from torch import nn


class CNN(nn.Module):
    """Two 3x3 convolutions with pooling and a linear classifier; no normalisation layer.

    It trains on one record or one class as on many, and keeps no statistics of the data.
    """

    name: ClassVar[str] = "cnn"

    def __init__(self, shape: tuple[int, ...], num_classes: int, width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        self.backbone = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(2 * width * (size // 4) ** 2, num_classes)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """(B, F) output of the backbone, before the classifier."""
        return self.backbone(2 * images - 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, K) logits."""
        return self.classifier(self.features(images))


CLASSIFIERS: dict[str, type[nn.Module]] = {kind.name: kind for kind in (CNN,)}
