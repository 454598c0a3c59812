"""Plug-ins: only named ones, only where a hospital also names them, never as proven."""

import importlib
import json

import numpy as np
import pytest
import yaml

from fed_dpsd.accounts.card import (
    NOT_REVIEWED_NOTE,
    how_answered,
    how_trained,
    ledger_epsilons,
    planned_run,
    privacy_card,
)
from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.config.compose import compose
from fed_dpsd.config.plugins import code_digest, split_plugins
from fed_dpsd.data.partition import load_or_split
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.flower.run_config import from_run_config
from fed_dpsd.errors import ConfigError
from fed_dpsd.experiment import from_json, load_data, one_run, partitions, set_up
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.protocol import Refusal
from fed_dpsd.server import run as runs
from fed_dpsd.server.inputs import inputs_of
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder
from fed_dpsd.server.words import how_to_continue
from fed_dpsd.sweep import sweep as sweeps
from tests.client.conftest import records  # noqa: F401
from tests.client.test_site import make, request
from tests.hospitals import Hospitals, site_file
from tests.ledgers import entries_of
from tests.plugin import installed, write

MECHANISM = ("plugins=fed_dpsd_example", "training=plain", "answers=laplace_probabilities")
NOTE = NOT_REVIEWED_NOTE.format("fed_dpsd_example")


@pytest.fixture
def example(tmp_path):
    """The page's package, installed."""
    folder = write(tmp_path / "installed")
    with installed(folder):
        yield folder


def test_a_sweep_compares_a_plugins_method_with_another(example, tmp_path):
    """Its defaults are the plug-in's."""
    settings = "plugins=fed_dpsd_example", "method=fed_dpsd,blend", "training=plain"
    assert len(sweeps.plan([*settings, "rounds=1"], tmp_path, tmp_path, lambda line: None)) == 2


def test_a_failed_run_of_a_plugin_says_that_a_correction_needs_a_new_run(example, tmp_path):
    for settings, others in (
        (MECHANISM, "others, or a changed plug-in, need a"),
        ((), "others need"),
    ):
        folder = new_run_folder(one_run([*settings, f"out={tmp_path}/{len(others)}"], tmp_path))
        assert f"with the same settings; {others} " in how_to_continue(folder, NameError("x"))


# --- names ---


def test_plugins_are_named_as_a_word_or_as_a_list():
    for typed, names in {
        "plugins=a": ["a"],
        "plugins=[a]": ["a"],
        "plugins=['a', \"b\"]": ["a", "b"],
        "plugins=a,b": ["a", "b"],
        "plugins=[]": [],
        "plugins=": [],
    }.items():
        assert split_plugins(["rounds=2", typed, "seed=1"]) == (names, ["rounds=2", "seed=1"]), (
            typed
        )


def test_runs_and_teachers_depend_on_the_code_of_plugins(
    example,
    small,
    records,  # noqa: F811
):
    def found():
        code_digest.cache_clear()  # as in a new process
        experiment = small(*MECHANISM)
        own = [experiment.config, experiment.training, 0, records, np.arange(len(records))]
        charged = Teachers(*own, SecretStreams(bytes(32))).identity
        return inputs_of(experiment)["plugins=fed_dpsd_example"], Teachers(*own)._cached(0), charged

    before = found()
    (example / "fed_dpsd_example" / "notes.txt").write_text("no code")
    assert found() == before
    with (example / "fed_dpsd_example" / "networks.py").open("a") as file:
        file.write("# changed\n")
    assert not {*found()} & {*before}


NOT_THERE = [
    ("plugins=exmple", "plugins=exmple: there is no such package here; pip install it"),
    ("plugins=fed_dpsd_example.networks", "plugins=fed_dpsd_example.networks: there is no such"),
    ("plugins=fed_dpsd", "plugins=fed_dpsd: FedDPSD is no plug-in; leave it out"),
    ("answers=laplace_probabilities", "answers=laplace_probabilities is unknown"),
    ("method=blend", "method=blend is unknown.*a plug-in's also needs plugins=PACKAGE"),
    (
        "plugins=fed_dpsd_example answers=laplace",
        "choose one of: .*label, laplace_probabilities, noisy",
    ),
    ("model.teacher=mlp_deep", "mlp_deep.* is unknown"),
    (
        "answers._target_=fed_dpsd_example.laplace_probabilities.LaplaceProbabilities",
        "is not an allowed class; give fed_dpsd.privacy.MODULE.CLASS",
    ),
    (
        "plugins=fed_dpsd_example answers._target_=os.path.join",
        "is not an allowed class; give fed_dpsd.privacy.MODULE",
    ),
    (
        "plugins=fed_dpsd_example answers._target_=fed_dpsd_example.networks.mlp_deep",
        "MODULE.CLASS or fed_dpsd.papers.MODULE.CLASS or fed_dpsd_example.MODULE.CLASS",
    ),
]


