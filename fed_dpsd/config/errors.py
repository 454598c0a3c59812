"""Messages for invalid overrides, because Hydra's own errors expose its grammar and internals."""

import difflib
import os
import re
import shlex
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

from fed_dpsd.config.plugins import files_of, groups

QUOTES = "put the value in quotes: "
_SYNONYMS = {"lr": "learning_rate", "epsilon": "target_epsilon", "sigma": "noise_multiplier"}


def quoted(text: str) -> str:
    """Return text in Hydra's quotes, so that none of it is interpreted.

    >>> quoted("/data/5=6, new")
    '"/data/5=6, new"'
    """
    # A backslash is special only before a quote or ${.
    escaped = re.sub(r'(\\*)("|\$\{|\Z)', lambda m: 2 * m[1] + (m[2] and f"\\{m[2]}"), text)
    return f'"{escaped}"'


def quote_letters(override: str) -> str:
    """Quote the words of a value that have letters outside ASCII, which Hydra only reads in quotes.

    >>> quote_letters("data.path=Bilder_ü/a.csv")
    'data.path="Bilder_ü/a.csv"'
    """
    key, equals, value = override.partition("=")
    kinds = {unicodedata.category(each)[0] for each in value if not each.isascii()}
    if re.search(r"[\s'\"$=\\]", value) or not kinds <= set("LMN"):  # letters, marks, numbers
        return override
    word = re.compile(r"[^,:()\[\]{}]+" if "{" in value else r"[^,()\[\]{}]+")
    return key + equals + word.sub(lambda m: m[0] if m[0].isascii() else quoted(m[0]), value)


def quoting_remedy(override: str) -> str:
    """Return the remedy for an override with a value that needs quotes, as typed in a shell."""
    key, _, value = override.partition("=")
    return QUOTES + shlex.quote(f"{key}={quoted(os.path.expanduser(value))}")


def split_tokens(text: str) -> tuple[list[str], bool]:
    """Split text at spaces outside Hydra's quotes and brackets; return whether all are closed."""
    found, token, quote, depth, escaped = [], "", "", 0, False
    for character in text:
        if not quote and depth == 0 and character.isspace():
            found.append(token)
            token = ""
            continue
        token += character
        if quote:
            quote = "" if character == quote and not escaped else quote
        elif character in "'\"" and not escaped:
            quote = character
        else:
            depth += (character in "[{(") - (character in ")}]")
        escaped = character == "\\" and not escaped
    return [token for token in [*found, token] if token], not quote and depth == 0


def unreadable_override(word: str, keys: Collection[str]) -> str:
    """Return the problem with a word that cannot be read as an override.

    Args:
        word: the word as typed.
        keys: the keys of the default run.
    """
    key, equals, value = word.partition("=")
    if not word.strip():
        return "an empty setting; write KEY=VALUE, as in rounds=10"
    if not key.strip():
        return f"{word} has no key; write KEY=VALUE without spaces, as in rounds=10"
    if not equals:
        if named := _choices_named(word):
            return f"{word}: write {' or '.join(named)}"
        if word in keys or word in groups():
            return f"{word}: write {word}=VALUE"
        return f"{word} is not a setting; write KEY=VALUE, as in rounds=10"
    path = "/" in value and not value.startswith(("'", '"', "["))
    if not path and not split_tokens(value)[1]:
        return f"{word}: a quote or bracket is not closed"
    others = {each.partition("=")[0] for each in value.split()[1:] if "=" in each}
    if others & {*keys, *groups()}:
        return f"{word}: give each setting as its own word"
    if value.endswith(","):
        return f"{word}: write the values without spaces between them, as in seed=0,1,2"
    if re.fullmatch(r"[\w.@]+", key) and not value.startswith(("'", '"', "=")):
        return f"{word}: {quoting_remedy(word)}"
    return f"{word} cannot be read; write KEY=VALUE, as in rounds=10"


