"""Names in messages: what a terminal would interpret or not show is escaped."""

import logging
from io import StringIO

import pytest
from rich.table import Table

from fed_dpsd.errors import ConfigError, ProtocolError, UserError, one_line, printable, shown
from fed_dpsd.progress import PlainConsole

LATIN = "r\udce9s.png"  # a byte that UTF-8 cannot encode


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("Röntgen αβ ≥5.png", "Röntgen αβ ≥5.png"),
        ("\x1b[31mill", r"\x1b[31mill"),
        ("\x9b31m\x07", r"\x9b31m\x07"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\u202ewell\u200b", r"\u202ewell\u200b"),
        ("no\u00a0mass\u2028", r"no\xa0mass\u2028"),
        ("\udc9b31m", r"\udc9b31m"),  # in an 8-bit encoding, a terminal's escape
    ],
)
def test_what_does_not_print_is_escaped(text, escaped, caplog):
    assert printable(text) == printable(escaped) == escaped
    assert str(UserError(text)) == escaped
    assert ConfigError([text, "b"]).problems == (escaped, "b")
    assert one_line(UserError(f"{text} is broken")) == f"{escaped} is broken"
    logging.getLogger("fed_dpsd").warning("%s at %d", text, 5)
    assert caplog.messages == [f"{escaped} at 5"]


def test_streams_keep_line_breaks_and_bytes_of_names():
    assert shown(f"a\n{LATIN}") == f"a\n{LATIN}"
    assert str(UserError(LATIN)) == LATIN
    assert one_line(UserError(LATIN)) == r"r\udce9s.png"
    assert one_line(ProtocolError(f"a\n{LATIN}")) == r"ProtocolError: a r\udce9s.png"
    assert str(ConfigError(["a", "b"])) == "a\nb"


def test_a_console_prints_text_as_it_is():
    out = PlainConsole(file=StringIO(), width=80, force_terminal=True, color_system=None)
    out.print("\x1b]0;title\x07 [red]ill[/red] :smile: 5")
    table = Table("[bold]class", box=None)
    table.add_row("\x1b[31m[ill]")
    out.print(table)
    lines = [line.strip() for line in out.file.getvalue().splitlines()]
    assert lines == [r"\x1b]0;title\x07 [red]ill[/red] :smile: 5", "[bold]class", r"\x1b[31m[ill]"]