def test_what_is_not_installed_or_not_named_is_not_there(example, tmp_path):
    for typed, expected in NOT_THERE:
        with pytest.raises(ConfigError, match=expected):
            set_up(compose(typed.split()), tmp_path)


def test_a_file_by_the_name_of_ours_is_an_error(example):
    path = example / "fed_dpsd_example" / "conf" / "data" / "mnist.yaml"
    path.write_text("name: mine")
    with pytest.raises(
        ConfigError, match="plugins=fed_dpsd_example: its conf/data/mnist.yaml has the same"
    ):
        compose(["plugins=fed_dpsd_example"])


def test_a_grid_of_a_plugin_is_no_single_run(example, tmp_path):
    folder = example / "fed_dpsd_example" / "conf" / "experiment"
    folder.mkdir()
    (folder / "retinas.yaml").write_text("# @package _global_\nsweep: {seed: '0,1'}\n")
    typed = ["plugins=fed_dpsd_example", "experiment=retinas"]
    with pytest.raises(ConfigError, match="experiment=retinas is a grid of 2 runs: fed-dpsd sweep"):
        one_run(typed, tmp_path)
    assert one_run([*typed, "seed=1"], tmp_path).config.seed == 1


def test_a_network_by_the_name_of_ours_is_an_error(example, tmp_path):
    package = example / "fed_dpsd_example" / "__init__.py"
    package.write_text(package.read_text().replace('"mlp_deep"', '"cnn"'))
    with pytest.raises(ConfigError, match="its network name cnn is taken"):
        set_up(compose(["plugins=fed_dpsd_example"]), tmp_path)


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        ("nn.Softmax(0)", "model.teacher=mlp_deep: its output for an image depends on the other"),
        ("nn.Dropout()", "model.teacher=mlp_deep: a layer draws random numbers in training"),
        ("nn.ReLU(inplace=True)", "model.teacher=mlp_deep: Opacus cannot compute the gradient of"),
    ],
)
def test_a_network_that_dp_sgd_cannot_train_is_an_error(example, tmp_path, layer, problem):
    module = example / "fed_dpsd_example" / "networks.py"
    module.write_text(module.read_text().replace("nn.ReLU()]\n    return", f"{layer}]\n    return"))
    typed = ["plugins=fed_dpsd_example", "model=cnn", "model.teacher=mlp_deep"]
    with pytest.raises(ConfigError, match=problem):
        set_up(compose([*typed, "training=dp_sgd"]), tmp_path)
    set_up(compose([*typed, "training=plain"]), tmp_path)


def test_a_network_of_a_plugin_must_be_a_classifier(example, tmp_path):
    module = example / "fed_dpsd_example" / "networks.py"
    text = module.read_text()
    module.write_text(text.replace("return Classifier(", "return nn.Sequential(*layers)\n    ("))
    with pytest.raises(ConfigError, match="model.teacher=mlp_deep: it must be a fed_dpsd.models"):
        set_up(
            compose(["plugins=fed_dpsd_example", "model=cnn", "model.teacher=mlp_deep"]), tmp_path
        )


