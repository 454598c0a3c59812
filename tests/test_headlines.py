"""benchmarks/headlines.py: results/README.md says where the rows of each page are from."""

import importlib.util

import pytest

from tests.pages import ROOT

# Another installed package has the name `benchmarks`.
spec = importlib.util.spec_from_file_location("headlines", ROOT / "benchmarks/headlines.py")
headlines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(headlines)

LINE = "| [page](page.md) | mnist | 0123abcd (2026-11-21) | no GPU | 0 | 0.1 | yes | needs a GPU |"


@pytest.fixture
def results(tmp_path):
    """A folder of results whose one page has rows."""
    (tmp_path / "rows.csv").write_text("method,seed,commit\nfed_dpsd,0,0123abcd\n")
    (tmp_path / "page.md").write_text("# Page\n\nOldest row: 0123abcd.\n\n[Rows](rows.csv).\n")
    header = headlines.markdown_table([headlines.HEADER])
    (tmp_path / "README.md").write_text(f"# Results\n\n{header}\n{LINE}\n")
    return tmp_path


def test_a_page_that_the_table_lists_and_that_names_its_oldest_commit_has_no_problem(results):
    assert headlines.unnamed(results) == []


def test_a_page_with_rows_that_the_table_lacks_is_a_problem(results):
    readme = results / "README.md"
    readme.write_text(readme.read_text().replace(LINE + "\n", ""))
    assert headlines.unnamed(results) == ["page.md: README.md's table lacks it"]


def test_a_page_that_does_not_name_its_oldest_commit_is_a_problem(results):
    page = results / "page.md"
    page.write_text("# Page\n\n[Rows](rows.csv).\n")
    problem = "page.md: it does not name its oldest commit, 0123abcd"
    assert headlines.unnamed(results) == [problem]


def test_our_table_lists_all_our_pages_with_rows():
    assert headlines.unnamed(ROOT / "results") == []
