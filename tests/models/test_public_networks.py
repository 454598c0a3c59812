"""Public features from any network: identified by the digest of its weights, wherever they are."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torchvision import models

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.client.teachers import Teachers, make_teacher
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import load_data
from fed_dpsd.models import pretrained, public_networks
from fed_dpsd.models.footprint import weight_bytes
from fed_dpsd.models.public_networks import PublicNetwork, digest_of
from fed_dpsd.needs import needs_of
from tests.every import every
from tests.hospitals import Hospitals, federate, site_file

BACKBONE = "torchvision/shufflenet_v2_x0_5"
PIXELS = 32


def network(seed):
    """The tests' network, with weights from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return models.shufflenet_v2_x0_5().eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of two networks that differ in nothing but the weights."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        safetensors.torch.save_file(network(seed).state_dict(), folder / f"{seed}.safetensors")
    return [str(folder / f"{seed}.safetensors") for seed in (0, 1)]


def test_the_weights_count_in_what_a_run_needs(small, files):
    """A file, its tensors and the network are in memory together."""
    linear = network(0)
    linear.fc = nn.Identity()
    held = source(files[0]).num_bytes
    assert held == pytest.approx(weight_bytes(linear), rel=1e-3)  # counters have 8 bytes
    own, bundled = (needs_of(small(*keys)) for keys in (chosen(files[0]), ["model=pretrained"]))
    more = 3 * (held - pretrained.LITE2.num_bytes)
    assert own.here["images"] - bundled.here["images"] == pytest.approx(more, abs=10**6)


def source(file):
    return PublicNetwork(BACKBONE, PIXELS, digest_of("file", file), file)


def chosen(file, **changes):
    """The overrides that choose a file's features."""
    keys = {"backbone": BACKBONE, "weights": file, "pixels": PIXELS}
    keys |= {"digest": digest_of("file", file), **changes}
    return ["model=pretrained", *(f"model.{key}={value}" for key, value in keys.items() if value)]


