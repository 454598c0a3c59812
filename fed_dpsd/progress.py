"""Progress of long work: bars on a terminal, a line now and then elsewhere.

Any code may call `track` and `reporting`. They show nothing outside `show_progress`, as on a
hospital's node.
"""

import contextlib
import datetime
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from rich import progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fed_dpsd.context import setting
from fed_dpsd.errors import shown

QUICK_SECONDS = 1.0  # shorter work has no bar
LINE_SECONDS = 10.0  # between two lines; in long work, a tenth of its time
Item = TypeVar("Item")


class PlainConsole(Console):
    """A console that prints text as it is: without markup, and with escapes (see `shown`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text that is printed or in the cell of a table."""
        return super().render_str(shown(text), **options)


def table_of(*headers: str) -> Table:
    """Return a table that folds long words, instead of cutting them, if the console is narrow."""
    return Table(*(Column(header, overflow="fold") for header in headers))


class Display(progress.Progress):
    """Rich's bars with the time left; if the console is no terminal, lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            progress.TextColumn("{task.completed:,} of {task.total:,} {task.description}"),
            progress.BarColumn(20),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=console.is_jupyter or not console.is_terminal,  # widgets may be missing
            redirect_stdout=sys.stdout.isatty(),  # data for a file stay off the terminal
            speed_estimate_period=float("inf"),  # a part may take hours
            transient=True,
        )
        self._began = self._printed = self.get_time()

    def get_renderables(self) -> Iterable[Table]:
        """Return the bars, the outermost work first."""
        yield self.make_tasks_table([t for t in self.tasks if (t.elapsed or 0.0) > QUICK_SECONDS])

    def begin(self, name: str, total: int, done: int) -> progress.TaskID:
        """Begin a task, or continue one of this name that stopped at this point."""
        state = (name, total, done, False)
        for task in self.tasks:
            if state == (task.description, task.total, task.completed, task.visible):
                self.update(task.id, visible=True)
                return task.id
        return self.add_task(name, total=total, completed=done)

    def end(self, number: progress.TaskID) -> None:
        """End a task, or stop it for now."""
        self.update(number, visible=False)
        if self._tasks[number].finished:
            self.remove_task(number)

    def say(self, text: str = "") -> None:
        """Print a text; without one and without bars, print now and then what is under way."""
        now = self.get_time()
        due = now - self._printed >= max(LINE_SECONDS, (now - self._began) / 10)
        if not text and self.disable and due:
            tasks = [task for task in self.tasks if task.visible]
            parts = [f"{t.completed:,} of {t.total:,} {t.description}" for t in tasks]
            # The outer work ends last; but its last part may take longer than its earlier ones.
            seconds, known = max((task.time_remaining or 0, task.description) for task in tasks)
            if seconds:
                left = datetime.timedelta(seconds=seconds)
                which = "" if len(tasks) == 1 else f" for the {known}"
                parts.append(f"about {left} left{which}")
            text = ", ".join(parts)
        if text:
            self._printed = now
            self.console.print(text, soft_wrap=True)


_display: ContextVar[Display | None] = ContextVar("display", default=None)


class Work:
    """Work of equal parts, `done` of them so far (see `reporting`)."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.done, self._display = done, _display.get()
        self._task = self._display.begin(name, total, done) if self._display else None

    def advance(self, parts: int = 1, text: str = "") -> None:
        """Report that `parts` more are done, with a line about them if given."""
        self.done += parts
        if self._display and self._task is not None:
            self._display.update(self._task, completed=self.done)
            self._display.say(text)

    def end(self) -> None:
        """Report that the work has ended or stopped."""
        if self._display and self._task is not None:
            self._display.end(self._task)


def listening(display: Display | None) -> AbstractContextManager[None]:
    """Show all work of this block on a display; None shows none of it."""
    return setting(_display, display)


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[None]:
    """Show the work of this block, unless an outer display already does."""
    if _display.get():
        yield
    else:
        with Display(console) as display, listening(display):
            yield


@contextlib.contextmanager
def reporting(name: str, total: int, done: int = 0) -> Iterator[Work]:
    """Report the work of this block, which advances it.

    Args:
        name: what the parts are, such as "cells".
        total: number of parts.
        done: number of parts that earlier blocks of the same name and total have done.
    """
    work = Work(name, total, done)
    try:
        yield work
    finally:
        work.end()


def track(
    name: str, items: Collection[Item], done: int = 0, total: int | None = None
) -> Iterator[Item]:
    """Yield the items; one is done when the next is requested. Arguments as for `reporting`."""
    with reporting(name, len(items) if total is None else total, done) as work:
        for item in items:
            yield item
            work.advance()
