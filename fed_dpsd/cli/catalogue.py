"""The command `fed-dpsd list`: every choice and every key, with their descriptions."""

from collections.abc import Sequence
from typing import Annotated

import click
import typer

from fed_dpsd.cli.console import OVERRIDE
from fed_dpsd.errors import UserError

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
            "After any kind: plugins=PACKAGE also lists the plug-in's choices.",
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
    from fed_dpsd.config.plugins import search_plugins, split_plugins

    packages, others = split_plugins(overrides or [])
    if others and kind != "keys":
        raise UserError(
            f"{others[0]}: only `fed-dpsd list keys` takes overrides, as in "
            f"`fed-dpsd list keys {others[0]}`"
        )
    if kind == "keys":
        _show_keys(overrides or [])
        return
    for name in [kind] if kind else GROUPS:
        group = GROUPS[name]
        with search_plugins(packages):
            listed = first_sentences(group)
        width = max(map(len, listed))
        print(f"{name} ({group}=...):")
        for choice, sentence in listed.items():
            print(f"  {choice:{width}}  {sentence}")
    if kind == "models":
        _show_architectures(packages)
    if not kind:
        print("architectures: fed-dpsd list models")


def _show_architectures(packages: Sequence[str]) -> None:
    """Print the names of built-in networks and of named plug-ins' networks. This imports torch."""
    from fed_dpsd.config import plugins
    from fed_dpsd.models.classifiers import CLASSIFIERS, NO_DP_SGD

    print("architectures (model.teacher=..., model.student=..., model.teachers=[...]):")
    print(f"  {', '.join(CLASSIFIERS)}")
    print(f"  not with training=dp_sgd: {', '.join(NO_DP_SGD)}")
    for package in packages:
        networks = ", ".join(getattr(plugins.load(package), "CLASSIFIERS", {})) or "none"
        print(f"  {networks} (plugins={package})")


def _show_keys(overrides: list[str]) -> None:
    """Print each key of the run that overrides describe, with its value and meaning."""
    from fed_dpsd.config import leaves
    from fed_dpsd.config.comments import key_comments
    from fed_dpsd.config.compose import compose_skipping_invalid, resolve_choices
    from fed_dpsd.config.plugins import search_plugins
    from fed_dpsd.config.schema import fields
    from fed_dpsd.errors import ConfigError, format_value

    composition = compose_skipping_invalid(overrides)
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
