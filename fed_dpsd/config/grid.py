"""The grid of a sweep, from overrides and from an experiment's file."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fed_dpsd.config.compose import Composition, choices, declared_sweep
from fed_dpsd.config.plugins import searching
from fed_dpsd.errors import ConfigError, shown
from fed_dpsd.storage import conf_folder

Grid = dict[str, list[str]]
OF_ONE_RUN = ("out", "run_folder")  # a sweep names its run folders itself


class Point(NamedTuple):
    """A point of a grid: the grid's name, "" if there is only one, and the overrides.

    `experiment` is the first override. The last key varies fastest.
    """

    grid: str
    overrides: dict[str, str]


def expand(overrides: Sequence[str]) -> list[Point]:
    """List every point of the grid of the overrides, or of the grids that experiments declare.

    An experiment's `sweep` maps keys to choices. A key that maps to further keys is a separate
    grid, which also has all keys that map to choices. `overrides` replace keys of the file, except
    for `experiment` itself, which names the file with the grids.

    A group of conf/, such as `privacy`, determines which other keys exist. For a group, the
    `overrides` select among the separate grids: a grid with none of the choices is omitted.

    Args:
        overrides: in Hydra's sweep syntax, such as "seed=0,1,2".

    Raises:
        ConfigError: the syntax is wrong, `sweep` is not a grid, a key names the run folder, or no
            grid has a chosen value of a group.
    """
    typed: Grid = {}
    for key, values in map(choices, overrides):
        typed.pop(key, None)  # a repeated key takes its last choices and their position
        typed[key] = values
    for key in typed:
        if key in OF_ONE_RUN:
            raise ConfigError([f"{key}={typed[key][0]}: a sweep names its run folders; use --out"])
    experiments = typed.pop("experiment", [])
    grids = [
        (name, {"experiment": [experiment]} | grid)
        for experiment in experiments
        for name, grid in _selected(experiment, typed)
    ]
    return [
        Point(name, dict(zip(grid, values, strict=True)))
        for name, grid in grids or [("", typed)]
        for values in itertools.product(*grid.values())
    ]


def require_one_run(overrides: Sequence[str], composition: Composition) -> None:
    """Check that an experiment is one run: its file has no grid, or all keys of the grid are given.

    Raises:
        ConfigError: it is a grid; the error names the number of runs and a command for them.
    """
    typed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    name = typed.get("experiment", "null")
    shared, separate = _grids(name, composition.sweep)
    if separate or shared.keys() - typed.keys():
        swept = [each for each in overrides if each.partition("=")[0] not in OF_ONE_RUN]
        with searching(composition.plugins):
            count = len(expand(swept))
        out = ["--out", typed["out"].strip("'\"")] if "out" in typed else []
        command = f"fed-dpsd sweep {shlex.join([*swept, *out])}"
        raise ConfigError([f"experiment={name} is a grid of {_runs(count)}: {command}"])


def _runs(count: int) -> str:
    return f"{count:,} runs" if count > 1 else "1 run, with settings that only a sweep accepts"


def _selected(experiment: str, typed: Grid) -> list[tuple[str, Grid]]:
    """Return the named grids of an experiment's file, with the given choices instead of theirs."""
    shared, separate = _grids(experiment, declared_sweep(experiment))
    groups = [key for key in typed if (conf_folder() / key).is_dir()]
    grids = []
    for name, own in separate.items() or [("", Grid())]:
        chosen = {key: [v for v in typed[key] if v in own[key]] for key in groups if key in own}
        if all(chosen.values()):
            grids.append((name, own | shared | typed | chosen))
    if not grids:
        request = " ".join(f"{key}={','.join(typed[key])}" for key in groups)
        raise ConfigError([f"{request}: no grid of experiment={experiment} contains it"])
    return grids


def _grids(experiment: str, declared: Any) -> tuple[Grid, dict[str, Grid]]:
    """Return the keys that an experiment's grids share, and each separate grid, by name."""
    if not isinstance(declared, Mapping):
        problem = f"experiment={experiment}: sweep={shown(declared)} must map keys to choices"
        raise ConfigError([problem])

    def parsed(grid: Mapping[str, Any]) -> Grid:
        for key, value in grid.items():
            if not isinstance(value, str):
                problem = f"experiment={experiment}: sweep.{key}={shown(value)} must be a string"
                raise ConfigError([f"{problem}, as in '0,1,2'"])
        return dict(choices(f"{key}={value}") for key, value in grid.items())

    shared = {key: value for key, value in declared.items() if not isinstance(value, Mapping)}
    separate = {name: value for name, value in declared.items() if isinstance(value, Mapping)}
    return parsed(shared), {str(name): parsed(grid) for name, grid in separate.items()}


def names(points: Sequence[Point]) -> list[str]:
    """Name each point by its grid, and by the overrides that differ within that grid."""
    shared: dict[str, set[tuple[str, str]]] = {}
    for grid, overrides in points:
        shared[grid] = shared.get(grid, set(overrides.items())) & overrides.items()
    lines = []
    for grid, overrides in points:
        own = [f"{k}={v}" for k, v in overrides.items() if (k, v) not in shared[grid]]
        words = [f"{grid}:" if own else grid] if grid else []
        lines.append(" ".join([*words, *own]) or "the only cell")
    return lines
