"""Figures of confusion matrices, clients' classes and attacks, which are only saved as files."""

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
from fed_dpsd.report.figures import COLOURS, INK, PAPER, PRINT, SOFT, TEXT, arrange, look, style
from fed_dpsd.report.settings import Row, Setting, names
from fed_dpsd.report.sweep_charts import picked

MOST_LEGEND = 20  # classes that a legend can name
MOST_MATRICES = 6  # in one figure
MOST_VALUES = 12  # classes whose rates fit into a matrix
PAIR_COLUMNS = ("truth", "predicted", "count")


def draw_confusions(
    settings: Sequence[Setting], pairs: Mapping[str, Sequence[Row]], width: float = TEXT
) -> Figure | None:
    """Draw a confusion matrix for each setting, summed over seeds; None if no matrix is known.

    Args:
        settings: the settings to draw, or to choose the best from if there are many.
        pairs: rows with PAIR_COLUMNS of each run, by the run's key.
        width: COLUMN or TEXT.

    Raises:
        UserError: a class does not exist in the data set.
    """
    known = [s for s in settings if any(run["key"] in pairs for run in s.runs)]
    if not known:
        return None
    titles = dict(zip(map(id, known), names(known), strict=True))
    best = list(map(id, picked(known, MOST_MATRICES)))
    shown = [setting for setting in known if id(setting) in best]
    across = min(2 if width == TEXT else 1, len(shown))
    down = math.ceil(len(shown) / across)
    with matplotlib.rc_context(style(width)):
        side = min(width / across, 3.4)
        figure = Figure((width, 0.5 + down * side), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for axes, setting in zip(panels, shown, strict=False):
            counts = confusions(setting, pairs)
            totals = counts.sum(1, keepdims=True)
            rates = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
            axes.imshow(rates, cmap="Blues", vmin=0, vmax=1)
            classes = range(len(counts))
            if len(counts) <= MOST_VALUES:
                for (row, column), rate in np.ndenumerate(rates):
                    if rate >= 0.005:
                        colour = PAPER if rate > 0.5 else INK
                        text = {"ha": "center", "va": "center", "fontsize": 6, "color": colour}
                        axes.text(column, row, f"{100 * rate:.0f}", **text)
                axes.set_xticks(classes)
                axes.set_yticks(classes)
            axes.set_title(textwrap.fill(titles[id(setting)], int(side * 14)))
            axes.set_xlabel("predicted class")
            axes.set_ylabel("true class")
        for axes in panels[len(shown) :]:
            axes.remove()
        many = f"; the best {len(shown)} of {len(known)} settings" * (len(shown) < len(known))
        note = f"Predictions for each true class in %, all seeds together{many}."
        figure.supxlabel(textwrap.fill(note, int(width * 16)), fontsize=7.5)
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
    """Draw a bar for each client's number of records, divided by class.

    Args:
        counts: (clients, K) numbers of records.
        classes: the names of the K classes.
    """
    clients = np.arange(len(counts))
    with matplotlib.rc_context(PRINT):
        figure = Figure((TEXT, 1))
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
        height = 0.3 + min(0.2 * len(clients), 8)
        arrange(figure, ["client"], [height], legend if len(classes) <= MOST_LEGEND else {})
    return figure


def draw_roc(
    curves: Sequence[tuple[str, str, Sequence[NDArray[np.float64]]]],
) -> Figure:
    """Draw ROC curves of attacks on logarithmic axes, with the bounds of a proof as dotted lines.

    Args:
        curves: for each curve, its panel, its name and three arrays of rates: false positive, true
            positive, and the highest true positive rate that a proof allows (1 without a proof).
    """
    panels = list(dict.fromkeys(panel for panel, *_ in curves))
    numbers = {name: n for n, name in enumerate(dict.fromkeys(name for _, name, _ in curves))}
    legend: dict[str, Artist] = {}
    with matplotlib.rc_context(PRINT):
        figure = Figure((TEXT, 1))
        for title in panels:
            axes = figure.add_subplot()
            for panel, name, (fpr, tpr, cap) in curves:
                if panel != title:
                    continue
                style = {**look(numbers[name]), "marker": ""}
                (legend[name],) = axes.plot(fpr, np.maximum(tpr, 1e-6), **style)
                if cap.min() < 0.999:
                    style["linestyle"] = ":"
                    (legend["allowed by a proof"],) = axes.plot(fpr, cap, **style)
            (line,) = axes.plot([1e-4, 1], [1e-4, 1], color=SOFT, linewidth=0.7)
            legend["guessing"] = line
            axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1))
            axes.set_xlabel("false positive rate")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
            axes.grid()
        titles = [f"{panel}\ntrue positive rate" for panel in panels]
        arrange(figure, titles, [2.4] * len(panels), legend, len(panels), left=0.65)
    return figure


def draw_pictures(rows: Sequence[tuple[str, NDArray[np.uint8]]]) -> Figure:
    """Draw each (K, C, H, W) array of pictures as a labelled row."""
    classes = max(len(pictures) for _, pictures in rows)
    with matplotlib.rc_context(PRINT):
        figure = Figure((TEXT, 0.52 * len(rows)), layout="constrained")
        every = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
        for axes, (label, pictures) in zip(every, rows, strict=True):
            line = np.concatenate(list(pictures.transpose(0, 2, 3, 1)), axis=1)
            width = line.shape[1] * classes // len(pictures)
            axes.imshow(line, cmap="gray", vmin=0, vmax=255, extent=(0, width, 0, line.shape[0]))
            axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7)
            axes.set(xticks=[], yticks=[])
    return figure
