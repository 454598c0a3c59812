"""A variational autoencoder of images.

Kingma, Welling: "Auto-Encoding Variational Bayes", arXiv 1312.6114.
"""

import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.models.generators import UpConvolution


class VAE(nn.Module):
    """An encoder from images to normal distributions of codes, and a decoder from codes to images.

    Args:
        shape: (C, size, size) of the images; size is a multiple of 4.
        latent_size: length of a code.
        width: number of channels of the first convolution.
    """

    def __init__(self, shape: tuple[int, ...], latent_size: int, width: int) -> None:
        super().__init__()
        channels, size, _ = shape
        small = (2 * width, size // 4, size // 4)
        features = small[0] * small[1] * small[2]
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(features, 2 * latent_size),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent_size, features),
            nn.LeakyReLU(0.2),
            nn.Unflatten(1, small),
            UpConvolution(2 * width, width),
            nn.LeakyReLU(0.2),
            UpConvolution(width, width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def encode(self, images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Draw (B, latent_size) codes for (B, C, H, W) images in [0, 1]."""
        return self._codes(images, rng)[0]

    def _codes(
        self, images: torch.Tensor, rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return drawn codes with the means and log-variances of their distributions."""
        mean, log_variance = self.encoder(2 * images - 1).chunk(2, dim=1)
        noise = torch.randn(mean.shape, generator=rng).to(mean)
        return mean + (log_variance / 2).exp() * noise, mean, log_variance

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Map (B, latent_size) codes to (B, C, H, W) images in [0, 1]."""
        return self.decoder(codes)

    def loss(self, images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Return the negative evidence lower bound, averaged over the images (Eq. 10).

        It is NaN if a decoded pixel is NaN. For such a pixel, the library's cross-entropy raises an
        error, which cannot be caught on a GPU.
        """
        codes, mean, log_variance = self._codes(images, rng)
        decoded = self.decode(codes)
        error = functional.binary_cross_entropy(decoded.nan_to_num(), images, reduction="sum")
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        return torch.where(decoded.isnan().any(), torch.nan, (error + divergence) / len(images))
