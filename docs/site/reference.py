"""Pages of the reference, generated from docstrings, key descriptions and `--help`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

from fed_dpsd.cli import app
from fed_dpsd.config import leaves
from fed_dpsd.config.comments import first_sentences, key_comments
from fed_dpsd.config.compose import compose, resolve_choices
from fed_dpsd.config.errors import file_sets
from fed_dpsd.config.plugins import groups
from fed_dpsd.config.schema import fields
from fed_dpsd.errors import format_value

ROOT = Path(__file__).parents[2]
API = {
    "fed_dpsd.api": ["run", "resume", "plan", "load_student", "Run"],
    "fed_dpsd.server.student": ["Student"],
    "fed_dpsd.accounts.card": ["PlannedRun"],
    "fed_dpsd.accounts.words": ["PrivacyCard"],
    "fed_dpsd.privacy.epsilon": ["Epsilon"],
    "fed_dpsd.errors": ["UserError", "ConfigError"],
}
EMPTY = '""'
CONTRACTS = [
    *("fed_dpsd.methods.method", "fed_dpsd.privacy.mechanism", "fed_dpsd.privacy.training"),
    *("fed_dpsd.privacy.accounting", "fed_dpsd.models.classifiers", "fed_dpsd.protocol"),
]


def pages() -> Iterator[tuple[str, str]]:
    """Yield each page of the reference, and its text."""
    yield "reference/api.md", _api()
    yield "reference/contracts.md", _contracts()
    yield "reference/configuration.md", _configuration()
    yield "reference/commands.md", _commands()


def _api() -> str:
    names = [f"{module}.{name}" for module, found in API.items() for name in found]
    return "\n\n".join(
        [
            "# Python",
            "`import fed_dpsd` has `run`, `resume`, `plan`, `load_student`, `Run`, `PlannedRun` "
            "and `UserError`. Heavy libraries are imported when one of them is first used.",
            *(f"::: {name}\n    options:\n      heading_level: 2" for name in names),
        ]
    )


def _contracts() -> str:
    text = (
        "# Contracts\n\nThe interfaces of methods, mechanisms and networks in your own package. "
        "[extending.md](../extending.md) has an example of each."
    )
    options = "    options:\n      heading_level: 2\n      show_root_full_path: true"
    return "\n\n".join([text, *(f"::: {name}\n{options}" for name in CONTRACTS)])


def _configuration() -> str:
    """Return a page of every key of a run, and every choice with the keys that it has or sets."""
    default, chosen = dict(leaves(compose([]))), resolve_choices([])
    parts = [
        "# Configuration",
        "Set a key by adding `KEY=VALUE` to a command. The tables repeat the output of "
        "`fed-dpsd list` and `fed-dpsd list keys`: the values in conf/ and their descriptions.",
        "## Keys of every run",
        _keys({k: v for k, v in default.items() if k.partition(".")[0] not in groups()}, {}),
    ]
    for group in groups():
        of_group = f" The default is `{chosen[group]}`." if chosen[group] else ""
        parts.append(f"## {group}\n\nOne is chosen by `{group}=NAME`.{of_group}")
        listed = first_sentences(group)
        parts.append(_table(("name", ""), ((f"`{n}`", _cell(text)) for n, text in listed.items())))
        if group == "experiment":  # these set keys of the other groups
            continue
        for name in listed:
            own = {
                key: value
                for key, value in leaves(compose([f"{group}={name}"]))
                if key.startswith(f"{group}.") or file_sets(group, name, key)
            }
            if own.keys() - {f"{group}._target_"}:
                parts.append(f"### {group}={name}\n\n{_keys(own, {group: name})}")
    project = (ROOT / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[2]
    flat = re.findall(r'^(\w+) = "" # (.+)$', project, re.MULTILINE)
    parts += [
        "## Keys of `flwr run --run-config`",
        "Text stands in quotes there, numbers without.",
        _table(("key", "meaning"), ((f"`{key}`", _cell(text)) for key, text in flat)),
        "## A hospital's file",
        "`fed-dpsd site init site.yaml` writes it.",
        f"```yaml\n{(ROOT / 'conf' / 'site.yaml').read_text()}```",
    ]
    return "\n\n".join(parts) + "\n"


def _keys(values: Mapping[str, Any], choices: Mapping[str, str]) -> str:
    meanings = {key: field.description or "" for key, field in fields().items()}
    meanings |= key_comments(choices)
    rows = (
        (f"`{key}`", f"`{format_value(value) or EMPTY}`", _cell(meanings.get(key, "")))
        for key, value in values.items()
        if not key.endswith("_target_")
    )
    return _table(("key", "default", "meaning"), rows)


def _commands() -> str:
    """Return a page of every command, in the words of its --help."""
    text = (
        "# Commands\n\nThe words of `fed-dpsd COMMAND --help`. Data goes to stdout, and every word "
        "for people to stderr."
    )
    root = get_command(app)
    return "\n\n".join([text, *_command(root, click.Context(root, info_name="fed-dpsd"))]) + "\n"


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below and not below.hidden:
                yield from _command(below, click.Context(below, context, name))
        return
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {context.command_path}"
    yield f"```text\n{context.command_path} {usage}\n```"
    yield _paragraphs(command.help or "")
    records = (p.get_help_record(context) for p in command.get_params(context))
    rows = [(f"`{name.strip()}`", _cell(text)) for name, text in filter(None, records)]
    yield _table(("argument or option", ""), rows)
    yield _paragraphs(command.epilog or "")


def _paragraphs(text: str) -> str:
    """Return a help text as Markdown, its examples as code."""
    text = re.sub(r"^(Example|Or): (.+)$", r"\1: `\2`", text.strip(), flags=re.MULTILINE)
    return re.sub(r"^Read on: (docs/)?(\w+)\.md$", _read_on, text, flags=re.MULTILINE)


def _read_on(match: re.Match[str]) -> str:
    page = "index" if match[2] == "README" else match[2]
    return f"Read on: [{match[1] or ''}{match[2]}.md](../{page}.md)"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("\\[", "[")  # as rich's markup has it
    return re.sub(r"([|<*])", r"\\\1", plain)
