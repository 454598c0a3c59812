"""Rounds over hospitals that are away, fail, lie or come back."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, Metadata

from fed_dpsd.client import hospital as hospitals
from fed_dpsd.engines.flower import grid as grids
from fed_dpsd.engines.flower import server
from fed_dpsd.engines.flower.grid import ATTEMPTS, GridFederation
from fed_dpsd.errors import UserError
from fed_dpsd.protocol import Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.hospitals import (
    Hospitals,
    federate,
    request,
    site_file,
)


def failure(reply, code, reason):
    """Flower's error in a reply's place; like its own, it does not say which node it is about."""
    number = reply.metadata.reply_to_message_id
    metadata = Metadata(1, "", 1, 1, number, "", 0.0, 1.0, "system")
    return Message(error=Error(code, reason), metadata=metadata)


def simulated_clock(monkeypatch):
    """The server's time from now on, in a list of one; only its sleeps move it."""
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(grids, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    return clock


PATIENT = ("federation.round_timeout_seconds=60", "federation.retry_seconds=10")


def test_a_round_goes_on_without_a_hospital_that_is_away_and_with_it_again(deployed, tmp_path):
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    grid = Hospitals(files)
    federation = federate(deployed("training=plain", "answers=gradient"), grid)
    both = federation.total(request())
    grid.offline = {101}
    alone = federation.total(request(2))
    assert (both.count, alone.count) == (2, 1)
    assert alone.refused == {1: "no answer within 1.5 s"}
    grid.offline = set()
    assert federation.total(request(3)).count == 2


def test_too_few_hospitals_end_the_run_and_the_round_can_be_asked_again(deployed, tmp_path):
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    grid = Hospitals(files)
    federation = federate(
        deployed("training=plain", "answers=gradient", "federation.min_clients=2"), grid
    )
    grid.offline = {100}
    with pytest.raises(
        UserError, match=r"1 of 2 clients did not answer \(client 0: no answer within 1.5 s\)"
    ):
        federation.each(request())
    grid.offline = set()
    assert all(isinstance(given, Response) for given in federation.each(request()).values())
    ledger = hospitals.open_file(files[1]).ledger
    with ledger.transaction():
        assert len(ledger.entries()) == 1
    grid.offline = {100, 101}
    with pytest.raises(UserError, match="no node connected"):
        federate(deployed(), grid)


def test_a_node_that_fails_once_is_asked_again(deployed, tmp_path):
    failures = []

    def fail_once(node, reply):
        if reply.metadata.message_type == "query.answer" and not failures:
            failures.append(node)
            return failure(reply, 2, "killed")
        return reply

    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    federation = federate(
        deployed("training=plain", "answers=gradient"), Hospitals(files, fail_once)
    )
    assert federation.total(request()).count == 2
    assert len(failures) == 1
    for file in files:
        ledger = hospitals.open_file(file).ledger
        with ledger.transaction():
            assert len(ledger.entries()) == 1


def test_a_node_that_fails_again_and_again_is_left_out(deployed, tmp_path, monkeypatch):
    simulated_clock(monkeypatch)
    failures = []

    def fail(node, reply):
        if node == 100 and reply.metadata.message_type == "query.answer":
            failures.append(node)
            return failure(reply, 8, "crashed")
        return reply

    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    total = federate(deployed("training=plain", "answers=gradient"), Hospitals(files, fail)).total(
        request()
    )
    assert (total.count, len(failures)) == (1, ATTEMPTS)
    assert "crashed" in total.refused[0]


@pytest.mark.parametrize("lost", ["silent", "out of reach"])
def test_an_ask_that_was_lost_is_sent_again_and_charged_once(deployed, tmp_path, monkeypatch, lost):
    """Its process died after the charge; Flower says nothing, or that the node was away."""
    asked = []

    def lose(node, reply):
        if node == 101 and reply.metadata.message_type == "query.answer":
            asked.append(clock[0])
            if len(asked) < 3:
                return None if lost == "silent" else failure(reply, 5, "unavailable")
        return reply

    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    federation = federate(
        deployed("training=plain", "answers=gradient", *PATIENT), Hospitals(files, lose)
    )
    clock = simulated_clock(monkeypatch)
    assert federation.total(request()).count == 2
    assert asked == ([0, 10, 30] if lost == "silent" else [0, 10, 20])
    ledger = hospitals.open_file(files[1]).ledger
    with ledger.transaction():
        assert len(ledger.entries()) == 1


def test_a_hospital_that_left_does_not_cost_every_round_its_time_out(
    deployed, tmp_path, monkeypatch
):
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    grid = Hospitals(files)
    federation = federate(deployed("training=plain", "answers=gradient", *PATIENT), grid)
    clock = simulated_clock(monkeypatch)
    grid.offline = {101}
    waited = []
    for number in (1, 2, 3, 4):
        before = clock[0]
        if number == 4:
            grid.offline = set()
        count = federation.total(request(number)).count
        waited.append((count, round(clock[0] - before)))
    assert waited == [(1, 60), (1, 10), (1, 10), (2, 0)]


def test_nobody_is_given_up_whose_answer_is_needed(deployed, tmp_path, monkeypatch):
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    grid = Hospitals(files)
    federation = federate(
        deployed("training=plain", "answers=gradient", "federation.min_clients=2", *PATIENT), grid
    )
    clock = simulated_clock(monkeypatch)
    grid.offline = {101}
    for _ in range(2):
        before = clock[0]
        with pytest.raises(UserError, match="1 of 2 clients did not answer"):
            federation.total(request())
        assert clock[0] - before > 60


def test_a_hospital_with_other_code_is_left_out_before_it_is_asked(deployed, tmp_path, caplog):
    def other(node, reply):
        if node == 101 and reply.metadata.message_type == "query.hello":
            reply.content["meta"]["code"] = "0" * 64
        return reply

    files = [site_file(tmp_path / f"hospital{number}", number) for number in (0, 1)]
    federation = federate(deployed("training=plain", "answers=gradient"), Hospitals(files, other))
    assert federation.total(request()).count == 1
    assert "client 1 runs other code than this server" in caplog.text
    assert not hospitals.open_file(files[1]).folder.exists()


def test_a_coordinator_with_other_code_is_refused_and_nothing_charged(deployed, tmp_path):
    file = site_file(tmp_path / "hospital0")
    federation = federate(deployed("training=plain", "answers=gradient"), Hospitals([file]))
    federation._code = "0" * 64
    with pytest.raises(UserError, match="runs other code than this server; install one version"):
        federation.total(request())
    assert not hospitals.open_file(file).folder.exists()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_coordinators_own_noise_follows_no_seed(deployed, tmp_path, seed):
    """Every hospital knows the seed: it comes with the experiment."""
    files = [
        site_file(tmp_path / f"hospital{client}", client, trust=["server"]) for client in (0, 1)
    ]
    experiment = deployed(
        "training=plain", "answers=gradient", "answers.noise_at=server", f"seed={seed}"
    )
    first, second = (federate(experiment, Hospitals(files)).total(request()) for _ in range(2))
    assert first.count == second.count == 2
    assert not np.allclose(first.sum, second.sum)


def test_a_bad_test_split_is_said_before_hospitals_are_waited_for(tmp_path, capsys):
    overrides = "federation=deployment data=folder data.shape=[1,8,8] data.num_classes=10"
    config = {"overrides": f"{overrides} data.path={tmp_path}", "out": f"{tmp_path}/runs"}
    with pytest.raises(server.RunFailed, match="has no folder of a class"):
        server.serve(Hospitals([]), config)
    assert "no node connected" not in capsys.readouterr().out


def test_two_nodes_cannot_be_the_same_client(deployed, tmp_path, caplog):
    """The first is, for the whole run: nobody else can take its place, or end the run."""
    files = [site_file(tmp_path / f"hospital{number}", 0) for number in (0, 1)]
    grid = Hospitals(files)
    federation = federate(deployed("training=plain", "answers=gradient"), grid)
    assert "node 101 says that it is client 0, which another is" in caplog.text
    assert federation.total(request()).count == 1
    grid.offline = {100}
    with pytest.raises(UserError, match="2 of 2 clients did not answer"):
        federation.total(request(2))
    with pytest.raises(UserError, match=r"only clients \[0\] connected"):
        federate(deployed("federation.min_clients=2"), Hospitals(files))


@pytest.mark.parametrize("client", [7, -1, "0", True, None])
def test_a_node_that_is_no_client_of_this_federation_is_left_out(
    deployed, tmp_path, caplog, client
):
    def lie(node, reply):
        if node == 101 and client is not None:
            reply.content["meta"]["client"] = client
        elif node == 101:
            del reply.content["meta"]["client"]
        return reply

    files = [site_file(tmp_path / f"hospital{number}", number) for number in (0, 1)]
    federation = federate(deployed("training=plain", "answers=gradient"), Hospitals(files, lie))
    assert federation.total(request()).refused == {1: "no answer within 1.5 s"}
    assert "node 101 is no hospital" in caplog.text


def test_what_goes_wrong_inside_a_hospital_stays_there(deployed, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    files = [site_file(tmp_path / f"hospital{number}", number) for number in (0, 1)]
    federation = federate(deployed("training=plain", "answers=gradient"), Hospitals(files))
    (tmp_path / "hospital1" / "scans.npz").unlink()
    total = federation.total(request())
    assert (total.count, total.refused) == (1, {1: "client 1 failed: see its log"})


@pytest.mark.parametrize(
    "break_meta",
    [
        {"code": "0"},
        {"error": "x" * 10_000},
        None,
    ],
)
def test_a_hospitals_bad_reply_is_its_own_refusal(deployed, tmp_path, break_meta):
    def lie(node, reply):
        if node == 101 and reply.metadata.message_type == "query.answer":
            if break_meta is None:
                del reply.content["meta"]
            else:
                meta = {**reply.content["meta"], **break_meta}
                reply.content["meta"] = ConfigRecord(meta)
        return reply

    files = [site_file(tmp_path / f"hospital{number}", number) for number in (0, 1)]
    federation = federate(deployed("training=plain", "answers=gradient"), Hospitals(files, lie))
    total = federation.total(request())
    assert list(total.refused) == [1]
    assert 0 < len(total.refused[1]) <= 200


# --- the file ---


def test_a_run_that_too_few_answered_goes_on_where_it_stopped(deployed, tmp_path, capsys):
    """The student is that of a run that nothing happened to: hospitals answer the same."""
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    experiment = deployed(
        "training=plain", "answers=gradient", "federation.min_clients=2", f"out={tmp_path}/runs"
    )
    grid = Hospitals(files)
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, grid, folder)
    with pytest.raises(
        UserError, match=r"1 of 2 clients did not answer \(client 1: no answer within 1.5 s\)"
    ):
        runs.run(experiment, federation, folder, lambda line: setattr(grid, "offline", {101}))
    grid.offline = set()
    server.serve(grid, {"resume": str(folder)})
    assert f"run folder: {folder}" in capsys.readouterr().out
    again = json.loads((folder / "summary.json").read_text())
    assert again["status"] == "completed"
    straight = new_run_folder(experiment)
    federation = GridFederation(experiment, grid, straight)
    summary = runs.run(experiment, federation, straight, lambda line: None)
    assert summary["student_sha256"] == again["student_sha256"]
    for file in files:
        ledger = hospitals.open_file(file).ledger
        with ledger.transaction():
            assert len(ledger.entries()) == experiment.config.rounds


@pytest.mark.parametrize(
    ("run_config", "problem"),
    [
        ({"resume": "runs/x"}, "must be an absolute path"),
        ({"resume": "/nowhere"}, "/nowhere is not a run folder"),
        ({"resume": "/x", "num_clients": 3}, "num_clients is given with resume=/x"),
    ],
)
def test_a_bad_resume_is_one_line(tmp_path, capsys, run_config, problem):
    with pytest.raises(server.RunFailed, match=problem):
        server.serve(Hospitals([]), run_config)
    assert capsys.readouterr().out.startswith("error: ")
