"""Pages with tables of benchmarks agree with the JSON next to them.

`python -m tests.test_bench_pages` updates the tables. They are between `<!-- bench: FILE NAME -->`
and `<!-- end of bench -->`: FILE is the path of a bench's JSON, and NAME a table or `origin`.
"""

import json
import re
from pathlib import Path

import pytest

from fed_dpsd.benchmarks.report import TABLES, origin
from fed_dpsd.report.tables import markdown_table, wrap_paragraph

DOCS = Path(__file__).parents[1] / "docs"
MARK = re.compile(r"(<!-- bench: (\S+) (\S+) -->).*?(<!-- end of bench -->)", re.DOTALL)
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if MARK.search(path.read_text())]


def filled(page):
    """Return the text of a page with its tables made from benches."""

    def fill(match):
        mark, file, name, end = match.groups()
        bench = json.loads((page.parent / file).read_text())
        text = (
            wrap_paragraph(origin(bench))
            if name == "origin"
            else markdown_table(TABLES[name](bench))
        )
        return f"{mark}\n\n{text}\n\n{end}"

    return MARK.sub(fill, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_shows_what_its_bench_measured(page):
    assert filled(page) == page.read_text(), "update it: python -m tests.test_bench_pages"


def test_every_mark_is_closed():
    """A mark without its end would keep old figures, or swallow the text up to the next end."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        places = len(MARK.findall(text))
        assert text.count("<!-- bench: ") == text.count("<!-- end of bench -->") == places, page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path))
