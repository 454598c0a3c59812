"""The files of `fed-dpsd report`: tables, figures for available numbers, and an HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fed_dpsd.report import alpha, confusion, curve, dots, paired, progress, run_page, sweep_page
from fed_dpsd.report.facts import Facts, Unfinished
from fed_dpsd.report.figure import save
from fed_dpsd.report.settings import beside, read
from fed_dpsd.report.table import FIRST_LINE, replace_own, write_page, write_summary

UNFINISHED = "results.html"  # the name that the page of the completed run has, too


def write_unfinished(run: Facts, folder: Path) -> Path:
    """Write the page of a run that has not completed, where that of the completed one will be.

    Raises:
        UserError: the report did not write the existing file, or it cannot be written.
    """
    return replace_own(folder / UNFINISHED, run_page.page(run), FIRST_LINE)


def write(
    tables: Sequence[Path],
    folder: Path,
    against: str | None = None,
    run: Facts | None = None,
    unfinished: Sequence[Unfinished] = (),
) -> Iterator[Path]:
    """Write the files, named after the first table, and yield each path.

    Args:
        tables: tables of `fed-dpsd sweep`; files beside them are read where they exist.
        folder: folder to write to.
        against: name of a setting from which the others' paired differences are shown.
        run: the one run that the table is of, whose page it then is; None for a sweep.
        unfinished: runs of the sweep that have not completed, which its page names.

    Raises:
        UserError: a file cannot be read or written, the report did not write the existing file, or
            no setting is named `against`.
    """
    settings, stem = read(tables), tables[0].stem
    differences = paired.rows(settings, against) if against else []
    rounds = beside(tables, "rounds", progress.COLUMNS)
    pairs = beside(tables, "confusion", confusion.COLUMNS)
    figures = {
        stem: curve.draw(settings),
        f"{stem}_settings": dots.draw(settings),
        f"{stem}_progress": progress.draw(settings, rounds),
        f"{stem}_alpha": alpha.draw(settings),
        f"{stem}_confusion": confusion.draw(settings, pairs),
    }
    yield write_page(settings, folder / f"{stem}.md", differences)
    yield write_summary(settings, folder / f"{stem}_summary.csv")
    for name, figure in figures.items():
        if figure:
            yield save(figure, folder / f"{name}.png")
    page = (
        run_page.page(run)
        if run
        else sweep_page.page(stem, settings, rounds, pairs, differences, unfinished)
    )
    yield replace_own(folder / f"{stem}.html", page, FIRST_LINE)
