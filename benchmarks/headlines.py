"""List the pages of results whose rows were measured with other code than today's.

    python benchmarks/headlines.py

A page's rows are in the CSV files that it links to, and each row has its commit. Its code is the
module of the row's method and what it imports from the rooms below. A file has changed if its
syntax tree has, so comments and docstrings do not count. A change need not move an accuracy: repeat
a row to find out, as results/README.md explains. A commit that this repository lacks is named.
"""

import ast
import csv
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from fed_dpsd.report.tables import markdown_table

ROOT = Path(__file__).parents[1]
HEADER = ["page", "commits", "number of commits", "changed files", "such as"]
ROOMS = ("client", "data", "losses", "methods", "models", "papers", "privacy", "streams")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
STARTS = ("client/learning.py", "client/teachers.py", "data/partition.py")  # every row needs them


def main() -> None:
    """Print a table of the pages."""
    rows = []
    for page in sorted((ROOT / "results").glob("*.md")):
        commits, changed = set(), set[str]()
        for method, commit in measured(page):
            commits.add(commit)
            changed |= changed_since(commit, method)
        if commits:
            rows.append(
                [page.name, ", ".join(sorted(commits)[:3]), str(len(commits)), *shown(changed)]
            )
    print(markdown_table([HEADER, *rows]))


def measured(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the method and the abbreviated commit of each row behind a page."""
    for name in sorted(set(re.findall(r"\]\(([\w-]+\.csv)\)", page.read_text()))):
        with (page.parent / name).open(newline="") as file:
            for row in csv.DictReader(file):
                if commit := row.get("commit"):
                    yield row.get("method") or "fed_dpsd", commit.removesuffix("+dirty")[:8]


def shown(changed: set[str]) -> tuple[str, str]:
    """Return how many files have changed, and the first three."""
    return str(len(changed)), ", ".join(sorted(changed)[:3])


@functools.cache
def changed_since(commit: str, method: str) -> set[str]:
    """Return the files of a method's code whose syntax trees differ between a commit and HEAD."""
    if (files := files_changed_since(commit)) is None:
        return {f"commit {commit} is not here"}
    config = ROOT / f"conf/method/{method}.yaml"
    if not config.exists():
        return {f"conf/method/{method}.yaml is gone"}
    settings = yaml.safe_load(config.read_text())
    target = settings.get("method", settings)["_target_"]
    module = ROOT / (target.rpartition(".")[0].replace(".", "/") + ".py")
    changed = imported(module) & files
    return {name for name in changed if tree_at(commit, name) != tree_at("HEAD", name)}


@functools.cache
def files_changed_since(commit: str) -> frozenset[str] | None:
    """Return the files that differ between a commit and HEAD; None without such a commit."""
    changed = git("diff", "--name-only", "--no-renames", commit, "HEAD")
    return None if changed.returncode else frozenset(changed.stdout.split())


@functools.cache
def imported(module: Path) -> frozenset[str]:
    """Return the files of our modules that a method needs, as paths in the repository."""
    found, new = set[Path](), [module, *(ROOT / "fed_dpsd" / start for start in STARTS)]
    while new:
        if (path := new.pop()) in found:
            continue
        found.add(path)
        pattern = rf"^from (fed_dpsd\.(?:{'|'.join(ROOMS)})[\w.]*) import"
        for name in re.findall(pattern, path.read_text(), re.MULTILINE):
            each = ROOT / name.replace(".", "/")
            new += filter(Path.exists, (each.with_suffix(".py"), each / "__init__.py"))
    return frozenset(str(path.relative_to(ROOT)) for path in found)


@functools.cache
def tree_at(commit: str, name: str) -> str:
    """Return a file's syntax tree at a commit without docstrings; empty if it was not there."""
    tree = ast.parse(git("show", f"{commit}:{name}").stdout)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in this repository."""
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
