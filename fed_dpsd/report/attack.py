"""The files of `fed-dpsd privacy attack`: a table, its Markdown, and a figure."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fed_dpsd.report.figure import WIDTH, add_legend, look
from fed_dpsd.storage import encoded, write_atomically

Row = Mapping[str, Any]
NONE = "-"


@dataclass(frozen=True)
class Curve:
    """An attack's curve, with the cap of a proof.

    Args:
        panel: title of the panel that it is drawn in.
        label: its name.
        fpr: rates of false positives, increasing.
        tpr: rates of true positives there.
        cap: the largest that a proof allows there; 1 where there is none.
    """

    panel: str
    label: str
    fpr: NDArray[np.float64]
    tpr: NDArray[np.float64]
    cap: NDArray[np.float64]


def write_table(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as a CSV file, with the columns of all.

    Raises:
        UserError: the file cannot be written.
    """
    text = io.StringIO()
    columns = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, encoded(text.getvalue()))
    return path


# --- membership -------------------------------------------------------------------------------


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
        line.append(_spread(row, "accuracy", 100, 1))
        line.append(_spread(row, "auc", 1, 3))
        for wanted in ("1%", "0.1%"):
            low, high = (100 * row[f"tpr@{wanted}_{end}"] for end in ("low", "high"))
            text = f"{100 * row[f'tpr@{wanted}']:.2f} ({low:.2f}-{high:.2f})"
            line.append(text if row[f"resolved@{wanted}"] else f"{text}, not resolved")
            line.append(_cap(row, wanted))
        least = row["epsilon_at_least"]
        line.append(NONE if least is None else f"{least:.2f}")
        line += [_proven(row), str(row["epsilon_published"])]
        lines.append(line)
    return lines


def _proven(row: Row) -> str:
    """Return the proven epsilon of a row, which has none where no model was attacked."""
    review = " (not reviewed)" if row.get("review") else ""
    return str(row.get("epsilon_proven", NONE)) + review


def _cap(row: Row, wanted: str) -> str:
    """Return the cap of the card's epsilon, and that of the whole proof if it is smaller."""
    caps = [100 * row[f"{kind}@{wanted}"] for kind in ("cap", "profile_cap")]
    one, whole = ("none" if cap > 99.995 else f"{cap:.2f}" for cap in caps)
    return one if one == whole else f"{one}; {whole}"


def draw_curves(curves: Sequence[Curve]) -> Figure:
    """Draw curves on logarithmic axes, a panel beside the other, with caps as dotted lines."""
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    labels = list(dict.fromkeys(curve.label for curve in curves))
    for ax, panel in zip(axes, panels, strict=True):
        for curve in curves:
            if curve.panel != panel:
                continue
            colour = look(labels.index(curve.label))
            ax.plot(curve.fpr, np.maximum(curve.tpr, 1e-6), label=curve.label, **colour)
            if curve.cap.min() < 0.999:
                style = {"color": colour["color"], "linestyle": ":"}
                ax.plot(curve.fpr, curve.cap, label="what a proof allows", **style)
        ax.plot([1e-4, 1], [1e-4, 1], color="grey", linewidth=0.7, label="guessing")
        ax.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1), title=panel)
        ax.set_xlabel("rate of false positives")
        ax.grid(alpha=0.25)
    axes[0].set_ylabel("rate of true positives")
    add_legend(figure)
    return figure


# --- inversion --------------------------------------------------------------------------------


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
        line.append(_spread(row, "recognised", 100, 1))
        line.append(_spread(row, "nearest_member", 100, 1))
        line.append(_spread(row, "reached", 100, 1))
        line += [_proven(row), str(row.get("epsilon_published", NONE))]
        lines.append(line)
    return lines


def draw_pictures(rows: Sequence[tuple[str, NDArray[np.uint8]]]) -> Figure:
    """Draw a labelled line of pictures for each row, of (K, C, H, W) bytes."""
    classes = max(len(pictures) for _, pictures in rows)
    figure = Figure(figsize=(WIDTH, 0.52 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for ax, (label, pictures) in zip(axes, rows, strict=True):
        line = np.concatenate(list(pictures.transpose(0, 2, 3, 1)), axis=1)
        width = line.shape[1] * classes // len(pictures)
        ax.imshow(line, cmap="gray", vmin=0, vmax=255, extent=(0, width, 0, line.shape[0]))
        ax.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7)
        ax.set(xticks=[], yticks=[])
    return figure


# --- words ------------------------------------------------------------------------------------


def write_markdown(lines: Sequence[Sequence[str]], path: Path) -> Path:
    """Write a header and its lines as a Markdown table.

    Raises:
        UserError: the file cannot be written.
    """
    head, *rest = lines
    text = [f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *rest)]
    write_atomically(path, encoded("\n".join(text) + "\n"))
    return path


def _spread(row: Row, key: str, scale: float, places: int) -> str:
    mean, deviation = scale * row[key], scale * row[f"{key}_deviation"]
    text = NONE if np.isnan(mean) else f"{mean:.{places}f}"
    return text if np.isnan(deviation) else f"{text} ± {deviation:.{places}f}"