def test_a_package_that_cannot_be_imported_says_why(example, tmp_path):
    (example / "fed_dpsd_example" / "__init__.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="fed_dpsd_example cannot be imported: No module named"):
        set_up(compose(["plugins=fed_dpsd_example"]), tmp_path)


def test_a_class_whose_imports_fail_says_why(example, tmp_path):
    module = example / "fed_dpsd_example" / "laplace_probabilities.py"
    module.write_text(f"import nothing_of_this_name\n{module.read_text()}")
    with pytest.raises(ConfigError, match="LaplaceProbabilities cannot be imported: No module na"):
        set_up(compose([*MECHANISM]), tmp_path)
    module.write_text("def wrong(:")
    with pytest.raises(ConfigError, match="cannot be imported: invalid syntax.*line 1"):
        set_up(compose([*MECHANISM]), tmp_path)


@pytest.mark.parametrize("typed", ["fed_dpsd_example", "fed_dpsd_example,"])
def test_plugins_are_a_flat_key_of_flower_too(example, typed):
    experiment = from_run_config({"plugins": typed, "method": "blend", "training": "plain"})
    assert experiment.config.plugins == ("fed_dpsd_example",)
    assert type(experiment.method).__module__ == "fed_dpsd_example.blend"


def test_a_partition_of_a_plugin_deals_records(example, small):
    experiment = small("plugins=fed_dpsd_example", "partition=unequal", "num_clients=3")
    sizes = [*map(len, partitions(experiment))]
    assert sizes[1] / sizes[0] == pytest.approx(2, rel=0.01)
    assert sizes[2] / sizes[1] == pytest.approx(2, rel=0.01)
    assert from_json(experiment.to_json()) == experiment


def test_a_partition_of_a_plugin_deals_again_when_its_code_changes(tmp_path):
    """The control: unchanged code reads the cached split."""
    cache = tmp_path / "cache"

    def dealt(ratio):
        with installed(tmp_path):  # as in a new process
            rule = importlib.import_module("fed_dpsd_example.unequal").Unequal(0, ratio)
            return [part.tolist() for part in load_or_split(rule, np.zeros(60, int), 2, cache)]

    write(tmp_path)
    first = dealt(2.0)
    assert dealt(2.0) == first
    assert len([*cache.rglob("*.npz")]) == 1
    module = tmp_path / "fed_dpsd_example" / "unequal.py"
    module.write_text(module.read_text().replace("self.ratio **", "(2 * self.ratio) **"))
    assert [len(part) for part in dealt(2.0)] == [12, 48]
    assert [len(part) for part in first] == [20, 40]


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("partition.ratio=0", "partition.ratio=0 must be >= 1"),
        (
            "partition._target_=fed_dpsd_example.blend.Blend",
            "partition._target_=fed_dpsd_example.blend.Blend does not derive from fed_dpsd.data",
        ),
        ("partition._target_=os.path", "is not an allowed class; give fed_dpsd.data.MODULE.CLASS"),
    ],
)
def test_a_wrong_partition_of_a_plugin_is_an_error(example, small, typed, problem):
    with pytest.raises(ConfigError, match=problem):
        small("plugins=fed_dpsd_example", "partition=unequal", typed)


# --- what parts of a plug-in check and say ---


def test_the_problems_of_a_plugins_parts_come_with_all_others(example, tmp_path):
    typed = ["plugins=fed_dpsd_example", "method=blend", "training=smoothed", "partition=class"]
    typed += ["answers=laplace_probabilities", "data=cifar100", "data.num_classes=101"]
    typed += ["model.student=cnn9", "teacher.path=t", "teacher.arch=cnn"]
    with pytest.raises(ConfigError) as caught:
        set_up(compose(typed), tmp_path)
    for part in (
        "partition=class: training=smoothed gives a part of each label to classes",  # its own
        "data.num_classes=101: answers=laplace_probabilities draws noise for every class",
        "teacher.path=t: training=smoothed trains its teachers itself",  # its base's
        "model.student=cnn9 is unknown; choose one of: cnn, ",  # ours
    ):
        assert any(problem.startswith(part) for problem in caught.value.problems), part


# What is replaced in a file of the page's package, and the error that must follow.
WRONG_CLASSES = [
    (
        "laplace_probabilities",
        ("Probabilities(Mechanism)", "Probabilities"),
        "answers._target_={} does not derive from fed_dpsd.privacy.mechanism.Mechanism",
    ),
    (
        "laplace_probabilities",
        ('calibrated_by: ClassVar[str] = "noise_multiplier"', 'calibrated_by: ClassVar = "scale"'),
        "answers._target_={} has calibrated_by=scale; name a field of class LaplaceProbabilities, "
        "noise_multiplier or epsilon_per_answer, or None",
    ),
    (
        "laplace_probabilities",
        ('= "noise_multiplier"', '= "epsilon_per_answer"'),  # which is no field of the class
        "answers._target_={} has calibrated_by=epsilon_per_answer; name a field of class Laplace",
    ),
    (
        "laplace_probabilities",
        ('name: ClassVar[str] = "laplace_probabilities"', ""),
        "answers._target_={} has no name; define it in class LaplaceProbabilities, as fed_dpsd.pri",
    ),
    (
        "laplace_probabilities",
        ('noise_at: ClassVar[Literal["client"]] = "client"', ""),
        "answers._target_={} has no noise_at; define it in class LaplaceProbabilities, as ",
    ),
    (
        "smoothed",
        ('name: ClassVar[str] = "smoothed"', ""),
        "training._target_={} has no name; define it in class Smoothed, as fed_dpsd.privacy.train",
    ),
    (
        "unequal",
        ('name: ClassVar[str] = "unequal"', ""),
        "partition._target_={} has no name; define it in class Unequal, as fed_dpsd.data.partition",
    ),
    *(
        (
            "laplace_probabilities",
            (f"def {method}(", f"def other_{method}("),
            f"answers._target_={{}} has no {method}; define it in class LaplaceProbabilities, as "
            "fed_dpsd.privacy.mechanism.Mechanism describes",
        )
        for method in ("constrain_sensitivity", "add_noise", "admissible", "event")
    ),
    (
        "unequal",
        ("def deal(", "def other_deal("),
        "partition._target_={} has no deal; define it in class Unequal, as fed_dpsd.data.partition",
    ),
    (
        "smoothed",
        ("def train(", "def other_train("),
        "training._target_={} has no train; define it in class Smoothed, as "
        "fed_dpsd.privacy.training.CustomTraining describes",
    ),
    (
        "blend",
        ("def synthesise(", "def other_synthesise("),
        "method._target_={} has no synthesise; define it in class Blend, as "
        "fed_dpsd.methods.white_box.Distilling describes",
    ),
]


