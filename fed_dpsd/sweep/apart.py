"""The keys in which runs differ, from their whole configurations."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fed_dpsd.config import leaves
from fed_dpsd.errors import UserError, format_value
from fed_dpsd.experiment import Experiment
from fed_dpsd.report.settings import GRID, RESULTS, RESULTS_OF_COPIES, Row, setting_of
from fed_dpsd.server.run_folder import open_run_folder

# Keys that do not distinguish runs: paths, the names of classes, and deadlines.
PLACES = (
    *("out", "cache", "run_folder", "ledger", "tracker"),
    *("data.path", "data.classes", "teacher.path"),
    *(f"federation.{time}_seconds" for time in ("node_timeout", "round_timeout", "grace", "retry")),
)
COPIES_OF_SEED = {"partition.seed", "partition.coins", "teacher.seed"}  # by default


def configuration(experiment: Experiment) -> dict[str, Any]:
    """Return the configuration, excluding keys for paths; 10 and 10.0 are the same."""
    config: dict[str, Any] = json.loads(experiment.to_json(), parse_float=_plain)
    for place in PLACES:
        group, _, name = place.rpartition(".")
        del (config[group] if group else config)[name]
    return config


def named_parts(experiment: Experiment) -> Row:
    """Return the names of a run's training, answers and partition."""
    return {part: getattr(experiment, part).name for part in ("training", "answers", "partition")}


def _plain(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def key_texts(experiments: Sequence[Experiment]) -> list[Row]:
    """Return each run's keys and values as text, without its seed; "" for seeds that follow it.

    One of COPIES_OF_SEED follows the run's seed if both are equal, unless a run that differs only
    in seeds has it with a different seed.
    """
    found, others, fixed = [], [], set()
    for each in experiments:
        known = {key: format_value(value) for key, value in leaves(configuration(each))}
        known |= named_parts(each)
        del known["partition._target_"]
        seed, seeds = known.pop("seed"), COPIES_OF_SEED & known.keys()
        other = frozenset((key, text) for key, text in known.items() if key not in seeds)
        fixed |= {(other, key, known[key]) for key in seeds if known[key] != seed}
        found.append(known)
        others.append((other, seed, seeds))
    for known, (other, seed, seeds) in zip(found, others, strict=True):
        for key in seeds:
            if known[key] == seed and (other, key, seed) not in fixed:
                known[key] = ""
    return found


def differing_keys(known: Sequence[Row]) -> list[str]:
    """Return the keys in which runs differ, given their `key_texts`."""
    keys = dict.fromkeys(key for own in known for key in own)
    return [key for key in keys if len({own.get(key, "") for own in known}) > 1]


def distinguish_rows(rows: Iterable[Row], runs: Mapping[str, Experiment | None]) -> list[Row]:
    """Add columns to a table's rows until the runs of each setting differ only in seeds.

    Keys in which the runs of a setting differ become columns. Blank cells of these columns, and of
    columns that are blank in only some rows of a grid, are filled. Copies of a run are removed.

    Args:
        rows: the rows.
        runs: the runs by their key; rows of unknown runs are unchanged.
    """
    rows = list(rows)
    experiments = {key: run for key, run in runs.items() if run}
    known = dict(zip(experiments, key_texts(list(experiments.values())), strict=True))
    columns = dict.fromkeys(column for row in rows for column in row if column not in RESULTS)
    cells = {(row.get(GRID), column, bool(row.get(column))) for row in rows for column in columns}
    some = {column for grid, column, given in cells if (grid, column, not given) in cells}
    rows = _fill_cells(rows, known, [column for column in columns if column in some])
    settings: dict[Any, list[Row]] = {}
    for row in rows:
        if row["key"] in known:
            settings.setdefault(setting_of(row), []).append(known[row["key"]])
    apart = dict.fromkeys(key for group in settings.values() for key in differing_keys(group))
    kept: dict[Any, Row] = {}
    for row in _fill_cells(rows, known, apart):
        own = known.get(row["key"], row)
        results = (row.get(column) for column in RESULTS_OF_COPIES)
        kept.setdefault((setting_of(row), *results, frozenset(own.items())), row)
    return list(kept.values())


def _fill_cells(rows: Sequence[Row], known: Mapping[str, Row], columns: Iterable[str]) -> list[Row]:
    """Fill blank cells with a run's value, written as in other rows.

    The rows of a setting are filled only if all its runs are known, or if the known ones differ.
    Otherwise, filling would separate the known runs from the unknown ones.
    """
    settings: dict[Any, list[Row | None]] = {}
    for row in rows:
        settings.setdefault(setting_of(row), []).append(known.get(row["key"]))
    columns = list(columns)

    def separable(runs: Sequence[Row | None]) -> bool:
        own = [run for run in runs if run is not None]
        return len(own) == len(runs) or bool(differing_keys(own))

    fillable = {setting: separable(runs) for setting, runs in settings.items()}
    written: dict[tuple[str, str], str] = {}
    for row in rows:
        for column in columns:
            value = known.get(row["key"], {}).get(column)
            if value and row.get(column):
                written.setdefault((column, value), row[column])
    return [
        row
        | {
            column: written.get((column, value), value)
            for column in columns
            if not row.get(column)
            and (value := known.get(row["key"], {}).get(column))
            and fillable[setting_of(row)]
        }
        for row in rows
    ]


def try_open_experiment(folder: Path) -> Experiment | None:
    """Return the experiment of a run folder; None if it has none or cannot be read."""
    try:
        return _opened(folder, (folder / "config.yaml").stat().st_mtime_ns)
    except (OSError, UserError):
        return None


@functools.cache
def _opened(folder: Path, _modified: int) -> Experiment:
    """Read a run folder once per change: a sweep writes its table after each run."""
    return open_run_folder(folder)
