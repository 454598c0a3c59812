"""Overrides: settings that are typed as KEY=VALUE, each checked, and composed with conf/ by Hydra.

No other file imports Hydra. Its own errors name grammar and internals, so overrides are examined
one by one before, and every problem is told in a sentence.
"""

import functools
import itertools
import os
import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fed_dpsd.errors import ConfigError
from fed_dpsd.keys import all_keys, flat_keys, groups, homes, leaves, unknown_choice, unknown_key
from fed_dpsd.plugins import Plugin, conf_folders, files_of, find, named_in, searching
from fed_dpsd.storage import conf_folder

QUOTES = "put the value in quotes: "
NOT_TYPED = ("sweep", "device")  # a grid of other runs, and a key for which two others stand


@dataclass(frozen=True)
class Composition:
    """The configuration that overrides ask for, and all that is wrong with them.

    Args:
        values: plain dictionaries, composed without the overrides that have a problem.
        sources: the key that another key takes its value from, such as "teacher.seed": "seed".
        problems: a line on each override that was left out.
        chosen: the overrides that choose files of conf/.
        plugins: the plug-ins whose files may be chosen too.
        sweep: the grid of runs that a chosen experiment declares, as for `choices`; {} is none.
    """

    values: dict[str, Any]
    sources: Mapping[str, str]
    problems: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    plugins: tuple[Plugin, ...] = ()
    sweep: Any = field(default_factory=dict)

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The values of the chosen files, with no other key typed."""
        with searching(self.plugins):
            return _compose(self.chosen)[0]


@dataclass(frozen=True)
class _Typed:
    """An override that can be read: its text without "+", its key, whether it chooses a file."""

    text: str
    key: str
    chooses: bool


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/ with Hydra `overrides` into plain dictionaries.

    `sweep` is left out, and `device`, for which two other keys stand.

    Raises:
        ConfigError: overrides cannot be read, or name unknown keys or choices; a line on each.
    """
    composition = read(overrides)
    if composition.problems:
        raise ConfigError(composition.problems)
    return composition.values


def declared_sweep(experiment: str) -> Any:
    """Return the `sweep` of an experiment's file: overrides, each with choices as for `choices`.

    Raises:
        ConfigError: there is no such experiment, or its file cannot be composed.
    """
    if problem := unknown_choice("experiment", experiment):
        raise ConfigError([problem])
    override = f"experiment={experiment}"
    try:
        return _compose((override,))[0]["sweep"]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([f"{override}: {_first_line(error)}"]) from None


