"""The grid of a sweep: what is typed, and what an experiment's file declares, cell by cell."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fed_dpsd.config import ConfigError, choices, conf_folder, declared_sweep


def expand(overrides: Sequence[str]) -> list[dict[str, str]]:
    """The overrides of every cell: `experiment` first, the last key varying fastest.

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
    cells = []
    names = given.pop("experiment", [])
    grids = [{"experiment": [name]} | grid for name in names for grid in _chosen(name, given)]
    for grid in grids or [given]:
        cells += [
            dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
        ]
    return cells


def _chosen(experiment: str, given: Mapping[str, list[str]]) -> list[dict[str, list[str]]]:
    """The grids of an experiment's file, with what is given in place of what they have."""
    shared, apart = _declared(experiment)
    groups = [key for key in given if (conf_folder() / key).is_dir()]
    grids = []
    for own in apart or [{}]:
        chosen = {key: [v for v in given[key] if v in own[key]] for key in groups if key in own}
        if all(chosen.values()):
            grids.append(own | shared | given | chosen)
    if not grids:
        wanted = " ".join(f"{key}={','.join(given[key])}" for key in groups)
        raise ConfigError([f"{wanted}: no grid of experiment={experiment} has that"])
    return grids


def _declared(experiment: str) -> tuple[dict[str, list[str]], list[dict[str, list[str]]]]:
    """What an experiment's grids share, and each grid apart."""
    declared = declared_sweep(experiment)
    if not isinstance(declared, Mapping):
        raise ConfigError([f"experiment={experiment}: sweep={declared!r} must map keys to choices"])

    def parsed(grid: Mapping[str, Any]) -> dict[str, list[str]]:
        for key, value in grid.items():
            if not isinstance(value, str):
                what = f"experiment={experiment}: sweep.{key}={value!r} must be a string"
                raise ConfigError([f"{what}, as in '0,1,2'"])
        return dict(choices(f"{key}={value}") for key, value in grid.items())

    shared = {key: value for key, value in declared.items() if not isinstance(value, Mapping)}
    apart = [value for value in declared.values() if isinstance(value, Mapping)]
    return parsed(shared), [parsed(grid) for grid in apart]


def names(grid: Sequence[Mapping[str, str]]) -> list[str]:
    """Of each cell of a grid, the overrides that not all of its cells have, for people."""
    shared = set.intersection(*(set(overrides.items()) for overrides in grid))
    apart = [
        [f"{k}={v}" for k, v in overrides.items() if (k, v) not in shared] for overrides in grid
    ]
    return [" ".join(words) or "the only cell" for words in apart]