def unknown_choice(group: str, name: str) -> str:
    """Return the problem with a choice that has no file; "" if it has one."""
    names = list(files_of(group))
    if name in names or (group, name) == ("experiment", "null"):
        return ""
    problem = f"{group}={name} is unknown; choose one of: {', '.join(names)}"
    if group == "model":
        problem += ", or set other architectures by model.teacher=... and model.student=..."
    if near := difflib.get_close_matches(name.lower(), names, n=1):
        problem += f"; did you mean {near[0]}?"
    else:
        problem += "; a plug-in's also needs plugins=PACKAGE"
    return problem


def unknown_key(key: str, tree: Mapping[str, Any]) -> str:
    """Describe a key that the chosen files do not have, and suggest the key to use."""
    group, _, rest = key.partition(".")
    if rest and (named := choices_with_key(key)):
        problem = f"{key} belongs to {named}; the keys of {group} here: {_join_keys(tree[group])}"
        alike = [each for each in flat_keys(tree) if each.endswith(f".{rest}")]
        return f"{problem}; did you mean {' or '.join(alike)}?" if alike else problem
    problem, known = f"{key} is not a configuration key", [*flat_keys(tree), *groups()]
    if rest and isinstance(own := tree.get(group), Mapping):
        near = difflib.get_close_matches(rest, own, n=1)
        if near:
            return f"{problem}; did you mean {group}.{near[0]}?"
        return f"{problem}; the keys of {group} here: {_join_keys(own)}"
    ours = _SYNONYMS.get(key, key)
    if ending := [each for each in known if each.endswith(f".{ours}")]:
        return f"{problem}; did you mean {' or '.join(ending)}?"
    if near := difflib.get_close_matches(key, known, n=1):
        return f"{problem}; did you mean {near[0]}?"
    return f"{problem}; `fed-dpsd list keys` lists all keys"


def choices_with_key(key: str) -> str:
    """Return the choices whose files have a key, as in "method=dense or method=fedadi"; or ""."""
    group = "method" if "@" in key else key.partition(".")[0]
    names = files_of(group) if group in groups() else {}
    found = [f"{group}={name}" for name in names if file_sets(group, name, key)]
    *most, last = found or [""]
    return f"{', '.join(most)} or {last}" if most else last


def file_sets(group: str, choice: str, key: str) -> bool:
    """Return whether a choice's file, or one that it builds on, sets a key of any group."""
    if choice not in files_of(group):
        return False
    text = files_of(group)[choice].read_text()
    tree = yaml.safe_load(text) or {}
    own = flat_keys(tree if text.startswith("# @package _global_") else {group: tree})
    if key in own or ("@" in key and f"/{key}:" in text):  # in its defaults list
        return True
    names = (each for each in tree.get("defaults", ()) if isinstance(each, str))
    bases = (name.partition("@")[0] for name in names)
    return any(file_sets(group, base, key) for base in bases)


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the path of every key, and of every group of keys."""
    below = [(prefix + key, value) for key, value in tree.items()]
    sections = (flat_keys(value, f"{key}.") for key, value in below if isinstance(value, Mapping))
    return [key for key, _ in below] + [key for section in sections for key in section]


def uncomposable_choice(choice: str, error: Exception, tree: Mapping[str, Any]) -> str:
    """Describe a choice that Hydra cannot compose with the earlier choices."""
    key = choice.partition("=")[0]
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        if unknown[1] != key:
            return f"{choice}: in its file, {unknown_key(unknown[1], tree)}"
        if named := choices_with_key(key):
            return f"{choice}: {key} belongs to {named}"
        return f"{choice}: this choice does not exist; see `fed-dpsd list`"
    return f"{choice}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of a Hydra or OmegaConf error; the other lines describe internals."""
    line = str(error).strip().splitlines()[0]
    if found := re.search(r"Could not find 'experiment/(\w+)/(\w+)'", line):
        group, choice = found.groups()
        return f"{group}: {choice} under defaults: write `override /{group}: {choice}`"
    return line


def _choices_named(word: str) -> list[str]:
    """Return the overrides that choose a file of this name."""
    return [f"{group}={word}" for group in groups() if word in files_of(group)]


def _join_keys(keys: Iterable[str]) -> str:
    return ", ".join(key for key in keys if key != "_target_") or "none"
