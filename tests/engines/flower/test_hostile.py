"""Attempts of a hostile coordinator or hospital to misuse messages."""

import json
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict

from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client.site import Site
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.engines.flower import codec
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.secure_sum import sealed_size
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.server.run_folder import new_run_folder
from tests.hospitals import (
    PLAIN,
    Hospitals,
    answer,
    charges,
    federate,
    request,
    site_file,
    site_files,
    summing,
)

COUNTS = "training=dp_sgd", "answers=probabilities", "training.steps=2", "model.teacher=scattering"
SUMMED = (
    *("num_clients=5", *PLAIN, "answers.noise_at=distributed"),
    "answers.quorum={threshold: 3, colluding: 0}",
)


WEIGHTS = "training=plain", "answers=probabilities", "teacher.same_start=true"


def imageless(kind, *more):
    return Request.without_images(kind, (1, 8, 8), 10, *more)


def seeds(experiment, count):
    """The experiment as text, with that many seeds of its teachers."""
    raw = json.loads(experiment.to_json())
    for seed in range(count):
        raw["teacher"]["seed"] = seed
        yield json.dumps(raw)


def on_disk(hospital):
    return sorted((hospital.folder / "cache" / "teachers").glob("*"))


# --- a coordinator ---


@pytest.mark.parametrize("admitted", [False, True], ids=["ours", "control"])
@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (PLAIN, {"budget": 0.0}),
        (COUNTS, {"queries": 16}),  # and one for the training
        (("method=fedavg", *WEIGHTS), {}),
    ],
    ids=["budget", "queries", "weights"],
)
def test_a_hospital_trains_for_no_request_that_it_would_refuse(
    deployed, tmp_path, monkeypatch, overrides, changes, admitted
):
    """Otherwise anyone could use its processor and disk. The control checks the budget later."""
    if admitted:
        monkeypatch.setattr(Site, "admit", lambda site, request: None)
    allowed = {"methods": ["fed_dpsd", "fedavg"], "answers": ["gradient", "probabilities"]}
    hospital = hospitals.open_hospital(site_file(tmp_path, **allowed, **changes))
    for text in seeds(deployed(*overrides), 2):
        query = imageless("weights") if "method=fedavg" in overrides else request()
        assert isinstance(answer(hospital, text, query), Refusal)
    assert bool(on_disk(hospital)) == admitted
    assert bool(charges(hospital)) == (admitted and overrides == COUNTS)


def test_old_teachers_are_deleted(deployed, tmp_path, monkeypatch):
    monkeypatch.setattr(hospitals, "KEPT", 2)
    hospital = hospitals.open_hospital(site_file(tmp_path))
    texts = list(seeds(deployed(*PLAIN, "teacher.epochs=0"), 5))
    answer(hospital, texts[0], request())
    (used,) = on_disk(hospital)
    for query, text in enumerate(texts[1:]):
        assert isinstance(answer(hospital, text, request()), Response)
        assert isinstance(answer(hospital, texts[0], request(2 + query)), Response)
        assert used in on_disk(hospital)  # what is used stays
        assert len(on_disk(hospital)) <= 2 + 1 + 1  # and what was just trained


def test_requests_without_images_count_too(deployed, tmp_path):
    """Otherwise an answer without images would be free, yet add a line to the ledger."""
    hospital = hospitals.open_hospital(site_file(tmp_path, queries=3))
    with pytest.raises(ProtocolError, match="answers with 0 images"):
        imageless("answers")
    first, other = seeds(deployed(*COUNTS), 2)
    asked = imageless("counts")
    assert isinstance(answer(hospital, first, asked), Response)
    unplanned = answer(replace(hospital, queries=4), other, asked)
    assert (
        unplanned.reason == "unplanned: this run would cost the client 2 releases of class_counts"
    )
    asked = replace(asked, acknowledged={"dp_sgd": 2, "class_counts": 2})
    refused = answer(hospital, other, asked)  # one for the training, and one for its counts
    assert refused.reason == "the client has reached its lifetime query limit"
    assert charges(hospital) == ["training", "counts"]
    assert isinstance(answer(replace(hospital, queries=4), other, asked), Response)
    assert charges(hospital) == 2 * ["training", "counts"]


def test_a_reason_is_one_printable_line(deployed, tmp_path, caplog):
    """What a message holds must not look like another line of a hospital's log."""
    raw = json.loads(deployed(*PLAIN).to_json())
    raw["a\nsite: budget check passed\x1b[31m" + "x" * 1_000] = 1
    grid = Hospitals(site_files(tmp_path))
    federation = federate(deployed(*PLAIN), grid)
    federation._text = json.dumps(raw)
    asked = {100: codec.pack_request(request())}
    with caplog.at_level(logging.WARNING):
        replies = federation._exchange(codec.ANSWER, 1, asked, {100: [0]})
    (line,) = (record.getMessage() for record in caplog.records)
    reason = replies[0].reason
    escaped = r"a\nsite: budget check passed\x1b[31mxxx"
    assert reason.startswith(f"the experiment is malformed: {escaped}")
    assert reason.isprintable()
    assert len(reason) == codec.LONGEST_REASON
    assert line.endswith(f": round 1, answers to 16 images: refused: {reason}; nothing was charged")
    assert line.isprintable()


