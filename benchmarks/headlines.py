"""Write the table of results/README.md that says where the rows of each page are from.

    python benchmarks/headlines.py           # --check: fail if the table or a page needs a change

A page's rows are in the CSV files that it links to, and each row has its commit. Its code is the
module of the row's method and what it imports from the rooms below. A file has changed if its
syntax tree has, so comments and docstrings do not count. A change need not move an accuracy: repeat
a row to find out, as results/README.md explains. A commit that this repository lacks is named.

The last column, and lines of pages whose rows have no commits, are written by hand and kept.
"""

import argparse
import ast
import csv
import functools
import re
import subprocess
import sys
from pathlib import Path

import yaml

from fed_dpsd.report.tables import markdown_table

ROOT = Path(__file__).parents[1]
HEADER = (
    *("page", "experiments", "oldest commit", "machines", "seeds", "hours of rounds"),
    *("code changed since", "why not repeated"),
)
UNKNOWN = "not repeated yet"
ROOMS = ("client", "data", "losses", "methods", "models", "papers", "privacy", "streams")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
STARTS = ("client/learning.py", "client/teachers.py", "data/partition.py")  # every row needs them


def main() -> None:
    """Rewrite the table, or list what it and the pages lack."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if stale")
    check, folder = parser.parse_args().check, ROOT / "results"
    readme = folder / "README.md"
    text, lines = readme.read_text(), table(readme)
    kept = {line[0]: line for line in lines}
    for page in pages_with_rows(folder):
        key = f"[{page.stem}]({page.name})"
        reason = kept[key][-1] if key in kept else UNKNOWN
        kept[key] = [key, *origin(page), reason]
    old, new = (markdown_table([HEADER, *each]) for each in (lines, sorted(kept.values())))
    if not check:
        readme.write_text(text.replace(old, new))
    problems = unnamed(folder) + (["results/README.md: the table is stale"] if old != new else [])
    if check and problems:
        sys.exit("\n".join(problems))


def table(readme: Path) -> list[list[str]]:
    """Return the cells of the lines of README.md's table."""
    head = rf"^\| {HEADER[0]} \| {HEADER[1]} .*\n.*\n((?:\|.*\n)*)"
    found = re.search(head, readme.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{readme} has no table whose first line is: {' | '.join(HEADER)}")
    return [line.strip("| ").split(" | ") for line in found[1].splitlines()]


def unnamed(folder: Path) -> list[str]:
    """Return the pages with rows that README.md's table lacks, or that do not name their oldest."""
    oldest = {line[0]: line[2] for line in table(folder / "README.md")}
    problems = []
    for page in pages_with_rows(folder):
        commit = oldest.get(f"[{page.stem}]({page.name})", "").partition(" ")[0]
        if not commit:
            problems.append(f"{page.name}: README.md's table lacks it")
        elif commit not in page.read_text():
            problems.append(f"{page.name}: it does not name its oldest commit, {commit}")
    return problems


def pages_with_rows(folder: Path) -> list[Path]:
    """Return the pages that link to rows with commits."""
    return [page for page in sorted(folder.glob("*.md")) if rows(page)]


def rows(page: Path) -> list[dict[str, str]]:
    """Return the rows with commits of the CSV files that a page links to."""
    found = []
    for name in sorted(set(re.findall(r"\]\(([\w-]+\.csv)\)", page.read_text()))):
        with (page.parent / name).open(newline="") as file:
            found += [row for row in csv.DictReader(file) if row.get("commit")]
    return found


def origin(page: Path) -> list[str]:
    """Return the cells of a page's line that follow from its rows."""
    known, missing, changed, hours = set[tuple[str, str]](), set[str](), False, 0.0
    for row in rows(page):
        commit = row["commit"].removesuffix("+dirty")[:8]
        dated = date(commit)
        if dated:
            known.add((dated, commit))
        else:
            missing.add(commit)
        changed |= bool(changed_since(commit, row.get("method") or "fed_dpsd"))
        hours += float(row.get("seconds") or 0) / 3600
    stamp, oldest = min(known)
    seeds = sorted({int(row["seed"]) for row in rows(page) if row.get("seed")})
    machines = {row["machine"].split(", ")[-1] for row in rows(page) if row.get("machine")}
    return [
        ", ".join(sorted({row["experiment"] for row in rows(page) if row.get("experiment")})),
        f"{oldest} ({stamp[:10]})"
        + (f", not here: {', '.join(sorted(missing))}" if missing else ""),
        ", ".join(sorted(machines)),
        ", ".join(map(str, seeds)),
        f"{hours:.1f}" if hours else "",
        "yes" if changed else "no",
    ]


@functools.cache
def date(commit: str) -> str:
    """Return when a commit was made, in ISO 8601; empty without such a commit."""
    return git("show", "-s", "--format=%cI", commit, "--").stdout.strip()


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
