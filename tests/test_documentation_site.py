"""The documentation site: links, the nav, the pages that are made, and a build without warnings."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import hooks  # noqa: E402
import reference  # noqa: E402
from typer.main import get_command  # noqa: E402

from fed_dpsd import cli  # noqa: E402
from fed_dpsd.storage import conf_folder  # noqa: E402
from tests.every import every  # noqa: E402


@every(
    ("text", "origin", "there"),
    [
        ("[a](docs/privacy.md#names)", "README.md", "[a](privacy.md#names)"),
        ("[a](../README.md)", "docs/privacy.md", "[a](index.md)"),
        ("[a](../../README.md)", "docs/howto/budgets.md", "[a](../index.md)"),
        ("![a](docs/round.svg)", "README.md", "![a](round.svg)"),
        ('<img src="docs/round.svg">', "README.md", '<img src="round.svg">'),
        ("[a](tutorial.ipynb)", "docs/tutorial.md", "[a](tutorial_notebook.md)"),
        ("[a](docs/privacy.md)", "SECURITY.md", "[a](../privacy.md)"),
        (
            "[`a`](../fed_dpsd/api.py#L12)",
            "docs/architecture.md",
            "[`a`](source/fed_dpsd/api.py.md#L12)",
        ),
        (
            "[a](../fed_dpsd/api.py), [b](#names)",
            "docs/privacy.md",
            "[a](source/fed_dpsd/api.py.md), [b](#names)",
        ),
        ("[a](https://flower.ai)", "README.md", "[a](https://flower.ai)"),
        ("[a](nowhere.md)", "docs/privacy.md", "[a](nowhere.md)"),  # mkdocs warns of it
    ],
)
def test_links_lead_to_pages_of_the_site(text, origin, there):
    assert hooks.rewritten(text, origin) == there


def test_a_page_that_no_line_of_the_nav_names_is_found_by_its_folder():
    nav = [{"Home": "index.md"}, {"More": ["b.md", "*.md"]}, {"Results": ["r/*.md"]}, "r/last.md"]
    pages = ["index.md", "a.md", "b.md", "r/one.md", "r/last.md", "r/deep/two.md"]
    assert hooks.expanded(nav, pages) == [
        {"Home": "index.md"},
        {"More": ["b.md", "a.md"]},
        {"Results": ["r/one.md"]},
        "r/last.md",
    ]


@pytest.mark.slow(seconds=40)  # Hydra composes every file of conf/
def test_the_reference_has_every_command_every_choice_and_every_key():
    made = dict(reference.pages())
    commands = made["reference/commands.md"]
    for command in ("run", "resume", "list keys", "privacy plan", "site serve"):
        assert f"fed-dpsd {command}" in commands
    assert commands.count("\n## fed-dpsd ") == len(list(leaves(get_command(cli.app))))
    configuration = made["reference/configuration.md"]
    for file in conf_folder().glob("*/*.yaml"):
        assert f"`{file.stem}`" in configuration
    for key in ("rounds", "training.steps", "method.student_steps", "data.label_columns"):
        assert f"| `{key}` |" in configuration


def leaves(command):
    for below in getattr(command, "commands", {"": None}).values():
        yield from leaves(below) if below else [command]
