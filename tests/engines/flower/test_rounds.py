"""Rounds with hospitals that are absent, fail, lie or return."""

import json
import logging

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, Metadata

from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.engines.flower import codec, server
from fed_dpsd.engines.flower.grid import ATTEMPTS, LAST_HELLO_SECONDS, GridFederation
from fed_dpsd.errors import UserError
from fed_dpsd.protocol import Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.attendance import (
    Member,
    incomplete_attendance,
    last_answers,
    members_of,
    requests_of,
    store_revoked,
)
from fed_dpsd.server.run_folder import new_run_folder
from tests.hospitals import PLAIN, Hospitals, charges, federate, request, site_file, site_files

ANSWER, HELLO = "query.answer", "query.hello"
PATIENT = ("federation.round_timeout_seconds=60", "federation.retry_seconds=10")
BOTH_NEEDED = "federation.min_clients=2"


def failure(reply, code, reason):
    """Flower's error instead of a reply; like Flower's own, it does not name the node."""
    number = reply.metadata.reply_to_message_id
    metadata = Metadata(1, "", 1, 1, number, "", 0.0, 1.0, "system")
    return Message(error=Error(code, reason), metadata=metadata)


def spoiling(node, kind, spoil):
    """A grid's `break_reply` that spoils one node's replies of a kind."""

    def break_reply(sender, reply):
        return spoil(reply) if (sender, reply.metadata.message_type) == (node, kind) else reply

    return break_reply


def test_a_round_continues_without_a_hospital_that_is_away(deployed, tmp_path, clock):
    """Only the first round waits, for the whole timeout."""
    grid = Hospitals(site_files(tmp_path))
    federation = federate(deployed(*PLAIN, *PATIENT), grid)
    assert federation.total(request()).count == 2
    grid.offline = {101}
    waited, reasons = [], []
    for number in (2, 3, 4, 5):
        before = clock[0]
        if number == 5:
            grid.offline = set()
        total = federation.total(request(number))
        waited.append((total.count, round(clock[0] - before)))
        reasons += total.refused.values()
    assert reasons == ["disconnected; no answer in time"] * 3
    assert waited == [(1, 60), (1, 0), (1, 0), (2, 0)]


def test_a_round_ends_when_the_grace_after_enough_answers_is_over(deployed, tmp_path, clock):
    """A hospital that returns gets one old request at most, since no later one is sent.

    In the second round, the coordinator knows that it has left.
    """
    grid = Hospitals(site_files(tmp_path), spoiling(101, ANSWER, lambda reply: None))
    sent, push = [], grid.push_messages

    def keep(messages):
        sent.extend((m.metadata.dst_node_id, clock[0] + m.metadata.ttl) for m in messages)
        return push(messages)

    grid.push_messages = keep
    grace = *PATIENT, "federation.grace_seconds=20"
    experiment, said, waited = deployed(*PLAIN, *grace), [], []
    federation = GridFederation(experiment, grid, new_run_folder(experiment), said.append)
    for number in (1, 2):
        sent.clear()
        before = clock[0]
        assert federation.total(request(number)).count == 1
        waited.append(round(clock[0] - before))
        grid.offline = {101}
        ends = {end for node, end in sent if node == 101}
        assert ends == ({before + 60} if number == 1 else set())
    assert waited == [20, 0]
    assert "waiting for the reply of hospital 1 (10 s left)" in said
    grid.offline = set()
    before = clock[0]
    with pytest.raises(UserError, match="no answer in time"):
        federate(deployed(*PLAIN, *grace, BOTH_NEEDED), grid).total(request())
    assert clock[0] - before >= 60  # the control: both are needed


def test_a_hospital_that_returns_during_a_round_takes_part_in_it(deployed, tmp_path, clock):
    """The other one, which is needed, takes a minute; nothing is sent while it is gone."""
    grid = Hospitals(site_files(tmp_path))
    federation = federate(deployed(*PLAIN, *PATIENT, "federation.round_timeout_seconds=90"), grid)
    federation.total(request())
    grid.offline = {101}
    federation.total(request(2))
    before, sent, push = clock[0], [], grid.push_messages

    def keep(messages):
        sent.extend((m.metadata.dst_node_id, round(clock[0] - before)) for m in messages)
        return push(messages)

    def slow(node, reply):
        if clock[0] >= before + 30:
            grid.offline = set()
        return reply if node == 101 or clock[0] >= before + 60 else None

    grid.push_messages, grid.break_reply = keep, slow
    assert federation.total(request(3)).count == 2
    assert 60 <= clock[0] - before < 90
    assert all(when >= 30 for node, when in sent if node == 101)
    assert 101 in dict(sent)


