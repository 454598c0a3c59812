"""Shared parts of the figures: looks, a legend, panels for data sets, and the PNG writer."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fed_dpsd.report.settings import ALPHA, Setting, names
from fed_dpsd.storage import replacing

# Okabe and Ito's colours, which colour-blind people can also tell apart; the palest is last.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#f0e442")
STYLES = ("-", "--", "-.", ":")
WIDTH = 9  # inches
PANEL = ("data", "num_classes", ALPHA)  # columns that line labels omit: title or axis show them
STUDENT_ACCURACY = "student's accuracy on the test split, %"


def look(number: int) -> dict[str, str]:
    """Return colour and line style for a line's number, from 0; the first 32 are different."""
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style}


def labelled_looks(settings: Sequence[Setting]) -> dict[int, dict[str, str]]:
    """Return label, colour and line style of each setting's line, by the setting's id().

    Settings that differ only in the columns of PANEL get the same label and look.
    """
    labels = names(settings, PANEL)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return {
        id(setting): {"label": label, **look(numbers[label])}
        for setting, label in zip(settings, labels, strict=True)
    }


def by_data(settings: Sequence[Setting], alphas: bool = False) -> dict[str, list[Setting]]:
    """Group settings by data set and, with `alphas`, by Dirichlet alpha if there are several."""
    several = alphas and len({setting.values.get(ALPHA) for setting in settings}) > 1
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        alpha = setting.values.get(ALPHA, "")
        title = setting.values["data"] + (f", alpha {alpha}" if several and alpha else "")
        groups.setdefault(title, []).append(setting)
    return groups


def add_legend(figure: Figure) -> None:
    """Add a legend below all panels, with each label once; the figure grows by its height."""
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    entries = {name: handle for pair in pairs for handle, name in pair}
    columns = 2 if max(map(len, entries)) < 60 else 1
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(entries) // columns))
    figure.legend(
        *(entries.values(), entries.keys()),
        **{"loc": "outside lower center", "ncols": columns, "fontsize": 8, "handlelength": 3},
    )


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG, readable at a width of 900 pixels.

    Raises:
        UserError: the file cannot be written.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=200, metadata={"Software": None})
    return path