def test_a_number_is_no_box():
    """`bytes` of a number would be that many zeros."""
    about = ConfigRecord({"request": "x", "named": [0]})
    huge = ConfigRecord({"0": 2**40})
    step = RecordDict({"step 0": about, "proofs 0": huge, "sealed 0": ConfigRecord()})
    with pytest.raises(ProtocolError, match="malformed"):
        codec.unpack_step(step, 0)
    reply = codec.pack_replies({0: codec.Reply()})
    reply["boxes 0"] = huge
    with pytest.raises(ProtocolError, match="malformed"):
        codec.unpack_replies(reply, [0])


def test_a_retraining_is_answered_again_and_another_is_refused_before_it(deployed, tmp_path):
    """Two training runs, the weights and the retrained ones are four of five queries."""
    settings = "method=dp_fedavg", *COUNTS, "teacher.same_start=true"
    text = deployed(*settings).to_json()
    file = site_file(tmp_path, methods=["dp_fedavg"], queries=5)
    hospital = hospitals.open_hospital(file)
    first = answer(hospital, text, imageless("weights"))
    weights = first.values[:, 0].astype(np.float32)
    train = imageless("train", 2, weights)
    assert all(isinstance(answer(hospital, text, train), Response) for _ in range(2))
    another = imageless("train", 2, 2 * weights)  # of the same number
    assert isinstance(answer(hospital, text, another), Refusal)
    assert charges(hospital) == ["training", "weights", "training", "train"]


def test_who_was_away_in_the_first_round_is_charged_for_what_it_trains(deployed, tmp_path):
    hospital = hospitals.open_hospital(site_file(tmp_path, methods=["dp_fedavg"]))
    experiment = deployed("method=dp_fedavg", *COUNTS, "teacher.same_start=true")
    start = to_vector(make_teacher(experiment.config, 0, 0)).detach().numpy()
    train = imageless("train", 2, start)
    assert isinstance(answer(hospital, experiment.to_json(), train), Response)
    assert charges(hospital) == ["training", "train"]


def test_a_resumed_run_keeps_a_sum_and_another_run_is_another_charge(deployed, tmp_path):
    """Otherwise the mean over runs would show the sum that each hospital was charged for once."""
    experiment = deployed(*PLAIN, "answers.noise_at=server")
    files = site_files(tmp_path, trust=["server"])
    folder, grid = new_run_folder(experiment), Hospitals(files)
    first = GridFederation(experiment, grid, folder).total(request())
    resumed = GridFederation(experiment, grid, folder)
    grid.offline = {101}  # which hospitals are there does not matter
    again = resumed.total(request())
    assert np.array_equal(first.sum, again.sum)
    assert (first.count, again.count) == (2, 2)
    assert not np.isclose(first.sum, resumed.total(request(2)).sum).any()
    assert charges(files[0]) == ["answers"] * 2
    grid.offline = set()
    another = federate(experiment, grid).total(request())
    assert not np.isclose(first.sum, another.sum).any()
    assert charges(files[0]) == ["answers"] * 3
    shutil.rmtree(folder)  # and the coordinator's secret with it
    renewed = deployed(*PLAIN, "answers.noise_at=server", f"run_folder={folder}")
    same_name = GridFederation(renewed, grid, new_run_folder(renewed)).total(request())
    assert not np.isclose(first.sum, same_name.sum).any()
    assert charges(files[0]) == ["answers"] * 4


def test_patients_are_promised_only_by_hospitals_that_know_them(deployed, tmp_path):
    """The coordinator's epsilons for a patient assume shards by patient."""
    text = deployed(*PLAIN, "+data.patient_column=patient").to_json()
    hospital = hospitals.open_hospital(site_file(tmp_path))
    refused = answer(hospital, text, request())
    assert refused.reason == "this site has no patient column: data.patient_column must be null"
    known = replace(hospital, files=replace(hospital.files, patient_column="patient"))
    assert isinstance(answer(known, text, request()), Response)


# --- a hospital ---


def test_an_error_without_a_reason_is_an_absence(deployed, tmp_path):
    def lie(node, reply):
        failed = node == 101 and reply.metadata.message_type == codec.ANSWER
        return Message(error=Error(2, None), metadata=reply.metadata) if failed else reply

    files = site_files(tmp_path)
    total = federate(deployed(*PLAIN), Hospitals(files, lie)).total(request())
    assert total.count == 1
    assert "no reason given" in total.refused[1]


