"""Plug-ins at the command line: listed, and their numbers never printed as reviewed."""

import json
import re
from pathlib import Path

import pytest
import yaml

import fed_dpsd as package
from fed_dpsd.api import Run
from fed_dpsd.audits.shadows import ShadowRun
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.experiment import from_overrides
from fed_dpsd.rehearsal.sites import site_keys
from fed_dpsd.server.run_folder import open_run_folder
from fed_dpsd.server.trackers import numbers_of_run
from tests.conftest import SMALL
from tests.hospitals import site_file
from tests.plugin import installed, write

MARK = "not reviewed"
NOTE = "not reviewed: nothing is proven of what fed_dpsd_example does"
OWN = [each for each in SMALL if not each.startswith(("answers", "rounds"))]
MECHANISM = ("plugins=fed_dpsd_example", "answers=laplace_probabilities", "rounds=1")
NETWORK = ("plugins=fed_dpsd_example", "answers=label", "model.teacher=mlp_deep", "rounds=1")
EPSILON = re.compile(r"\b(record|patient|client|label), (add_remove|replace_one)\b")


@pytest.fixture(scope="module")
def _example(tmp_path_factory):
    return write(tmp_path_factory.mktemp("installed"))


@pytest.fixture(autouse=True)
def _installed(_example):
    with installed(_example):
        yield


@pytest.mark.parametrize(
    "settings",
    [MECHANISM, pytest.param(NETWORK, marks=pytest.mark.slow)],
    ids=["mechanism", "network"],
)
def test_no_epsilon_of_a_run_with_a_plugin_is_printed_as_reviewed(fed_dpsd, tmp_path, settings):
    """Wherever one stands: in each line, or in words that begin what is printed."""
    code, out, _ = fed_dpsd("privacy", "plan", *OWN, *settings)
    assert (code, out[0]) == (0, NOTE)
    for line in out:
        assert not line.startswith("epsilon planned") or f", {MARK})" in line
    code, (folder,), err = fed_dpsd("run", *OWN, *settings)
    assert code == 0
    first, of_round, last = (line for line in err.splitlines() if EPSILON.search(line))
    assert NOTE in first
    assert f"spent (record, add_remove, seeded noise, {MARK})" in of_round
    assert NOTE in last
    run = Run(Path(folder))
    assert all(NOTE in row["notes"] for row in run.summary["privacy"]["proven"])
    lines = str(run.privacy).splitlines()
    assert sum(f", {MARK})" in line for line in lines) == len(run.privacy.proven) == 6
    assert NOTE in str(run)
    attacked = ShadowRun(run.folder, open_run_folder(run.folder))
    assert attacked.proven("student").review == NOTE  # next to what an attack on it shows
    private = from_overrides([settings[0], "model.teacher=scattering"], tmp_path)
    assert ShadowRun(run.folder, private).proven("teachers").review == NOTE
    names = [name for name, _ in numbers_of_run(run.summary) if "epsilon_proven" in name]
    assert len(names) == 6
    assert all(name.endswith("/not_reviewed") for name in names)
    student = package.load_student(run.export(tmp_path / "model")) if settings is MECHANISM else 0
    if student:
        assert (
            "**Not reviewed**: fed_dpsd_example" in (tmp_path / "model" / "PRIVACY.md").read_text()
        )
        assert NOTE in student.facts["result"]
        assert all(NOTE in row["notes"] for row in student.facts["privacy"]["proven"])

    for more in ((), ("--charges",), ("--json",)):
        code, out, _ = fed_dpsd("privacy", "ledger", folder, *more)
        assert code == 0
        assert f"{MARK}: nothing is proven of what a plug-in does" in "\n".join(out)
        clients = [line for line in out if re.match(r"client_\d+ ", line)]
        assert len(clients) == (0 if more == ("--json",) else 2)
        assert all(f" ({MARK}) " in line for line in clients)
    _, out, _ = fed_dpsd("privacy", "ledger", f"{folder}/ledger/simulated.sqlite", "--json")
    account, _ = json.loads(out[0]).values()
    assert all(entry["mechanism"].endswith(f" ({MARK})") for entry in account["entries"])

    code, _, err = fed_dpsd("report", folder, "--out", "report")
    assert code == 0, err
    files = {
        file: file.read_text()
        for file in (tmp_path / "report").iterdir()
        if file.suffix in (".md", ".html", ".csv")
    }
    mentioning = {file.name: text for file, text in files.items() if "add_remove" in text}
    assert {Path(name).suffix for name in mentioning} == {".md", ".html", ".csv"}
    assert {name for name, text in mentioning.items() if MARK not in text} == set()
    assert any(f" ({MARK}) |" in text for text in mentioning.values())


