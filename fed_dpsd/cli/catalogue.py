"""The command `fed-dpsd list`: every choice and every key, in the words of the files of conf/."""

from typing import Annotated, Literal

import typer

import fed_dpsd.cli.choices as choices
from fed_dpsd.cli.completion import override
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


def show(
    kind: Annotated[Kind | None, typer.Argument(help="Choices of one kind, or all keys.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="After keys: overrides whose keys are meant. Default: those of the default run.",
            autocompletion=override,
        ),
    ] = None,
) -> None:
    """List what can be chosen, a line each, or every key with its default and meaning."""
    if overrides and kind != "keys":
        raise UserError(
            f"{overrides[0]}: only `fed-dpsd list keys` takes overrides, as in "
            f"`fed-dpsd list keys {overrides[0]}`"
        )
    if kind == "keys":
        _show_keys(overrides or [])
        return
    for name in [kind] if kind else GROUPS:
        group = GROUPS[name]
        listed = choices.choices(group)
        width = max(map(len, listed))
        print(f"{name} ({group}=...):")
        for choice, sentence in listed.items():
            print(f"  {choice:{width}}  {sentence}")
        if name == "models":
            known = choices.all_keys()
            print("architectures (model.teacher=..., model.student=..., model.teachers=[...]):")
            print(f"  {next(k for k in known if k.name == 'model.teacher').meaning}")


def _show_keys(overrides: list[str]) -> None:
    """Print each key of the run that overrides mean, its value there, and what it means."""
    typed = dict(override.split("=", 1) for override in overrides if "=" in override)
    if overrides:
        from fed_dpsd.overrides import compose

        compose(overrides)  # names what is wrong with them
    for key in choices.all_keys(typed):
        value = typed.get(key.name, key.value)
        print(f"{key.name}={value}{f'  # {key.meaning}' if key.meaning else ''}")
