"""The command `fed-dpsd list`: every choice and every key, in the words of the files of conf/."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

GROUPS = {
    "methods": "method",
    "data": "data",
    "training": "training",
    "answers": "answers",
    "models": "model",
    "partitions": "partition",
    "federations": "federation",
    "experiments": "experiment",
}
Kind = Literal[
    "methods",
    "data",
    "training",
    "answers",
    "models",
    "partitions",
    "federations",
    "experiments",
    "keys",
]
_KEY = re.compile(r"( *)(\w+):(?: ([^#]*?))?(?: *# (.*))?")


def show(
    kind: Annotated[Kind | None, typer.Argument(help="Choices of one kind, or all keys.")] = None,
) -> None:
    """List what can be chosen: methods, data, experiments and more; or every key with its default.

    `fed-dpsd list keys` has each key of the default run, its default and what it means.
    """
    from fed_dpsd.storage import conf_folder

    if kind == "keys":
        for key, default, meaning in keys(conf_folder()):
            print(f"{key}={default}{f'  # {meaning}' if meaning else ''}")
        return
    for name in [kind] if kind else GROUPS:
        group = GROUPS[name]
        choices = {path.stem: path for path in sorted((conf_folder() / group).glob("*.yaml"))}
        width = max(map(len, choices))
        print(f"{name} ({group}=...):")
        for choice, path in choices.items():
            print(f"  {choice:{width}}  {sentence(path)}")


def sentence(path: Path) -> str:
    """Return what a file of conf/ says that it is: its first comment."""
    lines = path.read_text().splitlines()
    return next(line for line in lines if not line.startswith("# @package")).removeprefix("# ")


def keys(conf: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each key of the default run, its default, and the comments on it."""
    whole = (conf / "config.yaml").read_text()
    yield from _keys(whole.partition("\nsweep:")[2].partition("\n")[2])
    for group, choice in re.findall(r"^  - (\w+): (\w+)", whole, re.MULTILINE):
        for key, (default, meaning) in _of_choice(conf / group, choice).items():
            yield f"{group}.{key}", default, meaning


def _of_choice(folder: Path, choice: str) -> dict[str, tuple[str, str]]:
    """Return the keys of a group's file, and of those that it builds on."""
    text = (folder / f"{choice}.yaml").read_text()
    found: dict[str, tuple[str, str]] = {}
    for other in re.findall(r"^  - ([a-z]\w*)$", text, re.MULTILINE):
        found |= _of_choice(folder, other)
    for key, default, meaning in _keys(re.sub(r"\A(#.*\n)+", "", text)):
        found[key] = default, meaning or found.get(key, ("", ""))[1]
    return found


def _keys(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a file's text, without the comments that it begins with."""
    parents: list[str] = []
    comments: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comments.append(line.lstrip(" #"))
        elif match := _KEY.fullmatch(line):
            indent, key, default, comment = match.groups()
            parents = [*parents[: len(indent) // 2], key]
            if default and not key.startswith("_"):
                meaning = " ".join([*comments, *([comment] if comment else [])])
                yield ".".join(parents), default, meaning
            comments = []