def test_a_slow_hospital_that_stays_connected_has_the_grace_in_every_round(
    deployed, tmp_path, clock
):
    """Also after a round that it missed; a failed one does not count as enough."""
    files = [site_file(tmp_path / f"{n}", n, num_clients=3) for n in range(3)]
    slow = {1: 90, 2: 8}  # seconds until hospital 2 answers, by round

    def break_reply(node, reply):
        if reply.metadata.message_type == ANSWER and node == 101:
            reply.content["meta"]["error"] = "it failed"
        late = clock[0] - before < slow[number]
        return None if node == 102 and reply.metadata.message_type == ANSWER and late else reply

    grid, number, before = Hospitals(files, break_reply), 1, 0
    settings = (
        *("num_clients=3", "federation.min_clients=1", "federation.round_timeout_seconds=200"),
        *("federation.grace_seconds=20", "federation.retry_seconds=10"),
    )
    federation, counts = federate(deployed(*PLAIN, *settings), grid), []
    for number in (1, 2):
        before = clock[0]
        counts.append(federation.total(request(number)).count)
    assert counts == [1, 2]
    number, before = 1, clock[0]  # slow again, but two are needed
    needed = federate(deployed(*PLAIN, *settings, BOTH_NEEDED), grid)
    assert needed.total(request(3)).count == 2


def test_a_hospital_learns_of_no_other_hospitals_charges(deployed, tmp_path, clock):
    """A request repeats what its own hospital has stated."""
    grid = Hospitals(site_files(tmp_path))
    federation, sent, push = federate(deployed(*PLAIN), grid), [], grid.push_messages
    grid.push_messages = lambda messages: (sent.extend(messages), push(messages))[1]
    for number in (1, 2):
        sent.clear()
        assert federation.total(request(number)).count == 2
    repeated = {m.metadata.dst_node_id: m.content["request"]["heard"] for m in sent}
    assert {node: json.loads(heard) for node, heard in repeated.items()} == {
        100: {"0": {"gradient": 16}},
        101: {"1": {"gradient": 16}},
    }


def test_a_run_waits_for_all_hospitals_and_names_those_that_did_not_connect(
    deployed, tmp_path, clock
):
    """By default; a smaller number must be given. What it waits for is shown all the time."""
    grid = Hospitals(site_files(tmp_path))
    grid.offline = {101}
    said = []

    def start(*overrides):
        experiment = deployed(*PLAIN, *overrides, "federation.node_timeout_seconds=100", one=False)
        return GridFederation(experiment, grid, new_run_folder(experiment), said.append)

    with pytest.raises(
        UserError, match=r"1 of 2 hospitals connected; waiting for hospital 1 within"
    ):
        start()
    assert said[0] == "1 of 2 hospitals connected; waiting for hospital 1 (2 min left)"
    assert 9 <= len(said) <= 12  # every ten seconds
    said.clear()
    assert start("federation.min_clients=1")._clients == {0}
    assert said[-1] == "1 of 2 hospitals connected; waiting for hospital 1"
    grid.offline, began = set(), clock[0]
    said.clear()
    assert start()._clients == {0, 1}  # the control: nothing to wait for
    assert said == ["2 of 2 hospitals connected"]
    assert clock[0] - began < 10


def test_a_silent_node_that_nobody_needs_delays_no_round(deployed, tmp_path, clock):
    heard, said = [], []

    def reply_of(node, reply):
        heard.append(node)
        return None if node > 101 else reply

    grid = Hospitals([*site_files(tmp_path), *site_files(tmp_path / "others")], reply_of)
    grid.get_node_ids = lambda: [102] if clock[0] < 1 else [100, 101, 102]
    experiment = deployed(*PLAIN, "federation.node_timeout_seconds=60", one=False)
    federation = GridFederation(experiment, grid, new_run_folder(experiment), said.append)
    assert said == [
        "0 of 2 hospitals connected; waiting for hospitals 0, 1 (60 s left)",
        "2 of 2 hospitals connected",
    ]
    assert clock[0] < 1 + LAST_HELLO_SECONDS + 0.5  # it might claim to be one of them
    grid.get_node_ids = lambda: [100, 101, 102, 103]
    began = clock[0]
    assert [federation.total(request(number)).count for number in (1, 2)] == [2, 2]
    assert clock[0] == began
    assert 103 not in heard  # no hospital is missing


