"""The tables of `fed-dpsd privacy attack`, for CSV and Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
NONE = "-"


def membership_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the header and a line for each attack on members, for Markdown."""
    lines = [
        [
            *("setting", "victim", "attack", "accuracy", "AUC"),
            *("TPR at 1 % FPR", "cap", "TPR at 0.1 % FPR", "cap"),
            *("epsilon at least", "proven (record, add_remove)", "epsilon_published"),
        ]
    ]
    for row in rows:
        line = [str(row[key]) for key in ("setting", "victim", "attack")]
        line += [_spread(row, "accuracy", 100, 1), _spread(row, "auc", 1, 3)]
        for wanted in ("1%", "0.1%"):
            low, high = (100 * row[f"tpr@{wanted}_{end}"] for end in ("low", "high"))
            text = f"{100 * row[f'tpr@{wanted}']:.2f} ({low:.2f}-{high:.2f})"
            line.append(text if row[f"resolved@{wanted}"] else f"{text}, not resolved")
            line.append(_cap(row, wanted))
        least = row["epsilon_at_least"]
        line.append(NONE if least is None else f"{least:.2f}")
        lines.append([*line, _proven(row), str(row["epsilon_published"])])
    return lines


def inversion_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the header and a line for each attack on pictures, for Markdown."""
    lines = [
        [
            *("setting", "victim", "attack", "Inception score", "recognised, %"),
            *("nearest record is a member, %", "attack reached, %"),
            *("proven (record, add_remove)", "epsilon_published"),
        ]
    ]
    for row in rows:
        line = [str(row[key]) or NONE for key in ("setting", "victim", "attack")]
        line.append(_spread(row, "inception", 1, 2))
        line += [_spread(row, key, 100, 1) for key in ("recognised", "nearest_member", "reached")]
        lines.append([*line, _proven(row), str(row.get("epsilon_published", NONE))])
    return lines


def _proven(row: Row) -> str:
    """Return the proven epsilon of a row, which has none if no model was attacked."""
    review = " (not reviewed)" if row.get("review") else ""
    return str(row.get("epsilon_proven", NONE)) + review


def _cap(row: Row, wanted: str) -> str:
    """Return the cap of the card's epsilon, and that of the whole proof if it is smaller."""
    caps = [100 * row[f"{kind}@{wanted}"] for kind in ("cap", "profile_cap")]
    one, whole = ("none" if cap > 99.995 else f"{cap:.2f}" for cap in caps)
    return one if one == whole else f"{one}; {whole}"


def _spread(row: Row, key: str, scale: float, places: int) -> str:
    mean, deviation = scale * row[key], scale * row[f"{key}_deviation"]
    text = NONE if math.isnan(mean) else f"{mean:.{places}f}"
    return text if math.isnan(deviation) else f"{text} ± {deviation:.{places}f}"
