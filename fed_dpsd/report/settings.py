"""Reading of sweep tables; runs that differ only in the seed form one setting."""

import csv
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from fed_dpsd.errors import UserError, reason_of
from fed_dpsd.privacy.epsilon import NOT_REVIEWED

ACCURACIES = ("student", "weighted_ensemble", "ensemble", "client_best", "client_mean")
SCORES = (*ACCURACIES, *(f"auroc_{model}" for model in ACCURACIES))
CLAIMS = ("record_add_remove", "record_replace_one", "patient_add_remove", "client_add_remove")
COSTS = (
    *("forward_answers", "backward_answers", "bytes_to_clients", "bytes_to_server"),
    "seconds_rounds",
)
REASON = "reason"  # the reason for an infinite epsilon
# The epsilon of a label, not of a record, for runs in which only labels are private.
LABEL, LABEL_LEGEND = "label_replace_one", ("label_delta", "label_trust")
LEGEND = ("delta", "trust", "commit", "machine")
DIGESTS = ("data_sha256", "files_sha256")  # of what a run read: its data, and other files
CONTENTS = ("data contents", "file contents")  # columns that tell these apart in a report
CAVEATS = "caveats"  # notes on the epsilons
# Results of a run; every other column is part of its setting.
RESULTS = {
    *("key", "seed", "vote", *SCORES, *CLAIMS, *LEGEND, REASON, CAVEATS),
    *("epsilon_published", "patient_replace_one", "client_replace_one", LABEL, *LABEL_LEGEND),
    *("queries_per_client", *COSTS, "seconds", "student_sha256", *DIGESTS),
}
# Rows of one setting that are equal in these columns are of copies of a run.
RESULTS_OF_COPIES = ("seed", "student", "ensemble", "student_sha256", *DIGESTS)
ALPHA = "partition.alpha"
GRID = "grid"
MEASURED_AT = "measured at"  # a column of tables of one grid from several commits
PANEL = ("data", "num_classes", ALPHA)  # columns that a title or an axis shows, so names omit them
NEEDED = (
    *("key", "seed", "data", "num_classes", "mechanism", "teachers_per_client"),
    *("student", "ensemble", *CLAIMS, *LEGEND),
)

NUMBERS = (*SCORES, *CLAIMS, LABEL, *COSTS, ALPHA)
OPTIONAL = {*SCORES, LABEL, *COSTS, ALPHA, "student_accuracy"}  # numbers that may be unknown

Row = dict[str, str]


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in the seed."""

    values: Mapping[str, str]  # the columns that were set, with their values
    runs: Sequence[Mapping[str, str]]  # the runs' rows, one for each seed

    @property
    def review(self) -> str:
        """Return "not reviewed" if a run used a plug-in; "" otherwise."""
        return NOT_REVIEWED if any(NOT_REVIEWED in note for note in self.caveats) else ""

    @property
    def caveats(self) -> list[str]:
        """Return the notes on the runs' epsilons, each once."""
        notes = (note for run in self.runs for note in run.get(CAVEATS, "").split("; "))
        return list(dict.fromkeys(filter(None, notes)))

    def score(self, column: str) -> tuple[float, float]:
        """Return the mean and sample standard deviation in percent; NaN for too few values."""
        return self.spread(column, scale=100)

    def spread(self, *columns: str, scale: float = 1) -> tuple[float, float]:
        """Return the mean and deviation of `scale` times the columns' sum; NaN as in `score`."""
        known = [
            scale * sum(float(run[column]) for column in columns)
            for run in self.runs
            if all(run.get(column) for column in columns)
        ]
        mean = statistics.fmean(known) if known else math.nan
        return mean, statistics.stdev(known) if len(known) > 1 else math.nan

    def epsilon(self, claim: str) -> float:
        """Return the largest epsilon of the runs, which holds for each of them."""
        return max(float(run[claim]) for run in self.runs)

    @property
    def label_epsilon(self) -> float | None:
        """Return the largest epsilon of labels alone; None if no run has one."""
        return max((float(run[LABEL]) for run in self.runs if run.get(LABEL)), default=None)

    def all_of(self, column: str) -> str:
        """Return the different values of a column; "" if no run has it."""
        return ", ".join(dict.fromkeys(run[column] for run in self.runs if run.get(column)))