def choices(override: str) -> tuple[str, list[str]]:
    """Return the key of an override in Hydra's sweep syntax, and its choices, at least one.

    Raises:
        ConfigError: the syntax is wrong, or the choices cannot be listed.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        raise ConfigError([_unreadable(override)]) from None
    if not parsed.is_sweep_override():
        return parsed.get_key_element(), [parsed.get_value_element_as_str()]
    try:
        return parsed.get_key_element(), list(parsed.sweep_string_iterator())
    except HydraException:
        example = f"{parsed.get_key_element()}=0,1,2"
        raise ConfigError(
            [f"{override}: its values cannot be listed; write them out, as in {example}"]
        ) from None


def read(overrides: Sequence[str]) -> Composition:
    """Compose conf/ with the overrides that can be used, and find what is wrong with all others."""
    names, others = named_in(overrides)
    plugins = find(names)
    with searching(plugins):
        composition = _read(others)
    named = {"plugins": names} if names else {}
    return replace(composition, values=composition.values | named, plugins=plugins)


def _read(overrides: Sequence[str]) -> Composition:
    """Compose our files, and those that are searched, as `read` does."""
    typed, problems, sure = _parse(overrides)
    chosen = [each.text for each in typed if each.chooses]
    try:
        if not problems:
            values, sources = _compose([each.text for each in typed])
            return _composition(values, sources, (), chosen)
    except (HydraException, OmegaConfBaseException):
        pass  # the chosen files are composed alone, to know their keys
    files = _composable(chosen, problems)
    tree = _without(_compose(files)[0]) | {"device": None}
    known, settings = set(flat_keys(tree)), list[str]()
    for each in typed:
        group = each.key.partition(".")[0]
        if each.chooses or (group in groups() and not (sure and files == chosen)):
            continue  # a wrong choice leaves open which keys of any group there are
        if each.key in known:
            settings.append(each.text)
        else:
            problems.append(unknown_key(each.key, tree))
    values, sources = _compose_each(files, settings, problems)
    return _composition(values, sources, problems, files)


def _composition(
    values: dict[str, Any],
    sources: Mapping[str, str],
    problems: Sequence[str],
    chosen: Sequence[str],
) -> Composition:
    return Composition(
        _without(values), sources, tuple(problems), tuple(chosen), sweep=values["sweep"]
    )


def split_overrides(text: str) -> list[str]:
    """Split a string of overrides at blanks outside Hydra's quotes and brackets, keeping both.

    What follows a quote or bracket that is not closed is one override, which cannot be read.

    >>> split_overrides("method=dense model.teachers=[cnn, mlp] out='a b'")
    ['method=dense', 'model.teachers=[cnn, mlp]', "out='a b'"]
    """
    return _tokens(text)[0]


def _tokens(text: str) -> tuple[list[str], bool]:
    """Return the overrides in a string, and whether all quotes and brackets are closed."""
    tokens, token, quote, depth, escaped = [], "", "", 0, False
    for character in text:
        if not quote and depth == 0 and character.isspace():
            tokens.append(token)
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
    return [token for token in [*tokens, token] if token], not quote and depth == 0


# --- Hydra ---


def _compose(overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all values of a composition, and the key that a key takes its value from."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        places = [f'"file://{folder}"' for folder in conf_folders()[1:]]
        searched = [f"hydra.searchpath=[{','.join(places)}]"] if places else []
        composed = hydra.compose("config", overrides=[*overrides, *searched])
    values = OmegaConf.to_container(composed, resolve=True)
    raw = typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
    return typing.cast(dict[str, Any], values), dict(_sources(raw))


def _sources(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in leaves(tree):
        if isinstance(value, str) and (source := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            yield key, source[1]


def _without(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in NOT_TYPED}


def _composable(chosen: Sequence[str], problems: list[str]) -> list[str]:
    """Return the choices that can be composed; record a problem of each other one."""
    try:
        _compose(chosen)
    except (HydraException, OmegaConfBaseException):
        kept: list[str] = []
        for choice in chosen:
            try:
                _compose([*kept, choice])
            except (HydraException, OmegaConfBaseException) as error:
                problems.append(_unusable(choice, error))
            else:
                kept.append(choice)
        return kept
    return list(chosen)


def _unusable(choice: str, error: Exception) -> str:
    """Return the problem of a choice that Hydra cannot compose with those before it."""
    key = choice.partition("=")[0]
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        if unknown[1] != key:
            tree = _without(_compose(())[0])
            return f"{choice}: in its file, {unknown_key(unknown[1], tree)}"
        if named := homes(key):
            return f"{choice}: {key} belongs to {named}"
        return f"{choice}: there is no such choice here; see `fed-dpsd list`"
    return f"{choice}: {_first_line(error)}"


def _compose_each(
    files: Sequence[str], settings: Sequence[str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compose settings of known keys; record a problem of each whose value cannot be composed."""
    try:
        return _compose([*files, *settings])
    except (HydraException, OmegaConfBaseException):
        kept = list(files)
        for setting in settings:
            try:
                _compose([*files, setting])
            except (HydraException, OmegaConfBaseException) as error:
                problems.append(f"{setting}: {_first_line(error)}")
            else:
                kept.append(setting)
        return _compose(kept)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


# --- problems ---


def _parse(overrides: Sequence[str]) -> tuple[list[_Typed], list[str], bool]:
    """Read overrides one by one.

    Returns:
        Those that can be read, a problem of each other one, and whether every choice is among the
        former.
    """
    typed, problems, sure = list[_Typed](), list[str](), True
    parser, known = OverridesParser.create(), groups()
    words = iter(enumerate(overrides))
    for number, override in words:
        if spaced := _spaced(overrides[number : number + 3]):
            problem, length = spaced
            problems.append(problem)
            for _ in range(length - 1):
                next(words)
            continue
        try:
            parsed = parser.parse_override(override)
        except HydraException:
            first = number if "=" in override else max(number - 1, 0)
            if rest := _rest_of_path(overrides[first:]):
                whole = " ".join([overrides[first], *rest])
                problems.append(f"{whole}: {QUOTES}{_in_quotes(whole)}")
                for _ in range(first + len(rest) - number):
                    next(words)
                continue
            following = "".join(overrides[number + 1 : number + 2])
            alone = "=" in override + following or _choices_named(override)
            problems.append(_unreadable(override, "" if alone else following))
            if following and not alone:
                next(words)
            continue
        key, chooses = str(parsed.key_or_group), parsed.key_or_group in known
        problem = _not_one_value(parsed, override)
        if not problem and chooses:
            value = parsed.value()
            text = value if isinstance(value, str) else override.partition("=")[2]
            problem = unknown_choice(key, text)
        if problem:
            problems.append(problem)
            sure = sure and not chooses
        else:
            typed.append(_Typed(override.lstrip("+"), key, chooses))
    return typed, problems, sure


