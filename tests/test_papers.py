"""results/papers.md: printed numbers are the papers', proven ones have units, and rows compose."""

import functools
import operator
import re
from pathlib import Path

import pytest

from fed_dpsd.config.compose import compose
from fed_dpsd.config.grid import expand
from fed_dpsd.experiment import set_up
from fed_dpsd.storage import conf_folder
from tests.tables import read_files

PAPERS = read_files()
TEXT = (Path(__file__).parents[1] / "results" / "papers.md").read_text()
CODE = re.compile(r"`([^`]+)`")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
HEADING = "proven epsilon (record, replace_one unless stated)"
OTHER = r"\((?:(?:label|add_remove|delta 0|trust server)\b[^)]*|student [^)]*)\)"
NAMED = "gradients|sums|labels at 1|(?:all )?labels at 10"  # settings of results/printed_loops.md
PROVEN = re.compile(rf"-|inf( .*)?|(?:{NUMBER}|{NAMED})( as printed| {OTHER})?( of [^\d]+)?")


def items():
    """Each paper's rows of the table, with the names of the columns; a bold row names the paper."""
    head, _, *lines = [
        line[2:-2].split(" | ") for line in TEXT.splitlines() if line.startswith("| ")
    ]
    found = {}
    for first, *cells in lines:
        if first.startswith("**"):
            below = found.setdefault(first.split("**")[1], [])
        else:
            below.append(dict(zip(head, [first, *cells], strict=True)))
    return found


ITEMS = items()
EVERY = [(paper, row) for paper, found in ITEMS.items() for row in found]
SPANS = sorted({s for _, row in EVERY for s in CODE.findall(row["key or experiment"])})


def base(row):
    """The numbered item that a row is about, without which part of it."""
    return re.split(r"[:,]", row["item"])[0]


def numbers_below(content):
    """Every number of a paper's file, or of a part of it."""
    if isinstance(content, str):
        return {content.replace(",", "")}
    values = content.values() if isinstance(content, dict) else content
    return set().union(*map(numbers_below, values))


def test_what_is_called_published_is_in_the_papers_file():
    for paper, row in EVERY:
        content = PAPERS[paper]
        printed = numbers_below(content.get("tables", {}).get(base(row), content))
        cells = [] if row["published"] == "-" else row["published"].replace(",", "").split("; ")
        assert set(cells) <= printed, row


def test_a_proven_epsilon_has_its_unit_and_relation():
    parts = [part for _, row in EVERY for part in re.split("; | to ", row[HEADING])]
    assert [part for part in parts if not PROVEN.fullmatch(part)] == []


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
    for words in sorted(span for span in SPANS if "=" in span):
        named, *typed = words.split()
        if named in grids and all(word.startswith("data") for word in typed):
            own = compose(typed)["data"] | {"path": str(tmp_path)}
            grids[words] = [raw | {"data": own} for raw in grids[named]]
        else:
            grids[words] = grid_of(words, tmp_path)
        for raw in grids[words]:
            data = raw["data"] | ({"path": None} if raw["data"]["name"] == "digits" else {})
            assert set_up(raw | {"data": data}, tmp_path).plan.queries >= 0, words
