"""Fixed features: nothing to learn, nothing private, and the same bits everywhere."""

import functools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fed_dpsd.models import fixed_features, inference, initialise, patches, procedural, scattering
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.fixed_features import feature_cache, to_pixels, whitening
from fed_dpsd.models.inference import (
    Images,
    images_of,
    predict,
    sharing_images,
    trainable_part,
)
from fed_dpsd.models.patches import Patches
from fed_dpsd.models.scattering import Scattering
from fed_dpsd.progress import listening
from fed_dpsd.streams import Streams
from tests.every import every
from tests.listeners import Hearing

pytestmark = pytest.mark.usefixtures("few_examples")
SMALL = (1, 8, 8)


def drawn(count, shape=SMALL, seed=1):
    return procedural.areas(count, shape, Streams(seed).numpy("test images"))


def pixels(images):
    return to_pixels(torch.from_numpy(images))


def memory(features, images="asked"):
    return fixed_features._remembered(type(features), SMALL, features.num_features, images)


def classifier(name="scattering", shape=SMALL, width=4):
    return initialise(lambda: CLASSIFIERS[name](shape, 10, width), Streams(0).torch("classifier"))


@pytest.fixture
def empty_memory():
    """Makes features that remember nothing yet."""

    def make(shape=SMALL, num_features=64):
        fixed_features._remembered.cache_clear()
        return Scattering(shape, num_features)

    return make


@every(
    ("kind", "shape", "most"),
    [
        (Scattering, SMALL, 68),
        (Scattering, (1, 28, 28), 833),
        (Scattering, (3, 32, 32), 3_264),
        (Scattering, (1, 96, 96), 1_344),
        (Scattering, (1, 512, 512), 1_600),
        (Scattering, (3, 224, 224), 4_416),
        (Patches, SMALL, 2_304),
        (Patches, (1, 29, 29), 2_304),
        (Patches, (3, 32, 32), 2_304),
        (Patches, (1, 224, 224), 2_304),
    ],
)
def test_images_of_any_shape_have_as_many_features_as_said_at_length_one(kind, shape, most):
    images = pixels(drawn(3, shape))
    rows = kind.coefficients(images)
    assert rows.shape == (3, most)
    assert kind.num_coefficients(shape) == most
    assert kind(shape, 10_000).num_features == most
    assert rows.norm(dim=1) == pytest.approx([1, 1, 1], rel=1e-5)


def test_large_images_are_computed_in_parts_that_do_not_change_them(monkeypatch):
    images = pixels(drawn(5, (1, 96, 96))).requires_grad_()
    weights = torch.rand(Scattering.num_coefficients((1, 96, 96)), dtype=torch.float64)
    together = Scattering.coefficients(images)
    (slopes,) = torch.autograd.grad((together @ weights).sum(), images)
    sizes, original = [], scattering._coefficients
    monkeypatch.setattr(
        scattering, "_coefficients", lambda part: sizes.append(len(part)) or original(part)
    )
    monkeypatch.setattr(fixed_features, "AT_ONCE", 2 * 16 * 96**2)
    apart = Scattering.coefficients(images)
    assert torch.allclose(apart, together, atol=1e-12)
    assert sizes == [2, 2, 1]
    (each,) = torch.autograd.grad((apart @ weights).sum(), images)
    assert torch.allclose(each, slopes, atol=1e-12)
    assert sizes[3:] == [1, 2, 2]  # for their gradients, in the reverse order


def test_details_of_large_images_have_features():
    """Stripes of 3 pixels vanish when an image is reduced to 32."""
    line = torch.arange(96, dtype=torch.float64) * (2 * torch.pi / 3)
    stripes = torch.stack([line.sin().expand(96, 96), line.sin().expand(96, 96).T])[:, None] / 2
    across, along = Scattering.coefficients(stripes)
    assert (across - along).norm() > 0.3
    across, along = Patches.coefficients(stripes)  # the control: without details
    assert (across - along).norm() < 1e-6


