"""The coordinator's side of Flower: the same bits whatever hosts the clients, and failures."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity

import client_app
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.engines.flower import client
from fed_dpsd.engines.flower import server as flower
from fed_dpsd.engines.flower.codec import Shares
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ConfigError, ProtocolError, UserError
from fed_dpsd.models import precision
from fed_dpsd.protocol import Request, Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL, contents
from tests.hospitals import PLAIN, charges, site_file
from tests.server.test_federation import request


@pytest.fixture(autouse=True)
def _flower_process(monkeypatch):
    """Messages can only be made inside a Flower process; this process claims to be one."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


class FakeGrid:
    """A grid whose nodes run the real client code in this process, answering in reverse order."""

    def __init__(self, nodes, break_reply=lambda reply: reply, lose=0):
        self.nodes, self.break_reply, self.lose = nodes, break_reply, lose
        self.pull_interval = 0.1
        self.node_config = {"partition-id": 0}
        self.sent = []

    def get_node_ids(self):
        return [100 + node for node in range(self.nodes)]

    def send_and_receive(self, messages, timeout=None):
        self.sent += messages
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            reply = client_app.app(message, SimpleNamespace(node_config=self.node_config))
            reply.metadata.__dict__["_src_node_id"] = node
            replies.append(self.break_reply(reply))
        return list(reversed(replies))[self.lose :]


def grid_run(experiment, nodes):
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, FakeGrid(nodes), folder)
    return runs.run(experiment, federation, folder, lambda line: None), federation


PRIVATE = ("training=dp_sgd", "training.steps=3", "model=scattering", "model.student_width=4")


def slowly(*settings):
    return pytest.param(settings, marks=pytest.mark.slow)


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    "settings",
    [
        ("training=plain", "answers=label"),
        ("training=plain", "answers=label", "precision=bfloat16"),
        slowly(*PRIVATE, "answers=probabilities"),
        slowly("training=plain", "answers=gradient", "answers.k=5", "teachers_per_client=3"),
    ],
    ids=" ".join,
)
def test_every_engine_and_number_of_nodes_gives_the_same_student(small, monkeypatch, settings):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)  # torch emulates it elsewhere
    experiment = small("num_clients=5", *settings)
    folder = new_run_folder(experiment)
    local = runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    for nodes in (1, 2, 7):
        summary, federation = grid_run(experiment, nodes)
        assert summary["student_sha256"] == local["student_sha256"]
        assert summary["queries"] == local["queries"]
        messages = federation._grid.sent
        asked = [m.content["request"]["kind"] for m in messages if "request" in m.content]
        counted = asked.count("counts") // min(nodes, 5)  # for the diagnosis, and for the method
        assert counted == (2 if "training=dp_sgd" in settings else 0)
        assert len(messages) == min(nodes, 5) * (experiment.config.rounds + 1 + counted)


@pytest.mark.parametrize("clients", [2, 3, 4])
def test_nodes_host_clients_in_turn(small, clients):
    experiment = small(f"num_clients={clients}")
    grid = FakeGrid(3)
    federation = GridFederation(experiment, grid, new_run_folder(experiment))
    assert sorted(federation.each(request())) == list(range(clients))
    hosted = {m.metadata.dst_node_id: [*m.content["meta"]["clients"]] for m in grid.sent}
    in_turn = {100 + node: [*range(node, clients, 3)] for node in range(min(3, clients))}
    assert hosted == in_turn


def test_no_more_nodes_than_gpu_shares_get_messages_and_each_names_the_shares(small, monkeypatch):
    experiment, grid, offered, taken = small("num_clients=3"), FakeGrid(5), Shares("a", 2, 1, 7), []
    monkeypatch.setattr(client.shares, "take_share", taken.append)
    federation = GridFederation(experiment, grid, new_run_folder(experiment), shares=offered)
    assert sorted(federation.each(request())) == [0, 1, 2]
    assert {message.metadata.dst_node_id for message in grid.sent} == {100, 101}
    assert taken == [offered, offered]


def test_weights_travel_where_the_method_ships_them(small):
    own = ("num_clients=1", "method.discriminator=teacher", "method.generator_steps=1")
    experiment = small("method=dpsd", *own)
    folder = new_run_folder(experiment)
    local = runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    assert grid_run(experiment, 1)[0]["student_sha256"] == local["student_sha256"]


