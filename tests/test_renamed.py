"""Run folders and ledgers of version 0.1 after keys were renamed."""

import json
from pathlib import Path

import pytest
import yaml

from fed_dpsd.renamed import former_method, upgraded
from fed_dpsd.server.run_folder import open_run_folder

# As version 0.1 wrote it, at the commit before the names changed.
FORMER = Path(__file__).parent / "run_folder_0.1.yaml"


@pytest.fixture
def former(tmp_path):
    raw = yaml.safe_load(FORMER.read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw | {"out": str(tmp_path)}))
    return tmp_path


def test_a_run_folder_of_version_0_1_opens(former):
    experiment = open_run_folder(former)
    assert experiment.method_name == "fed_dpsd"
    assert experiment.method.polarity == "answers"
    assert experiment.method.noise_fraction == 0.125
    assert experiment.method.recombined_fraction == 0  # a key that came later
    assert experiment.answers.name == "label"
    assert experiment.config.server_device == "auto"
    assert experiment.config.client_device == "cpu"  # `device` was the server's alone


def test_digests_are_over_the_names_of_version_0_1(former):
    raw = yaml.safe_load((former / "config.yaml").read_text())
    assert former_method(upgraded(raw)["method"]) == raw["method"]
    written = json.loads(open_run_folder(former).to_json())
    assert former_method(written["method"]) == raw["method"]
    assert upgraded(written) == written


def test_a_papers_loop_without_keys_that_came_later_opens_and_keeps_its_digest():
    method = {"_target_": "fed_dpsd.methods.paper_dpsd.PaperDPSD", "divisor": "own"}
    raw = {"method": method, "privacy": {}, "training": {}, "answers": {}}
    today = upgraded(raw)["method"]
    assert today == method | {"distillation": "decoupled"}
    assert former_method(today) == former_method(method)
    assert former_method(today | {"distillation": "classic"}) != former_method(method)


@pytest.mark.parametrize(
    ("former", "today"),
    [({"match_polarity": False}, "both"), ({"match_polarity": True}, "answers")],
)
def test_a_run_folder_with_the_former_polarity_opens(former, today):
    method = {"_target_": "fed_dpsd.methods.fed_dpsd.FedDPSD"}
    raw = {"method": method | former, "privacy": {}, "training": {}, "answers": {}}
    assert upgraded(raw)["method"] == method | {"polarity": today}
    known = former_method(method | {"polarity": "dark"})  # it had no other name
    assert known["turn"] == "dark"
    assert former_method(method | {"polarity": today})["turn"] == former["match_polarity"]
