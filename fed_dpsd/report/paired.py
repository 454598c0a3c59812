"""Differences between settings that ran with the same seeds, by a paired t-test."""

import statistics
from collections.abc import Sequence

from scipy.stats import t

from fed_dpsd.errors import UserError
from fed_dpsd.report.settings import Setting, names

CONFIDENCE = 0.95
EXPLANATION = (
    "Differences between students, in points: the mean over the seeds that both settings have, and "
    f"the {CONFIDENCE:.0%} interval of a paired t-test."
)


def rows(settings: Sequence[Setting], against: str) -> list[list[str]]:
    """Return the header and a row for each other setting: its student minus the one of `against`.

    A difference is a mean over the seeds that both have, in points. Its interval is that of a
    paired t-test, which takes differences to be normal over seeds; it needs two seeds.

    Args:
        settings: the settings of a report.
        against: name of one setting, as `names` returns it.

    Raises:
        UserError: no setting has that name.
    """
    known = dict(zip(names(settings), settings, strict=True))
    if against not in known:
        raise UserError(
            f"--against={against!r} is no setting of these tables; give one of: {'; '.join(known)}"
        )
    base = known.pop(against)
    shown = ["student", "auroc_student"] if base.values["num_classes"] == "2" else ["student"]
    lines = [[f"minus {against}", *shown, "seeds"]]
    for name, setting in known.items():
        pairs = [_pairs(setting, base, score) for score in shown]
        lines.append([name, *map(_interval, pairs), str(len(pairs[0]))])
    return lines


def _pairs(setting: Setting, base: Setting, score: str) -> list[float]:
    """Return the differences in points, one for each seed that both have a score for."""
    others = {run["seed"]: run for run in base.runs}
    return [
        100 * (float(run[score]) - float(others[run["seed"]][score]))
        for run in setting.runs
        if run.get(score) and others.get(run["seed"], {}).get(score)
    ]


def _interval(differences: Sequence[float]) -> str:
    """Return the mean with its confidence interval; "" without any, the mean alone of one."""
    if not differences:
        return ""
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return f"{mean:+.1f}"
    reach = t.ppf((1 + CONFIDENCE) / 2, count - 1) * statistics.stdev(differences) / count**0.5
    return f"{mean:+.1f} ({mean - reach:+.1f} to {mean + reach:+.1f})"