@pytest.mark.parametrize(("module", "change", "problem"), WRONG_CLASSES)
def test_a_class_that_lacks_what_its_base_leaves_open_is_an_error(
    example, tmp_path, module, change, problem
):
    path = example / "fed_dpsd_example" / f"{module}.py"
    before = path.read_text()
    path.write_text(before.replace(*change))
    assert path.read_text() != before
    keys = {"smoothed": "training", "unequal": "partition", "blend": "method"}
    key = keys.get(module, "answers")
    typed = ["plugins=fed_dpsd_example", f"{key}={module}"]
    target = f"fed_dpsd_example.{module}.{''.join(map(str.title, module.split('_')))}"
    with pytest.raises(ConfigError) as caught:
        set_up(compose(typed), tmp_path)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem.format(target))


@pytest.mark.slow
def test_a_plugins_parts_describe_themselves_on_plans_and_cards(example, tmp_path):
    typed = ["plugins=fed_dpsd_example", "training=smoothed", "answers=laplace_probabilities"]
    experiment = set_up(compose(typed), tmp_path)
    assert how_trained(experiment) == "on labels smoothed by 0.1, without noise"
    assert how_answered(experiment) == "probabilities, with Laplace noise of 40 on each"
    text = str(planned_run(experiment))
    assert f"training: {how_trained(experiment)}\nanswers: {how_answered(experiment)}\n" in text
    blend = set_up(compose(["plugins=fed_dpsd_example", "method=blend"]), tmp_path)
    assert how_answered(blend) == "none: the teachers' own weights leave the clients"


# --- what a run records ---


def test_a_run_records_its_plugins(example, small):
    experiment = small(*MECHANISM)
    folder = new_run_folder(experiment)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["plugins"] == ["fed_dpsd_example"]
    assert open_run_folder(folder) == from_json(experiment.to_json()) == experiment


def test_teachers_of_runs_with_and_without_a_plugin_differ(example, small):
    keys = []
    for overrides in (MECHANISM, ("training=plain",)):
        experiment = small(*overrides)
        own = load_data(experiment.config.data, experiment.config.cache).train
        own = own.take(np.arange(20))
        parts = experiment.config, experiment.training, 0, own, np.arange(20)
        keys.append(Teachers(*parts).identity)
    assert keys[0] != keys[1]


# --- what is claimed ---


@pytest.mark.parametrize(
    "overrides",
    [
        MECHANISM,
        ("plugins=fed_dpsd_example", "method=local", "training=plain"),  # with a part of ours alone
    ],
)
def test_every_epsilon_of_a_run_with_a_plugin_says_that_it_is_not_reviewed(
    example, small, overrides
):
    experiment = small(*overrides)
    for row in privacy_card(experiment, experiment.plan)["proven"]:
        assert NOTE in row["notes"]
    own = small(*(o for o in overrides[1:] if "laplace" not in o))
    for row in privacy_card(own, own.plan)["proven"]:
        assert not any("reviewed" in note for note in row["notes"])


def test_a_ledger_marks_what_is_not_reviewed(example, small, records):  # noqa: F811
    """The control: a charge of our own mechanism in the same ledger has no such mark."""
    site, reply = make(small("training=plain", "answers=label"), records)
    assert not isinstance(reply(request()), Refusal)
    ours = ledger_epsilons(entries_of(site.ledger), 1e-5, "record", "add_remove")
    _, reply = make(small(*MECHANISM), records, site.ledger)
    assert not isinstance(reply(request(2)), Refusal)
    first, second = entries_of(site.ledger)
    assert "not reviewed" not in first.mechanism
    assert second.mechanism.endswith(" (not reviewed)")
    both = ledger_epsilons(entries_of(site.ledger), 1e-5, "record", "add_remove")
    mark = NOT_REVIEWED_NOTE.format("a plug-in")
    assert [mark in proof.notes for proof in (*ours.values(), *both.values())] == [
        *(False for _ in ours),
        *(True for _ in both),
    ]