def differing_columns(settings: Sequence[Setting]) -> list[str]:
    """Return the columns in which settings differ, but only the first of equivalent columns.

    If all settings belong to named grids, the grid is the first column. Columns implied by the
    grid's name are omitted.
    """
    columns: dict[tuple[str, ...], str] = {}
    grids = tuple(setting.values.get(GRID, "") for setting in settings)
    for column in dict.fromkeys(key for setting in settings for key in setting.values):
        texts = tuple(setting.values.get(column, "") for setting in settings)
        follows = all(grids) and len(set(zip(grids, texts, strict=True))) == len(set(grids))
        if len(set(texts)) > 1 and (column == GRID or not follows):
            columns.setdefault(texts, column)
    return sorted(columns.values(), key=lambda column: column != GRID)


def setting_names(settings: Sequence[Setting], without: Sequence[str] = ()) -> list[str]:
    """Return a name for each setting, from the columns that differ, except `without`.

    A grid's name is followed by what differs within the grid. Words appear without their key;
    numbers and booleans appear after it.
    """
    return [", ".join(own.values()) or "the only setting" for own in name_parts(settings, without)]


def name_parts(settings: Sequence[Setting], without: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the parts of each setting's name, by column."""
    columns = [column for column in differing_columns(settings) if column not in without]
    values: dict[tuple[str, str], set[str]] = {}  # of each column in each grid
    for s in settings:
        for column in columns:
            values.setdefault((s.values.get(GRID, ""), column), set()).add(s.values.get(column, ""))

    found = []
    for s in settings:
        grid = s.values.get(GRID, "")
        own = [c for c in columns if not grid or c == GRID or len(values[grid, c]) > 1]
        found.append({c: _word(c, s.values[c]) for c in own if c in s.values})
    return found


def _word(column: str, text: str) -> str:
    word = text.isidentifier() and text not in ("true", "false", "null")
    return text if word or column in (GRID, MEASURED_AT) else f"{column.rpartition('.')[2]}={text}"


def group_by_data(settings: Sequence[Setting], alphas: bool = False) -> dict[str, list[Setting]]:
    """Group settings by data set and, with `alphas`, by Dirichlet alpha if there are several."""
    several = alphas and len({setting.values.get(ALPHA) for setting in settings}) > 1
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        alpha = setting.values.get(ALPHA, "")
        title = setting.values["data"] + (f", alpha {alpha}" if several and alpha else "")
        groups.setdefault(title, []).append(setting)
    return groups


def setting_of(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the columns of a row that are set, with their values, in alphabetical order."""
    return tuple((key, row[key]) for key in sorted(row) if row[key] and key not in RESULTS)


def number_contents(rows: Sequence[Row]) -> list[Row]:
    """Number what runs read, in columns of CONTENTS, where it differs under the same names.

    Runs of a data set are compared with each other, whatever else they set; other files are
    compared within a setting. Rows whose digests are unknown are unchanged.
    """

    def names_of(row: Row) -> tuple[tuple[str, str], ...]:
        named = ("data", "num_classes")
        return tuple(pair for pair in setting_of(row) if pair[0] in named or pair[0][:5] == "data.")

    rows = list(rows)
    for digest, column, same in zip(DIGESTS, CONTENTS, (names_of, setting_of), strict=True):
        found: dict[object, dict[str, int]] = {}
        for row in rows:
            if row.get(digest):
                numbers = found.setdefault(same(row), {})
                numbers.setdefault(row[digest], len(numbers) + 1)
        rows = [
            row | {column: str(numbers[row[digest]])}
            if row.get(digest) and len(numbers := found[same(row)]) > 1
            else row
            for row in rows
        ]
    return rows


def contents_notes(settings: Sequence[Setting]) -> list[str]:
    """Return a line for each of the contents that runs read under the same name."""
    keys: dict[tuple[str, str, str], list[str]] = {}
    for setting in settings:
        for column in CONTENTS:
            if number := setting.values.get(column):
                runs = keys.setdefault((setting.values["data"], column, number), [])
                runs += [run["key"] for run in setting.runs]
    return [
        f"data={data}, {column}={number}: {', '.join(runs)}"
        for (data, column, number), runs in sorted(keys.items())
    ]


Change = Callable[[list[Row], Mapping[str, Path]], list[Row]]


def read_settings(
    paths: Sequence[Path], change: Change = lambda rows, folders: rows
) -> list[Setting]:
    """Read the settings in tables of `fed-dpsd sweep`; for a table's key, the last row counts.

    If two tables have one setting and seed at two commits, the commit is part of every setting.
    `change` may change the rows before they form settings; it is given the folder next to its table
    that each run has by its key.
    """
    tables = [
        list({row["key"]: row for row in _rows(path, NEEDED, NUMBERS)}.values()) for path in paths
    ]
    runs = [{(setting_of(row), row["seed"]): row["commit"] for row in rows} for rows in tables]
    first: dict[object, str] = {}
    several = any(
        first.setdefault(run, commit) != commit for own in runs for run, commit in own.items()
    )
    name_of = _key_at if several else itemgetter("key")
    measured: dict[str, set[tuple[str, ...]]] = {}
    for row in itertools.chain(*tables):
        results = tuple(row.get(column, "") for column in RESULTS_OF_COPIES)
        measured.setdefault(name_of(row), set()).add(results)
    read: dict[str, Row] = {}
    folders: dict[str, Path] = {}
    for number, (path, rows) in enumerate(zip(paths, tables, strict=True)):
        for row in rows:
            folder, name = path.parent / row["key"], name_of(row)
            if several:
                row[MEASURED_AT] = f"commit {row['commit']}"
            if len(measured[name]) > 1:  # two runs, not a run and its copy
                name = _key_in(name, number)
            row["key"] = name
            read[name], folders[name] = row, folder
    rows = change(list(read.values()), folders)
    settings: dict[tuple[tuple[str, str], ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        seeds = settings.setdefault(setting_of(row), {})
        if row["seed"] in seeds:
            raise UserError(
                f"seed={row['seed']} occurs twice for equal settings, keys "
                f"{seeds[row['seed']]['key']} and {row['key']}: they differ in keys, or in the "
                "contents of their data, that the table lacks, and their run folders are not next "
                "to it; remove one of the two rows, and sweep other settings with another --out"
            )
        seeds[row["seed"]] = row
    if not settings:
        raise UserError(f"{', '.join(map(str, paths))}: no run to report")
    order = list(dict.fromkeys(key for row in rows for key in row))
    return [
        Setting(dict(sorted(setting, key=lambda pair: order.index(pair[0]))), list(seeds.values()))
        for setting, seeds in settings.items()
    ]


def rows_by_key(paths: Sequence[Path], name: str, columns: Sequence[str]) -> dict[str, list[Row]]:
    """Read the rows of STEM_NAME.csv next to each table, if it exists, by the run's key.

    They are also found by the key that `read_settings` gives to one of several runs of one name.
    """
    found: dict[str, list[Row]] = {}
    for number, table in enumerate(paths):
        path = table.with_stem(f"{table.stem}_{name}")
        if path.exists():
            rows: dict[str, list[Row]] = {}
            needed = [column for column in columns if column not in COSTS]
            for row in _rows(path, ("key", *needed), columns):
                rows.setdefault(row["key"], []).append(row)
            runs = _rows(table, ("key", "commit"), ()) if rows else ()
            for run in runs:
                if run["key"] in rows:
                    for key in (run["key"], _key_at(run)):
                        found |= dict.fromkeys((key, _key_in(key, number)), rows[run["key"]])
    return found


def _key_at(run: Row) -> str:
    return f"{run['key']}@{run['commit']}"


def _key_in(key: str, number: int) -> str:
    return f"{key}@table {number + 1}"


def _rows(path: Path, needed: Sequence[str], numbers: Sequence[str]) -> list[Row]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} cannot be read ({reason_of(error)}); give a sweep's table"
        ) from None
    if list(columns) == ["key"] and not rows:  # a sweep created it, and no run has completed
        return []
    for column in needed:
        if column not in columns:
            raise UserError(f"{path} has no column {column!r}; give a table of `fed-dpsd sweep`")
    for row in rows:
        for column in numbers:
            text = row.get(column) or ("nan" if column in OPTIONAL else "")
            try:
                float(text)
            except ValueError:
                cell = f"{path}: {column}={text!r} of {row['key']}"
                raise UserError(f"{cell} is not a number; recreate the table") from None
    return rows
