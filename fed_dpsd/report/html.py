"""A self-contained HTML page with the table and the figures, ready to send to a colleague."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fed_dpsd.report import paired
from fed_dpsd.report.settings import Setting
from fed_dpsd.report.table import FIRST_LINE, origin, preface, replace_own, rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
div { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap }
th, td { border-bottom: 1px solid #ccc; padding: 0.3rem 0.6rem; text-align: left }
img { display: block; margin: 2rem 0; max-width: 100% }
"""


def write(
    settings: Sequence[Setting],
    figures: Sequence[Path],
    path: Path,
    differences: Sequence[Sequence[str]] = (),
) -> Path:
    """Write the page, unless a person wrote the file that is there.

    Args:
        settings: the rows.
        figures: PNG files, which become part of the page.
        path: file to write; its stem is the title.
        differences: header and rows of paired differences; () for none.

    Raises:
        UserError: the report did not write the existing file, or it cannot be written.
    """
    return replace_own(path, page(path.stem, settings, figures, differences), FIRST_LINE)


def page(
    title: str,
    settings: Sequence[Setting],
    figures: Sequence[Path],
    differences: Sequence[Sequence[str]] = (),
) -> str:
    """Return the page's text."""
    compared = [f"<p>{_text(paired.EXPLANATION)}</p>", *_table(differences)] if differences else []
    images = [
        f'<img alt="{escape(figure.stem)}" '
        f'src="data:image/png;base64,{base64.b64encode(figure.read_bytes()).decode()}">'
        for figure in figures
    ]
    return "\n".join(
        [
            FIRST_LINE,
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{_text(preface(settings))}</p>",
            *_table(rows(settings)),
            *compared,
            *images,
            f"<p>{_text(origin(settings))}</p>",
            "</html>\n",
        ]
    )


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    header, *others = lines
    cells = [_row("th", header), *(_row("td", row) for row in others)]
    return ["<div><table>", *cells, "</table></div>"]


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _text(text: str) -> str:
    """Escape the text, and turn backticks into code elements."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
