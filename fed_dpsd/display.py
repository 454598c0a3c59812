"""The display of long work: bars with the time left on a terminal, and a few lines elsewhere."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fed_dpsd.progress import Listener, Task, listened, listening

QUICK_SECONDS = 1.0  # shorter work has no bar
LINE_SECONDS = 10.0  # from one line on some work to the next; later more, a tenth of all its time
SILENT_SECONDS = 20.0  # after which work inside other work has a line, too


@contextlib.contextmanager
def shown(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Show all work of this block, unless a display around it does so already."""
    if listened():
        yield
    elif console.is_jupyter or not console.is_terminal:  # widgets may be missing
        with listening(Lines(console, clock)):
            yield
    else:
        bars = Bars(console, clock)
        # Data that is redirected to a file stays out of the console.
        live = Live(bars, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        with live, listening(bars):
            yield


class Bars(Listener):
    """A bar for each piece of work, the outermost at the top; below, how a run stands."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console

    def end(self, task: Task) -> None:
        """Remove the bar; the last text of some work stays, if anything was done."""
        super().end(task)
        if task.text and task.done:
            self._console.print(task.text, markup=False, soft_wrap=True)

    def __rich__(self) -> Group:
        """Return the bars of this moment, and below them how the work stands that says so."""
        table, below = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
        below.add_column(style="dim", no_wrap=True)
        for task in self.under_way.copy():
            if (seconds := task.seconds) >= QUICK_SECONDS:
                bar = ProgressBar(task.total, task.done, width=20)
                elapsed = str(datetime.timedelta(seconds=int(seconds)))
                told = task.count if task.facts else str(task)
                table.add_row(told, bar, elapsed, time_left(task))
                for name, text in task.facts.items():
                    below.add_row(f"  {name}", Text(text))
        return Group(table, below) if below.row_count else Group(table)


class Lines(Listener):
    """A line for each text of some work, and now and then one on how much is done."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._told: WeakKeyDictionary[Task, float] = WeakKeyDictionary()
        self._last = clock()

    def changed(self, task: Task) -> None:
        """Print the work's text, and the time left if the last such line is a while ago.

        Work without a text is left out where work around it knows its own time left, unless nothing
        has been printed for long, as in a run's last round.
        """
        around = self.under_way[: self.under_way.index(task)]
        due = task.seconds - self._told.get(task, 0.0) >= max(LINE_SECONDS, task.seconds / 10)
        due = due and 0 < task.done < task.total
        if due:
            self._told[task] = task.seconds
        left = time_left(task) if due else ""
        if task.text:
            self._say(f"{task} · {left}" if left else str(task))
        elif due and (self._silent or all(outer.left is None for outer in around)):
            self._say(f"{task}, {left}" if left else str(task))

    @property
    def _silent(self) -> bool:
        """Return whether nothing has been printed for long."""
        return self.clock() - self._last >= SILENT_SECONDS

    def _say(self, line: str) -> None:
        self._last = self.clock()
        self._console.print(line, markup=False, soft_wrap=True)


def time_left(task: Task) -> str:
    """Return the time left in words; "" where nothing is known of it, or it is over."""
    seconds = task.left
    if seconds is None or seconds < 0.5:
        return ""
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3_600:.1f} h left"
