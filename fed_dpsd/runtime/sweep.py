"""Many runs: a grid of overrides, a run folder for each of its cells, and one table of the results.

A sweep that was killed is given again: finished cells are skipped, an unfinished one goes on. Any
number of processes may sweep one folder; they share its cells.
"""

import contextlib
import csv
import dataclasses
import fcntl
import gc
import hashlib
import io
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fed_dpsd.config import (
    ConfigError,
    UserError,
    choices,
    compose,
    conf_folder,
    declared_sweep,
)
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.runtime import run as runs
from fed_dpsd.runtime.checkpoint import write_atomically
from fed_dpsd.runtime.experiment import Experiment, set_up

PLACES = ("out", "cache", "run_folder", "ledger", "data.path", "teacher.path")

Say = Callable[[str], None]
Work = Callable[[Experiment, Path], Any]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Args:
        key: what its run folder is named.
        name: the overrides that set it apart in its sweep, for people.
        overrides: all that it was composed from, key by key.
        experiment: what to run, and in which run folder.
    """

    key: str
    name: str
    overrides: Mapping[str, str]
    experiment: Experiment

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.experiment.config.run_folder)

    @property
    def finished(self) -> bool:
        """Whether the run folder says that the run is completed."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text())
        except FileNotFoundError:
            return False
        return bool(summary["status"] == "completed")


# --- cells ---


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


def _names(grid: Sequence[Mapping[str, str]]) -> list[str]:
    """Each cell's overrides that not all cells have."""
    shared = set.intersection(*(set(overrides.items()) for overrides in grid))
    apart = [
        [f"{k}={v}" for k, v in overrides.items() if (k, v) not in shared] for overrides in grid
    ]
    return [" ".join(words) or "the only cell" for words in apart]


def cell_key(experiment: Experiment) -> str:
    """16 hex digits: SHA-256 over the configuration, without what only names a place."""
    config = json.loads(experiment.to_json(), parse_float=_plain)
    for place in PLACES:
        group, _, name = place.rpartition(".")
        del (config[group] if group else config)[name]
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _plain(text: str) -> float:
    """A number as it is, however it was written: 10 and 10.0 are one."""
    number = float(text)
    return int(number) if number.is_integer() else number


def plan(overrides: Sequence[str], folder: Path, base: Path, say: Say) -> list[Cell]:
    """Set up every cell, each once, before any data is read.

    Args:
        overrides: as for `expand`.
        folder: parent of the run folders.
        base: folder that relative paths start from.
        say: told how far it is, since calibration takes seconds, and of cells that are equal.

    Raises:
        ConfigError: every problem of every cell.
    """
    cells: dict[str, Cell] = {}
    problems: dict[str, str] = {}
    grid = expand(overrides)
    for number, (name, values) in enumerate(zip(_names(grid), grid, strict=True), start=1):
        say(f"setting up {number}/{len(grid)}: {name}")
        try:
            experiment = set_up(compose([f"{key}={value}" for key, value in values.items()]), base)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, name)
            continue
        key = cell_key(experiment)
        if key in cells:
            say(f"{name} is the same configuration as {cells[key].name}: one run for both")
            continue
        places = {"out": str(folder), "run_folder": str(folder / key)}
        config = dataclasses.replace(experiment.config, **places)
        cells[key] = Cell(key, name, values, dataclasses.replace(experiment, config=config))
    if problems:
        raise ConfigError([f"{problem} (in {name})" for problem, name in problems.items()])
    return list(cells.values())


def run(cells: Sequence[Cell], work: Work, table: Path, say: Say) -> dict[str, str]:
    """Run the cells that are not finished, and write the table again after each.

    A cell that another process runs is left to it, and looked at again at the end.

    Args:
        cells: of one `plan`.
        work: runs an experiment in its run folder, or goes on with it.
        table: the CSV file; what it holds of other cells stays.
        say: told what is skipped, begun and failed.

    Returns:
        The error of each cell that failed, by its name.

    Raises:
        UserError: a folder or the table cannot be written, or the file is no such table.
    """
    for parent in {cell.folder.parent for cell in cells} | {table.parent}:
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(parent, error) from None
    write_table(table, cells)
    failed: dict[str, str] = {}
    waiting = list(cells)
    for wait in (False, True):
        held = []
        for cell in waiting:
            with _lock(cell.folder.with_suffix(".lock"), wait) as mine:
                if not mine:
                    held.append(cell)
                    say(f"left to another process, for now: {cell.name}")
                elif cell.finished:
                    say(f"finished already: {cell.name}")
                else:
                    say(f"{cell.name}: {cell.folder}")
                    try:
                        _make_folder(cell)
                        work(cell.experiment, cell.folder)
                    except Exception as error:
                        failed[cell.name] = runs.one_line(error)
                        say(f"failed: {failed[cell.name]}")
                    gc.collect()
                    torch.cuda.empty_cache()
                    write_table(table, cells)
        waiting = held
    write_table(table, cells)  # with what other processes finished
    return failed