# --- hospitals ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, r"plugins=fed_dpsd_example: this site runs no plug-in \(plugins: in its file\)"),
        (
            {"plugins": ["fed_dpsd_example"]},
            r"allows only answers=label or gradient or probabilities \(answers: in its file\)",
        ),
    ],
)
def test_a_hospital_runs_only_what_its_own_file_names(example, deployed, tmp_path, changes, reason):
    """Neither a plug-in that it does not name nor a part that it does not allow."""
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital", **changes))
    with pytest.raises(NotAllowed, match=reason):
        hospital.experiment(deployed(*MECHANISM).to_json(), 0)


def test_a_hospital_refuses_before_anything_of_a_plugin_is_imported(deployed, tmp_path):
    """Even if it is installed there."""
    with installed(write(tmp_path / "coordinator")):
        text = deployed(*MECHANISM).to_json()
    folder = write(tmp_path / "here")
    package = folder / "fed_dpsd_example" / "__init__.py"
    package.write_text(f"raise SystemExit('imported')\n{package.read_text()}")
    with installed(folder):
        hospital = hospitals.open_hospital(site_file(tmp_path / "hospital"))
        with pytest.raises(NotAllowed, match="plugins=fed_dpsd_example: this site runs no plug-in"):
            hospital.experiment(text, 0)


@pytest.mark.parametrize("plugins", [["fed_dpsd_example"], "fed_dpsd_example", [3]])
def test_a_class_of_a_plugin_that_the_message_does_not_name_is_refused(
    example, deployed, tmp_path, plugins
):
    allowed = {"plugins": ["fed_dpsd_example"], "answers": ["laplace_probabilities"]}
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital", **allowed))
    raw = json.loads(deployed(*MECHANISM).to_json())
    if plugins == ["fed_dpsd_example"]:  # the control
        experiment = hospital.experiment(json.dumps(raw), 0)
        assert hospital.open(experiment, "run").account.plugins
        del raw["plugins"]
    else:
        raw["plugins"] = plugins
    with pytest.raises(NotAllowed):
        hospital.experiment(json.dumps(raw), 0)


def test_a_hospital_imports_no_part_of_a_plugin_that_its_file_does_not_list(
    example, deployed, tmp_path
):
    """Neither a partition, which it does not use, nor a training of a method's own."""
    (example / "fed_dpsd_example" / "other.py").write_text("raise SystemExit('imported')")
    allowed = {"plugins": ["fed_dpsd_example"], "answers": ["laplace_probabilities"]}
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital", **allowed))
    raw = json.loads(deployed(*MECHANISM).to_json())
    other = {"_target_": "fed_dpsd_example.other.Other", "name": "other"}
    assert hospital.experiment(json.dumps({**raw, "partition": other}), 0)
    raw["method"]["baseline"] = other
    with pytest.raises(NotAllowed, match=r"only method.baseline=.* \(training: in its file\)"):
        hospital.experiment(json.dumps(raw), 0)


@pytest.mark.slow
def test_a_run_over_hospitals_that_name_the_plugin(example, deployed, tmp_path):
    allowed = {"plugins": ["fed_dpsd_example"], "answers": ["laplace_probabilities"], "budget": 1e6}
    files = [site_file(tmp_path / f"hospital{n}", n, **allowed) for n in (0, 1)]
    experiment = deployed(*MECHANISM, "model.teacher=mlp_deep")
    folder = new_run_folder(experiment)
    with pytest.raises(NotAllowed, match="allows only the teachers cnn or scattering"):
        hospitals.open_hospital(files[0]).experiment(experiment.to_json(), 0)
    files = [
        site_file(tmp_path / f"hospital{n}", n, models=["mlp_deep"], **allowed) for n in (0, 1)
    ]
    federation = GridFederation(experiment, Hospitals(files), folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    assert summary["status"] == "completed"
    assert all(NOTE in row["notes"] for row in summary["privacy"]["proven"])


def test_a_site_file_names_what_is_installed(tmp_path):
    with pytest.raises(
        ConfigError, match="plugins=fed_dpsd_example: there is no such package here"
    ):
        hospitals.open_hospital(site_file(tmp_path, plugins=["fed_dpsd_example"]))
    with pytest.raises(ConfigError, match="plugins=fed_dpsd: FedDPSD is no plug-in"):
        hospitals.open_hospital(site_file(tmp_path, plugins=["fed_dpsd"]))
