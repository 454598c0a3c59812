"""The grid of a sweep: what is typed, and what an experiment's file declares, cell by cell."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fed_dpsd.config import ConfigError, choices, declared_sweep
from fed_dpsd.storage import conf_folder

Grid = dict[str, list[str]]


class Point(NamedTuple):
    """A cell's place: the name of its grid, "" where an experiment has but one, and its overrides.

    The overrides are `experiment` first; of a grid's points the last key varies fastest.
    """

    grid: str
    overrides: dict[str, str]


def expand(overrides: Sequence[str]) -> list[Point]:
    """Every cell of the grid that is typed, or that experiments declare.

    An experiment's `sweep` is expanded too: its keys map to choices, and those that map to keys of
    their own are grids apart, each with what the others share. For a key that it has in common with
    `overrides`, these win, but for `experiment` itself: the one given here is where the grids are
    read from. A group of conf/, such as `privacy`, decides which other keys there are, so there
    `overrides` choose among the grids apart instead: a grid with none of the choices is left out.

    Args:
        overrides: in Hydra's sweep syntax, such as "seed=0,1,2".

    Raises:
        ConfigError: wrong syntax, a `sweep` that is no grid, a key that names the run folder, or a
            choice of a group that no grid has.
    """
    given: dict[str, list[str]] = {}
    for key, values in map(choices, overrides):
        given.pop(key, None)  # of a key given twice the last counts, its place too
        given[key] = values
    for key in given:
        if key in ("out", "run_folder"):
            raise ConfigError([f"{key}={given[key][0]}: a sweep names its run folders; use --out"])
    experiments = given.pop("experiment", [])
    grids = [
        (name, {"experiment": [experiment]} | grid)
        for experiment in experiments
        for name, grid in _chosen(experiment, given)
    ]
    return [
        Point(name, dict(zip(grid, values, strict=True)))
        for name, grid in grids or [("", given)]
        for values in itertools.product(*grid.values())
    ]


def _chosen(experiment: str, given: Mapping[str, list[str]]) -> list[tuple[str, Grid]]:
    """The named grids of an experiment's file, with what is given in place of what they have."""
    shared, apart = _declared(experiment)
    groups = [key for key in given if (conf_folder() / key).is_dir()]
    grids = []
    for name, own in apart.items() or [("", Grid())]:
        chosen = {key: [v for v in given[key] if v in own[key]] for key in groups if key in own}
        if all(chosen.values()):
            grids.append((name, own | shared | given | chosen))
    if not grids:
        wanted = " ".join(f"{key}={','.join(given[key])}" for key in groups)
        raise ConfigError([f"{wanted}: no grid of experiment={experiment} has that"])
    return grids


def _declared(experiment: str) -> tuple[Grid, dict[str, Grid]]:
    """Return the keys that an experiment's grids share, and each grid apart, by its name."""
    declared = declared_sweep(experiment)
    if not isinstance(declared, Mapping):
        raise ConfigError([f"experiment={experiment}: sweep={declared!r} must map keys to choices"])

    def parsed(grid: Mapping[str, Any]) -> Grid:
        for key, value in grid.items():
            if not isinstance(value, str):
                what = f"experiment={experiment}: sweep.{key}={value!r} must be a string"
                raise ConfigError([f"{what}, as in '0,1,2'"])
        return dict(choices(f"{key}={value}") for key, value in grid.items())

    shared = {key: value for key, value in declared.items() if not isinstance(value, Mapping)}
    apart = {name: value for name, value in declared.items() if isinstance(value, Mapping)}
    return parsed(shared), {str(name): parsed(grid) for name, grid in apart.items()}


def names(points: Sequence[Point]) -> list[str]:
    """Name each point for people: its grid, and the overrides that not all its points have."""
    shared: dict[str, set[tuple[str, str]]] = {}
    for grid, overrides in points:
        shared[grid] = shared.get(grid, set(overrides.items())) & overrides.items()
    found = []
    for grid, overrides in points:
        own = [f"{k}={v}" for k, v in overrides.items() if (k, v) not in shared[grid]]
        words = [f"{grid}:" if own else grid] if grid else []
        found.append(" ".join([*words, *own]) or "the only cell")
    return found
