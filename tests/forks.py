"""Commands in a fork of this process, whose imports would take a new process many seconds."""

import importlib
import os
import sys
import traceback

LATE = ("flwr_datasets.partitioner",)  # what a run imports lazily


def fork(work, log, folder=None):
    """Start `work` in a child process in its own folder, with output to `log`; return its id."""
    for name in LATE:
        importlib.import_module(name)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with log.open("w", buffering=1) as file:
            for stream, number in (("stdout", 1), ("stderr", 2)):
                os.dup2(file.fileno(), number)
                setattr(sys, stream, file)
            if folder:
                os.chdir(folder)
            try:
                work()
                status = 0
            except SystemExit as done:
                status = done.code if isinstance(done.code, int) else int(bool(done.code))
                if isinstance(done.code, str):
                    print(done.code)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(status)  # nothing of pytest continues here


def finished(child):
    """Wait for a child, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
