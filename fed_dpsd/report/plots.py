"""Figures of confusions, of clients' classes and of attacks, only as PNG and PDF."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from fed_dpsd.errors import UserError
from fed_dpsd.report.figures import COLOURS, SOFT, STYLE, WIDE, arrange, look
from fed_dpsd.report.settings import Row, Setting, names

MOST_LEGEND = 20  # classes that a legend can name
PAIR_COLUMNS = ("truth", "predicted", "count")


def draw_confusions(
    settings: Sequence[Setting], pairs: Mapping[str, Sequence[Row]]
) -> Figure | None:
    """Draw a confusion matrix for each setting, summed over seeds; None if none is known.

    Args:
        settings: the settings to draw.
        pairs: rows with PAIR_COLUMNS of each run, by the run's key.

    Raises:
        UserError: a class does not exist in the data set.
    """
    known = [s for s in settings if any(run["key"] in pairs for run in s.runs)]
    if not known:
        return None
    across = min(3, len(known))
    down = math.ceil(len(known) / across)
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDE, 1 + down * WIDE / across), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for axes, setting, name in zip(panels, known, names(known), strict=False):
            counts = confusions(setting, pairs)
            totals = counts.sum(1, keepdims=True)
            rates = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
            axes.imshow(rates, cmap="Blues", vmin=0, vmax=1)
            classes = range(len(counts))
            right = [
                f"{k}" if math.isnan(rate) else f"{k}: {100 * rate:.0f} %"
                for k, rate in enumerate(rates.diagonal())
            ]
            axes.set_xticks(classes, [str(k) for k in classes], fontsize=7)
            axes.set_yticks(classes, right, fontsize=7)
            axes.set_title(textwrap.fill(name, 120 // across), fontsize=8)
            axes.set_xlabel("predicted", fontsize=7)
            axes.set_ylabel("true", fontsize=7)
        for axes in panels[len(known) :]:
            axes.remove()
        figure.supxlabel(
            "predictions for each true class (white: never, dark: always), with the class's "
            "accuracy; all seeds together",
            fontsize=9,
        )
    return figure


def confusions(setting: Setting, pairs: Mapping[str, Sequence[Row]]) -> NDArray[np.float64]:
    """Return (K, K) counts over all seeds, true classes by predicted classes.

    Raises:
        UserError: a class does not exist in the data set.
    """
    num_classes = int(setting.values["num_classes"])
    counts = np.zeros((num_classes, num_classes))
    for run in setting.runs:
        for row in pairs.get(run["key"], ()):
            for column in ("truth", "predicted"):
                if float(row[column]) not in range(num_classes):
                    raise UserError(
                        f"{column}={row[column]} of {run['key']} in a confusion file is not one of "
                        f"{num_classes} classes, 0 to {num_classes - 1}; run the sweep again"
                    )
            counts[int(float(row["truth"])), int(float(row["predicted"]))] += float(row["count"])
    return counts


def draw_partition(counts: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Draw the number of records of each client as a bar, divided by class.

    Args:
        counts: (clients, K) numbers of records.
        classes: the names of the K classes.
    """
    clients = np.arange(len(counts))
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDE, 1))
        axes = figure.add_subplot()
        ends, legend = counts.cumsum(1), {}
        for number, name in enumerate(classes):
            hatch = ("", "//", "..", "xx")[number // len(COLOURS) % 4]  # tells equal colours apart
            legend[name] = axes.barh(
                *(clients, counts[:, number]),
                **{"left": ends[:, number] - counts[:, number], "hatch": hatch},
                color=look(number)["color"],
            )
        axes.set_xlabel("records")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.invert_yaxis()
        height = 0.4 + min(0.25 * len(clients), 12)
        arrange(figure, ["client"], [height], legend if len(classes) <= MOST_LEGEND else {})
    return figure


def draw_roc(
    curves: Sequence[tuple[str, str, Sequence[NDArray[np.float64]]]],
) -> Figure:
    """Draw ROC curves of attacks on logarithmic axes, and the bounds of a proof as dotted lines.

    Args:
        curves: for each, its panel, its name and three arrays of rates: false positive, true
            positive, and the highest true positive rate that a proof allows (1 without a proof).
    """
    panels = list(dict.fromkeys(panel for panel, *_ in curves))
    numbers = {name: n for n, name in enumerate(dict.fromkeys(name for _, name, _ in curves))}
    legend: dict[str, Artist] = {}
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDE, 1))
        for title in panels:
            axes = figure.add_subplot()
            for panel, name, (fpr, tpr, cap) in curves:
                if panel != title:
                    continue
                style = {**look(numbers[name]), "marker": ""}
                (legend[name],) = axes.plot(fpr, np.maximum(tpr, 1e-6), **style)
                if cap.min() < 0.999:
                    style["linestyle"] = ":"
                    (legend["what a proof allows"],) = axes.plot(fpr, cap, **style)
            (line,) = axes.plot([1e-4, 1], [1e-4, 1], color=SOFT, linewidth=0.7)
            legend["guessing"] = line
            axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1))
            axes.set_xlabel("false positive rate")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
            axes.grid()
        titles = [f"{panel}\ntrue positive rate" for panel in panels]
        arrange(figure, titles, [3.2] * len(panels), legend, len(panels), left=0.65)
    return figure


def draw_pictures(rows: Sequence[tuple[str, NDArray[np.uint8]]]) -> Figure:
    """Draw each (K, C, H, W) array of pictures as a labelled row."""
    classes = max(len(pictures) for _, pictures in rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDE, 0.52 * len(rows)), layout="constrained")
        every = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
        for axes, (label, pictures) in zip(every, rows, strict=True):
            line = np.concatenate(list(pictures.transpose(0, 2, 3, 1)), axis=1)
            width = line.shape[1] * classes // len(pictures)
            axes.imshow(line, cmap="gray", vmin=0, vmax=255, extent=(0, width, 0, line.shape[0]))
            axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7)
            axes.set(xticks=[], yticks=[])
    return figure
