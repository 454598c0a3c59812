"""Fixed features: nothing to learn, nothing private, and the same bits for everybody."""

import numpy as np
import pytest
import torch
from torch import nn

from fed_dpsd.models import initialise, procedural, scattering
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.inference import learner, predict
from fed_dpsd.models.scattering import Scattering
from fed_dpsd.streams import Streams

SMALL = (1, 8, 8)


def drawn(count, shape=SMALL, seed=1):
    return procedural.areas(count, shape, Streams(seed).numpy("test images"))


def pixels(images):
    return 2 * torch.from_numpy(images).float() / 255 - 1


def classifier(shape=SMALL, width=4):
    return initialise(
        lambda: CLASSIFIERS["scattering"](shape, 10, width), Streams(0).torch("classifier")
    )


@pytest.fixture
def empty_memory():
    """Makes a scattering that remembers nothing yet."""

    def make(shape=SMALL, num_features=64):
        made = Scattering(shape, num_features)
        made._remembered.clear()
        return made

    return make


@pytest.mark.parametrize(
    ("shape", "most"), [(SMALL, 68), ((1, 28, 28), 833), ((3, 32, 32), 3_264)], ids=str
)
def test_images_of_any_shape_have_as_many_features_as_said_at_length_one(shape, most):
    images = pixels(drawn(3, shape))
    rows = scattering.coefficients(images)
    assert rows.shape == (3, most)
    assert scattering.num_coefficients(shape) == most
    assert Scattering(shape, 10_000).num_features == most
    assert rows.norm(dim=1) == pytest.approx([1, 1, 1], rel=1e-5)


@pytest.mark.parametrize("shape", [SMALL, (3, 8, 8)], ids=str)
def test_a_row_has_root_mean_square_one_whatever_the_image(shape):
    images = np.concatenate([drawn(6, shape), np.zeros((1, *shape), np.uint8)])
    images = np.concatenate([images, np.full((1, *shape), 255, np.uint8)])
    features = Scattering(shape, 64)(pixels(images))
    assert features.shape == (8, 64)
    assert features.square().mean(1).sqrt() == pytest.approx(np.ones(8), rel=1e-5)


def test_no_image_has_no_features():
    """An empty shard is trained too, else a private training would tell that it is empty."""
    assert Scattering(SMALL, 64)(torch.zeros(0, *SMALL)).shape == (0, 64)
    _, take = learner(classifier(), np.zeros((0, *SMALL), np.uint8), torch.device("cpu"))
    assert take(slice(None)).shape == (0, 64)


def test_nothing_learns_but_the_linear_layer():
    model = classifier()
    assert not list(model.backbone.parameters())
    assert model.fixed
    assert not classifier_of("cnn").fixed
    assert set(model.state_dict()) == {"classifier.weight", "classifier.bias"}
    assert model.classifier.weight.shape == (10, 64)


def classifier_of(name):
    return initialise(lambda: CLASSIFIERS[name](SMALL, 10, 4), Streams(0).torch("classifier"))


def test_wavelets_are_blind_to_brightness_and_the_mean_is_not():
    for scale in range(scattering.SCALES):
        waves = scattering.wavelets(scale)
        assert len(waves) == 2 * scattering.ORIENTATIONS
        assert waves.sum((1, 2, 3)).abs().max() < 1e-12
        assert waves.abs().sum((1, 2, 3)).min() > 0.1  # the control: they are not all zero
    assert scattering.low_pass().sum() == pytest.approx(1)


def off_diagonal(features):
    """The largest correlation of two features, and their mean one, without signs."""
    correlations = np.abs(np.corrcoef(features.double().numpy().T))
    others = correlations[~np.eye(len(correlations), dtype=bool)]
    return others.max(), others.mean()


