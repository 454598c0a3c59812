"""The figure of a partition: each client's records, by class."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fed_dpsd.report.figure import WIDTH, add_legend, look

LEGEND_MOST = 20  # classes that a legend can name


def draw(counts: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """Draw a bar for each client, with a part for each class.

    Args:
        counts: (clients, K) numbers of records.
        names: the names of the K classes.
    """
    clients = np.arange(len(counts))
    figure = Figure((WIDTH, 1.5 + min(0.25 * len(clients), 12)), layout="constrained")
    axes = figure.subplots()
    ends = counts.cumsum(1)
    for number, name in enumerate(names):
        colour = look(number)["color"]
        starts = ends[:, number] - counts[:, number]
        hatch = ("", "//", "..", "xx")[number // 8 % 4]  # where colours repeat
        axes.barh(
            *(clients, counts[:, number]),
            **{"left": starts, "color": colour, "label": name, "hatch": hatch},
        )
    axes.set(xlabel="records", ylabel="client")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.invert_yaxis()
    if len(names) <= LEGEND_MOST:
        add_legend(figure)
    return figure
