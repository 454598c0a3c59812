"""Published results at the epsilons that the papers state; none of them is proven here.

literature/ has a file for each paper, with its tables, its text on its figures, and every other
number that this project quotes. Values are read as printed text.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_suffix("")


@dataclass(frozen=True)
class Published:
    """A result of a paper."""

    method: str  # the method's name in the paper
    epsilon: float  # the stated epsilon, in the paper's own accounting and unit
    accuracy: float  # accuracy on the test split, in percent


def _files() -> list[dict[str, Any]]:
    paths, loader = sorted(FOLDER.glob("*.yaml")), getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    return [yaml.load(path.read_text(), Loader=loader) for path in paths]


def read_papers() -> dict[str, dict[str, dict[str, str]]]:
    """Return each paper's numbers and notes by name, all as text."""
    return {paper["name"]: paper["numbers"] for paper in _files()}


def published(data: str) -> list[Published]:
    """Return the results on a data set for which papers state an epsilon."""
    return [
        Published(number["of"], float(number["epsilon"]), float(number["printed"]))
        for numbers in read_papers().values()
        for number in numbers.values()
        if number.get("data") == data
    ]


def printed_for(experiment: str, data: str) -> dict[str, float]:
    """Return the accuracies printed in a paper's table for the grids of an experiment, by grid.

    The table names the experiment; its columns are named "DATA, KIND" and grids "KIND, ROW".
    """
    return {
        f"{kind}, {row}": float(cell)
        for paper in _files()
        for table in paper.get("tables", {}).values()
        if table.get("experiment") == experiment
        for row, cells in table["rows"].items()
        for (own, kind), cell in zip(map(_split, table["columns"]), cells, strict=True)
        if own == data
    }


def _split(column: str) -> list[str]:
    return column.split(", ", 1)
