"""The grid of a sweep, from overrides and from an experiment's file, ours or a user's."""

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fed_dpsd.config.bind import UniqueKeys
from fed_dpsd.config.compose import Composition, declared_sweep, sweep_choices
from fed_dpsd.config.plugins import files_of, search_plugins, with_experiment
from fed_dpsd.errors import ConfigError, format_value, reason_of
from fed_dpsd.storage import conf_folder

Grid = dict[str, list[str]]
PACKAGE = "# @package _global_\n"  # Hydra's header of an experiment's file
OF_ONE_RUN = ("out", "run_folder")  # a sweep names its run folders itself


class Point(NamedTuple):
    """A point of a grid: the grid's name ("" if there is only one grid) and the overrides.

    `experiment` is the first override. The last key varies fastest.
    """

    grid: str
    overrides: dict[str, str]


@contextlib.contextmanager
def own_grid(overrides: Sequence[str], base: Path) -> Iterator[list[str]]:
    """Yield the overrides, with a user's YAML file replaced by the experiment that it declares.

    The file has the format of conf/experiment/*.yaml. Inside the block, the experiment is named
    after the file, and every error names the file.

    Args:
        overrides: overrides, and at most one path that ends in .yaml or .yml.
        base: the folder that a relative path starts from.

    Raises:
        ConfigError: the file cannot be read or declares no grid, or there are two files.
    """
    files = [each for each in overrides if re.search(r"^[^=]*\.ya?ml$", each)]
    others = [each for each in overrides if each not in files]
    if not files:
        yield others
        return
    file = files[0]
    if also := [*files[1:], *(each for each in others if each.startswith("experiment="))]:
        raise ConfigError([f"{also[0]}: {file} already gives the grid; use only one of the two"])
    name, text = re.sub(r"\W", "_", Path(file).stem), _read_grid(base / file, file)
    if name in files_of("experiment"):
        raise ConfigError([f"{file}: experiment={name} comes with FedDPSD; rename the file"])
    typed = ("--only", *(each.partition("=")[0] for each in others))
    try:
        with with_experiment(text if text.startswith("# @package") else PACKAGE + text, name):
            yield [f"experiment={name}", *others]
    except ConfigError as error:
        lines = (re.sub(rf"^experiment={name}: (in its file, )?", "", p) for p in error.problems)
        raise ConfigError(
            [line if line.startswith(typed) else f"{file}: {line}" for line in lines]
        ) from None


def _read_grid(path: Path, file: str) -> str:
    """Return the text of a YAML file with a grid; errors refer to it as `file`."""
    try:
        text = path.read_text()
        content = yaml.load(text, UniqueKeys)
    except (OSError, UnicodeError) as error:
        raise ConfigError([f"{file} cannot be read ({reason_of(error)}); check its path"]) from None
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError([f"{file} is not YAML: {why}"]) from None
    except ValueError as error:  # a key is given twice
        raise ConfigError([f"{file}: {error}"]) from None
    if not (isinstance(content, Mapping) and isinstance(content.get("sweep"), Mapping)):
        raise ConfigError(
            [f"{file} has no grid; add the key sweep, as in sweep: {{DENSE: {{method: dense}}}}"]
        )
    return text


def expand(overrides: Sequence[str], only: Sequence[str] = ()) -> list[Point]:
    """List every point of the overrides' grid, or of the grids that experiments declare.

    An experiment's `sweep` maps keys to choices. A key that maps to further keys is a separate
    grid, which also includes all keys that map to choices, unless it has its own. `overrides`
    replace keys of the file, except for `experiment` itself, which names the file with the grids.

    A group of conf/, such as `privacy`, determines which other keys exist. For a group, the
    `overrides` select among the separate grids; a grid without any of the choices is omitted.

    Args:
        overrides: in Hydra's sweep syntax, such as "seed=0,1,2".
        only: names of the separate grids to keep (see `_select_grids`); () for all.

    Raises:
        ConfigError: the syntax is wrong, `sweep` is not a grid, a key names the run folder, no
            grid has a chosen value of a group, or a name in `only` is unknown.
    """
    typed: Grid = {}
    for key, values in map(sweep_choices, overrides):
        typed.pop(key, None)  # a repeated key takes its last choices and their position
        typed[key] = values
    for key in typed:
        if key in OF_ONE_RUN:
            raise ConfigError([f"{key}={typed[key][0]}: a sweep names its run folders; use --out"])
    experiments = typed.pop("experiment", [])
    grids = [
        (name, {"experiment": [experiment]} | grid)
        for experiment in experiments
        for name, grid in _grids_of(experiment, typed)
    ]
    kept = _select_grids(only, [name for name, _ in grids if name])
    grids = [(name, grid) for name, grid in grids if not only or name in kept]
    return [
        Point(name, dict(zip(grid, values, strict=True)))
        for name, grid in grids or [("", typed)]
        for values in itertools.product(*grid.values())
    ]


