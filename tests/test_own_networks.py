"""Python as people use it: networks from functions, data frames, notebooks, sweeps."""

import functools
import json
import random
import shutil

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fed_dpsd
from fed_dpsd.config.bind import read_yaml
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.models import functions, initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.inference import Images
from fed_dpsd.models.own_networks import network_problem
from tests.conftest import SMALL

TEACHER, STUDENT = f"{__name__}.make_net()", f"{__name__}.Net()"


def make_net():
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(1, 4), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 10))


class Net(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.out = nn.Linear(16, num_classes)  # defined first, used last
        self.hidden = nn.Sequential(nn.Conv2d(shape[0], 4, 4, stride=4), nn.Flatten())
        self.hidden.append(nn.Linear(16, 16))

    def forward(self, images):
        return self.out(torch.relu(self.hidden(images)))


def batch_norm():
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))


def centred():
    class Centred(nn.Module):
        def forward(self, images):
            return images - images.mean(0)

    return nn.Sequential(Centred(), nn.Flatten(), nn.Linear(64, 10))


class Layer(nn.Module):
    """A layer with a function of its input and of how often it was called."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, inputs):
        self.calls += 1
        return self.function(inputs, self.calls)


def network_with(function, size=64):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, size), Layer(function), nn.Linear(size, 10))


def scaled_by_largest():
    return network_with(lambda x, _: x / x.abs().amax())


def scaled_by_mean_square():
    return network_with(lambda x, _: x / x.square().mean().sqrt())


def summed_in_order():
    return network_with(lambda x, _: x + x.cumsum(0))


def annealed():
    return network_with(lambda x, calls: x * (1 + 3e-5 * calls))


def scaled_by_large():
    return network_with(lambda x, _: x / x.abs().amax().clamp_min(3.0))


def scaled_by_largest_so_far():
    largest = [0.0]

    def scaled(inputs, _):
        if inputs.is_meta:
            return inputs
        largest[0] = max(largest[0], float(inputs.detach().abs().amax()))
        return inputs / largest[0]

    return network_with(scaled)


def centred_by_earlier_batches():
    centre = [0.0]

    def moved(inputs, _):
        if not inputs.is_meta and torch.is_grad_enabled():
            centre[0] = (centre[0] + float(inputs.detach().mean())) / 2
        return inputs - centre[0]

    return network_with(moved)


def of_four_images():
    """A layer of the positions of four patches, which look like a batch of four."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.out = nn.Linear(4, 16), nn.Linear(64, 10)

        def forward(self, images):
            patches = images.reshape(len(images), 4, 16) + self.positions(torch.eye(4))
            return self.out(patches.flatten(1))

    return Positions()


def squeezing():
    class Squeezed(nn.Module):
        def forward(self, images):
            return images.squeeze()

    return nn.Sequential(nn.Conv2d(1, 8, 8), Squeezed(), nn.Linear(8, 10))


def without_affine():
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4, affine=False), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 36, 10))


def dropping():
    return network_with(lambda x, _: x * (random.random() < 2))


def dropping_by_numpy():
    return network_with(lambda x, _: x * (np.random.rand() < 2))  # noqa: NPY002


def many_features():
    return nn.Sequential(nn.Upsample(72), nn.Flatten(), nn.Linear(72 * 72, 10))


def in_place():
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 36, 10))


class Unused(Net):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.spare = nn.Linear(16, 16)


class Frozen(Net):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.hidden.requires_grad_(False)


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def softmax():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))


def five_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def own_weights():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    network.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return network


def own_buffer():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    network.register_buffer("mean", torch.ones(1))
    return network


def crashing():
    raise KeyError("weights")


