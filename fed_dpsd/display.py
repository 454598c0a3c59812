"""Progress display: bars with the time left on a terminal, a few lines elsewhere."""

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

from fed_dpsd.progress import Listener, Task, has_listener, listening

QUICK_SECONDS = 1.0  # shorter work has no bar
LINE_SECONDS = 10.0  # between two lines about a task; for long tasks, a tenth of their time
SILENT_SECONDS = 20.0  # after which nested work gets a line, too


class Display(Listener):
    """A listener that prints on a console."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console, self._last = console, clock()

    def _say(self, line: str) -> None:
        self._last = self.clock()
        self._console.print(line, markup=False, soft_wrap=True)


@contextlib.contextmanager
def show_progress(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Show the progress of this block, unless an outer display already shows it."""
    if has_listener():
        yield
    elif console.is_jupyter or not console.is_terminal:  # widgets may be missing
        with listening(Lines(console, clock)):
            yield
    else:
        bars = Bars(console, clock)
        # Data that is redirected to a file stays off the console.
        live = Live(bars, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        with live, listening(bars):
            yield


class Bars(Display):
    """A bar for each task, with the outermost at the top, above the tasks' texts."""

    def end(self, task: Task) -> None:
        """Remove the bar; keep the task's last text if any work was done."""
        super().end(task)
        if task.text and task.done:
            self._say(task.text)

    def __rich__(self) -> Group:
        """Return the current bars, and their texts below them."""
        table, below = Table.grid(padding=(0, 1)), Table.grid()
        below.add_column(style="dim")
        for task in self.under_way.copy():
            if (seconds := task.seconds) >= QUICK_SECONDS:
                bar = ProgressBar(task.total, task.done, width=20)
                elapsed = str(datetime.timedelta(seconds=int(seconds)))
                table.add_row(task.count, bar, elapsed, time_left(task))
                if task.text:
                    below.add_row(Text(f"  {task.text}"))
        return Group(table, below) if below.row_count else Group(table)


class Lines(Display):
    """A line for each text of a task, and an occasional line with the work done."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._printed: WeakKeyDictionary[Task, float] = WeakKeyDictionary()

    def changed(self, task: Task) -> None:
        """Print the task's text, and the time left unless a recent line shows it.

        A task without a text is printed only if no outer task knows its time left, or if nothing
        has been printed for a while, as in a run's last round.
        """
        around = self.under_way[: self.under_way.index(task)]
        due = task.seconds - self._printed.get(task, 0.0) >= max(LINE_SECONDS, task.seconds / 10)
        due = due and 0 < task.done < task.total
        if due:
            self._printed[task] = task.seconds
        left = time_left(task) if due else ""
        silent = self.clock() - self._last >= SILENT_SECONDS
        if task.text:
            self._say(f"{task} · {left}" if left else str(task))
        elif due and (silent or all(outer.left is None for outer in around)):
            self._say(f"{task}, {left}" if left else str(task))


def time_left(task: Task) -> str:
    """Return the time left in words; "" if it is unknown or nearly zero."""
    seconds = task.left
    if seconds is None or seconds < 0.5:
        return ""
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3_600:.1f} h left"