def test_each_hospital_counts_as_soon_as_it_answers(deployed, tmp_path, clock, caplog):
    """A late answer is read, too; a node that then claims a number that is known is not it."""
    files = [site_file(tmp_path / f"{n}", n % 3, num_clients=3) for n in (0, 1, 3, 2)]
    held, said = [], []
    grid = Hospitals(files, lambda node, reply: held.append(reply) if node > 101 else reply)
    experiment = deployed(
        *(*PLAIN, "num_clients=3", "federation.min_clients=2", "federation.retry_seconds=30"),
        "federation.node_timeout_seconds=100",
    )
    federation = GridFederation(experiment, grid, new_run_folder(experiment), said.append)
    assert said[0] == "2 of 3 hospitals connected; waiting for hospital 2 (2 min left)"
    assert 100 <= clock[0] < 101
    assert len(held) == 2 * 4  # asked every 30 s
    before = clock[0]
    assert federation.total(request()).count == 2
    assert clock[0] == before
    grid.offline = {100}
    for reply in held:
        grid.replies[reply.metadata.reply_to_message_id] = reply
    assert federation._discover_nodes()
    assert federation._hosts == {100: [0], 101: [1], 103: [2]}
    assert "node 102 claims to be hospital 0, as another node does" in caplog.text


@pytest.mark.slow
def test_a_hospital_that_connects_after_the_class_counts_takes_part_at_once(deployed, tmp_path):
    """They are requested again: it releases its own, and the other hospital repeats its own."""

    def connect(node, reply):
        if reply.metadata.message_type == ANSWER:
            grid.offline = set()
        return reply

    files = site_files(tmp_path)
    grid = Hospitals(files, connect)
    grid.offline = {101}
    private = "training=dp_sgd", "training.steps=2", "model.teacher=scattering"
    experiment = deployed(*private, "answers=label", "rounds=2")
    folder, lines = new_run_folder(experiment), []
    runs.run(experiment, GridFederation(experiment, grid, folder), folder, lines.append)
    assert [line["refused"] for line in lines] == [{}, {}]
    asked = [(line["kind"], line["answered"]) for line in requests_of(folder)]
    both = [("answers", [0, 1]), ("counts", [0, 1]), ("answers", [0, 1])]
    assert asked == [("counts", [0]), *both]
    assert charges(files[0]) == ["training", "counts", "answers", "answers"]
    assert charges(files[1]) == ["training", "answers", "counts", "answers"]


def test_absence_and_return_are_shown_as_they_happen(deployed, tmp_path, clock):
    """Hospital 1 is late, leaves and returns. Its absence is no refusal, and no wait is made up."""
    grid, said = Hospitals(site_files(tmp_path)), []
    grid.offline = {101}
    experiment = deployed(*PLAIN, *PATIENT)
    federation = GridFederation(experiment, grid, new_run_folder(experiment), said.append)
    said.clear()
    before = clock[0]
    assert federation.total(request()).refused == {1: "had not connected"}
    assert clock[0] - before < 10  # nobody waits for who was never there
    for number, offline in ((2, set()), (3, {101}), (4, {101}), (5, set())):
        grid.offline = offline
        federation.total(request(number))
    changes = [line for line in said if "left)" not in line]
    assert changes == [
        "round 1: hospital 1 does not answer: had not connected",
        "round 2: hospital 1 has joined",
        "round 3: hospital 1 does not answer: disconnected; no answer in time",
        "round 5: hospital 1 is back",
    ]
    waits = [line for line in said if "left)" in line]
    assert waits[0] == "waiting for the reply of hospital 1 (50 s left)"
    lines = requests_of(federation._run_folder)
    assert {c: str(each) for c, each in incomplete_attendance(lines).items()} == {
        1: "answered 2 of 5 requests"
    }
    assert {c: str(each) for c, each in incomplete_attendance(lines[:1]).items()} == {
        1: "never connected"
    }
    assert not incomplete_attendance(lines[1:2])


def test_hospitals_are_called_by_their_names(deployed, tmp_path, clock):
    """Also those that have left. A name is one printable line of limited length."""
    files = [site_file(tmp_path / "0", 0), site_file(tmp_path / "1", 1, hospital="St Mary's")]
    grid, said, experiment = Hospitals(files), [], deployed(*PLAIN, *PATIENT)
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, grid, folder, said.append)
    federation.total(request())
    assert members_of(folder) == {0: Member(0, "", 100), 1: Member(1, "St Mary's", 101)}
    times = last_answers(folder)
    assert times.keys() == {0, 1}
    grid.offline = {101}
    federation.total(request(2))
    assert said[-1].startswith("round 2: hospital 1 (St Mary's) does not answer")
    assert "waiting for the reply of hospital 1 (St Mary's) (50 s left)" in said
    assert last_answers(folder)[1] == times[1]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a\x1b[31m", ""), ("x" * 65, ""), (7, ""), ("7", ""), (["x"], ""), ("St. 7", "St. 7")],
    ids=["control", "long", "number", "digits", "list", "name"],
)
def test_a_name_is_printable_and_no_number(deployed, tmp_path, name, shown):
    def lie(reply):
        reply.content["meta"]["hospital"] = name
        return reply

    folder = new_run_folder(experiment := deployed(*PLAIN))
    GridFederation(experiment, Hospitals(site_files(tmp_path), spoiling(101, HELLO, lie)), folder)
    assert members_of(folder)[1].name == shown


