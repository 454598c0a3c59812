"""Runs of a method without the loop of fed_dpsd/server/run.py, and tables of refused settings."""

import re

import numpy as np

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ConfigError
from fed_dpsd.streams import Streams


def rounds(experiment, folder, resume=None):
    """The rounds of a run, one at a time."""
    federation = LocalFederation(experiment, folder)
    return experiment.method.server(federation, experiment.public, Streams(0), resume)


def finish(experiment, folder, wrapped=lambda federation: federation):
    """A federation, which may be wrapped, and all rounds of a run over it."""
    federation = wrapped(LocalFederation(experiment, folder))
    server = experiment.method.server(federation, experiment.public, Streams(0), None)
    return federation, list(server)


def not_refused(small, table, *first):
    """The rows (overrides, expected) with another error or none; {} if all are refused."""
    wrong = {}
    for overrides, expected in table:
        try:
            small(*first, *overrides.split())
            wrong[overrides] = "no error"
        except ConfigError as error:
            if not re.search(expected, str(error)):
                wrong[overrides] = str(error)
    return wrong


def without(records, left_out):
    """The records of a split, except those at some places."""
    return records.take(np.flatnonzero(~np.isin(np.arange(len(records)), left_out)))