def sent_bytes(content):
    """The bytes of a message's content, as Flower sends it."""
    return len(recorddict_to_proto(content).SerializeToString())


def test_an_answer_takes_few_bytes(small):
    """In messages of 1,000 queries; `-s` prints what results/time.md says."""
    for answers, payload in (
        ("answers=label", 10 * 1),
        ("answers=gradient answers.k=5", 10 * 8),
        ("answers=votes", 10 * 8),
        ("training=dp_sgd answers=probabilities training.steps=1 model=scattering", 10 * 4),
    ):
        experiment = small("training=plain", *answers.split(), "queries_per_round=1000")
        replies = []
        grid = FakeGrid(2, lambda reply, replies=replies: replies.append(reply) or reply)
        federation = GridFederation(experiment, grid, new_run_folder(experiment))
        grid.sent.clear()
        replies.clear()
        query = request(1_000)
        given = federation.each(query)
        assert all(isinstance(response, Response) for response in given.values())
        assert federation.bytes_to_server == 2 * 1_000 * payload, answers
        pixels, predictions = query.images.nbytes, query.predictions.nbytes
        assert (pixels, predictions) == (1_000 * 8 * 8, 1_000 * 4 * 10)
        for message, reply in zip(grid.sent, replies, strict=True):
            answered, asked = sent_bytes(reply.content), sent_bytes(message.content)
            more = asked - pixels - predictions
            print(f"{answers}: {answered / 1_000:.2f} bytes an answer, {more} more per request")
            assert 1_000 * payload < answered < 1_000 * payload + 600, answers
            assert more < 0.01 * 1_000 * 28 * 28  # 1 % of the pixels of such images


def test_a_nodes_clients_share_its_images(small):
    experiment = small("num_clients=5", "queries_per_round=500")
    federation = GridFederation(experiment, FakeGrid(2), new_run_folder(experiment))
    federation.each(query := request(500))
    asked = [sent_bytes(message.content) for message in federation._grid.sent]
    assert len(asked) == 2
    assert max(asked) < query.nbytes + 4_000 < 2 * query.images.nbytes


def test_refusals_are_counted_out_and_named(small):
    experiment = small("privacy.budget=0")
    federation = GridFederation(experiment, FakeGrid(2), new_run_folder(experiment))
    total = federation.total(request())
    assert total.count == 0
    assert total.refused == dict.fromkeys((0, 1), "the client's privacy budget is spent")


# --- what goes wrong ---


def failing(small, **grid):
    experiment = small("federation.round_timeout_seconds=1", "federation.node_timeout_seconds=0.2")
    return GridFederation(experiment, FakeGrid(**grid), new_run_folder(experiment))


def test_no_node_within_the_time_out(small):
    with pytest.raises(UserError, match=r"no node connected.*node_timeout_seconds=0.2; num-supern"):
        failing(small, nodes=0)


def test_a_lost_reply_is_an_error_with_the_client(small):
    with pytest.raises(UserError, match=r"\(client 1: no answer .*round_timeout_seconds=1"):
        failing(small, nodes=2, lose=1).each(request())
    with pytest.raises(UserError, match=r"clients \[1\] did not .*round_timeout_seconds=1"):
        list(failing(small, nodes=2, lose=1).diagnose())


def test_an_error_reply_names_the_clients(small):
    def broken(reply):
        metadata = Metadata(1, "", 100, 0, "", "", 0.0, 1.0, "query.answer")
        return Message(error=Error(2, "worker\ndied"), metadata=metadata)

    with pytest.raises(ProtocolError, match=r"hosts clients \[0, 1\] failed: worker died"):
        failing(small, nodes=1, break_reply=broken).each(request())


def test_foreign_code_is_refused(small):
    for foreign in ({}, {"code": "0" * 64, "error": "", "refusals": "{}"}):

        def replace(reply, foreign=foreign):
            content = {"answers": ArrayRecord({})}
            if foreign:
                content["meta"] = ConfigRecord(foreign)
            reply.content = RecordDict(content)
            return reply

        with pytest.raises(ProtocolError, match="runs different code from this server"):
            failing(small, nodes=1, break_reply=replace).each(request())


def test_a_client_failure_is_one_line_in_a_simulation(small, caplog):
    caplog.set_level(logging.CRITICAL)
    wrong = Request(1, np.zeros((4, 1, 12, 12), np.uint8), np.full((4, 10), 0.1, np.float32))
    with pytest.raises(ProtocolError, match=r"client 0 failed: ProtocolError: images have shape"):
        failing(small, nodes=1).each(wrong)


