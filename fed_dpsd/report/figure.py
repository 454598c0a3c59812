"""What figures share: looks, a legend, panels for data sets, and how they are written."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fed_dpsd.config import UserError
from fed_dpsd.report.settings import ALPHA, Setting

# Okabe and Ito's colours, which the colour-blind can tell apart too; the palest last.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#f0e442")
STYLES = ("-", "--", "-.", ":")
WIDTH = 9  # inches
PANEL = ("data", "num_classes")  # what a panel's title says, so that its lines need not


def look(number: int) -> dict[str, str]:
    """Colour and line style of the line with this number, from 0; 32 are different."""
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style}


def by_data(settings: Sequence[Setting], alphas: bool = False) -> dict[str, list[Setting]]:
    """The settings of each data set and, with `alphas`, of each Dirichlet alpha if they differ."""
    several = alphas and len({setting.values.get(ALPHA) for setting in settings}) > 1
    found: dict[str, list[Setting]] = {}
    for setting in settings:
        alpha = setting.values.get(ALPHA, "")
        title = setting.values["data"] + (f", alpha {alpha}" if several and alpha else "")
        found.setdefault(title, []).append(setting)
    return found


def add_legend(figure: Figure) -> None:
    """One below all panels, with each name once; the figure grows by its height."""
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
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose --out") from None
    return path