@pytest.fixture
def forgotten(monkeypatch):
    """A process that was never given a function."""
    known = {name: build for name, build in CLASSIFIERS.items() if not name.endswith("()")}
    monkeypatch.setattr(functions, "_MADE", {})
    for name in CLASSIFIERS.keys() - known.keys():
        monkeypatch.delitem(CLASSIFIERS, name)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run whose networks come from functions; to be read only."""
    out = tmp_path_factory.mktemp("own")
    return fed_dpsd.run(
        *SMALL, "rounds=2", f"out={out}", teacher=make_net, student=Net, progress=False
    )


def test_a_runs_networks_come_from_functions_which_it_records_by_name(own):
    model = yaml.safe_load((own.folder / "config.yaml").read_text())["model"]
    assert (model["teacher"], model["student"]) == (TEACHER, STUDENT)
    assert isinstance(own.student.model.backbone, Net)
    images = np.zeros((2, 1, 8, 8), np.uint8)
    assert own.student.predict(images).shape == (2, 10)
    # The function of the teachers has not been reviewed; the student is post-processing.
    assert TEACHER in own.privacy.review
    assert STUDENT not in own.privacy.review


def test_a_resumed_run_needs_its_functions(own, tmp_path, forgotten):
    half = tmp_path / "half"
    shutil.copytree(own.folder, half)
    facts = json.loads((half / "summary.json").read_text()) | {"status": "failed"}
    (half / "summary.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=rf"model.teacher={TEACHER[:-2]}\(\) .*teacher=make_net"):
        fed_dpsd.resume(half, progress=False)
    with pytest.raises(UserError, match=r"model.student=.* give it .*student=Net"):
        fed_dpsd.resume(half, teacher=make_net, progress=False)
    again = fed_dpsd.resume(half, teacher=make_net, student=Net, progress=False)
    assert again.summary["student_sha256"] == own.summary["student_sha256"]


def test_an_exported_student_needs_its_function(own, tmp_path, forgotten):
    functions.add_functions({"teacher": make_net, "student": Net})
    file = own.export(tmp_path / "model")
    del CLASSIFIERS[STUDENT]
    with pytest.raises(UserError, match=r"fed_dpsd.load_student\(FILE, student=Net\)"):
        fed_dpsd.load_student(file)
    assert fed_dpsd.load_student(file, student=Net).network.architecture == STUDENT


def test_networks_that_cannot_be_used_are_refused_with_the_reason(forgotten):
    expected = {
        softmax: "without a softmax",
        five_classes: r"last layer is torch.nn.Linear\(..., 10\)",
        own_weights: "there is no rule for the weights",
        own_buffer: "its buffer backbone.mean would not be set",
        crashing: "KeyError: 'weights'",
        batch_norm: "depends on the other images of a batch",
        centred: "depends on the other images of a batch",
        make_net: "a layer draws random numbers in training, as dropout does",
        in_place: "Opacus cannot compute .*modified inplace\\); use inplace=False",
        scaled_by_largest: "depends on the other images of a batch",
        scaled_by_mean_square: "depends on the other images of a batch",
        scaled_by_large: "depends on the other images of a batch",
        scaled_by_largest_so_far: "let no layer keep a state",
        centred_by_earlier_batches: "let no layer keep a state",
        of_four_images: "Opacus cannot compute the gradient of each record",
        squeezing: r"returns \(10,\) for one image, not \(1, 10\)",
        summed_in_order: "depends on the other images of a batch",
        annealed: "let no layer keep a state",
        dropping: "a layer draws random numbers in training",
        dropping_by_numpy: "a layer draws random numbers in training",
        many_features: "5,184 inputs of a linear layer: products are exact for 4,096 at most",
        Unused: "its weights backbone.spare.weight are frozen or unused",
        Frozen: "its weights backbone.hidden.0.weight are frozen or unused",
    }
    for make, problem in expected.items():
        with pytest.raises(ConfigError, match=problem):
            fed_dpsd.run("training=dp_sgd", teacher=make, progress=False)
    never = {softmax, five_classes, own_weights, own_buffer, crashing, squeezing}
    for make in (*(expected.keys() - never), Net, linear, without_affine):  # the controls
        name = functions.add_functions({"teacher": make})["teacher"]
        bounds = make in (Net, linear, without_affine)
        assert network_problem(name, (1, 8, 8), 10, 1, bounds_gradients=bounds) == "", make


@pytest.mark.parametrize("training", ["dp_merf", "gep"])
def test_a_linear_network_learns_no_generated_images(training, forgotten):
    settings = ["method=dp_merf"] if training == "dp_merf" else ["training=gep", "method=central"]
    with pytest.raises(ConfigError, match=r"model.teacher=.*linear\(\): training=.* are fixed"):
        fed_dpsd.run(*settings, teacher=linear, progress=False)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"teacher": lambda: make_net()}, "has no name to record"),
        ({"student": 5}, "has no name to record"),
        ({"teacher": nn.Conv2d}, "must take no arguments, or an image shape"),
        ({"teacher": make_net, "engine": "flower"}, "needs engine=local"),
    ],
)
def test_what_is_no_function_of_a_network_is_an_error(settings, problem, forgotten):
    with pytest.raises(UserError, match=problem):
        fed_dpsd.run(*SMALL, progress=False, **settings)


def test_a_cached_teacher_of_another_function_of_the_same_name_is_not_used(forgotten):
    name = functions.add_functions({"teacher": make_net})["teacher"]
    before = functions.network_digest(name, (1, 8, 8), 10)
    assert functions.network_digest(name, (1, 8, 8), 10) == before

    def make_other():
        network = make_net()
        network[2] = nn.Tanh()  # weights of the same shapes
        return network

    make_other.__qualname__ = "make_net"
    assert functions.add_functions({"teacher": make_other})["teacher"] == name
    assert functions.network_digest(name, (1, 8, 8), 10) != before


def test_history_is_a_data_frame(own):
    history = own.history()
    assert list(history.index) == [1, 2]
    assert "rounds" not in history  # it is constant
    assert list(history["answered_queries"]) == [64, 128]
    last = read_yaml(own.folder / "summary.json")["accuracy"]["student"]
    assert history["student_accuracy"][2] == last


def test_a_notebook_shows_the_result_its_privacy_and_its_images(own):
    html = own._repr_html_()
    assert str(own) in html  # the result line has no character that HTML escapes
    assert "epsilon proven: " in html
    assert 'src="data:image/png;base64,iVBOR' in html


@pytest.mark.slow
def test_a_sweep_and_a_report_in_python(tmp_path):
    """Two runs, and all figures of a report: ten seconds."""
    pandas = pytest.importorskip("pandas")
    settings = (*SMALL, "rounds=1", "seed=0,1")
    swept = fed_dpsd.sweep(*settings, out=tmp_path / "sweep", progress=False)
    assert [run.summary["seed"] for run in swept.runs] == [0, 1]
    assert isinstance(swept.results(), pandas.DataFrame)
    assert list(swept.results()["seed"]) == [0, 1]
    page = fed_dpsd.report(swept, out=tmp_path / "report")
    assert page.suffix == ".html"
    assert page.is_file()
    assert fed_dpsd.report(swept.runs[0], out=tmp_path / "one").is_file()
    with pytest.raises(UserError, match="diverged"):
        fed_dpsd.sweep(
            *settings, "teacher.learning_rate=1e30", out=tmp_path / "bad", progress=False
        )


def test_a_linear_network_cannot_move_images(forgotten):
    with pytest.raises(ConfigError, match=r"teacher.shift=2: model.teacher=.*linear\(\) computes"):
        fed_dpsd.run("training=plain", "teacher.shift=2", teacher=linear, progress=False)


def mirrored():
    return nn.Sequential(Layer(lambda x, _: x.flip(-1)), nn.Flatten(), nn.Linear(64, 10))


def test_a_fixed_network_is_not_scored_on_anothers_features(forgotten):
    images = np.random.default_rng(0).integers(256, size=(4, 1, 8, 8), dtype=np.uint8)
    scored, together = [], Images(images)
    for make in (linear, mirrored):
        name = functions.add_functions({"teacher": make})["teacher"]
        build = functools.partial(CLASSIFIERS[name], (1, 8, 8), 10, 1)
        network = initialise(build, torch.Generator().manual_seed(0))
        assert network.fixed
        scored.append(together.predict(network))
        assert np.array_equal(scored[-1], Images(images).predict(network))
    assert not np.array_equal(*scored)
