"""Fixtures for hospitals."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def deployed(small, monkeypatch):
    """Sets up an experiment over hospitals, in what says it is a Flower process."""
    for name in ("task_id", "run_id", "node_id"):  # else no message can be made
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)

    def make(*overrides):
        return small(
            *("federation=deployment", "federation.node_timeout_seconds=0.5"),
            *("federation.round_timeout_seconds=1.5", *overrides),
        )

    return make
