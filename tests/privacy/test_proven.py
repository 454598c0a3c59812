"""docs/proofs.md and audits.md: every theorem has tests, and every named test exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "proofs.md").read_text()
AUDITS = (ROOT / "docs" / "audits.md").read_text()
SECTION = PAGE.split("## What is proven, and the tests that check it")[1].split("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if line.startswith("| ")][2:]


def functions(path):
    return {
        node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")
    }


def test_every_row_names_tests_that_exist():
    assert len(ROWS) > 20
    for row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert name in functions(path), f"{path}::{name}"


def test_every_theorem_has_a_row():
    theorems = set(re.findall(r"^\*\*(Theorem \w+|Proposition)\b", PAGE + AUDITS, re.MULTILINE))
    rows = {re.match(r"\| (Theorem \w+|\w+)", row)[1] for row in ROWS}
    numbered = {f"Theorem {n}" for n in (*range(1, 20), *range(21, 25), "5b")} | {"Proposition"}
    assert theorems == numbered
    assert theorems <= rows