def test_a_node_that_is_no_simulations_answers_nothing(small):
    """Its configuration would come with the message, so a sender could raise its budget."""
    experiment = small()
    grid = FakeGrid(1)
    federation = GridFederation(experiment, grid, new_run_folder(experiment))
    grid.node_config = {}
    with pytest.raises(ProtocolError, match=r"not part of a simulation.*--node-config 'site="):
        federation.each(request())
    grid.node_config = {"simulation": True}
    assert len(federation.each(request())) == 2


# --- the server app ---


def test_the_server_app_runs_and_prints_its_result(small, tmp_path, capsys):
    overrides = " ".join(override for override in SMALL if "num_clients" not in override)
    config = {"num_clients": 2, "out": str(tmp_path / "out"), "overrides": overrides}
    flower.start(FakeGrid(2), config)
    *_, result, folder = capsys.readouterr().out.strip().splitlines()
    assert result.startswith("result: student ")
    folder = Path(folder.removeprefix("run folder: "))
    assert folder.parent == tmp_path / "out"
    before = contents(folder)
    flower.start(FakeGrid(0), {"resume": str(folder)})
    assert contents(folder) == before
    said = ["already completed; nothing to do", result, f"run folder: {folder}"]
    assert capsys.readouterr().out.splitlines() == said
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(flower.RunFailed, match="checkpoint, with the student, is missing"):
        flower.start(FakeGrid(0), {"resume": str(folder)})


@pytest.mark.slow
def test_warnings_are_those_of_the_command_line(tmp_path, capsys):
    flat = {"training": "plain", "budget": 5000.0, "num_clients": 900, "out": str(tmp_path)}
    with pytest.raises(flower.RunFailed, match="num_clients=900"):
        flower.start(FakeGrid(1), flat)
    assert capsys.readouterr().out.startswith("error: num_clients=900")
    assert not list(tmp_path.iterdir())
    flat = {"num_clients": 3, "out": str(tmp_path)}
    flat |= {"overrides": "federation.node_timeout_seconds=0.1"}
    large = "warning: delta=0.01 is too large for the "
    unused = "warning: partition: "
    spent = "warning: budget=5000 is less than this run needs, "
    for changes, expected in (
        ({"training": "plain", "budget": 5000.0}, [spent]),
        ({"delta": 1e-5}, []),
        ({"delta": 0.01}, [large]),
        ({"partition": "class"}, [unused]),
    ):
        with pytest.raises(flower.RunFailed, match="no node connected"):
            flower.start(FakeGrid(0), flat | changes)
        lines = capsys.readouterr().out.splitlines()
        warnings = [line for line in lines if line.startswith((large, unused, spent))]
        assert len(warnings) == len(expected), (changes, lines)
        assert all(map(str.startswith, warnings, expected)), (changes, lines)
        assert all("6 of 10 classes have no client" in w for w in warnings if unused in w)


FAILURES = [
    ({"num_clients": 0}, 1, "num_clients=0 must be >= 1"),
    ({"num_clients": 900}, 1, "num_clients=.* works here"),
    ({"overrides": "federation.node_timeout_seconds=0.1"}, 0, "no node connected"),
    ({"overrides": "device=cuda"}, 1, "^device=cuda: this machine has no usable GPU"),
    ({"overrides": "server_device=cuda"}, 1, "^server_device=cuda: this machine has no usable"),
    ({"budget": 0.5}, 1, "^budget=0.5 is less than this run needs, .*; raise it"),
    ({"cache": "/proc/nope"}, 1, "^cache=/proc/nope is not writable; choose another folder"),
    ({"seed": "x", "rounds": 0}, 1, "^seed=x must be an integer; rounds=0 must be >= 1"),
    ({"experiment": "table5"}, 1, "^experiment=table5 is a grid of [0-9]+ runs: fed-dpsd"),
]


@pytest.mark.slow
def test_the_server_app_fails_with_one_line_and_no_traceback(tmp_path, capsys, caplog):
    caplog.set_level(logging.CRITICAL)
    for run_config, nodes, expected in FAILURES:
        with pytest.raises(flower.RunFailed, match=expected) as caught:
            flower.start(FakeGrid(nodes), run_config | {"out": str(tmp_path)})
        assert caught.value.__traceback__ is None
        assert "\n" not in str(caught.value)
        assert "error: " in capsys.readouterr().out
    for summary in tmp_path.glob("*/summary.json"):
        assert '"status": "failed"' in summary.read_text()


