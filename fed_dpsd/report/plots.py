"""Figures of clients' classes and of attacks, which are only saved as files."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from fed_dpsd.report.figures import COLOURS, PRINT, SOFT, TEXT, add_legend, look, new_figure

MOST_LEGEND = 20  # classes that a legend can name
ACROSS = 8  # images in a row


def draw_partition(counts: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Draw a bar for each client's records, divided by class, from their (clients, K) numbers."""
    clients = np.arange(len(counts))
    with matplotlib.rc_context(PRINT):
        figure, (axes,) = new_figure(TEXT, [0.8 + min(0.2 * len(clients), 8)])
        ends = counts.cumsum(1)
        legend: dict[str, Artist] = {}
        for number, name in enumerate(classes):
            hatch = ("", "//", "..", "xx")[number // len(COLOURS) % 4]  # for equal colours
            legend[name], *_ = axes.barh(
                clients,
                counts[:, number],
                left=ends[:, number] - counts[:, number],
                hatch=hatch,
                color=look(number)["color"],
            )
        axes.set_xlabel("records")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.invert_yaxis()
        axes.set_title("client", loc="left")
        add_legend(figure, legend if len(classes) <= MOST_LEGEND else {})
    return figure


def draw_roc(curves: Sequence[tuple[str, str, Sequence[NDArray[np.float64]]]]) -> Figure:
    """Draw ROC curves of attacks on logarithmic axes, with the bounds of a proof as dotted lines.

    Args:
        curves: for each curve, its panel, its name and three arrays of rates: false positive, true
            positive, and the highest true positive rate that a proof allows (1 without a proof).
    """
    panels = list(dict.fromkeys(panel for panel, *_ in curves))
    numbers = {name: n for n, name in enumerate(dict.fromkeys(name for _, name, _ in curves))}
    legend: dict[str, Artist] = {}
    with matplotlib.rc_context(PRINT):
        figure, every = new_figure(TEXT, [3.0] * len(panels), len(panels))
        for axes, title in zip(every, panels, strict=True):
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
            axes.set_title(f"{title}\ntrue positive rate", loc="left")
        add_legend(figure, legend)
    return figure


def draw_sheet(images: Mapping[str, NDArray[np.uint8]]) -> Figure:
    """Draw the (n, C, H, W) images of each class in rows; the first has the name of the class."""
    across, rows = min(ACROSS, max(map(len, images.values()))), []
    for name, own in images.items():
        for start in range(0, len(own), across):
            row = own[start : start + across]
            margin = np.full((across - len(row), *row.shape[1:]), 255, np.uint8)
            rows.append(("" if start else name, np.concatenate([row, margin])))
    return draw_pictures(rows)


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