def _not_one_value(parsed: Override, override: str) -> str:
    """Return the problem of an override that deletes a key, or has several values."""
    if parsed.type == OverrideType.DEL:
        return f"{override}: a setting cannot be deleted; write KEY=VALUE"
    if parsed.is_sweep_override():
        key, _, values = override.lstrip("+").partition("=")
        if key in {known.name for known in all_keys() if known.value.startswith("[")}:
            return f"{override}: {key} is a list; write '{key}=[{values}]'"
        grid = f"{override} is a grid of runs: fed-dpsd sweep {shlex.quote(override)}"
        one = key.endswith("path") or "/" in values
        return f"{grid}; for one value {QUOTES}{_in_quotes(override)}" if one else grid
    return ""


def _spaced(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the problem of a setting that is typed with blanks or a colon, and its words."""
    for length in range(len(words), 0, -1):
        typed = " ".join(words[:length])
        if match := re.fullmatch(r"([\w.@]+)(?: = | =|= |: ?)([^\s=:]+)", typed):
            return f"{typed}: write {match[1]}={match[2]}", length
    return None


def _unreadable(override: str, following: str = "") -> str:
    """Return the problem of an override that has wrong syntax; a word may follow as its value."""
    key, equals, value = override.partition("=")
    if not override.strip():
        return "an empty setting; write KEY=VALUE, as in rounds=10"
    if not equals:
        if following:
            return f"{override} {following}: write {override.lstrip('-')}={following}"
        if named := _choices_named(override):
            return f"{override}: write {' or '.join(named)}"
        if override in {*groups(), *(key.name for key in all_keys())}:
            return f"{override}: write {override}=VALUE"
        return f"{override} is no setting; write KEY=VALUE, as in rounds=10"
    path = "/" in value and not value.startswith(("'", '"', "["))
    if not path and not _tokens(value)[1]:
        return f"{override}: a quote or bracket is not closed"
    if value.endswith(","):
        return f"{override}: write the values without blanks between them, as in seed=0,1,2"
    if re.fullmatch(r"[\w.@]+", key) and not value.startswith(("'", '"', "=")):
        return f"{override}: {QUOTES}{_in_quotes(override)}"
    return f"{override} cannot be read; write KEY=VALUE, as in rounds=10"


def _rest_of_path(words: Sequence[str]) -> list[str]:
    """Return the words after the first that may belong to its value, a path with blanks."""
    known = {*groups(), *(key.name for key in all_keys())}
    value = words[0].partition("=")[2]
    rest = itertools.takewhile(lambda w: "=" not in w and w.lstrip("-") not in known, words[1:])
    return list(rest) if "/" in value else []


def _in_quotes(override: str) -> str:
    """Return an override as it is typed in a shell, where nothing in its value has a meaning."""
    key, _, value = override.partition("=")
    return shlex.quote(f"{key}={quoted(os.path.expanduser(value))}")


def quoted(text: str) -> str:
    """Return text in Hydra's quotes, so that nothing in it has a meaning.

    >>> quoted("/data/5=6, new")
    '"/data/5=6, new"'
    """
    # Only before a quote or ${ is a backslash more than itself.
    escaped = re.sub(r'(\\*)("|\$\{|\Z)', lambda m: 2 * m[1] + (m[2] and f"\\{m[2]}"), text)
    return f'"{escaped}"'


def _choices_named(word: str) -> list[str]:
    """Return the overrides that choose a file of this name."""
    return [f"{group}={word}" for group in groups() if word in files_of(group)]
