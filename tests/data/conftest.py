"""What was reported to the user."""

import logging

import pytest

from fed_dpsd.data import datasets


@pytest.fixture
def said(caplog):
    """A function that returns the messages so far."""
    datasets.warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "fed_dpsd")
    return lambda: [record.getMessage() for record in caplog.records]
