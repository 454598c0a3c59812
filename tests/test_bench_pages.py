"""Pages with benchmark figures agree with the JSON next to them.

`python -m tests.test_bench_pages` updates their placeholders (fed_dpsd/benchmarks/report.py).
"""

from pathlib import Path

import pytest

from fed_dpsd.benchmarks.report import MARK, filled

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if MARK.search(path.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_shows_what_its_bench_measured(page):
    text = page.read_text()
    assert filled(text, page.parent) == text, "update it: python -m tests.test_bench_pages"


def test_every_mark_is_closed():
    """A mark without its end would keep old figures, or swallow the text up to the next end."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        places = len(MARK.findall(text))
        assert text.count("<!-- bench: ") == text.count("<!-- end of bench -->") == places, page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(), path.parent))