def test_a_hospital_that_is_back_has_the_whole_time_again(deployed, tmp_path, clock):
    """Its teachers may have to be trained; one that has left has not."""
    grid = Hospitals(site_files(tmp_path))
    federation = federate(deployed(*PLAIN, *PATIENT), grid)
    for returns in (True, False):
        silent = []

        def lose(node, reply, silent=silent):
            return None if node == 101 and silent else reply

        grid.break_reply = lose
        number = 10 * returns
        grid.offline, waited = {101}, []
        federation.total(request(number + 1))  # it is away from now on
        silent.append(True)
        grid.offline = set() if returns else {101}
        for later in (2, 3):
            before = clock[0]
            federation.total(request(number + later))
            waited.append(round(clock[0] - before))
        assert waited == ([60, 60] if returns else [0, 0])
    grid.break_reply = lambda node, reply: grid.offline.clear() or reply  # back during the round
    grid.offline = {101}
    federation.total(request(21))
    grid.break_reply = lambda node, reply: None if node == 101 else reply
    before = clock[0]
    federation.total(request(22))
    assert round(clock[0] - before) == 60


def test_too_few_hospitals_end_the_run_and_the_round_can_be_asked_again(deployed, tmp_path, clock):
    files = site_files(tmp_path)
    grid = Hospitals(files)
    federation = federate(deployed(*PLAIN, BOTH_NEEDED, *PATIENT), grid)
    grid.offline = {100}
    for _ in range(2):  # no required hospital is given up early
        before = clock[0]
        with pytest.raises(
            UserError,
            match=r"1 of 2 hospitals did not answer \(hospital 0: disconnected; no answer in time",
        ):
            federation.each(request())
        assert clock[0] - before >= 60
    grid.offline = set()
    assert all(isinstance(given, Response) for given in federation.each(request()).values())
    assert charges(files[1]) == ["answers"]
    grid.offline = {100, 101}
    with pytest.raises(UserError, match="0 of 2 hospitals connected; waiting for hospitals 0, 1"):
        federate(deployed(), grid)


def test_a_node_that_fails_once_is_asked_again_and_one_that_keeps_failing_is_left_out(
    deployed, tmp_path
):
    failures, most = [], 1

    def fail(reply):
        if len(failures) < most:
            failures.append(reply)
            return failure(reply, 8, "crashed")
        return reply

    files = site_files(tmp_path)
    federation = federate(deployed(*PLAIN), Hospitals(files, spoiling(100, ANSWER, fail)))
    assert (federation.total(request()).count, len(failures)) == (2, 1)
    assert [charges(file) for file in files] == [["answers"]] * 2
    most = 99
    total = federation.total(request(2))
    assert (total.count, len(failures)) == (1, 1 + ATTEMPTS)
    assert "crashed" in total.refused[0]


@pytest.mark.parametrize("lost", ["silent", "out of reach"])
def test_a_lost_request_is_sent_again_and_charged_once(deployed, tmp_path, clock, lost):
    """Its process died after the charge; Flower reports nothing, or that the node was away."""
    asked = []

    def lose(reply):
        asked.append(clock[0])
        if len(asked) < 3:
            return None if lost == "silent" else failure(reply, 5, "unavailable")
        return reply

    files = site_files(tmp_path)
    grid = Hospitals(files, spoiling(101, ANSWER, lose))
    federation = federate(deployed(*PLAIN, *PATIENT), grid)
    clock[0] = 0.0
    assert federation.total(request()).count == 2
    assert asked == ([0, 10, 30] if lost == "silent" else [0, 10, 20])
    assert charges(files[1]) == ["answers"]


def test_other_code_on_either_side_is_refused_and_nothing_charged(deployed, tmp_path, caplog):
    def other(reply):
        reply.content["meta"]["code"] = "0" * 64
        return reply

    files = site_files(tmp_path)
    federation = federate(deployed(*PLAIN), Hospitals(files, spoiling(101, HELLO, other)))
    assert federation.total(request()).count == 1
    assert "hospital 1 runs different code from this server" in caplog.text
    assert not charges(files[1])
    federation = federate(deployed(*PLAIN), Hospitals(files[1:]))
    federation._code = "0" * 64
    with pytest.raises(UserError, match="from this server; install the same version"):
        federation.total(request())
    assert not charges(files[1])


def test_a_coordinators_own_noise_follows_no_seed(deployed, tmp_path):
    """Every hospital knows the seed: it comes with the experiment."""
    files = site_files(tmp_path, trust=["server"])
    for seed in (0, 1):
        experiment = deployed(*PLAIN, "answers.noise_at=server", f"seed={seed}")
        first, second = (federate(experiment, Hospitals(files)).total(request()) for _ in range(2))
        assert first.count == second.count == 2
        assert not np.allclose(first.sum, second.sum)


