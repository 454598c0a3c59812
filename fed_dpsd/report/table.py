"""The table: one row a setting, with its scores over seeds and what is proven."""

import math
from collections.abc import Sequence
from pathlib import Path

from fed_dpsd.config import UserError
from fed_dpsd.report.settings import ACCURACIES, CLAIMS, SCORES, Setting

FIRST_LINE = "<!-- Written by `fed-dpsd report`: edit the table it was made from instead. -->"


def markdown(settings: Sequence[Setting]) -> str:
    """One row a setting; what all of them share stands above."""
    columns = dict.fromkeys(key for setting in settings for key in setting.values)
    values = {key: tuple(s.values.get(key, "") for s in settings) for key in columns}
    shared = [f"`{key}={texts[0]}`" for key, texts in values.items() if len(set(texts)) == 1]
    apart: dict[tuple[str, ...], str] = {}
    for key, texts in values.items():
        if len(set(texts)) > 1:
            apart.setdefault(texts, key)  # of columns that say the same, such as privacy, the first
    # Areas say more than accuracies where two classes are not balanced.
    shown = SCORES if any(s.values["num_classes"] == "2" for s in settings) else ACCURACIES
    scores = [s for s in shown if any(not math.isnan(x.score(s)[0]) for x in settings)]
    claims = [f"epsilon {claim.replace('_', ', ', 1)}" for claim in CLAIMS]
    header = [*apart.values(), *scores, "seeds", *claims, "delta", "trust"]
    lines = [header, ["---"] * len(header)]
    for setting in settings:
        row = [setting.values.get(key, "") for key in apart.values()]
        row += [_spread(*setting.score(score)) for score in scores]
        row += [str(len(setting.runs)), *(_bound(setting.epsilon(claim)) for claim in CLAIMS)]
        lines.append([*row, setting.all_of("delta"), setting.all_of("trust")])
    every = Setting({}, [run for setting in settings for run in setting.runs])
    return (
        f"{FIRST_LINE}\n\nMean ± sample standard deviation over seeds, in percent, on the held-out "
        "test split after the last round. Epsilons are proven, for one run; delta and trust are "
        f"those of (record, add_remove). In all rows: {', '.join(shared)}.\n\n"
        + "".join(f"| {' | '.join(line)} |\n" for line in lines)
        + f"\nCommit {every.all_of('commit')}. Machine: {every.all_of('machine')}.\n"
    )


def _spread(mean: float, deviation: float) -> str:
    if math.isnan(mean):
        return ""
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f} ± {deviation:.1f}"


def _bound(epsilon: float) -> str:
    """Five digits, rounded up, for it is an upper bound."""
    if math.isinf(epsilon):
        return "inf"
    digits = max(0, 4 - math.floor(math.log10(max(epsilon, 1e-4))))
    number = f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:,.{digits}f}"
    return number.rstrip("0").rstrip(".") if digits else number


def write_page(settings: Sequence[Setting], path: Path) -> Path:
    """Write the markdown table; a page that a person wrote is not overwritten.

    Raises:
        UserError: the file is another's, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_text().startswith(FIRST_LINE):
            raise UserError(f"{path} was not written by `fed-dpsd report`; choose another --out")
        path.write_text(markdown(settings))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose --out") from None
    return path