def test_what_a_run_with_a_plugin_was_charged_is_what_was_planned(fed_dpsd):
    """Its releases belong to a mechanism that the plan knows, although its charges are marked."""
    _, (folder,), _ = fed_dpsd("run", *OWN, *MECHANISM)
    card = Run(Path(folder)).summary["privacy"]
    assert card["reason"] is None
    for row in card["proven"]:
        assert row["epsilon"] == row["planned"] == row["spent"]


def test_an_audit_of_a_plugin_says_that_it_is_not_reviewed(fed_dpsd, few_draws, monkeypatch):
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", 2_000)
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLAIM_RUNS", 20)
    small = ("training=plain", *MECHANISM, "queries_per_round=16")
    code, out, _ = fed_dpsd("privacy", "audit", *small)
    assert code == 0
    proven = [line for line in out if "proven epsilon" in line]
    assert len(proven) == 2
    assert all(f", {MARK})" in line for line in proven)
    _, out, _ = fed_dpsd("privacy", "audit", "--json", *small)
    assert any(note.startswith(MARK) for note in json.loads(out[0])["proven"]["notes"])


def test_a_label_of_a_run_with_a_plugin_is_not_reviewed_either(fed_dpsd):
    """The control: without the plug-in no line says so."""
    settings = ("method=central", "num_clients=1", "training=lp_2st", "model=cnn")
    _, out, _ = fed_dpsd("privacy", "plan", *settings)
    assert MARK not in "\n".join(out)
    _, out, _ = fed_dpsd("privacy", "plan", *settings, "plugins=fed_dpsd_example")
    (line,) = [line for line in out if line.startswith("epsilon planned") and "label," in line]
    assert f", {MARK})" in line


def test_a_hospital_sees_at_its_own_screen_what_is_not_reviewed(fed_dpsd, tmp_path):
    allowed = {"plugins": ["fed_dpsd_example"], "answers": ["laplace_probabilities"], "budget": 1e6}
    allowed |= {"training": ["plain"], "models": ["cnn"]}
    file = site_file(tmp_path / "hospital", **allowed)
    run = ("num_clients=2", "plugins=[fed_dpsd_example]", "answers=laplace_probabilities")
    run += ("training=plain", "model=cnn", "rounds=1", "queries_per_round=8")
    settings = (*run, "teacher.min_steps=2", "teacher.epochs=0")
    code, out, err = fed_dpsd("site", "check", str(file), *settings)
    assert code == 0, err
    (cost,) = [line for line in out if EPSILON.search(line) and "spent so far" not in line]
    assert f", {MARK})" in cost


# --- list ---


def test_choices_of_named_plugins_are_listed(fed_dpsd):
    own = {"blend", "laplace_probabilities", "smoothed", "retina", "unequal"}
    for named, listed in (((), set()), (("plugins=fed_dpsd_example",), own)):
        found = set()
        for kind in ("methods", "answers", "training", "data", "partitions"):
            code, out, _ = fed_dpsd("list", kind, *named)
            assert code == 0
            found |= {line.split()[0] for line in out}
        assert found & own == listed
    code, out, _ = fed_dpsd("list", "models", "plugins=fed_dpsd_example")
    assert code == 0
    assert "  mlp_deep (plugins=fed_dpsd_example)" in out
    code, out, _ = fed_dpsd("list", "keys", "plugins=fed_dpsd_example", "method=blend")
    assert code == 0
    assert any(line.startswith("method.share=0.5") for line in out)
    code, out, _ = fed_dpsd("run", "plugins=fed_dpsd_example", "method=blend", "--show-config")
    assert "  share: 0.5" in out


def test_a_plugin_that_is_not_there_cannot_be_listed(fed_dpsd):
    code, _, err = fed_dpsd("list", "models", "plugins=retina")
    assert code == 1
    assert "plugins=retina: there is no such package here" in err


# --- rehearse ---


@pytest.mark.parametrize("settings", [MECHANISM, NETWORK], ids=["mechanism", "network"])
def test_hospitals_of_a_rehearsal_name_the_plugins_and_parts_of_the_run(tmp_path, settings):
    """The control: hospitals of a rehearsal without plug-ins refuse the run."""
    overrides = ["training=plain", "model=cnn", "num_clients=2", "rounds=1", *settings]
    experiment = from_overrides([*overrides, "federation=deployment"], tmp_path)
    facts = site_keys(experiment)
    assert facts["plugins"] == ["fed_dpsd_example"]
    file = site_file(tmp_path / "hospital")
    site = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({"client": 0, **facts, "files": site["files"]}))
    open_hospital(file).experiment(experiment.to_json(), 0)
    ours = site_keys(from_overrides(["federation=deployment"], tmp_path))
    assert "plugins" not in ours
    file.write_text(yaml.safe_dump({"client": 0, **ours, "files": site["files"]}))
    with pytest.raises(Exception, match=r"plugins=fed_dpsd_example: this site runs no plug-in"):
        open_hospital(file).experiment(experiment.to_json(), 0)