def test_a_bad_test_split_is_reported_before_waiting_for_hospitals(tmp_path, capsys):
    overrides = "federation=deployment data=folder data.shape=[1,8,8] data.num_classes=10"
    config = {"overrides": f"{overrides} data.path={tmp_path}", "out": f"{tmp_path}/runs"}
    with pytest.raises(server.RunFailed, match="has no class folder"):
        server.start(Hospitals([]), config)
    assert "no node connected" not in capsys.readouterr().out


@pytest.mark.parametrize("seconds", [0, 3])
def test_two_nodes_that_claim_one_number_end_the_run_before_anything_is_sent(
    deployed, tmp_path, clock, seconds
):
    """Even if the second claim comes when all hospitals are known."""
    files = [site_file(tmp_path / f"{n}", n % 2) for n in range(3)]
    grid, pull = Hospitals(files), Hospitals.pull_messages

    def pull_messages(numbers):
        late = clock[0] >= seconds
        return [r for r in pull(grid, numbers) if late or r.metadata.src_node_id < 102]

    grid.pull_messages = pull_messages
    with pytest.raises(UserError) as ended:
        federate(deployed(*PLAIN, "federation.node_timeout_seconds=60"), grid)
    assert str(ended.value) == (
        "nodes 100 and 102 both claim to be hospital 0. Find the wrong one (`flwr supernode list "
        "federation`). Correct `client` in its file, stop it or unregister it (`flwr supernode "
        "unregister`); see docs/deployment.md"
    )
    assert clock[0] == pytest.approx(seconds, abs=0.2)
    assert [charges(file) for file in files] == [[]] * 3


def test_a_listed_node_that_does_not_answer_is_no_rival(deployed, tmp_path, clock):
    """A hospital that registered a new key; its old node is listed until Flower misses it."""
    files = [site_file(tmp_path / f"{n}", max(0, n - 1)) for n in range(3)]
    grid = Hospitals(files, lambda node, reply: reply if node > 100 else None)
    federation = federate(deployed(*PLAIN, "federation.node_timeout_seconds=60"), grid)
    assert federation._hosts == {101: [0], 102: [1]}
    assert clock[0] < 6


def test_a_node_that_has_left_is_no_rival(deployed, tmp_path, clock, caplog):
    grid = Hospitals([site_file(tmp_path / f"{n}", 0) for n in range(2)])
    grid.get_node_ids = lambda: [100] if clock[0] < 1 else [101]
    federate(deployed(*PLAIN, "federation.node_timeout_seconds=5"), grid)
    assert "node 101 claims to be hospital 0, as another node does" in caplog.text


def test_another_federations_hospital_is_no_rival(deployed, tmp_path, caplog):
    other = site_file(tmp_path / "other", 0, classes=[f"{9 - label}" for label in range(10)])
    files = [site_file(tmp_path / "0", 0), other]
    assert federate(deployed(*PLAIN), Hospitals(files))._hosts == {100: [0]}
    assert "node 101 claims to be hospital 0, as another node does" in caplog.text


def test_a_node_that_claims_a_known_number_later_changes_nothing(deployed, tmp_path, caplog):
    """The first one is that client for the whole run: another cannot replace it or end the run."""
    files = [site_file(tmp_path / f"hospital{number}", 0) for number in (0, 1)]
    grid = Hospitals(files)
    grid.offline = {101}
    federation = federate(deployed(*PLAIN), grid)
    grid.offline = set()
    assert [federation.total(request(number)).count for number in (1, 2)] == [1, 1]
    assert "node 101 claims to be hospital 0, as another node does" in caplog.text
    grid.offline = {100}
    with pytest.raises(UserError, match="2 of 2 hospitals did not answer"):
        federation.total(request(3))


def test_a_node_that_is_no_client_of_this_federation_is_left_out(deployed, tmp_path, caplog):
    files = site_files(tmp_path)
    for client in (7, -1, "0", True, None):

        def lie(reply, client=client):
            del reply.content["meta"]["client"]
            if client is not None:
                reply.content["meta"]["client"] = client
            return reply

        caplog.clear()
        federation = federate(deployed(*PLAIN), Hospitals(files, spoiling(101, HELLO, lie)))
        assert "node 101 is not a hospital" in caplog.text, client
        assert federation._clients == {0}, client
    assert federation.total(request()).refused == {1: "had not connected"}


