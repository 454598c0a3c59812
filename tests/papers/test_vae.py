"""The autoencoder: shapes, its bound, and that training tightens it."""

import math

import pytest
import torch

from fed_dpsd.models import initialise
from fed_dpsd.papers.vae import VAE
from fed_dpsd.streams import Streams


def made(shape, code_size=4):
    return initialise(lambda: VAE(shape, code_size, 4), Streams(0).torch("vae"))


def test_its_loss_is_the_error_and_the_divergence_from_the_prior():
    vae = made((1, 8, 8))
    with torch.no_grad():  # laws N(1, 1), and grey images whatever the code
        for layer in (vae.encoder[-1], vae.decoder[-2]):
            layer.weight.zero_()
            layer.bias.zero_()
        vae.encoder[-1].bias[:4] = 1
    images = torch.rand((3, 1, 8, 8), generator=Streams(0).torch("images"))
    loss = vae.loss(images, Streams(0).torch("codes")).item()
    assert loss == pytest.approx(64 * math.log(2) + 4 / 2, rel=1e-5)


def test_training_finds_two_kinds_of_images():
    vae = made((1, 8, 8))
    images = torch.zeros((64, 1, 8, 8))
    images[::2, :, :4] = 1
    rng = Streams(0).torch("codes")
    optimiser = torch.optim.Adam(vae.parameters(), 0.01)
    first = vae.loss(images, rng).item()
    for _ in range(60):
        loss = vae.loss(images, rng)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        error = (vae.decode(vae.encode(images, rng)) - images).abs().mean().item()
    assert vae.loss(images, rng).item() < first / 4
    assert error < 0.1