def _select_grids(only: Sequence[str], known: Sequence[str]) -> set[str]:
    """Return the grids that `only` names, separated by commas, which names may also contain.

    Raises:
        ConfigError: part of `only` is not the name of a grid.
    """
    words, found = [word for text in only for word in text.split(",")], set()
    while words:
        ends = range(len(words), 0, -1)
        names = {end: ",".join(words[:end]).strip() for end in ends}
        end = next((end for end in ends if names[end] in known), 0)
        if not end:
            choose = f"choose among: {'; '.join(dict.fromkeys(known))}"
            remedy = choose if known else "this sweep has no named entries; leave out --only"
            raise ConfigError([f"--only {words[0].strip()}: {remedy}"])
        found.add(names[end])
        words = words[end:]
    return found


def require_one_run(overrides: Sequence[str], composition: Composition) -> None:
    """Check that an experiment is one run: its file has no grid, or all keys of a grid are given.

    A grid that does not contain a chosen value of a group, as in `expand`, does not count.

    Raises:
        ConfigError: it is a grid; the error gives the number of runs and the command to run them.
    """
    if composition.sweep == {}:
        return
    typed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    swept = [each for each in overrides if each.partition("=")[0] not in OF_ONE_RUN]
    with search_plugins(composition.plugins):
        points = expand(swept)
    if not any(point.overrides.keys() <= typed.keys() for point in points):
        out = ["--out", typed["out"].strip("'\"")] if "out" in typed else []
        command = f"fed-dpsd sweep {shlex.join([*swept, *out])}"
        name = typed["experiment"]
        raise ConfigError([f"experiment={name} is a grid of {_runs(len(points))}: {command}"])


def _runs(count: int) -> str:
    return f"{count:,} runs" if count > 1 else "1 run, with settings that only a sweep accepts"


def _grids_of(experiment: str, typed: Grid) -> list[tuple[str, Grid]]:
    """Return the named grids of an experiment's file, with the given choices in place of theirs."""
    shared, separate = _grids(experiment, declared_sweep(experiment))
    groups = [key for key in typed if (conf_folder() / key).is_dir()]
    grids = []
    for name, own in separate.items() or [("", Grid())]:
        chosen = {key: [v for v in typed[key] if v in own[key]] for key in groups if key in own}
        if all(chosen.values()):
            others = {key: values for key, values in shared.items() if key not in own}
            grids.append((name, own | others | typed | chosen))
    if not grids:
        request = " ".join(f"{key}={','.join(typed[key])}" for key in groups)
        raise ConfigError([f"{request}: no grid of experiment={experiment} contains it"])
    return grids


def _grids(experiment: str, declared: Any) -> tuple[Grid, dict[str, Grid]]:
    """Return the keys that an experiment's grids share, and each separate grid by name."""
    if not isinstance(declared, Mapping):
        problem = (
            f"experiment={experiment}: sweep={format_value(declared)} must map keys to choices"
        )
        raise ConfigError([problem])

    def parsed(grid: Mapping[str, Any]) -> Grid:
        return dict(sweep_choices(f"{key}={_override_text(value)}") for key, value in grid.items())

    shared = {key: value for key, value in declared.items() if not isinstance(value, Mapping)}
    separate = {name: value for name, value in declared.items() if isinstance(value, Mapping)}
    return parsed(shared), {str(name): parsed(grid) for name, grid in separate.items()}


def _override_text(value: Any) -> str:
    """Return the choices of a key as in an override: text unchanged, a list separated by commas."""
    if isinstance(value, str):
        return value
    return ",".join(map(format_value, value)) if isinstance(value, list) else format_value(value)


def name_points(points: Sequence[Point]) -> list[str]:
    """Name each point by its grid and the overrides that differ within that grid."""
    shared: dict[str, set[tuple[str, str]]] = {}
    for grid, overrides in points:
        shared[grid] = shared.get(grid, set(overrides.items())) & overrides.items()
    lines = []
    for grid, overrides in points:
        own = [f"{k}={v}" for k, v in overrides.items() if (k, v) not in shared[grid]]
        words = [f"{grid}:" if own else grid] if grid else []
        lines.append(" ".join([*words, *own]) or "the only cell")
    return lines
