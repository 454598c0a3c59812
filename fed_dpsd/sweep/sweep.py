"""Sweeps: a grid of overrides, a run folder for each cell, and tables of the results.

Repeat a sweep to resume it: finished cells are skipped and unfinished cells are resumed, unless
their data has changed. Any number of processes may sweep the same folder; they share its cells.
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
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fed_dpsd.accounts.words import mechanism_of
from fed_dpsd.config.compose import method_values
from fed_dpsd.config.grid import expand, name_points, own_grid
from fed_dpsd.errors import ConfigError, UserError, one_line
from fed_dpsd.experiment import Experiment, calibrated, forget_data, from_overrides
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, combined_trust
from fed_dpsd.progress import reporting
from fed_dpsd.report.settings import Row
from fed_dpsd.server.inputs import (
    Inputs,
    difference,
    digests_of_inputs,
    inputs_of,
    recorded_inputs,
)
from fed_dpsd.server.run_folder import new_run_folder, read_log, versions
from fed_dpsd.server.summary import ANSWERS, TRAVELLED, read_summary
from fed_dpsd.storage import to_utf8, write_together, writing
from fed_dpsd.sweep.apart import PLACES, configuration, distinguish_rows, try_open_experiment

TABLE, VERSIONS = "results.csv", "versions.json"
ROUNDS = (
    *("key", "round", "seconds", *ANSWERS, "student_accuracy"),
    *("bytes_to_clients", "bytes_to_server"),
)

TRAINING = re.compile("(steps|epochs)(_per_round)?$")  # keys of a method's training

Say = Callable[[str], None]
Work = Callable[[Experiment, Path], Any]


@dataclass(frozen=True)
class Cell:
    """A run of a sweep.

    Args:
        key: the name of its run folder.
        name: the overrides that distinguish it from other cells of the sweep, for display.
        grid: the name of its grid; "" if there is only one.
        overrides: all its overrides, by key.
        experiment: the experiment, with its run folder.
    """

    key: str
    name: str
    grid: str
    overrides: Mapping[str, str]
    experiment: Experiment

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.experiment.config.run_folder)

    @property
    def finished(self) -> bool:
        """Return whether the run is completed."""
        return read_summary(self.folder).get("status") == "completed"


# --- cells ---


def cell_key(experiment: Experiment) -> str:
    """Return 16 hex digits of the SHA-256 of the configuration, excluding keys for paths."""
    canonical = json.dumps(configuration(experiment), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def folder_name(experiment: Experiment, grid: str, key: str) -> str:
    """Return a cell's folder name: grid or method, data, partition, seed and part of the key."""
    config, partition = experiment.config, experiment.partition
    alpha = getattr(partition, "alpha", None)
    kind = partition.name if alpha is None else f"alpha{alpha:g}"
    words = grid or experiment.method_name, config.data.name, kind, f"seed{config.seed}", key
    return "-".join(re.sub(r"[^\w.]+", "_", word) for word in words)


def plan(
    overrides: Sequence[str],
    folder: Path,
    base: Path,
    say: Say,
    only: Sequence[str] = (),
    read: Callable[[Experiment], Inputs] = inputs_of,
) -> list[Cell]:
    """Return every distinct cell of a sweep.

    All cells are checked before any noise is calibrated, because calibrating is slow. Then the data
    is read: a cell is finished only for the same data.

    Args:
        overrides: as for `config.grid.own_grid` and `config.grid.expand`.
        folder: the parent of the run folders.
        base: the folder that relative paths start from.
        say: called with each line of progress.
        only: names of the grids to keep; () for all.
        read: returns what a cell's run reads.

    Raises:
        ConfigError: the problems of all cells.
    """
    forget_data()
    with own_grid(overrides, base) as known:
        points = expand(known, only)
        described = list(zip(name_points(points), points, strict=True))
        problems = _Problems(len(points))
        bound = []
        for name, point in described:
            with problems.of(name):
                typed = [f"{key}={value}" for key, value in point.overrides.items()]
                bound.append((name, point, from_overrides(typed, base, calibrate=False)))
        problems.finish()
        for line in _unequal_training([experiment for _, _, experiment in bound]):
            say(f"warning: {line}")
        cells: dict[str, Cell] = {}
        taken: dict[str, str] = {}
        for number, (name, point, experiment) in enumerate(bound, start=1):
            if experiment.config.privacy.target_epsilon is not None:
                say(f"calibrating noise {number}/{len(points)}: {name}")
            with problems.of(name):
                experiment = calibrated(experiment)
                key, inputs = cell_key(experiment), read(experiment)
                whole = json.dumps([key, inputs])
                if whole in cells:
                    same = f"has the same configuration as {cells[whole].name}"
                    twice = "is given twice" if name == cells[whole].name else same
                    say(f"{name} {twice}: one run for both")
                    continue
                own, changed = _folder_of(experiment, point.grid, key, inputs, folder, taken)
                if changed:
                    say(f"{name} is a new run: {changed}, and keeps its results")
                taken[own] = key
                config = dataclasses.replace(
                    experiment.config, out=str(folder), run_folder=str(folder / own)
                )
                experiment = dataclasses.replace(experiment, config=config)
                cells[whole] = Cell(own, name, point.grid, point.overrides, experiment)
        problems.finish()
    return list(cells.values())


