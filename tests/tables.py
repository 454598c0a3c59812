"""The papers' tables, from fed_dpsd/report/literature/."""

import re

from fed_dpsd.report import literature


def read_files():
    """Each paper's file, by the paper's name; all values are text."""
    return {paper["name"]: paper for paper in literature._files()}


def cells_of(table):
    """All cells of a table, row by row; an empty one is "-"."""
    rows = [*table["rows"].values(), *table.get("unplaced", {}).values()]
    return [cell for row in rows for cell in row]


def cells_by_name(paper):
    """Each cell of a paper's tables, by table, row and column, such as Table_II_DPSD_COVIDx_1."""
    return {
        re.sub(r"\W+", "_", f"{number} {row} {column}"): cell
        for number, table in paper.get("tables", {}).items()
        for row, cells in table["rows"].items()
        for column, cell in zip(table["columns"], cells, strict=True)
    }
