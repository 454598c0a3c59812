"""docs/papers.md: the experiments and settings that its tables name compose, and can be planned."""

import functools
import operator
import re
from pathlib import Path

import pytest

from fed_dpsd.accounts.card import plan_of
from fed_dpsd.config.compose import compose
from fed_dpsd.config.grid import expand
from fed_dpsd.experiment import set_up
from fed_dpsd.storage import conf_folder

TABLES = re.findall(
    r"^\| .*$", (Path(__file__).parents[1] / "docs" / "papers.md").read_text(), re.MULTILINE
)
NAMED = sorted({words for row in TABLES for words in re.findall(r"`([^`]+=[^`]+)`", row)})


def grid_of(words, folder):
    """A configuration for each choice of groups; the other cells' keys are looked up in it."""
    composed = {}
    for _, cell in expand([*words.split(), f"data.path={folder}"]):
        chosen = tuple((k, v) for k, v in cell.items() if (conf_folder() / k).is_dir())
        if chosen not in composed:
            composed[chosen] = compose([f"{key}={value}" for key, value in cell.items()])
        for key in cell.keys() - dict(chosen).keys() - {"training@method.baseline"}:
            functools.reduce(operator.getitem, key.split("."), composed[chosen])
    return list(composed.values())


@pytest.mark.slow
def test_what_is_named_composes_and_plans(tmp_path, monkeypatch):
    """No data is read. On other data, an experiment's cells are those above with its `data`."""
    monkeypatch.setattr("fed_dpsd.experiment.calibrate", lambda spend, target, least, most: least)
    (tmp_path / "teachers").mkdir()
    (tmp_path / "teachers" / "alexnet.safetensors").touch()
    grids = {}
    for words in NAMED:
        named, *typed = words.split()
        if named in grids and all(word.startswith("data") for word in typed):
            own = compose(typed)["data"] | {"path": str(tmp_path)}
            grids[words] = [raw | {"data": own} for raw in grids[named]]
        else:
            grids[words] = grid_of(words, tmp_path)
        for raw in grids[words]:
            data = raw["data"] | ({"path": None} if raw["data"]["name"] == "digits" else {})
            assert plan_of(set_up(raw | {"data": data}, tmp_path)).queries >= 0, words
