"""A listener for tests, which keeps the reports of long work."""

from fed_dpsd.progress import Listener


class Hearing(Listener):
    """A listener whose clock the test sets: parts that are apart by 0.1 s and more are heard."""

    def __init__(self):
        super().__init__(clock=lambda: self.now)
        self.now = 0.0
        self.heard = []

    def changed(self, task):
        self.heard.append((task.name, task.done, task.total))


class Counting(Hearing):
    """A listener that hears every part, since each look at the clock takes a second."""

    def __init__(self):
        super().__init__()
        self.clock = self._tick

    def _tick(self):
        self.now += 1.0
        return self.now
