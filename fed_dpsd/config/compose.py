"""Overrides: settings typed as KEY=VALUE, composed with conf/ by Hydra.

No other file imports Hydra. Hydra composes the chosen files; each setting is then applied
separately, so that every problem is reported, with a message from errors.py.
"""

import copy
import functools
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fed_dpsd.config.errors import (
    first_line,
    flat_keys,
    quote_letters,
    quoted,
    quoting_remedy,
    split_tokens,
    uncomposable_choice,
    unknown_choice,
    unknown_key,
    unreadable_override,
)
from fed_dpsd.config.plugins import conf_folders, groups, search_plugins, split_plugins
from fed_dpsd.config.schema import fields, leaves
from fed_dpsd.errors import ConfigError

_SOURCE = re.compile(r"\$\{(\w[\w.]*)\}")
NOT_TYPED = ("sweep", "device")  # a grid of runs, and a key that sets two others
_ERRORS = (HydraException, OmegaConfBaseException)
# Files of Hydra's own, which set its launcher and logs: reading them takes a quarter of the time.
_WITHOUT = tuple(
    f"~hydra/{group}"
    for group in (
        *("help", "hydra_help", "hydra_logging", "job_logging"),
        *("launcher", "output", "sweeper"),
    )
)


@dataclass(frozen=True)
class Composition:
    """The configuration that overrides describe, and all their problems.

    Args:
        values: plain dictionaries, composed without the invalid overrides.
        sources: for a key, the key that its value is copied from, as in "teacher.seed": "seed".
        problems: a line for each omitted override.
        plugins: the plug-ins, whose files may also be chosen.
        sweep: the grid of runs that a chosen experiment declares; {} for none.
    """

    values: dict[str, Any]
    sources: Mapping[str, str]
    problems: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    sweep: Any = field(default_factory=dict)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/ with Hydra `overrides` into plain dictionaries.

    The result omits `sweep` and `device`, which sets two other keys.

    Raises:
        ConfigError: overrides cannot be read, or name unknown keys or choices; one problem per
            line.
    """
    composition = compose_skipping_invalid(overrides)
    if composition.problems:
        raise ConfigError(composition.problems)
    return composition.values


@functools.cache
def method_values(name: str, plugins: tuple[str, ...]) -> dict[str, Any]:
    """Return a method by name, composed from this process's own files."""
    method: dict[str, Any] = compose([f"method={name}", f"plugins=[{','.join(plugins)}]"])["method"]
    return method


def compose_skipping_invalid(overrides: Sequence[str]) -> Composition:
    """Compose conf/ with the valid overrides; the result also has the problems of the others."""
    names, others = split_plugins(overrides)
    with search_plugins(names):
        composition = _read(others)
    named = {"plugins": names} if names else {}
    return replace(composition, values=composition.values | named, plugins=tuple(names))


def _read(overrides: Sequence[str]) -> Composition:
    parsed, problems = _parse(overrides)
    known = groups()
    choices = [each for each in parsed if each.key_or_group in known]
    files, wrong = _composable(choices)
    problems += wrong
    raw = copy.deepcopy(_raw_files(files, conf_folders()))
    defaults = _run_values(_resolved_files(files, conf_folders()))
    # After a wrong choice, the keys of its group are unknown.
    typed = [each.lstrip("+~").partition("=")[0].partition("@")[0] for each in overrides]
    problems += _replaced_networks(files, typed)
    sure = not wrong and sum(key in known for key in typed) == len(choices)
    keys = {*flat_keys(defaults), "device"}
    for setting in (each for each in parsed if each.key_or_group not in known):
        key, text = str(setting.key_or_group), str(setting.input_line)
        if key not in keys:
            if sure or key.partition(".")[0] not in known:
                problems.append(unknown_key(key, defaults | {"device": None}))
            continue
        value = setting.value()
        changed = copy.deepcopy(raw) if "${" in str(value) else raw
        _set(changed, key, value)
        try:
            if changed is not raw:
                _resolved(OmegaConf.create(changed))
            raw = changed
        except OmegaConfBaseException as error:
            problems.append(f"{text}: {first_line(error)}")
    grid = raw.pop("sweep")  # its own keys have dots
    sources = {
        key: source[1]
        for key, value in leaves(raw)
        if isinstance(value, str) and (source := _SOURCE.fullmatch(value))
    }
    values = _run_values(_filled(raw, sources))
    return Composition(values, sources, tuple(problems), sweep=grid)