def test_whitening_makes_features_of_other_procedural_images_nearly_uncorrelated():
    """2,000 fresh images; the control, the coefficients themselves, is far from it."""
    images = pixels(np.concatenate([drawn(1_000), procedural.lines(1_000, SMALL, rng())]))
    mean, components = scattering.whitening(SMALL, 16)
    rows = scattering.coefficients(images)
    largest, average = off_diagonal((rows - mean) @ components)
    assert largest < 0.3
    assert average < 0.06
    worst, plain = off_diagonal(rows)
    assert worst > 0.9
    assert plain > 0.15
    spreads = ((rows - mean) @ components).std(0)
    assert spreads.argmax() == 0  # the leading components are kept
    raw = (rows - mean) @ torch.linalg.qr(components)[0]
    assert raw.std(0)[0] / raw.std(0)[-1] > 2 * spreads[0] / spreads[-1]  # and levelled


def rng():
    return Streams(2).numpy("test images")


def test_whitening_is_the_same_bits_in_every_process():
    """Servers and clients have other numbers of threads; the control fits with two."""
    torch.set_num_threads(1)
    scattering.whitening.cache_clear()
    before = scattering.whitening(SMALL, 64)
    torch.set_num_threads(2)
    try:
        scattering.whitening.cache_clear()
        with torch.inference_mode():
            after = scattering.whitening(SMALL, 64)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(tensor.is_inference() for tensor in after)


def test_features_are_the_same_remembered_or_not(empty_memory):
    images = pixels(drawn(20))
    features = empty_memory()
    first = features(images)
    assert len(features._remembered) == 1
    assert features(images.clone()) is first
    assert torch.equal(empty_memory()(images), first)
    assert torch.equal(features._features(images), first)
    assert not torch.equal(features(-images), first)


def test_equal_bytes_of_another_type_are_other_images(empty_memory):
    features = empty_memory()
    images = pixels(drawn(2)).double()
    assert features(images).shape == (2, 64)
    bits = torch.from_numpy(images.numpy().view(np.float32).reshape(4, *SMALL))
    assert features(bits).shape == (4, 64)


def test_memory_is_bounded_and_forgets_the_oldest(empty_memory, monkeypatch):
    monkeypatch.setattr(scattering, "REMEMBERED", 3)
    features = empty_memory()
    batches = [pixels(drawn(2, seed=seed)) for seed in range(5)]
    rows = [features(batch) for batch in batches]
    assert [any(row is known for known in features._remembered.values()) for row in rows] == [
        *(False, False),
        *(True, True, True),
    ]
    assert all(torch.equal(features(b), r) for b, r in zip(batches, rows, strict=True))


def test_features_do_not_hang_on_the_batch_but_for_rounding():
    images = pixels(drawn(9))
    features = Scattering(SMALL, 64)
    alone = torch.cat([features(image[None]) for image in images])
    assert torch.allclose(features(images), alone, atol=1e-4)


@pytest.mark.parametrize("remembered", [True, False])
def test_a_layer_trains_on_features_that_were_predicted_with(empty_memory, remembered):
    """Tensors of inference mode cannot be trained on, and the memory is filled in it."""
    model, images = classifier(), drawn(12)
    model.backbone = empty_memory()
    if remembered:
        predict(model, images, torch.device("cpu"))
    layer, take = learner(model, images, torch.device("cpu"))
    assert layer is model.classifier
    loss = nn.functional.cross_entropy(layer(take(slice(None))), torch.arange(12) % 10)
    loss.backward()
    assert layer.weight.grad.norm() > 0
    model(pixels(images) / 2 + 0.5)[:, 0].sum().backward()  # not through `learner` either


def test_a_generator_can_be_trained_through_the_features():
    """Its images need a gradient, a flat one's too, and what is remembered has none."""
    images = torch.cat([pixels(drawn(3)), torch.zeros(1, *SMALL)]).requires_grad_()
    features = Scattering(SMALL, 64)
    features(images)[:, :5].sum().backward()
    assert torch.isfinite(images.grad).all()
    assert images.grad[:3].abs().amax((1, 2, 3)).min() > 0
    assert torch.equal(features(images).detach(), features(images.detach()))