def _unequal_training(experiments: Iterable[Experiment]) -> Iterator[str]:
    """Yield a line for each method that trains less than its default, if another one does not.

    The largest value of a key in the sweep counts, so it may vary.
    """
    most: dict[str, dict[str, int]] = {}
    plugins: dict[str, tuple[str, ...]] = {}
    for experiment in experiments:
        plugins[experiment.method_name] = experiment.config.plugins
        own = most.setdefault(experiment.method_name, {})
        for key, value in vars(experiment.method).items():
            if TRAINING.search(key):
                own[key] = max(value, own.get(key, 0))
    less = {}
    for name, own in most.items():
        default = method_values(name, plugins[name]) if own and len(most) > 1 else {}
        less[name] = [
            f"{name} has method.{key}={value}, below its default of {default[key]}"
            for key, value in own.items()
            if value < default.get(key, 0)
        ]
    if not all(less.values()):
        remedy = "check that the comparison is fair to it"
        yield from (f"{line}; {remedy}" for lines in less.values() for line in lines)


def _folder_of(
    experiment: Experiment,
    grid: str,
    key: str,
    inputs: Inputs,
    parent: Path,
    taken: Mapping[str, str],
) -> tuple[str, str]:
    """Return the name of a cell's folder, from an earlier sweep or new.

    Four digits of the key suffice, unless two cells share them and the rest of the name. Runs of
    the same key on other data have numbers after it.

    Returns:
        The name, and how an earlier run of the cell differs in what it read; "" without one.
    """
    short, changed = key[:4], ""
    there: dict[str, str] = {}
    for path in sorted(parent.glob(f"*-{short}*/")):
        if run := try_open_experiment(path):
            there[path.name] = cell_key(run)
            if there[path.name] == key:
                found = difference(recorded_inputs(run, path), inputs)
                if not found:
                    return path.name, ""
                changed = f"{path.name} {found}"
    used = {**there, **taken}
    name = folder_name(experiment, grid, short)
    if used.get(name, key) != key:
        name = folder_name(experiment, grid, key)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in used), changed


def check(
    cells: Sequence[Cell], check_cell: Callable[[Experiment, Sequence[str]], Any]
) -> list[Any]:
    """Check each unfinished cell before any of them runs; return the results of `check_cell`."""
    problems = _Problems(len(cells))
    found = []
    for cell in cells:
        if cell.finished:
            continue
        overrides = [f"{key}={value}" for key, value in cell.overrides.items()]
        with problems.of(cell.name):
            found.append(check_cell(cell.experiment, overrides))
    problems.finish()
    return found


class _Problems:
    """The problems of many cells; each problem is reported once."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._found: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Catch the errors of the cell with this name."""
        try:
            yield
        except UserError as error:
            for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
                self._found.setdefault(problem, []).append(name)

    def finish(self) -> None:
        """Raise ConfigError for all problems; a problem names a cell unless all cells have it."""
        lines = [
            problem
            if len(names) == self._cells or names[0] in problem
            else f"{problem} (in {names[0]})"
            for problem, names in self._found.items()
        ]
        if lines:
            raise ConfigError(lines)


