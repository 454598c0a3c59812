"""The figure of the last students' confusions between classes, and of each class's accuracy."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fed_dpsd.errors import UserError
from fed_dpsd.report.figure import WIDTH
from fed_dpsd.report.settings import Row, Setting, names

COLUMNS = ("truth", "predicted", "count")
PANELS_ACROSS = 3
LEGEND = (
    "predictions for each true class (white: never, dark: always), with the class's accuracy; "
    "all seeds together"
)


def draw(settings: Sequence[Setting], pairs: Mapping[str, Sequence[Row]]) -> Figure | None:
    """Draw a panel for each setting, summed over seeds; None if no pair is known.

    Args:
        settings: the settings to draw.
        pairs: rows with COLUMNS of each run, by the run's key.

    Raises:
        UserError: a class does not exist in the data set.
    """
    known = [s for s in settings if any(run["key"] in pairs for run in s.runs)]
    if not known:
        return None
    across = min(PANELS_ACROSS, len(known))
    down = math.ceil(len(known) / across)
    figure = Figure(figsize=(WIDTH, 1 + down * WIDTH / across), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, setting, name in zip(panels, known, names(known), strict=False):
        _panel(axes, summed(setting, pairs), textwrap.fill(name, 120 // across))
    for axes in panels[len(known) :]:
        axes.remove()
    figure.supxlabel(LEGEND, fontsize=9)
    return figure


def summed(setting: Setting, pairs: Mapping[str, Sequence[Row]]) -> NDArray[np.float64]:
    """Return (K, K) counts over all seeds, true classes by predicted classes."""
    num_classes = int(setting.values["num_classes"])
    counts = np.zeros((num_classes, num_classes))
    for run in setting.runs:
        for row in pairs.get(run["key"], ()):
            for column in ("truth", "predicted"):
                if float(row[column]) not in range(num_classes):
                    raise UserError(
                        f"{column}={row[column]} of {run['key']} in a confusion file is none of "
                        f"{num_classes} classes, 0 to {num_classes - 1}; run the sweep again"
                    )
            counts[int(float(row["truth"])), int(float(row["predicted"]))] += float(row["count"])
    return counts


def _panel(axes: Axes, counts: NDArray[np.float64], title: str) -> None:
    totals = counts.sum(1, keepdims=True)
    rates = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    axes.imshow(rates, cmap="Blues", vmin=0, vmax=1)
    classes = range(len(counts))
    ticks = [
        f"{k}" if math.isnan(rates[k, k]) else f"{k}: {100 * rates[k, k]:.0f} %" for k in classes
    ]
    axes.set_xticks(classes, [str(k) for k in classes], fontsize=7)
    axes.set_yticks(classes, ticks, fontsize=7)
    axes.set_title(title, fontsize=8)
    axes.set_xlabel("predicted", fontsize=7)
    axes.set_ylabel("true", fontsize=7)
