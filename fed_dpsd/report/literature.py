"""Published results at the epsilons that their papers state; none is proven here.

literature.yaml holds them, with every other number that this project quotes from a paper.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

LITERATURE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Published:
    """A result of a paper.

    Args:
        method: the method's name in the paper.
        epsilon: the stated epsilon, in the paper's own accounting and unit.
        accuracy: accuracy on the test split, in percent.
    """

    method: str
    epsilon: float
    accuracy: float


def read_papers() -> dict[str, dict[str, dict[str, str]]]:
    """Return each paper's numbers by name, with all that is said of them as it is written."""
    papers = yaml.load(LITERATURE.read_text(), Loader=yaml.BaseLoader)
    return {name: paper["numbers"] for name, paper in papers.items()}


def published(data: str) -> list[Published]:
    """Return the results on a data set that papers print under an epsilon."""
    return [
        Published(number["of"], float(number["epsilon"]), float(number["printed"]))
        for numbers in read_papers().values()
        for number in numbers.values()
        if number.get("data") == data
    ]