@pytest.mark.slow
def test_a_hospital_that_states_most_records_is_shown(deployed, tmp_path, caplog):
    """Its answers would weigh more than all others; each share is shown only when it is new."""
    stated, said = {100: 30.0, 101: 10.0, 102: 1e300}, []

    def state(node, reply):
        if "values" in reply.content:
            reply.content["values"][f"{node - 100}"] = Array(np.full((1, 10), stated[node]))
        return reply

    grid = Hospitals(site_files(tmp_path, 3, num_clients=3), state)
    grid.offline = {102}
    experiment = deployed(*COUNTS, "num_clients=3")
    federation = GridFederation(experiment, grid, new_run_folder(experiment), said.append)
    federation.each(imageless("counts"))
    assert "states" not in caplog.text
    grid.offline = set()
    for _ in range(2):
        federation.each(imageless("counts"))
    assert [line for line in said if "shares" in line] == [
        "shares of the stated records: hospital 0 75.0%, hospital 1 25.0%",
        "shares of the stated records: hospital 0 0.0%, hospital 1 0.0%, hospital 2 100.0%",
    ]
    warned = [line for line in caplog.messages if "states" in line]
    assert warned == ["hospital 2 states more records than all others together"]


def sealing(size):
    """A reply of node 104 whose sealed shares have this size, or their own if it is None."""

    def lie(node, reply):
        if node == 104 and reply.metadata.message_type == codec.ANSWER:
            sealed = reply.content["boxes 4"]
            boxes = {name: bytes(len(sealed[name]) if size is None else size) for name in sealed}
            reply.content["boxes 4"] = ConfigRecord(boxes)
        return reply

    return lie


@pytest.mark.slow
def test_a_client_that_seals_no_shares_is_left_out_of_the_sum(deployed, tmp_path):
    files = summing(tmp_path, clients=5)
    for size in (0, 7, sealed_size(5) + 1):
        federation = federate(deployed(*SUMMED), Hospitals(files, sealing(size)))
        assert federation.total(request()).count == 4, size


@pytest.mark.slow
def test_a_client_that_spoils_a_sum_is_named(deployed, tmp_path, caplog):
    grid = Hospitals(summing(tmp_path, clients=5), sealing(None))
    federation = federate(deployed(*SUMMED), grid)
    spoiled = pytest.raises(UserError, match="another run; .* without that client")
    with caplog.at_level(logging.WARNING), spoiled:
        federation.total(request())
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "client 0 takes no part in a sum: the shares of party 4 were tampered with" in logged
    grid.offline = {104}
    again = federate(deployed(*SUMMED, "seed=1"), grid)  # another run
    assert again.total(request()).count == 4


STRUCTURED = np.dtype([("a", np.float32)])


BAD = {
    "nan": lambda values: values * np.nan,
    "too large for float32": lambda values: values + 1e300,
    "short": lambda values: values[:-1],
    "flat": lambda values: values[:, 0],
    "text": lambda values: np.full(values.shape, "x"),
    "structured": lambda values: values.astype(np.float32).view(STRUCTURED),
}


@pytest.mark.slow
def test_bad_weights_are_left_out_and_in_a_simulation_an_error(deployed, small, tmp_path):
    spoil = None

    def lie(node, reply):
        if node == 101 and reply.metadata.message_type == codec.ANSWER:
            found = reply.content["values"]["1"].numpy().astype(np.float64)
            reply.content["values"]["1"] = Array(spoil(found))
        return reply

    class Diverged(LocalFederation):
        def _deliver(self, request):
            answers = super()._deliver(request)
            bad = spoil(answers[1].values.astype(np.float64))
            return answers | {1: replace(answers[1], values=bad)}

    settings = "method=dp_fedavg", *COUNTS, "teacher.same_start=true"
    grid = Hospitals(site_files(tmp_path, methods=["dp_fedavg"]), lie)
    simulated = small(*settings)
    local = Diverged(simulated, new_run_folder(simulated))
    for name in BAD:
        spoil = BAD[name]
        given = federate(deployed(*settings), grid).each(imageless("weights"))
        assert isinstance(given[0], Response), name
        assert isinstance(given[1], Refusal), name
        with pytest.raises(ProtocolError, match="client 1 sent invalid weights"):
            local.each(imageless("weights"))


# --- what a hospital reports ---


def test_a_training_in_each_round_is_lacking_although_the_first_is_paid(deployed, tmp_path):
    hospital = hospitals.open_hospital(
        site_file(tmp_path, methods=["dp_fedavg"], budget=4.0, models=["scattering"])
    )
    settings = "method=dp_fedavg", *COUNTS, "teacher.same_start=true", "training.steps=100"
    wanted = deployed(*settings, "rounds=10")
    experiment = hospital.experiment(wanted.to_json(), 0)
    assert hospital.open(experiment, "check").exceeded_limit() == "budget"
    first = answer(hospital, wanted.to_json(), imageless("weights"))
    assert isinstance(first, Response)
    assert hospital.open(experiment, "check").exceeded_limit() == "budget"
    one = hospital.experiment(deployed(*settings, "rounds=1").to_json(), 0)
    assert hospital.open(one, "check").exceeded_limit() == ""


def test_queries_are_lacking_where_a_run_has_more(deployed, tmp_path):
    text = deployed(
        "training=dp_sgd", "answers=probabilities", "rounds=2", "queries_per_round=16"
    ).to_json()
    for queries, lacking in ((33, "queries"), (34, "")):  # training and class counts are one each
        hospital = hospitals.open_hospital(site_file(tmp_path, queries=queries))
        experiment = hospital.experiment(text, 0)
        assert hospital.open(experiment, "check").exceeded_limit() == lacking