def _replaced_networks(files: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return a problem for each network of a chosen model that an experiment's file replaces."""
    chosen = dict(each.partition("=")[::2] for each in files)
    if not {"experiment", "model"} <= chosen.keys():
        return []
    alone = _resolved_once((f"model={chosen['model']}",), conf_folders())["model"]
    given = _resolved_once(tuple(files), conf_folders())["model"]
    return [
        f"model={chosen['model']}: the experiment's own block sets model.{key}={given[key]}, not "
        f"{alone[key]}; also set model.{key}"
        for key in ("teacher", "student")
        if alone[key] != given[key] and f"model.{key}" not in typed
    ]


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, given by its path; the keys of a dictionary are set one by one."""
    *path, last = key.split(".")
    for name in path:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    _merge(tree, last, value)


def _merge(tree: dict[str, Any], name: str, value: Any) -> None:
    if not (isinstance(value, dict) and isinstance(tree.get(name), dict)):
        tree[name] = value
        return
    for key, each in value.items():
        _merge(tree[name], key, each)


def _filled(raw: dict[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return values in which ${KEY} is replaced; OmegaConf, which is slow, does the rare cases."""
    flat = dict(leaves(raw))
    unfilled = {key for key, value in flat.items() if "${" in str(value)}
    if unfilled != sources.keys() or not flat.keys() >= set(sources.values()):
        return _resolved(OmegaConf.create(raw))
    filled = copy.deepcopy(raw)
    for key, source in sources.items():
        while source in sources:
            source = sources[source]
        _set(filled, key, flat[source])
    return filled


def resolve_choices(overrides: Sequence[str]) -> dict[str, str]:
    """Return the choice of every group, as in {"training@method.baseline": "plain"}.

    Raises:
        ConfigError: as `compose`.
    """
    names, others = split_plugins(overrides)
    with search_plugins(names):
        known = groups()
        words = [each for each in _parse(others)[0] if each.key_or_group in known]
        files, _ = _composable(words)
        chosen = _composed(files, conf_folders(), True).hydra.runtime.choices
    return {place: choice for place, choice in chosen.items() if not place.startswith("hydra/")}


def declared_sweep(experiment: str) -> Any:
    """Return the `sweep` of an experiment's file: overrides in the syntax of `sweep_choices`.

    Raises:
        ConfigError: there is no such experiment, or its file cannot be composed.
    """
    if problem := unknown_choice("experiment", experiment):
        raise ConfigError([problem])
    override = f"experiment={experiment}"
    try:
        return _resolved_files((override,), conf_folders())["sweep"]
    except _ERRORS as error:
        tree = _run_values(_resolved_files((), conf_folders()))
        raise ConfigError([uncomposable_choice(override, error, tree)]) from None


def sweep_choices(override: str) -> tuple[str, list[str]]:
    """Return the key of an override in Hydra's sweep syntax, and its one or more choices.

    Raises:
        ConfigError: the syntax is wrong, or the choices cannot be listed.
    """
    try:
        parsed = _parse_one(override)
    except HydraException:
        raise ConfigError([unreadable_override(override, _default_run())]) from None
    key = parsed.get_key_element()
    if not parsed.is_sweep_override():
        return key, [parsed.get_value_element_as_str()]
    try:
        return key, list(parsed.sweep_string_iterator())
    except HydraException:
        raise ConfigError(
            [f"{override}: its values cannot be listed; write them out, as in {key}=0,1,2"]
        ) from None


def split_overrides(text: str) -> list[str]:
    """Split a string of overrides at spaces outside Hydra's quotes and brackets; keep both.

    The text after an unclosed quote or bracket is one override, which cannot be read.

    >>> split_overrides("method=dense model.teachers=[cnn, mlp] out='a b'")
    ['method=dense', 'model.teachers=[cnn, mlp]', "out='a b'"]
    """
    return split_tokens(text)[0]


# --- Hydra ---


@functools.lru_cache(maxsize=256)
def _composed(
    choices: tuple[str, ...], folders: tuple[Path, ...], with_hydra: bool = False
) -> DictConfig:
    """Return the keys of chosen files in folders laid out like conf/; do not modify the result."""
    ours, *others = (str(folder) for folder in folders)
    searched = ",".join(quoted(f"file://{folder}") for folder in others)
    overrides = [*choices, *([f"hydra.searchpath=[{searched}]"] if searched else []), *_WITHOUT]
    with hydra.initialize_config_dir(ours, version_base="1.3"):
        return hydra.compose("config", overrides, with_hydra)


@functools.lru_cache(maxsize=256)
def _raw_files(files: tuple[str, ...], folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return all values of chosen files, with ${KEY} as it is; do not modify the result."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(_composed(files, folders)))


def _resolved(tree: DictConfig) -> dict[str, Any]:
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))


