"""The command `fed-dpsd list`: every choice and every key, with their descriptions."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fed_dpsd.cli.console import OVERRIDE
from fed_dpsd.errors import UserError

if TYPE_CHECKING:
    from fed_dpsd.config.plugins import Plugin

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


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"Choices of one kind, or all keys: {', '.join(GROUPS)} or keys.",
            metavar="KIND",
            click_type=click.Choice([*GROUPS, "keys"]),
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="After keys: overrides of the run to list. Default: the default run. "
            "After any kind: plugins=NAME also lists the plug-in's choices.",
            click_type=OVERRIDE,
        ),
    ] = None,
) -> None:
    """List choices, one per line, or every key with its default and meaning.

    Example: fed-dpsd list methods

    Or: fed-dpsd list keys method=dense

    Read on: docs/extending.md
    """
    from fed_dpsd.config.comments import first_sentences
    from fed_dpsd.config.plugins import (
        find_plugins,
        installed_plugins,
        split_plugins,
    )

    names, others = split_plugins(overrides or [])
    if others and kind != "keys":
        raise UserError(
            f"{others[0]}: only `fed-dpsd list keys` takes overrides, as in "
            f"`fed-dpsd list keys {others[0]}`"
        )
    named = find_plugins(names)
    if kind == "keys":
        _show_keys(overrides or [])
        return
    for name in [kind] if kind else GROUPS:
        group = GROUPS[name]
        listed = first_sentences(group) | _plugin_choices(
            group, named or installed_plugins().values()
        )
        width = max(map(len, listed))
        print(f"{name} ({group}=...):")
        for choice, sentence in listed.items():
            print(f"  {choice:{width}}  {sentence}")
    if kind == "models":
        _show_architectures(named)
    if not kind:
        print("architectures: fed-dpsd list models")


def _plugin_choices(group: str, plugins: Iterable["Plugin"]) -> dict[str, str]:
    """Return the choices of plug-ins, each with its description and the plug-in's name."""
    from fed_dpsd.config.comments import first_sentences
    from fed_dpsd.config.plugins import search_plugins

    ours, found = first_sentences(group), dict[str, str]()
    for plugin in plugins:
        with search_plugins([plugin]):
            both = first_sentences(group)
        for choice in both.keys() - ours:
            found[choice] = f"{both[choice]} (plugins={plugin.name}, of {plugin.package})"
    return dict(sorted(found.items()))


def _show_architectures(plugins: Sequence["Plugin"]) -> None:
    """Print the names of built-in networks and of named plug-ins' networks. This imports torch."""
    from fed_dpsd.models.classifiers import CLASSIFIERS, NO_DP_SGD

    print("architectures (model.teacher=..., model.student=..., model.teachers=[...]):")
    print(f"  {', '.join(CLASSIFIERS)}")
    print(f"  not with training=dp_sgd: {', '.join(NO_DP_SGD)}")
    for plugin in plugins:
        networks = ", ".join(getattr(plugin.load(), "CLASSIFIERS", {})) or "none"
        print(f"  {networks} (plugins={plugin.name}, of {plugin.package})")


def _show_keys(overrides: list[str]) -> None:
    """Print each key of the run that overrides describe, with its value and meaning."""
    from fed_dpsd.config import leaves
    from fed_dpsd.config.comments import key_comments
    from fed_dpsd.config.compose import compose_valid, resolve_choices
    from fed_dpsd.config.plugins import search_plugins
    from fed_dpsd.config.schema import fields
    from fed_dpsd.errors import ConfigError, format_value

    composition = compose_valid(overrides)
    if composition.problems:
        raise ConfigError(composition.problems)
    values = dict(leaves(composition.values))
    copied = {source: values[key] for key, source in composition.sources.items()}
    meanings = {key: field.description or "" for key, field in fields().items()}
    with search_plugins(composition.plugins):
        meanings |= key_comments(resolve_choices(overrides))
    for key, value in (values | copied).items():
        if key.endswith("_target_"):
            continue
        source, meaning = composition.sources.get(key), meanings.get(key)
        shown = f"${{{source}}}" if source else format_value(value) or '""'
        print(f"{key}={shown}{f'  # {meaning}' if meaning else ''}")
