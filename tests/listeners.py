"""A display for tests, which keeps the reports of long work."""

from io import StringIO

from rich.console import Console

from fed_dpsd.progress import Display


class Hearing(Display):
    """A display that keeps (name, done, total) of each report."""

    def __init__(self, clock=None):
        super().__init__(Console(file=StringIO(), get_time=clock))
        self.heard = []

    def say(self, text=""):
        """Called once for each report, of the task whose count changed."""

    def update(self, number, *, completed=None, **changes):
        super().update(number, completed=completed, **changes)
        if completed is not None:
            task = self._tasks[number]
            self.heard.append((task.description, task.completed, task.total))
