"""Choices and keys of conf/, read from its files without Hydra.

This is faster than Hydra, which composes the runs, and records the file that a value comes from. A
test compares both. The schema describes its own keys. Comments in conf/ describe the keys of chosen
classes, and the purpose of the file's values.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fed_dpsd.config.plugins import conf_folders, files_of
from fed_dpsd.config.schema import field_of

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAIN = "config"


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Args:
        name: the key as typed, such as "training.steps".
        value: its value in the file.
        meaning: its description.
        file: the file of conf/ that sets the value, such as "training/dp_sgd".
    """

    name: str
    value: str
    meaning: str
    file: str


def groups() -> dict[str, str]:
    """Return the groups of conf/, each with its default choice; "null" for none."""
    return {name: choice for name, choice in _defaults(MAIN) if choice}


def choices(group: str) -> dict[str, str]:
    """Return the choices of a group by name, each with the first sentence of its file."""
    return {
        name: re.sub(r"\A# @.*\n", "", file.read_text()).partition("\n")[0].removeprefix("# ")
        for name, file in files_of(group).items()
    }


def resolve_choices(typed: Mapping[str, str]) -> dict[str, str]:
    """Return the choice of every group, given the typed choices.

    The other choices come from the experiment's file, then the method's, then the defaults.
    """
    found = dict(typed)

    def visit(group: str, choice: str) -> None:
        defaults = _defaults(f"{group}/{choice}")
        for name, value in defaults:
            if name.startswith(("/", "override /")):
                found.setdefault(name.removeprefix("override ").removeprefix("/"), value)
        for name, value in reversed(defaults):
            if not value and name != "_self_":
                visit(group, name.partition("@")[0])

    known = groups()
    for group in reversed(known):
        choice = found.get(group, known[group])
        if choice in files_of(group):
            visit(group, choice)
    return known | found


def all_keys(typed: Mapping[str, str] | None = None) -> list[Key]:
    """Return all keys of a run, given the typed choices of groups, in the order of the files."""
    choice_of = resolve_choices(typed or {})
    found = {key.name: key for key in _of_file(MAIN, "", choice_of)}
    for group, choice in choice_of.items():
        if "@" in group or choice not in files_of(group):
            continue
        for key in _of_file(f"{group}/{choice}", group, choice_of):
            known = found.get(key.name)
            meaning = key.meaning or (known.meaning if known else "")
            found[key.name] = Key(key.name, key.value, meaning, key.file)
    return list(found.values())


def choices_with_key(key: str) -> str:
    """Return the choices whose files have a key, as in "method=dense or method=fedadi"; or ""."""
    group = key.partition(".")[0]
    found = [
        ("method", c)
        for c in files_of("method")
        if "@" in key and key in resolve_choices({"method": c})
    ]
    if group in groups():
        found += [
            (group, choice)
            for choice in files_of(group)
            if key in {known.name for known in _of_file(f"{group}/{choice}", group, {})}
        ]
    *most, last = [f"{group}={name}" for group, name in dict.fromkeys(found)] or [""]
    return f"{', '.join(most)} or {last}" if most else last


def method_sets(method: str, key: str) -> bool:
    """Return whether a method's file sets a key, which may belong to another group."""
    if method not in files_of("method"):
        return False
    return key in {known.name for known in _of_file(f"method/{method}", "method", {})}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every key that is not a group of keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the path of every key, and of every group of keys."""
    below = [(prefix + key, value) for key, value in tree.items()]
    sections = (flat_keys(value, f"{key}.") for key, value in below if isinstance(value, Mapping))
    return [key for key, _ in below] + [key for section in sections for key in section]


# --- files ---


def _text(name: str) -> str:
    """Return the text of a file in our conf/ or a plug-in's."""
    paths = (folder / f"{name}.yaml" for folder in conf_folders())
    return next(filter(Path.exists, paths)).read_text()


def _defaults(name: str) -> list[tuple[str, str]]:
    """Return the entries of a file's defaults list with their choices; "" is the file's group."""
    found = list[tuple[str, str]]()
    for entry in (yaml.load(_text(name), _LOADER) or {}).get("defaults", []):
        pairs = entry.items() if isinstance(entry, Mapping) else [(entry, "")]
        found += [(key.removeprefix("optional "), "null" if c is None else c) for key, c in pairs]
    return found


def _of_file(name: str, package: str, choice_of: Mapping[str, str]) -> Iterator[Key]:
    """Yield the keys of a file and of the files that it builds on; the last equal key counts."""
    text = _text(name)
    if text.startswith("# @package _global_\n"):
        package = package if "@" in package else ""
    package = package.removeprefix("@")
    defaults = _defaults(name) if name != MAIN else []
    if ("_self_", "") not in defaults:
        defaults = [*defaults, ("_self_", "")]
    for other, choice in defaults:
        sibling, _, place = other.partition("@")
        if other == "_self_":
            for key, value, comment in _keys(text):
                path = f"{package}.{key}" if package else key
                field = field_of(path)
                yield Key(path, value, comment or (field and field.description) or "", name)
        elif other.startswith("/"):
            taken = choice_of.get(other.removeprefix("/"), choice)
            yield from _of_file(f"{sibling.removeprefix('/')}/{taken}", f"@{place}", choice_of)
        elif not choice:
            group = name.partition("/")[0]
            yield from _of_file(f"{group}/{sibling}", f"@{place}" if place else group, choice_of)


def _keys(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the keys with a value in a file's text, each with its value and comments."""
    lines = text.splitlines()

    def comment(key: yaml.Node, value: yaml.Node) -> str:
        above = key.start_mark.line
        while above and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        # The comments at the top describe the choice.
        found = lines[above : key.start_mark.line] if above else []
        found.append(lines[value.end_mark.line][value.end_mark.column :].partition("#")[2])
        return " ".join(filter(None, (line.strip(" #") for line in found)))

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, str, str]]:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if key.value.startswith("_") or name in ("sweep", "defaults"):
                continue
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, f"{name}.")
            else:
                shown = text[value.start_mark.index : value.end_mark.index]
                yield name, shown, comment(key, value)

    if isinstance(root := yaml.compose(text, _LOADER), yaml.MappingNode):
        yield from walk(root, "")