def test_any_cause_of_a_failed_start_is_one_line(tmp_path, capsys, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    for error, expected in (
        (RuntimeError("CUDA error:\nout"), "RuntimeError: CUDA error: out"),
        (ConfigError(["a=1 is wrong", "b=2 too"]), "a=1 is wrong; b=2 too"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(flower, "prepare", fail)
        with pytest.raises(flower.RunFailed, match=f"^{expected}"):
            flower.start(FakeGrid(1), {"out": str(tmp_path)})
        assert capsys.readouterr().out.startswith(f"error: {expected.partition(';')[0]}")


def test_a_resumed_run_prints_its_devices_as_a_new_one_does(small, capsys, monkeypatch):
    def stop(*_):
        raise UserError("stopped")

    folder = new_run_folder(small("client_device=auto"))
    monkeypatch.setattr(flower, "serve", stop)
    for run_config in ({"resume": str(folder)}, {"num_clients": 2}):
        with pytest.raises(flower.RunFailed, match="stopped"):
            flower.start(FakeGrid(3), run_config)
        assert capsys.readouterr().out.splitlines()[:3] == [
            "2 clients on 3 nodes",
            "devices: clients compute on the CPU; the server computes on the CPU",
            "error: stopped",
        ]


def test_a_hospital_refuses_a_simulation_and_the_run_says_so(small, tmp_path):
    """Its budget would be spent on a run that then fails."""
    file = site_file(tmp_path / "hospital", num_clients=1)
    experiment = small(*PLAIN, "num_clients=1")
    grid = FakeGrid(1)
    grid.node_config = {"site": str(file)}
    federation = GridFederation(experiment, grid, new_run_folder(experiment))
    with pytest.raises(ProtocolError, match="node 100 is a hospital; run with federation=deploy"):
        federation.each(request())
    assert charges(file) == []
    raw = json.loads(experiment.to_json())
    with pytest.raises(NotAllowed, match="^this is a hospital; run with federation=deployment$"):
        open_hospital(file).experiment(json.dumps(raw), 16)
    raw["federation"]["simulation"] = False  # the control
    assert open_hospital(file).experiment(json.dumps(raw), 16)


@pytest.mark.slow
def test_secret_noise_on_every_engine(small, tmp_path):
    """Two runs have two secrets; with the same one they are the same run, whatever hosts it."""
    experiment = small("training=plain", "answers=gradient", "noise=secure")
    first, _ = grid_run(experiment, 2)
    second, _ = grid_run(experiment, 2)
    assert first["student_sha256"] != second["student_sha256"]
    assert "seeded noise" not in first["privacy"]["proven"][0]["notes"]
    kept = small("training=plain", "answers=gradient", "noise=secure", f"ledger={tmp_path}/ledger")
    on_grid, _ = grid_run(kept, 2)
    for path in (tmp_path / "ledger").iterdir():  # its secret stays, its answers go
        if path.name != "secret":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder = new_run_folder(kept)
    local = runs.run(kept, LocalFederation(kept, folder), folder, lambda line: None)
    assert local["student_sha256"] == on_grid["student_sha256"]


@pytest.mark.parametrize(
    "noise_at", ["client", pytest.param("distributed", marks=pytest.mark.slow)]
)
def test_sums_of_gradients_are_the_same_on_every_engine(small, tmp_path, noise_at):
    experiment = small(
        *("method=dp_fedsgd", "answers=clipped_gradients", "model=scattering", "num_clients=3"),
        *("diagnostics=false", f"answers.noise_at={noise_at}"),
        *["answers.quorum={threshold: 3, colluding: 1}"] * (noise_at == "distributed"),
    )
    digests = set()
    for nodes in (None, 1, 2):
        folder = tmp_path / f"{nodes}"
        if nodes:
            federation = GridFederation(experiment, FakeGrid(nodes), folder)
        else:
            federation = LocalFederation(experiment, folder)
        summary = runs.run(experiment, federation, folder, lambda line: None)
        digests.add(summary["student_sha256"])
        assert summary["privacy"]["proven"][0]["trust"] == (
            "threshold" if noise_at == "distributed" else "nobody"
        )
    assert len(digests) == 1