@every("channels", [1, 3])
def test_features_are_the_inputs_of_the_networks_last_layer(files, channels):
    """Of enlarged pixels, normalised as ImageNet's; in inference mode first, as predictions are."""
    public_networks._loaded.cache_clear()
    images = torch.rand(3, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalised = (images - mean[:, None, None]) / std[:, None, None]
    enlarged = functional.interpolate(normalised, (PIXELS, PIXELS), mode="bilinear")
    whole, inputs = network(0), []
    whole.fc.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    before = torch.get_rng_state()
    with torch.inference_mode():
        whole(enlarged)
        rows = source(files[0]).features(2 * images - 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(rows, inputs[0], rtol=1e-4, atol=1e-5)
    assert rows.shape == (3, source(files[0]).num_features) == (3, 1024)
    pixels = (2 * images - 1).requires_grad_()
    source(files[0]).features(pixels).sum().backward()
    assert pixels.grad.abs().sum() > 0


def problems(small, *overrides):
    with pytest.raises(ConfigError) as error:
        small(*overrides)
    (problem,) = error.value.problems
    return problem


def test_a_missing_digest_is_printed_and_a_wrong_one_refused(small, files):
    """The other file has the same names and shapes."""
    own, other = (digest_of("file", file) for file in files)
    assert problems(small, *chosen(files[0], digest=None)).endswith(f"add model.digest={own}")
    said = problems(small, *chosen(files[0], digest=other))
    assert said.startswith(f"model.digest={other}: model.weights={files[0]} has {own}; give")


@every(
    ("changes", "said"),
    [
        ({"weights": "none.safetensors"}, r"none.safetensors: No such file .*; give a safetensors"),
        ({"weights": None}, r"model.backbone=\S+ has no weights; give model.weights=FILE"),
        ({"backbone": "resnet50"}, "backbone=resnet50 is unknown; write torchvision/NAME or timm/"),
        ({"backbone": "torchvision/resnet5O"}, "to torchvision; use torchvision/resnet50"),
        ({"backbone": "torchvision/squeezenet1_1"}, "does not end with a linear layer"),
        (
            {"backbone": "torchvision/resnet18"},
            r"does not fit .*: conv1.weight has shape none inst",
        ),
        (
            {"backbone": "torchvision/shufflenet_v2_x1_0"},
            r"has shape \[24, .*\] instead of \[58, .*\]; give",
        ),
        (
            {"backbone": "torchvision/vit_b_32"},
            r"model.pixels=32: \S+ does not take images of this",
        ),
        ({"backbone": "timm/resnet18"}, "timm is not installed; run pip install timm"),
        ({"digest": "sha256:12"}, "digest=sha256:12 must be sha256: and 64 hexadecimal digits"),
        ({"backbone": None}, "names no network; add model.backbone=NAME"),
    ],
)
def test_problems_are_named_before_any_data_are_read(small, files, monkeypatch, changes, said):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert re.search(said, problems(small, *chosen(files[0], **changes)))


def test_a_pickle_is_refused(small, tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(network(0).state_dict(), file)
    assert "is not a safetensors file; write it with" in problems(small, *chosen(str(file)))


def test_a_file_that_changes_after_the_check_is_refused(files, tmp_path, monkeypatch):
    """It is read and hashed at once; the control is the file as it was."""
    file = tmp_path / "own.safetensors"
    file.write_bytes(Path(files[0]).read_bytes())
    own = source(str(file))
    public_networks._loaded(own, torch.device("cpu"))
    public_networks._loaded.cache_clear()
    monkeypatch.setattr(PublicNetwork, "require", lambda _: None)
    file.write_bytes(Path(files[1]).read_bytes())
    with pytest.raises(UserError, match=r"own.safetensors has changed; give sha256:"):
        public_networks._loaded(own, torch.device("cpu"))


def test_other_weights_are_other_features_everywhere(small, files, tmp_path):
    """In rows, and in all caches of them and of teachers; the same file elsewhere is the same."""
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(files[0]).read_bytes())
    found = []
    for file in (files[0], str(copy), files[1]):
        experiment = small(*chosen(file), "num_clients=1")
        config, ids = experiment.config, np.arange(9)
        teacher = make_teacher(config, 0, 0)
        records = load_data(config.data, config.cache).train.take(ids)
        row = teacher.backbone.public.features(torch.from_numpy(records.images[:1] / 255).float())
        keys = Teachers(config, experiment.training, 0, records, ids).keys
        folder = pretrained._memory(
            (1, 8, 8), tmp_path, "asked", 1, teacher.backbone.public
        )._folder
        found.append((row, keys[0], folder, teacher.features_key[1].digest))
    first, same, other = found
    assert torch.equal(first[0], same[0])
    assert first[1:] == same[1:]
    assert not torch.allclose(first[0], other[0])
    assert not set(first[1:]) & set(other[1:])


def test_the_card_names_the_network_and_its_digest(small, files):
    experiment = small(*chosen(files[0]))
    notes = "; ".join(privacy_card(experiment, experiment.plan)["proven"][0]["notes"])
    assert f"{BACKBONE}'s with the weights {digest_of('file', files[0])}" in notes
    assert "whose training data is public by assumption" in notes
    assert "EfficientNet" not in notes


def test_a_hospital_answers_with_its_own_copy_of_the_same_file_only(deployed, files, tmp_path):
    """A message names no file of its machine, and none of the coordinator's."""
    chosen_by = deployed(*chosen(files[0]), "training=dp_sgd", "answers=probabilities")
    sent = chosen_by.to_json()

    def site(name, **changes):
        return open_hospital(site_file(tmp_path / name, models=["pretrained"], **changes))

    (tmp_path / "same").mkdir()
    copy = tmp_path / "same" / "own.safetensors"
    copy.write_bytes(Path(files[0]).read_bytes())
    experiment = site("same", weights="own.safetensors").experiment(sent, 0)
    assert experiment.config.model.weights == str(copy)
    texts = []

    class Reading(Hospitals):
        def push_messages(self, messages):
            texts.extend(message.content["meta"]["experiment"] for message in messages)
            return super().push_messages(messages)

    federate(chosen_by, Reading([tmp_path / "same" / "site.yaml"]))
    places = (files[0], str(tmp_path))
    assert [place in sent for place in places] == [True, True]
    assert not any(place in texts[0] for place in places)
    assert site("same", weights="own.safetensors").experiment(texts[0], 0) == experiment
    assert make_teacher(site("same", weights="own.safetensors").experiment(sent, 0).config, 0, 0)
    for name, weights, said in (
        ("other", files[1], f"model.digest is {digest_of('file', files[1])} at this site"),
        ("none", None, "model.digest is None at this site"),
    ):
        with pytest.raises(NotAllowed, match=said):
            site(name, weights=weights).experiment(sent, 0)
    large = sent.replace('"pixels": 32', '"pixels": 5000')
    with pytest.raises(NotAllowed, match="model.pixels is at most 512"):
        site("same", weights="own.safetensors").experiment(large, 0)
    with pytest.raises(UserError, match=r"weights=.*gone: No such file"):
        site("gone", weights="gone").experiment(sent, 0)


def test_a_message_cannot_make_a_hospital_import_another_module():
    """`this` prints its text on import."""
    network = PublicNetwork("this/x", 64, "sha256:" + 64 * "0", None)
    with pytest.raises(UserError, match="model.backbone=this/x is unknown"):
        network.version  # noqa: B018
    assert "this" not in sys.modules