def run(cells: Sequence[Cell], work: Work, table: Path, say: Say) -> dict[str, str]:
    """Run the unfinished cells, and write the tables after each.

    Cells that another process is running are skipped and checked again at the end.

    Returns:
        The error of each failed cell, by the cell's name.
    """
    for parent in {cell.folder.parent for cell in cells} | {table.parent}:
        with writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
    write_tables(table, cells)
    failed: dict[str, str] = {}
    waiting, begun = list(cells), [cell for cell in cells if not cell.finished]
    with reporting("cells", len(begun)) as task:
        for wait in (False, True):
            held = []
            for cell in waiting:
                with _lock(cell.folder.with_name(f"{cell.key}.lock"), wait) as mine:
                    if not mine:
                        held.append(cell)
                        say(f"running in another process, checked again later: {cell.name}")
                        continue
                    if cell.finished:
                        say(f"already finished: {cell.name}{_other_versions(cell.folder)}")
                    else:
                        say(f"{cell.name}: {cell.folder}")
                        try:
                            _make_folder(cell)
                            work(cell.experiment, cell.folder)
                        except Exception as error:
                            failed[cell.name] = one_line(error)
                            say(f"failed: {failed[cell.name]}")
                        gc.collect()
                        torch.cuda.empty_cache()
                        write_tables(table, cells)
                if cell in begun:
                    task.advance()
            waiting = held
    write_tables(table, cells)  # adds the cells that other processes finished
    return failed


def _other_versions(folder: Path) -> str:
    """Return the versions of a finished run that differ from those here; "" if none do."""
    then, now = _versions(folder / VERSIONS), versions()
    differing = [
        f"{name} {then[name] or 'unknown'} (now {now[name] or 'unknown'})"
        for name in now.keys() & then.keys()
        if then[name] != now[name]
    ]
    return f", with {', '.join(sorted(differing))}" if differing else ""