def test_the_cause_of_a_hospitals_failure_stays_there(deployed, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    federation = federate(deployed(*PLAIN), Hospitals(site_files(tmp_path)))
    (tmp_path / "hospital1" / "scans.npz").unlink()
    total = federation.total(request())
    assert (total.count, total.refused) == (1, {1: "client 1 failed: see its log"})


def test_a_hospitals_bad_reply_is_its_own_refusal(deployed, tmp_path):
    files = site_files(tmp_path)
    for number, changes in enumerate(({"code": "0"}, {"error": "x" * 10_000}, None)):

        def lie(reply, changes=changes):
            meta = reply.content.pop("meta")
            if changes is not None:
                reply.content["meta"] = ConfigRecord({**meta, **changes})
            return reply

        federation = federate(deployed(*PLAIN), Hospitals(files, spoiling(101, ANSWER, lie)))
        total = federation.total(request(number))
        assert list(total.refused) == [1], changes
        assert 0 < len(total.refused[1]) <= codec.LONGEST_REASON, changes


def test_a_hospitals_words_do_not_make_it_one_that_never_connected(deployed, tmp_path):
    def lie(reply):
        reply.content["meta"]["error"] = "had not connected"
        return reply

    grid = Hospitals(site_files(tmp_path), spoiling(101, ANSWER, lie))
    federation = federate(deployed(*PLAIN, *PATIENT), grid)
    assert federation.total(request()).refused == {1: "had not connected"}
    lines = requests_of(federation._run_folder)
    assert str(incomplete_attendance(lines)[1]) == "answered 0 of 1 requests"


def test_a_message_that_flower_does_not_take_is_sent_again(deployed, tmp_path, clock, monkeypatch):
    grid = Hospitals(site_files(tmp_path))
    federation = federate(deployed(*PLAIN, *PATIENT), grid)
    push, failures = grid.push_messages, [[], [None]]
    monkeypatch.setattr(grid, "push_messages", lambda m: failures.pop() if failures else push(m))
    assert federation.total(request()).count == 2
    assert clock[0] == 10


# --- the file ---


@pytest.mark.slow
def test_a_run_that_too_few_answered_resumes_where_it_stopped(deployed, tmp_path, capsys):
    """Its student is the same as without an interruption: hospitals answer the same."""
    files = site_files(tmp_path)
    experiment = deployed(*PLAIN, BOTH_NEEDED, f"out={tmp_path}/runs")
    grid = Hospitals(files)
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, grid, folder)
    with pytest.raises(
        UserError,
        match=r"1 of 2 hospitals did not answer \(hospital 1: disconnected; no answer in time",
    ):
        runs.run(experiment, federation, folder, lambda line: setattr(grid, "offline", {101}))
    grid.offline = set()
    server.start(grid, {"resume": str(folder)})
    assert f"run folder: {folder}" in capsys.readouterr().out
    again = json.loads((folder / "summary.json").read_text())
    assert again["status"] == "completed"
    straight = new_run_folder(experiment)
    federation = GridFederation(experiment, grid, straight)
    summary = runs.run(experiment, federation, straight, lambda line: None)
    assert summary["student_sha256"] == again["student_sha256"]
    assert [len(charges(file)) for file in files] == [experiment.config.rounds] * 2


def test_a_refusal_ends_a_run_that_needs_all_and_it_resumes_without_that_hospital(
    deployed, tmp_path, capsys
):
    files = site_files(tmp_path)
    experiment = deployed(*PLAIN, f"out={tmp_path}/runs", one=False)
    grid, folder = Hospitals(files), new_run_folder(experiment)
    federation = GridFederation(experiment, grid, folder)

    def stop_allowing(line):
        site_file(files[1].parent, 1, answers=["label"])

    with pytest.raises(
        UserError,
        match=r"^1 of 2 hospitals refused or did not answer \(hospital 1: this site allows only "
        r"answers=label .*\); see their logs, then resume the run, or .* federation.min_clients=1$",
    ):
        runs.run(experiment, federation, folder, stop_allowing)
    with pytest.raises(
        server.RunFailed,
        match=r"^hospital 1: this site allows only answers=label .*\. Nothing more was charged\. "
        r"Correct this, or resume it without them .*federation.min_clients=1; ",
    ):
        server.start(grid, {"resume": str(folder)})
    assert f"resume it with --run-config 'resume=\"{folder}\"'" in capsys.readouterr().out
    server.start(grid, {"resume": str(folder), "overrides": "federation.min_clients=1"})
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert len(charges(files[0])) == experiment.config.rounds


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"methods": ["dpsd"]}, "this site allows only method=dpsd (methods: in its file)"),
        ({"models": ["scattering"]}, "allows only the teachers scattering"),
        (
            {"fit": "pad", "num_clients": 3},
            "num_clients is 3 at this site; data.fit is pad at this site",
        ),
        ({"limits": {"rounds": 1}}, "rounds is at most 1 at this site"),
        ({"budget": 0.5}, "the budget left at this site is not enough for this run; `fed-dpsd si"),
        ({"queries": 20}, "the number of images (queries:) left at this site is not"),
    ],
)
def test_a_file_that_does_not_allow_a_run_ends_it_before_any_charge(
    deployed, tmp_path, clock, changes, reason
):
    files = site_files(tmp_path)
    experiment = deployed("training=dp_sgd", "answers=probabilities", "rounds=2", one=False)
    federate(experiment, Hospitals(files))  # the control
    site_file(files[1].parent, 1, **changes)
    with pytest.raises(UserError) as caught:
        federate(experiment, Hospitals(files))
    assert str(caught.value).startswith("hospital 1: ")
    assert reason in str(caught.value)
    assert "Nothing was charged. Change the run's settings or the hospital's file; " in str(
        caught.value
    )
    assert (clock[0], charges(files[0]), charges(files[1])) == (0, [], [])


