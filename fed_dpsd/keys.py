"""Choices and keys of conf/, read from its files; what to use in place of one that is unknown."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from fed_dpsd.plugins import files_of
from fed_dpsd.storage import conf_folder


def groups() -> list[str]:
    """Return the names of the groups of conf/."""
    return sorted(path.name for path in conf_folder().iterdir() if path.is_dir())


def choices_of(group: str) -> list[str]:
    """Return the names of a group's files."""
    return list(files_of(group))


def unknown_choice(group: str, name: str) -> str:
    """Return the problem of a choice that has no file; "" where it has one."""
    names = choices_of(group)
    if name in names or (group, name) == ("experiment", "null"):
        return ""
    problem = f"{group}={name} is unknown; choose one of: {', '.join(names)}"
    if near := difflib.get_close_matches(name, names, n=1):
        return f"{problem}; did you mean {near[0]}?"
    if group == "model":
        return f"{problem}; architectures are model.teacher=... and model.student=..."
    return problem


def unknown_key(key: str, tree: Mapping[str, Any]) -> str:
    """Return the problem of a key that the chosen files do not have, with the one to use."""
    group, _, rest = key.partition(".")
    if rest and (named := homes(key)):
        return f"{key} belongs to {named}; the keys of {group} here: {_listed(tree[group])}"
    problem, known = f"{key} is not a configuration key", [*flat_keys(tree), *groups()]
    if rest and isinstance(own := tree.get(group), Mapping):
        near = difflib.get_close_matches(rest, own, n=1)
        if near:
            return f"{problem}; did you mean {group}.{near[0]}?"
        return f"{problem}; the keys of {group} here: {_listed(own)}"
    if ending := [each for each in known if each.endswith(f".{key}")]:
        return f"{problem}; did you mean {' or '.join(ending)}?"
    if near := difflib.get_close_matches(key, known, n=1):
        return f"{problem}; did you mean {near[0]}?"
    return f"{problem}; `fed-dpsd list keys` names them"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(key for key in keys if key != "_target_") or "none"


def homes(key: str) -> str:
    """Return the choices whose files have a key of their group, as a text; "" where none has."""
    group, _, rest = key.partition(".")
    found = [("method", c) for c in choices_of("method") if key in _keys_of("method", c)]
    if group in groups():
        found += [(group, name) for name in choices_of(group) if rest in _keys_of(group, name)]
    names = list(dict.fromkeys(f"{group}={name}" for group, name in found))
    *most, last = names or [""]
    return f"{', '.join(most)} or {last}" if most else last


def _keys_of(group: str, name: str) -> set[str]:
    """Return the keys of a group that one of its files sets, and those that it builds on."""
    text = files_of(group)[name].read_text()
    content = yaml.safe_load(text)
    own = content.get(group, {}) if text.startswith("# @package _global_") else content
    keys = {key for key in own if key != "defaults"}
    for entry in content.get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            keys |= _keys_of(group, entry.partition("@")[0])
        elif isinstance(entry, dict):  # a choice that only this file has, or one that it makes
            keys |= {key.lstrip("/") for key in entry if key.startswith("/")}
    return keys


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every key that is no group of keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the path of every key, and of every group of keys."""
    keys = [prefix + key for key in tree]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            keys += flat_keys(value, f"{prefix}{key}.")
    return keys