def _make_folder(cell: Cell) -> None:
    if not (cell.folder / "config.yaml").exists():
        if cell.folder.exists():
            shutil.rmtree(cell.folder)
        new_run_folder(cell.experiment)


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Lock `path`, a folder or a lock file; yield whether this process has the lock.

    The operating system releases the lock of a process that dies.
    """
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        mine = True
    except BlockingIOError:
        mine = False
    try:
        yield mine
    finally:
        os.close(descriptor)


# --- the tables ---


def write_tables(path: Path, cells: Sequence[Cell]) -> None:
    """Write the rows of finished cells to CSV files, replacing rows with the same keys.

    `path`, STEM.csv, has a row per cell, and STEM_rounds.csv a row per round of each cell. All
    other rows and all columns stay in place. The rows of STEM.csv are distinguished.
    """
    swept = dict.fromkeys(key for cell in cells for key in cell.overrides if key not in PLACES)
    with _lock(path.parent, wait=True):
        finished, files = [cell for cell in cells if cell.finished], {}

        def complete(rows: Sequence[Row]) -> list[Row]:
            ours = {cell.key: cell.experiment for cell in finished}
            others = [row["key"] for row in rows if row["key"] not in ours]
            parent = cells[0].folder.parent
            return distinguish_rows(
                rows, ours | {key: try_open_experiment(parent / key) for key in others}
            )

        for suffix, columns, rows_of, change in (
            ("", ("key",), lambda cell: [_row(cell, swept)], complete),
            ("_rounds", ROUNDS, _rounds, list),
        ):
            file = path.with_stem(f"{path.stem}{suffix}")
            ours = {cell.key: rows_of(cell) for cell in finished}
            files[file] = _merge_table(file, columns, ours, change)
        write_together(files)


def _merge_table(
    path: Path,
    columns: Iterable[str],
    ours: Mapping[str, Sequence[Row]],
    change: Callable[[Sequence[Row]], list[Row]],
) -> bytes:
    """Return a table in which our rows replace the rows of their keys, or follow the others."""
    before, old = read_table(path)
    ahead = itertools.takewhile(lambda key: key not in ours, old)
    known = {**old, **ours}
    rows = change([row for key in dict.fromkeys([*ahead, *ours, *old]) for row in known[key]])
    text = io.StringIO()
    header = list(dict.fromkeys(itertools.chain(before, columns, *rows)))
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return to_utf8(text.getvalue())


def read_table(path: Path) -> tuple[list[str], dict[str, list[Row]]]:
    """Return the columns and the rows by key of a table, which need not exist yet."""
    if not path.exists():
        return [], {}
    rows: dict[str, list[Row]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ["key"])
        if "key" not in columns:
            raise UserError(f"{path} is not a sweep's table (it has no column 'key'); use --csv")
        for row in reader:
            rows.setdefault(row["key"], []).append(row)
    return columns, rows


def _row(cell: Cell, swept: Iterable[str]) -> Row:
    """Return a finished cell's overrides and results.

    The row's trust is the weakest and its delta the largest of its proven epsilons, and its caveats
    include all of theirs. A label's epsilon has its own delta and trust, since it does not cover
    records.
    """
    config, summary = cell.experiment.config, read_summary(cell.folder)
    origin = _versions(cell.folder / VERSIONS)
    scores, areas = summary["accuracy"], summary["auroc"]
    proven = {(row["unit"], row["relation"]): row for row in summary["privacy"]["proven"]}
    label = summary["privacy"]["label"] or {}
    row: dict[str, Any] = {"key": cell.key, "grid": cell.grid}
    row |= {key: cell.overrides.get(key) for key in swept}
    row |= {
        "method": summary["method"],
        "data": summary["data"],
        "num_classes": config.data.num_classes,
        "num_clients": config.num_clients,
        "teachers_per_client": config.teachers_per_client,
        "seed": config.seed,
        "mechanism": mechanism_of(summary["privacy"]),
        **_scores(scores),
        "vote": scores["vote"],
        **{f"auroc_{role}": area for role, area in _scores(areas).items()},
        "epsilon_published": summary["privacy"]["epsilon_published"],
        **{f"{unit}_{how}": proven[unit, how]["epsilon"] for unit, how in UNITS_AND_RELATIONS},
        "delta": max(row["delta"] for row in proven.values()),
        "trust": combined_trust(row["trust"] for row in proven.values()),
        "label_replace_one": label.get("epsilon"),
        "label_delta": label.get("delta"),
        "label_trust": label.get("trust"),
        "reason": summary["privacy"]["reason"],  # the reason for infinite epsilons
        "caveats": "; ".join(
            dict.fromkeys(
                note for row in (*proven.values(), label) for note in row.get("notes", ())
            )
        ),
        "queries_per_client": summary["queries"]["answered_per_client"],
        **{name: summary["queries"].get(name) for name in (*ANSWERS, *TRAVELLED)},
        "seconds": round(summary["seconds"]["total"], 1),
        "seconds_rounds": round(summary["seconds"]["rounds"], 1),
        "student_sha256": (summary["student_sha256"] or "")[:16],  # method=local has no student
        "commit": origin.get("commit"),
        "machine": origin.get("machine"),
        **_public_digests(cell),
    }
    return _as_texts(row)


def _public_digests(cell: Cell) -> dict[str, str]:
    """Return the digests of a run's inputs; "" with secret noise, since tables are shared."""
    digests = digests_of_inputs(cell.experiment, cell.folder)
    return digests if cell.experiment.seeded else dict.fromkeys(digests, "")


def _versions(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        raise UserError(
            f"{path} is missing or damaged; restore it from a backup, or write {{}} to it for a "
            "table without the run's commit and machine"
        ) from None


def _rounds(cell: Cell) -> list[Row]:
    """Return a row per line of rounds.jsonl; answers, bytes and seconds are totals so far."""
    lines = (line | {"key": cell.key} for line in read_log(cell.folder))
    return [_as_texts({column: line.get(column) for column in ROUNDS}) for line in lines]


def _as_texts(row: Mapping[str, Any]) -> Row:
    return {column: "" if value is None else str(value) for column, value in row.items()}


def _scores(scores: Mapping[str, Any]) -> dict[str, float | None]:
    clients = [score for score in scores["clients"] or () if score is not None]
    return {role: scores[role] for role in ("student", "ensemble", "weighted_ensemble")} | {
        "client_best": max(clients, default=None),
        "client_mean": sum(clients) / len(clients) if clients else None,
    }