def _resolved_files(files: tuple[str, ...], folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return all values of chosen files, which the caller may modify."""
    return copy.deepcopy(_resolved_once(files, folders))


@functools.lru_cache(maxsize=256)
def _resolved_once(files: tuple[str, ...], folders: tuple[Path, ...]) -> dict[str, Any]:
    return _resolved(_composed(files, folders))


def _default_run() -> dict[str, Any]:
    """Return the values of the run without overrides, by key."""
    return dict(leaves(_resolved_files((), conf_folders())))


def _run_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all keys that a run has."""
    return {key: value for key, value in values.items() if key not in NOT_TYPED}


def _composable(choices: Sequence[Override]) -> tuple[tuple[str, ...], list[str]]:
    """Return the choices that can be composed, and a problem for each of the others."""
    files, problems = tuple[str, ...](), []
    for choice in choices:
        value, text = choice.value(), str(choice.input_line).lstrip("+")
        name = value if isinstance(value, str) else text.partition("=")[2]
        if problem := unknown_choice(str(choice.key_or_group), name):
            problems.append(problem)
        elif value is not None:  # experiment=null
            files += (text,)
    try:
        _resolved_once(files, conf_folders())
    except _ERRORS:
        kept = tuple[str, ...]()
        for text in files:
            try:
                _resolved_once((*kept, text), conf_folders())
                kept += (text,)
            except _ERRORS as error:
                tree = _run_values(_resolved_files((), conf_folders()))
                problems.append(uncomposable_choice(text, error, tree))
        files = kept
    return files, problems


# --- words ---


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Return the overrides that can be parsed, and a problem for each of the others."""
    parsed, problems = list[Override](), list[str]()
    for word in overrides:
        try:
            each = _parse_one(word)
        except HydraException:
            problems.append(unreadable_override(word, _default_run()))
            continue
        if not each.key_or_group:
            problems.append(unreadable_override(word, _default_run()))
        elif problem := _not_one_value(each, word):
            problems.append(problem)
        else:
            parsed.append(each)
    return parsed, problems


@functools.lru_cache(maxsize=1_024)
def _parse_one(word: str) -> Override:
    parse = OverridesParser.create().parse_override
    try:
        return parse(word)
    except HydraException:
        if (spelt := quote_letters(word)) == word:
            raise
        return parse(spelt)


def _not_one_value(parsed: Override, override: str) -> str:
    """Return the problem with an override that deletes a key or has several values."""
    if parsed.type == OverrideType.DEL:
        return f"{override}: a setting cannot be deleted; write KEY=VALUE"
    if parsed.is_sweep_override():
        key, _, values = override.lstrip("+").partition("=")
        of_schema = "tuple" in str(getattr(fields().get(key), "annotation", ""))
        if of_schema or isinstance(_default_run().get(key), list):
            return f"{override}: {key} is a list; write '{key}=[{values}]'"
        grid = f"{override} is a grid of runs: fed-dpsd sweep {shlex.quote(override)}"
        one = key.endswith("path") or "/" in values
        return f"{grid}; for one value {quoting_remedy(override)}" if one else grid
    return ""
