"""What a hospital's own log says about each request, and that none of it leaves the hospital."""

import logging

import pytest

from fed_dpsd.errors import UserError
from fed_dpsd.protocol import Refusal
from tests.hospitals import Hospitals, federate, request, site_files


@pytest.fixture
def logged(caplog):
    """The lines on requests so far, without hellos, since the last call."""
    caplog.set_level(logging.INFO, "fed_dpsd")

    def lines():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [line for line in found if line.startswith("run ")]

    return lines


PRIVATE = ("training=dp_sgd", "answers=label", "training.steps=3")


def test_each_request_is_a_line_with_its_charge_and_the_budget_left(deployed, tmp_path, logged):
    files = site_files(tmp_path, 1, num_clients=1, budget=50.0)
    federation = federate(deployed(*PRIVATE, "num_clients=1"), Hospitals(files))
    run = federation._run_folder.name
    federation.each(request())
    (first,) = logged()
    assert first.startswith(f"run {run}: round 1, answers to 16 images: answered; charged private")
    assert "training of its teachers and answers to 16 images (covered by" in first
    assert " of 50 (record, add_remove, delta 1e-05), " in first
    assert first.endswith("; 983 of 1,000 images left")
    federation._deliver(request())  # sent again
    (again,) = logged()
    assert "answered; charged nothing; spent epsilon " in again
    assert again.endswith("; 983 of 1,000 images left")


def test_a_refusal_says_why_and_that_nothing_was_charged(deployed, tmp_path, logged):
    files = site_files(tmp_path, 1, num_clients=1)
    federation = federate(deployed(*PRIVATE, "num_clients=1"), Hospitals(files))
    site_files(tmp_path, 1, num_clients=1, budget=0.001)
    with pytest.raises(UserError, match="hospital 0: the client's privacy budget is spent"):
        federation.each(request())
    (line,) = logged()
    assert "refused: the client's privacy budget is spent; charged nothing; spent epsilon 0" in line
    site_files(tmp_path, 1, num_clients=1, answers=["probabilities"])
    federation._deliver(request())
    (line,) = logged()
    assert "refused: this site allows only answers=probabilities" in line
    assert line.endswith("; nothing was charged")
    federation._code = "0" * 64
    with pytest.raises(UserError, match="different code"):
        federation._deliver(request())
    (line,) = logged()
    run = federation._run_folder.name
    assert line.startswith(f"run {run}: a request: refused: the coordinator runs different code")


def test_a_delta_that_is_too_large_is_a_warning_in_each_line_and_in_no_reply(
    deployed, tmp_path, logged
):
    sent = []

    def keep(node, reply):
        sent.append({name: dict(record) for name, record in reply.content.items()})
        return reply

    (file,) = site_files(tmp_path, 1, num_clients=1, delta=0.5)
    federation = federate(deployed(*PRIVATE, "num_clients=1"), Hospitals([file], keep))
    for delta in (0.5, 0.5, 0.024):  # the same request
        site_files(tmp_path, 1, num_clients=1, delta=delta)
        federation._deliver(request())
    warning = "; warning: site.delta=0.5 must be below 1 / 40, the number of records; else a "
    assert [warning in line for line in logged()] == [True, True, False]
    assert sent[1:] == [sent[1]] * 3
    assert "warning" not in str(sent)


def test_the_log_is_not_sent(deployed, tmp_path, logged):
    """A reply has neither the budget nor what is left of it: 987.5 is in the log alone."""
    sent = []

    def keep(node, reply):
        sent.append(str(reply.content))
        return reply

    files = site_files(tmp_path, 1, num_clients=1, budget=987.5)
    federation = federate(deployed(*PRIVATE, "num_clients=1"), Hospitals(files, keep))
    assert not isinstance(federation.each(request()).answers[0], Refusal)
    assert "of 987.5 " in logged()[0]
    assert len(sent) == 2
    assert "images left" not in "".join(sent)
    assert "987.5" not in "".join(sent)
    assert "dp_sgd" in "".join(sent)  # the control: the statement of charges is there
