"""Errors that users can fix, and protocol errors caused by a peer. Each prints as one line."""

import errno
import functools
import logging
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

UNREAD = 141  # exit code of a command whose output is no longer read: 128 + SIGPIPE
BYTES = "".join(map(chr, range(0xDCA0, 0xDD00)))  # of file names: each stream encodes them
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class UserError(Exception):
    """An error that the user can fix: the message names the field, its value and the remedy.

    It is one line, in which names have escapes for what does not print.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, BYTES))


class ConfigError(UserError):
    """All problems of a configuration, one per line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(printable(problem, BYTES) for problem in problems)
        Exception.__init__(self, "\n".join(self.problems))


class Diverged(UserError):
    """Training diverged: the message names the network, the step, and the keys to lower.

    Args:
        problem: a sentence on what is not finite, without a final period.
        rates: the keys that may be too large, with their current values; {} if unknown.
    """

    def __init__(self, problem: str, rates: Mapping[str, float]) -> None:
        keys = " or ".join(f"{key} (now {rate:g})" for key, rate in rates.items())
        super().__init__(f"training diverged: {problem}; lower {keys or 'its learning rate'}")


class ProtocolError(RuntimeError):
    """A peer broke the protocol; the message names the peer, the field and the value."""


def one_line(error: BaseException) -> str:
    """Return an error as one line: a UserError unchanged, any other error with its type.

    If a signal stopped this process, the line names it. The line is valid UTF-8 and can be sent.
    """
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
        return "stopped by SIGTERM"
    if isinstance(error, SystemExit) and not error.code:
        return "stopped"
    if isinstance(error, SystemExit) and error.code == UNREAD:
        return "stopped because nothing reads its output any more"
    text = printable(" ".join(str(error).split()))
    if isinstance(error, UserError):
        return text
    if is_disk_full(error):
        name = printable(str(getattr(error, "filename", None) or "a file"))
        return (
            f"no space left for {name}; free some space, or set FED_DPSD_HOME and TMPDIR to "
            "folders on another disk"
        )
    if isinstance(error, MemoryError):
        return (
            f"this machine does not have enough memory ({text or 'none is left'}); use fewer "
            "queries_per_round, num_clients or method.batch_size"
        )
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: str, kept: str = "") -> str:
    """Return text with escapes for all characters that do not print, except those in `kept`.

    These are control characters such as ESC and line breaks, invisible characters, spaces that only
    look like one, and bytes of file names that UTF-8 cannot encode.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def encodable(text: str) -> str:
    """Return text with escapes for bytes that UTF-8 cannot encode, as in file names."""
    return text.encode(errors="backslashreplace").decode()


def shown(text: str) -> str:
    """Return text as streams show it: with escapes, but with its own line breaks."""
    return printable(text, BYTES + "\n")


def _escape_record(record: logging.LogRecord) -> bool:
    """Escape what does not print in a log message, which may contain names."""
    record.msg, record.args = printable(record.getMessage(), BYTES), ()
    return True


logging.getLogger("fed_dpsd").addFilter(_escape_record)


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error is due to a full disk or quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once per process."""
    logging.getLogger("fed_dpsd").warning(text)


def reason_of(error: Exception) -> str:
    """Return the reason why a file cannot be read or written, as part of a sentence."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 client" and "1,000 clients"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_text(count: float) -> str:
    """Return a number of bytes as text, such as "3.4 MB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def format_value(value: Any) -> str:
    """Return a value in the syntax of overrides: null, true, [1, 2]; "1" keeps its quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else str(value)