def test_a_run_that_has_begun_is_not_judged_by_the_budget_it_has_spent(deployed, tmp_path):
    """Half the budget is left after the first round, less than the whole run costs."""
    files = site_files(tmp_path, queries=34)
    settings = "training=dp_sgd", "answers=probabilities", "rounds=2", "queries_per_round=16"
    experiment = deployed(*settings, f"out={tmp_path}/runs", one=False)
    grid, folder = Hospitals(files), new_run_folder(experiment)
    federation = GridFederation(experiment, grid, folder)
    with pytest.raises(UserError, match="did not answer"):
        runs.run(experiment, federation, folder, lambda line: setattr(grid, "offline", {101}))
    grid.offline = set()
    server.start(grid, {"resume": str(folder)})
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    with pytest.raises(
        UserError, match=r"the number of images \(queries:\) left at this site is not"
    ):
        federate(experiment, grid)  # another run


def test_a_resumed_run_does_not_wait_for_a_hospital_that_was_revoked(
    deployed, tmp_path, clock, capsys
):
    experiment = deployed(*PLAIN, f"out={tmp_path}/runs", one=False)
    grid, folder = Hospitals(site_files(tmp_path)), new_run_folder(experiment)

    def revoke(line):
        grid.offline = {101}
        store_revoked(folder, 101)

    with pytest.raises(UserError, match=r"\(hospital 1: its node was revoked\)"):
        runs.run(experiment, GridFederation(experiment, grid, folder), folder, revoke)
    started = clock[0]
    longer = "federation.node_timeout_seconds=300"
    with pytest.raises(server.RunFailed, match="^hospital 1: its node was revoked. Nothing more"):
        server.start(grid, {"resume": str(folder), "overrides": longer})
    server.start(grid, {"resume": str(folder), "overrides": f"{longer} federation.min_clients=1"})
    assert clock[0] == started
    assert "· without hospital 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("enough", [1, 2])
def test_a_run_does_not_wait_for_a_hospital_that_was_revoked(deployed, tmp_path, clock, enough):
    """In the round in which it is revoked, too."""
    grid = Hospitals(site_files(tmp_path))
    experiment = deployed(*PLAIN, *PATIENT, f"federation.min_clients={enough}")
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, grid, folder)
    assert federation.total(request()).count == 2
    push, started = grid.push_messages, clock[0]

    def revoke(messages):
        if clock[0] > started:
            store_revoked(folder, 101)
        return push([message for message in messages if message.metadata.dst_node_id != 101])

    grid.push_messages = revoke
    grid.offline = {101}
    if enough == 1:
        assert federation.total(request(2)).refused == {1: "its node was revoked"}
    else:
        with pytest.raises(UserError, match=r"1 of 2 .* \(hospital 1: its node was revoked\); "):
            federation.total(request(2))
    assert clock[0] - started < 15  # of 60
    paid = charges(grid.files[100])
    if enough == 2:  # nobody is asked in vain
        with pytest.raises(UserError, match=r"1 of 2 hospitals refuse this run or are gone \(hosp"):
            federation.total(request(4))
        assert charges(grid.files[100]) == paid
    grid.push_messages, grid.offline = push, set()
    grid.files[202] = grid.files.pop(101)  # with a new key
    assert federation.total(request(3)).count == 2


def test_a_refusal_gives_the_others_no_less_time(deployed, tmp_path, clock):
    """Two of three must answer; one refuses, and one needs longer than the grace."""
    files = [site_file(tmp_path / f"{number}", number, num_clients=3) for number in range(3)]

    def slow(node, reply):
        late = node == 102 and reply.metadata.message_type == ANSWER and clock[0] < 150
        return None if late else reply

    settings = "num_clients=3", BOTH_NEEDED, "federation.round_timeout_seconds=1800"
    federation = federate(deployed(*PLAIN, *settings), Hospitals(files, slow))
    site_file(files[0].parent, 0, num_clients=3, answers=["label"])
    total = federation.total(request())
    assert (total.count, list(total.refused)) == (2, [0])


