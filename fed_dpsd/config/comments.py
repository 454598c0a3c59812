"""The comments of conf/, which describe choices and the keys of classes for `fed-dpsd list`.

The schema describes all other keys. Hydra alone reads values.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from fed_dpsd.config.plugins import files_of
from fed_dpsd.storage import conf_folder


def first_sentences(group: str) -> dict[str, str]:
    """Return the choices of a group, each with the first line of its file's comment."""
    return {
        name: re.sub(r"\A# @.*\n", "", file.read_text()).partition("\n")[0].removeprefix("# ")
        for name, file in files_of(group).items()
    }


def key_comments(choices: Mapping[str, str]) -> dict[str, str]:
    """Return the comments on keys in conf/config.yaml and in the files of choices.

    Args:
        choices: a choice for each group, as in {"training@method.baseline": "plain"}; comments in
            the files of the first choices replace others.
    """
    found = dict(_of_file(conf_folder() / "config.yaml", "", {}))
    for place, choice in reversed([*choices.items()]):
        group, _, package = place.partition("@")
        files = files_of(group)
        if choice in files:
            found |= _of_file(files[choice], f"{package or group}.", files)
    return found


def _of_file(path: Path, prefix: str, files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield the commented keys of a file and, before these, of the `files` that it builds on."""
    text = path.read_text()
    root = yaml.compose(text, yaml.CSafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return
    for entry in next((list_.value for key, list_ in root.value if key.value == "defaults"), []):
        if isinstance(entry, yaml.ScalarNode) and entry.value in files:
            yield from _of_file(files[entry.value], prefix, files)
    shared = text.startswith("# @package _global_\n")
    yield from _of_mapping(root, "" if shared else prefix, text.splitlines())


def _of_mapping(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each key that has a comment above it, unless this begins the file, or next to it."""
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _of_mapping(value, f"{prefix}{key.value}.", lines)
            continue
        end = above = key.start_mark.line
        while above and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        after = lines[value.end_mark.line][value.end_mark.column :].partition("#")[2]
        said = [*(lines[above:end] if above else []), after]
        if text := " ".join(filter(None, (line.strip(" #") for line in said))):
            yield prefix + key.value, text