def test_no_image_has_no_features():
    """An empty shard is trained too; otherwise private training would reveal that it is empty."""
    assert Scattering(SMALL, 64)(torch.zeros(0, *SMALL)).shape == (0, 64)
    model = classifier()
    _, take = trainable_part(model, np.zeros((0, *SMALL), np.uint8), torch.device("cpu"))
    assert take(slice(None)).shape == (0, 64)


@every("name", ["scattering", "patches"])
def test_nothing_learns_but_the_linear_layer(name):
    model = classifier(name)
    assert not list(model.backbone.parameters())
    assert model.fixed
    assert not classifier("cnn").fixed
    assert set(model.state_dict()) == {"classifier.weight", "classifier.bias"}
    assert model.classifier.weight.shape == (10, 64)


def test_a_folder_keeps_the_bits_of_whitening(tmp_path, monkeypatch):
    """Also the layout, on which rounding depends; damaged files are written again."""
    computed = whitening(Scattering, SMALL, 64)
    whitening(Scattering, SMALL, 64, tmp_path)
    files = sorted(tmp_path.iterdir())
    for content in (files[0].read_bytes(), b"damaged"):
        files[0].write_bytes(content)
        whitening.cache_clear()
        if content != b"damaged":
            monkeypatch.setattr(fixed_features, "_components", None)
        with torch.inference_mode():
            found = whitening(Scattering, SMALL, 64, tmp_path)
        monkeypatch.undo()
        for a, b in zip(found, computed, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
            assert not a.is_inference()
    assert sorted(tmp_path.iterdir()) == files
    assert files[0].read_bytes() != b"damaged"


# Patterns of patches take a second to fit, and more for each number of threads.
@pytest.mark.parametrize("kind", [Scattering, pytest.param(Patches, marks=pytest.mark.slow)])
def test_whitening_is_the_same_bits_in_every_process(kind):
    """Servers and clients have other numbers of threads; the control fits with two."""

    def fitted():
        whitening.cache_clear()
        patches.patterns.cache_clear()
        return whitening(kind, SMALL, 64)

    torch.set_num_threads(1)
    before = fitted()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            after = fitted()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(tensor.is_inference() for tensor in (*after, *patches.patterns(SMALL)))


def test_features_are_the_same_remembered_or_not(empty_memory):
    images = pixels(drawn(20))
    features = empty_memory()
    first = features(images)
    assert len(memory(features)) == 1
    assert features(images.clone()) is first
    assert torch.equal(empty_memory()(images), first)
    assert torch.equal(features._features(images), first)
    assert not torch.equal(features(-images), first)


def test_memory_is_bounded_and_forgets_the_oldest(empty_memory, monkeypatch):
    monkeypatch.setattr(fixed_features, "REMEMBERED", 3)
    features = empty_memory()
    batches = [pixels(drawn(2, seed=seed)) for seed in range(5)]
    rows = [features(batch) for batch in batches]
    assert [any(row is known for known in memory(features).values()) for row in rows] == [
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
    layer, take = trainable_part(model, images, torch.device("cpu"))
    assert layer is model.classifier
    loss = nn.functional.cross_entropy(layer(take(slice(None))), torch.arange(12) % 10)
    loss.backward()
    assert layer.weight.grad.norm() > 0
    model(pixels(images) / 2 + 0.5)[:, 0].sum().backward()  # not through `trainable_part` either


def test_a_generator_can_be_trained_through_the_features():
    """Its images need a gradient, a flat one's too, and what is remembered has none."""
    images = torch.cat([pixels(drawn(3)), torch.zeros(1, *SMALL)]).requires_grad_()
    features = Scattering(SMALL, 64)
    features(images)[:, :5].sum().backward()
    assert torch.isfinite(images.grad).all()
    assert images.grad[:3].abs().amax((1, 2, 3)).min() > 0
    assert torch.equal(features(images).detach(), features(images.detach()))


def test_records_and_asked_images_have_memories_of_their_own(empty_memory):
    """Otherwise an immediate answer would reveal that the requested images are records."""
    features, images = empty_memory(), pixels(drawn(4))
    with feature_cache("records"):
        first = features(images)
        assert features(images) is first
    assert not memory(features)
    asked = features(images)
    assert asked is not first
    assert torch.equal(asked, first)
    with feature_cache("nothing"):
        assert features(images) is not asked
    assert len(memory(features)) == len(memory(features, "records")) == 1


def test_the_layout_of_an_image_does_not_change_its_features(empty_memory):
    images = pixels(drawn(6, (3, 8, 8)))
    other = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(empty_memory((3, 8, 8))(images), empty_memory((3, 8, 8))(other))


def test_the_features_of_many_images_are_reported_as_they_are_computed():
    hearing = Hearing()
    with listening(hearing):
        trainable_part(classifier(), drawn(200), torch.device("cpu"))
    assert hearing.heard == [("images", 128, 200), ("images", 200, 200)]


def test_known_features_are_not_computed_again():
    images, known, cpu = drawn(300), [], torch.device("cpu")
    trainable_part(classifier(), images[:200], cpu, known=known)
    hearing = Hearing()
    with listening(hearing):
        _, take = trainable_part(classifier(), images, cpu, known=known)
    assert hearing.heard == [("images", 128, 172), ("images", 172, 172)]
    _, fresh = trainable_part(classifier(), images, cpu)
    assert torch.equal(take(slice(None)), fresh(slice(None)))


@every("most", [2**14, 0])
def test_incomplete_batches_are_filled_with_images_that_are_read_later(monkeypatch, most):
    """30 shards of 20 images need five batches of 128, and one each if no features are kept."""
    monkeypatch.setattr(inference, "_rows", OrderedDict())
    monkeypatch.setattr(inference, "ROWS", most)
    model, cpu, computed = classifier(), torch.device("cpu"), []
    shards = np.split(drawn(600), 30)
    alone = [trainable_part(model, shard, cpu)[1](slice(None)) for shard in shards]
    features = model.backbone.forward
    monkeypatch.setattr(
        model.backbone, "forward", lambda images: computed.append(len(images)) or features(images)
    )
    others = (image for shard in shards for image in shard)
    for _ in range(2):
        for shard, expected in zip(shards, alone, strict=True):
            _, take = trainable_part(model, shard, cpu, others=others)
            assert torch.equal(take(slice(None)), expected)
    assert computed == [128] * (5 if most else 60)
    assert most or not inference._rows


def test_kept_features_belong_to_one_kind_of_network(monkeypatch):
    monkeypatch.setattr(inference, "_rows", OrderedDict())
    images, cpu = drawn(20), torch.device("cpu")
    for model in (classifier("scattering"), classifier("patches")):
        _, alone = trainable_part(model, images, cpu)
        _, kept = trainable_part(model, images, cpu, others=iter(()))
        assert torch.equal(kept(slice(None)), alone(slice(None)))
    assert len(inference._rows) == 40


def test_clients_of_a_request_share_its_features(monkeypatch):
    model, images = classifier(), drawn(20)
    with sharing_images():
        first = images_of(images)
        assert images_of(images) is first
        assert images_of(images.copy()) is not first
        expected = first.predict(model)
        monkeypatch.setattr(model.backbone, "forward", None)
        assert (images_of(images).predict(model) == expected).all()
    assert images_of(images) is not first


def test_images_that_are_predicted_often_have_the_bits_of_others(monkeypatch):
    """200 images are a batch and a part of one; the second student computes no features."""
    build = functools.partial(CLASSIFIERS["scattering"], SMALL, 10, 4)
    students = [initialise(build, Streams(seed).torch("student")) for seed in (0, 1)]
    drawn_images = drawn(200)
    images, computed = Images(drawn_images), []
    features = type(students[0]).features
    for student in students:
        expected = predict(student, drawn_images, torch.device("cpu"))
        monkeypatch.setattr(
            type(student), "features", lambda *given: computed.append(given) or features(*given)
        )
        assert (images.predict(student) == expected).all()
        monkeypatch.undo()
    assert len(computed) == 2
    learning = initialise(functools.partial(CLASSIFIERS["mlp"], SMALL, 10, 4), torch.Generator())
    assert (images.predict(learning) == predict(learning, drawn_images, torch.device("cpu"))).all()