def _make_folder(cell: Cell) -> None:
    """A run folder to begin or to go on in; one whose making was cut short is made anew."""
    if not (cell.folder / "config.yaml").exists():
        if cell.folder.exists():
            shutil.rmtree(cell.folder)
        runs.new_run_folder(cell.experiment)


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Whether this process has `path`, a folder or a file of its own; a dead one lets go of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        mine = True
    except BlockingIOError:
        mine = False
    try:
        yield mine
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror}); choose another folder")


# --- the table ---


def write_table(path: Path, cells: Sequence[Cell]) -> None:
    """Write the rows of finished cells into a CSV file, in place of those with the same keys.

    All other rows stay where they are, and columns of both are kept.

    Raises:
        UserError: the file is there and has no column `key`, or cannot be written.
    """
    with _lock(path.parent, wait=True):
        columns, old = _read_table(path)
        swept = dict.fromkeys(key for cell in cells for key in cell.overrides if key not in PLACES)
        known = old | {cell.key: _row(cell, swept) for cell in cells if cell.finished}
        ours = [cell.key for cell in cells if cell.key in known]
        before = itertools.takewhile(lambda key: key not in ours, old)
        rows = [known[key] for key in dict.fromkeys([*before, *ours, *old])]
        text = io.StringIO()
        header = list(dict.fromkeys(itertools.chain(columns, *rows)))
        writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        try:
            write_atomically(path, text.getvalue().encode())
        except OSError as error:
            raise _unwritable(path, error) from None


def _read_table(path: Path) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Columns and rows, by key, of a table that may not be there yet."""
    if not path.exists():
        return ["key"], {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ["key"])
        if "key" not in columns:
            raise UserError(f"{path} is no table of a sweep (it has no column 'key'); use --csv")
        return columns, {row["key"]: row for row in reader}


def _row(cell: Cell, swept: Iterable[str]) -> dict[str, str]:
    """A finished cell's overrides and results. `delta`, `trust`: of (record, add_remove)."""
    config = cell.experiment.config
    summary = json.loads((cell.folder / "summary.json").read_text())
    versions = json.loads((cell.folder / "versions.json").read_text())
    scores, areas = summary["accuracy"], summary["auroc"]
    proven = {(row["unit"], row["relation"]): row for row in summary["privacy"]["proven"]}
    row = {"key": cell.key} | {key: cell.overrides.get(key) for key in swept}
    row |= {
        "method": summary["method"],
        "data": summary["data"],
        "num_classes": config.data.num_classes,
        "num_clients": config.num_clients,
        "teachers_per_client": config.teachers_per_client,
        "seed": config.seed,
        "mechanism": summary["privacy"]["mechanism"],
        **_scores(scores),
        "vote": scores["vote"],
        **{f"auroc_{who}": area for who, area in _scores(areas).items()},
        "epsilon_published": summary["privacy"]["epsilon_published"],
        **{f"{unit}_{how}": proven[unit, how]["epsilon"] for unit, how in UNITS_AND_RELATIONS},
        "delta": proven["record", "add_remove"]["delta"],
        "trust": proven["record", "add_remove"]["trust"],
        "queries_per_client": summary["queries"]["answered_per_client"],
        "seconds": round(summary["seconds"]["total"], 1),
        "student_sha256": summary["student_sha256"][:16],
        "commit": versions.get("commit"),
        "machine": versions.get("machine"),
    }
    return {column: "" if value is None else str(value) for column, value in row.items()}


def _scores(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """What accuracy and AUROC have in common."""
    clients = [score for score in scores["clients"] or () if score is not None]
    return {who: scores[who] for who in ("student", "ensemble", "weighted_ensemble")} | {
        "client_best": max(clients, default=None),
        "client_mean": sum(clients) / len(clients) if clients else None,
    }