def test_a_refusal_ends_a_run_without_waiting_for_those_that_are_away(deployed, tmp_path, clock):
    grid = Hospitals(site_files(tmp_path))
    site_file(grid.files[101].parent, 1, answers=["label"])
    grid.offline = {100}
    needed = deployed(*PLAIN, "federation.node_timeout_seconds=300", one=False)
    with pytest.raises(UserError, match="^hospital 1: this site allows only answers=label"):
        federate(needed, grid)
    assert clock[0] < 1


def test_another_studys_hospital_of_the_same_number_ends_no_run(deployed, tmp_path, clock):
    """It refuses, and the right one introduces itself a little later."""
    files = site_files(tmp_path)
    other = site_file(tmp_path / "other", 0, num_clients=5)

    def late(node, reply):
        return None if node == 101 and clock[0] < 2 else reply

    grid = Hospitals([other, *files], late)
    waiting = "federation.node_timeout_seconds=300", "federation.retry_seconds=1"
    federation = federate(deployed(*PLAIN, *waiting, one=False), grid)
    assert federation.total(request()).count == 2


def test_a_ledger_that_cannot_be_read_ends_a_run_before_any_charge(deployed, tmp_path):
    files = site_files(tmp_path)
    experiment = deployed(*PLAIN, one=False)
    federate(experiment, Hospitals(files))  # the control
    folder = open_hospital(files[1]).folder / "ledger"
    (folder / "client_001.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match="^hospital 1: client 1 failed: see its log. Nothing was"):
        federate(experiment, Hospitals(files))
    assert not charges(files[0])


def test_a_training_that_was_paid_for_needs_no_second_budget(deployed, tmp_path):
    """The control: other training of the same cost does not fit."""
    files = site_files(tmp_path, budget=5.0, queries=1_000)
    settings = "training=dp_sgd", "answers=probabilities", "rounds=1"
    for seed in (0, 1):
        federation = federate(deployed(*settings, f"seed={seed}", one=False), Hospitals(files))
        assert federation.total(request(1 + seed)).count == 2
    with pytest.raises(UserError, match="the budget left at this site is not enough"):
        federate(deployed(*settings, "training.steps=101", one=False), Hospitals(files))


def test_a_cohort_of_a_run_that_needs_all_is_enough(deployed, tmp_path):
    """Hospitals that take part in few rounds need no budget for all rounds."""
    files = site_files(tmp_path, queries=20)
    settings = "clients_per_round=1", "rounds=3", "queries_per_round=16"
    federation = federate(deployed(*PLAIN, *settings, one=False), Hospitals(files))
    assert federation.total(request()).count == 1


def test_a_bad_resume_is_one_line(capsys):
    for run_config, problem in (
        ({"resume": "runs/x"}, "must be an absolute path"),
        ({"resume": "/nowhere"}, "/nowhere is not a run folder"),
        ({"resume": "/x", "num_clients": 3}, "num_clients is given with resume=/x"),
        ({"resume": "/x", "overrides": "federation.min_clients=1"}, "/x is not a run folder"),
    ):
        with pytest.raises(server.RunFailed, match=problem):
            server.start(Hospitals([]), run_config)
        assert capsys.readouterr().out.startswith("error: ")


KEPT = "is given with resume, but a run keeps its configuration"
SUMMED = (
    "num_clients=3",
    "answers.noise_at=distributed",
    "answers.quorum={threshold: 2, colluding: 0}",
)


@pytest.mark.parametrize(
    ("settings", "overrides", "problem"),
    [
        ((), "rounds=9", f"rounds=9 {KEPT}"),
        ((), "federation.simulation=true", f"simulation=true {KEPT}"),
        ((), "min_clients=1", f"min_clients=1 {KEPT}"),
        ((), "federation.min_clients=3", "=3 must be a number of hospitals from 1 to 2"),
        ((), "federation.min_clients=1 rounds=9", f"rounds=9 {KEPT}"),
        ((), "federation.grace_seconds=soon", "^federation.grace_seconds='?soon'? must be "),
        (("clients_per_round=1",), "federation.min_clients=2", "must be .* from 1 to 1"),
        (SUMMED, "federation.min_clients=1", "must be a number of hospitals from 2 to 3"),
    ],
)
def test_a_resumed_run_changes_only_its_deadlines_and_how_many_must_answer(
    deployed, tmp_path, settings, overrides, problem
):
    folder = new_run_folder(deployed(*PLAIN, *settings, f"out={tmp_path}/runs", one=False))
    with pytest.raises(server.RunFailed, match=problem):
        server.start(Hospitals([]), {"resume": str(folder), "overrides": overrides})
