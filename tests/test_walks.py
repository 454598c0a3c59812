"""docs/architecture.md: its tree and its line numbers are those of the code.

`python -m tests.test_walks` writes them anew.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.test_architecture import LADDER, WALL

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)")
TREE = re.compile(r"(<!-- tree -->\n).*?(<!-- end of tree -->)", re.DOTALL)


def line_of(name, path):
    """The line of a definition; 1 for the module itself, 0 where there is no such thing."""
    module = path.removesuffix(".py").replace("/", ".")
    if module.startswith(name):
        return 1
    names, body, line = name.removeprefix(f"{module}.").split("."), None, 0
    body = ast.parse((ROOT / path).read_text()).body
    for part in names:
        named = [node for node in body if getattr(node, "name", None) == part]
        if not named:
            return 0
        line, body = named[0].lineno, getattr(named[0], "body", [])
    return line


def purpose(path):
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


def rows():
    """A row for each room, from the lowest to the highest, with the files that it holds."""
    yield "| room | holds | its files |\n| --- | --- | --- |\n"
    for rung in LADDER:
        for room in sorted(rung):
            path = ROOT / "fed_dpsd" / room
            if not path.is_dir():
                yield f"| `{room}.py` | {purpose(path.with_suffix('.py'))} | |\n"
                continue
            files = sorted(p.stem for p in path.glob("*.py") if p.stem != "__init__")
            side = " **private side.**" if room == "client" else ""
            side = " **public side.**" if room == "server" else side
            yield f"| `{room}/` | {purpose(path / '__init__.py')}{side} | {', '.join(files)} |\n"


def rewritten(text):
    """The page with the tree and the line numbers of today."""

    def link(match):
        name, path, _ = match.groups()
        return f"[`{name}`](../{path}#L{line_of(name, path)})"

    text = TREE.sub(lambda match: match[1] + "\n" + "".join(rows()) + "\n" + match[2], text)
    return LINK.sub(link, text)


def test_the_tree_and_the_lines_are_those_of_the_code():
    text = PAGE.read_text()
    assert rewritten(text) == text, "write them anew: python -m tests.test_walks"
    assert "#L0)" not in text
    assert len(LINK.findall(text)) > 40


def test_a_moved_definition_is_noticed():
    text = PAGE.read_text()
    moved = LINK.sub(lambda m: m[0].replace(f"#L{m[3]}", f"#L{int(m[3]) + 1}"), text, count=1)
    assert rewritten(moved) != moved
    assert line_of("Site.nothing", "fed_dpsd/client/site.py") == 0


@pytest.mark.parametrize("line", re.findall(r"^\| .*README →.*$", PAGE.read_text(), re.MULTILINE))
def test_a_walk_opens_at_most_five_files(line):
    assert line.count("→") <= 4


def test_the_wall_is_drawn_in_the_tree():
    text = PAGE.read_text()
    assert all(f"`{room}/`" in text for room in WALL)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
