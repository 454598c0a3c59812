"""Tables of sweeps, read back: runs that differ in the seed alone are one setting, and one row."""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fed_dpsd.config import UserError

ACCURACIES = ("student", "weighted_ensemble", "ensemble", "client_best", "client_mean")
SCORES = (*ACCURACIES, *(f"auroc_{who}" for who in ACCURACIES))
CLAIMS = ("record_add_remove", "record_replace_one", "patient_add_remove", "client_add_remove")
LEGEND = ("delta", "trust", "commit", "machine")
# What a run yields; every other column is part of its setting.
RESULTS = {
    *("key", "seed", "vote", *SCORES, *CLAIMS, *LEGEND),
    *("epsilon_published", "patient_replace_one", "client_replace_one"),
    *("queries_per_client", "seconds", "student_sha256"),
}
NEEDED = ("key", "seed", "data", "num_classes", "mechanism", "teachers_per_client")
NEEDED += ("student", "ensemble", *CLAIMS, *LEGEND)


@dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but the seed.

    Args:
        values: column and value of all that was set.
        runs: their rows, one for each seed.
    """

    values: Mapping[str, str]
    runs: Sequence[Mapping[str, str]]

    def score(self, column: str) -> tuple[float, float]:
        """Mean and sample standard deviation, in percent; NaN where too few runs know."""
        known = [100 * float(run[column]) for run in self.runs if run.get(column)]
        mean = statistics.fmean(known) if known else math.nan
        return mean, statistics.stdev(known) if len(known) > 1 else math.nan

    def epsilon(self, claim: str) -> float:
        """What is proven for each of the runs: the largest."""
        return max(float(run[claim]) for run in self.runs)

    def all_of(self, column: str) -> str:
        """The different values of a column."""
        return ", ".join(dict.fromkeys(run[column] for run in self.runs if run[column]))


def read(paths: Sequence[Path]) -> list[Setting]:
    """The settings of tables that `fed-dpsd sweep` wrote; of rows with one key the last counts.

    Raises:
        UserError: a file cannot be read, lacks a column or holds no number where one belongs; two
            runs of one setting have the same seed; or there is no run.
    """
    rows = {row["key"]: row for path in paths for row in _rows(path)}
    settings: dict[tuple[tuple[str, str], ...], dict[str, dict[str, str]]] = {}
    for row in rows.values():
        setting = tuple((key, row[key]) for key in sorted(row) if row[key] and key not in RESULTS)
        seeds = settings.setdefault(setting, {})
        if row["seed"] in seeds:
            raise UserError(
                f"seed={row['seed']} twice in equal columns, keys {seeds[row['seed']]['key']} and "
                f"{row['key']}: their configurations differ elsewhere; remove one of the rows"
            )
        seeds[row["seed"]] = row
    if not settings:
        raise UserError(f"{', '.join(map(str, paths))}: no run to report")
    order = list(dict.fromkeys(key for row in rows.values() for key in row))
    return [
        Setting(dict(sorted(setting, key=lambda pair: order.index(pair[0]))), list(seeds.values()))
        for setting, seeds in settings.items()
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({error}); give a sweep's table") from None
    for column in NEEDED:
        if column not in columns:
            raise UserError(f"{path} has no column {column!r}; give a table of `fed-dpsd sweep`")
    for row in rows:
        for column in (*SCORES, *CLAIMS):
            text = row.get(column) or ("" if column in CLAIMS else "nan")
            try:
                float(text)
            except ValueError:
                what = f"{path}: {column}={text!r} of {row['key']}"
                raise UserError(f"{what} is no number; write the table again") from None
    return rows
