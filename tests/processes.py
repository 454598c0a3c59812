"""Processes that tests start: found, and ended, by a mark in their environment."""

import contextlib
import os
import signal
import socket
import time

import psutil

MARK = "FED_DPSD_TEST"
PATIENCE = 1200  # seconds: a machine that does other work is slow


def marked(mark):
    """The other living processes whose environment has this mark, with all their descendants.

    Ray's agents overwrite their environment, but not their parents'.
    """
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return [each for each in found if lives(each)]


def lives(process):
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def commands_of(mark):
    """The command lines of the marked processes."""
    lines = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


def end_marked(mark):
    """End the marked processes, by SIGTERM and then by SIGKILL."""
    known = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            known.update(marked(mark))
            if not (alive := [each for each in known if lives(each)]):
                return
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            psutil.wait_procs(alive, timeout=1)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def wait_until(condition, process=None):
    """Wait until a condition holds; a process must not end before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
