"""Secure sums over hospitals."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from scipy import stats

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.accounts.words import against
from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client import site as sites
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.losses import decoupled_kd_gradient
from fed_dpsd.privacy.events import ShuffledResponseDpEvent
from fed_dpsd.protocol import Refusal, Response, SumStep
from fed_dpsd.server.run_folder import new_run_folder
from tests.hospitals import (
    DISTRIBUTED,
    PLAIN,
    Hospitals,
    answer,
    charges,
    federate,
    request,
    summing,
)
from tests.ledgers import entries_of
from tests.privacy.ideals import ideal


def exact_sum(files, experiment, query):
    """What the noise is added to."""
    total = 0
    for file in files:
        hospital = hospitals.open_hospital(file)
        site = hospital.open(hospital.experiment(experiment.to_json(), 16), "exact")
        probabilities = site.sensitive_probabilities(query.images)
        gradients = [
            decoupled_kd_gradient(p, query.predictions, experiment.method.balance)
            for p in probabilities
        ]
        total += sum(
            experiment.answers.constrain_sensitivity(g, query.predictions) for g in gradients
        )
    return total


@pytest.mark.parametrize("offline", [set(), {101}])
def test_a_secure_sum_over_hospitals(deployed, tmp_path, offline):
    """Over the hospitals present; each message looks uniform. The noise is almost zero here."""
    files = summing(tmp_path, budget=1e15)
    experiment = deployed(*DISTRIBUTED, "answers.noise_multiplier=1e-3")
    grid = Hospitals(files)
    federation = federate(experiment, grid)
    grid.offline = offline
    total = federation.total(request())
    there = [file for node, file in grid.files.items() if node not in offline]
    assert total.count == len(there)
    expected = exact_sum(there, experiment, request())
    assert np.abs(total.sum - expected).max() < 0.01 * np.abs(expected).max()
    sent = [
        reply.content["values"][client].numpy()
        for reply in grid.replies.values()
        if reply and reply.metadata.message_type == "query.answer"
        for client in reply.content["values"]
    ]
    assert all(values.dtype == np.uint64 for values in sent)
    assert stats.kstest(np.stack(sent).ravel() / 2.0**64, "uniform").pvalue > 1e-6


def test_responses_are_counted_in_a_secure_sum(deployed, tmp_path):
    """Almost all are true, so the counts equal the counts of the teachers' classes."""
    experiment = deployed(
        *("num_clients=3", "training=plain", "answers=label", "answers.noise_at=distributed"),
        *("answers.quorum={threshold: 2, colluding: 0}", "answers.epsilon_per_answer=20"),
    )
    files = summing(tmp_path, budget=1e6)
    total = federate(experiment, Hospitals(files)).total(request())
    expected = np.zeros((16, 10))
    for file in files:
        hospital = hospitals.open_hospital(file)
        site = hospital.open(hospital.experiment(experiment.to_json(), 16), "exact")
        classes = site.sensitive_probabilities(request().images)[0].argmax(1)
        expected[np.arange(16), classes] += 1
    assert np.array_equal(total.sum, expected)
    (entry,) = entries_of(hospitals.open_hospital(files[0]).ledger)
    cost = ideal(entry.costs["record", "replace_one"])
    assert cost == ShuffledResponseDpEvent(20.0, 10, 2)
    assert entry.trust == "threshold"


def test_the_sums_noise_has_the_promised_law(deployed, tmp_path):
    """With one hospital away it is the whole noise, of `threshold` shares. The control: a share."""
    experiment = deployed(*DISTRIBUTED, "queries_per_round=600", "answers.noise_multiplier=100")
    files = summing(tmp_path, budget=1e3, queries=10_000)
    grid = Hospitals(files)
    federation = federate(experiment, grid)
    grid.offline = {102}
    noise = (federation.total(request(count=600)).sum / experiment.answers.bound).ravel()
    assert stats.kstest(noise, stats.norm(scale=100).cdf).pvalue > 1e-6
    assert stats.kstest(noise, stats.norm(scale=100 / 2**0.5).cdf).pvalue < 1e-6


def test_too_few_for_a_sum_is_an_error_and_nothing_is_unmasked(deployed, tmp_path):
    files = summing(tmp_path)
    grid = Hospitals(files)
    federation = federate(deployed(*DISTRIBUTED), grid)
    grid.offline = {101, 102}
    with pytest.raises(
        UserError, match="1 clients answered; 2 are needed; no part of it was revealed"
    ):
        federation.total(request())
    assert not any(
        reply and reply.metadata.message_type == "query.step" for reply in grid.replies.values()
    )
    grid.offline = set()
    assert federation.total(request()).count == 3


def test_a_hospital_confirms_one_set_of_names_and_sums_only_what_it_has_masked(deployed, tmp_path):
    files = summing(tmp_path)
    experiment = deployed(*DISTRIBUTED)
    hospital = hospitals.open_hospital(files[0])
    site = hospital.open(hospital.experiment(experiment.to_json(), 16), "run")
    step = SumStep(request().digest, (0, 1, 2))
    with pytest.raises(ProtocolError, match="does not take part in that sum"):
        sites.take_step(site, step)
    first = sites.answer(experiment.method, request(), site)
    again = sites.answer(experiment.method, request(), site)
    assert (first.values == again.values).all()
    assert first.sealed == again.sealed
    assert sites.take_step(site, step) == sites.take_step(site, step)
    with pytest.raises(ProtocolError, match="has confirmed other names"):
        sites.take_step(site, replace(step, named=(0, 1)))
    with pytest.raises(ProtocolError, match="parties received these names"):
        sites.take_step(site, replace(step, proofs={0: b"", 1: b"", 2: b""}))
    other_run = hospital.open(hospital.experiment(experiment.to_json(), 16), "another run")
    with pytest.raises(ProtocolError, match="does not take part in that sum"):
        sites.take_step(other_run, step)


def test_a_site_says_whom_it_trusts(deployed, tmp_path):
    for changes, reason in (
        ({"trust": ["nobody"]}, "needs threshold in trust:"),
        ({"colluding": 1}, "sums must withstand 1 colluding clients"),
    ):
        hospital = hospitals.open_hospital(summing(tmp_path, **changes)[0])
        given = answer(hospital, deployed(*DISTRIBUTED).to_json(), request())
        assert isinstance(given, Refusal), changes
        assert reason in given.reason


def test_the_card_says_against_whom_a_sum_holds(deployed):
    for threshold, colluding in ((2, 0), (3, 1)):
        quorum = f"answers.quorum={{threshold: {threshold}, colluding: {colluding}}}"
        experiment = deployed(*DISTRIBUTED, quorum)
        card = privacy_card(experiment, experiment.plan)
        assert card["colluding"] == colluding
        assert card["observers"][0]["observer"] == against("threshold", colluding)
    alone = deployed("num_clients=3", *PLAIN)
    assert privacy_card(alone, alone.plan)["observers"] == []


def test_a_bad_key_is_an_error_before_anything_is_charged(deployed, tmp_path):
    text, files = deployed(*DISTRIBUTED).to_json(), summing(tmp_path)
    hospital = hospitals.open_hospital(files[0])
    keys = hospital.keys
    for bad, problem in (
        (keys[::-1], "the public key of party 0 does not match its private"),
        ((*keys[:2], "00" * 32), "the public key of party 2 is invalid"),
    ):
        refusal = answer(replace(hospital, keys=bad), text, request())
        assert refusal.reason.startswith(f"keys: {problem}")
    assert not charges(hospital)


def test_lists_of_keys_in_different_orders_end_a_run_before_any_charge(deployed, tmp_path, clock):
    """Also if fewer hospitals are needed: it is unknown which list is right."""
    files = summing(tmp_path)
    first, second, third = yaml.safe_load(files[2].read_text())["keys"]
    for keys, equal in (
        ([first, f" {second.upper()}", third], True),
        ([second, first, third], False),
    ):
        settings = yaml.safe_load(files[2].read_text())
        files[2].write_text(yaml.safe_dump(settings | {"keys": keys}))
        digests = [hospitals.open_hospital(file).digest_of_keys for file in files]
        assert digests[0] == digests[1]
        assert (digests[1] == digests[2]) == equal
        for least in (3, 2):
            experiment = deployed(*DISTRIBUTED, f"federation.min_clients={least}")
            if equal:
                federate(experiment, Hospitals(files))
                continue
            with pytest.raises(UserError) as caught:
                federate(experiment, Hospitals(files))
            listed = f"hospitals 0, 1: {digests[0][:16]}; hospital 2: {digests[2][:16]}"
            assert f"content or order ({listed}). Nothing was charged. " in str(caught.value)
    assert clock[0] == 0
    assert not any(map(charges, files))


def test_keys_are_compared_only_for_secure_sums(deployed, tmp_path):
    def lie(node, reply):
        if node == 100 and reply.metadata.message_type == "query.hello":
            reply.content["meta"]["keys"] = "x"
        return reply

    files = summing(tmp_path, trust=["nobody"])
    federation = federate(deployed(*PLAIN, "num_clients=3"), Hospitals(files, lie))
    assert federation.total(request()).count == 3


def test_a_run_is_not_resumed_with_fewer_than_a_sum_needs(deployed, tmp_path, clock):
    grid = Hospitals(summing(tmp_path))
    federation = federate(deployed(*DISTRIBUTED, one=False), grid)
    for offline, remedy in (({102}, "overrides federation.min_clients=2"), ({101, 102}, "the run")):
        grid.offline = offline
        with pytest.raises(UserError, match=f"then resume .*{remedy}$"):
            federation.total(request(1 + len(offline)))


def test_another_run_gets_other_noise_for_another_charge(deployed, tmp_path):
    """Two sums of one answer, over other hospitals, would reveal one hospital's answer."""
    hospital = hospitals.open_hospital(summing(tmp_path)[0])
    text, noise = deployed(*DISTRIBUTED).to_json(), []
    for run in ("one", "one", "two"):
        experiment = hospital.experiment(text, 16)
        site = hospital.open(experiment, run)
        assert isinstance(sites.answer(experiment.method, request(), site), Response)
        with site.ledger.transaction():
            entries = site.ledger.entries()
            noise.append(site.ledger.stored_answer(entries[-1].digest))
    assert len(entries) == 2
    assert np.array_equal(noise[0], noise[1])
    assert not np.isclose(noise[0], noise[2]).any()


def test_a_resumed_run_requests_the_same_sum(deployed, tmp_path):
    """Killed after some or all have confirmed: the names stay, whichever hospitals are there."""
    files = summing(tmp_path, budget=1e15)
    experiment = deployed(*DISTRIBUTED, "answers.noise_multiplier=1e-3")
    grid = Hospitals(files)
    for query, before, after in ((1, {102}, set()), (2, set(), {102})):
        folder = new_run_folder(experiment)
        grid.offline = before
        first = GridFederation(experiment, grid, folder).total(request(query))
        grid.offline = set()
        resumed = GridFederation(experiment, grid, folder)
        grid.offline = after  # what it sent is kept, and opened
        again = resumed.total(request(query))
        assert np.array_equal(again.sum, first.sum)
        assert first.count == again.count == 3 - len(before)


def test_hospitals_that_count_patients_and_records_are_summed(deployed, tmp_path):
    files = summing(tmp_path)
    raw = yaml.safe_load(files[0].read_text())
    raw["files"]["patient_column"] = "patient"
    files[0].write_text(yaml.safe_dump(raw))
    assert federate(deployed(*DISTRIBUTED), Hospitals(files)).total(request()).count == 3


def test_no_answer_is_in_two_sums_where_the_federation_grows(deployed, tmp_path):
    """Two sums of one answer would show it, with only its share of the noise."""
    kept = []
    for clients in (3, 4):
        hospital = hospitals.open_hospital(summing(tmp_path, clients)[0])
        experiment = deployed(
            *DISTRIBUTED,
            f"num_clients={clients}",
            "answers.quorum={threshold: 3, colluding: 0}",
        )
        site = hospital.open(hospital.experiment(experiment.to_json(), 16), "run")
        assert isinstance(sites.answer(experiment.method, request(), site), Response)
        kept.append([entry.digest for entry in entries_of(site.ledger)])
    assert [len(digests) for digests in kept] == [1, 2]


def test_shares_are_not_opened_before_names_are_confirmed(deployed, tmp_path):
    hospital = hospitals.open_hospital(summing(tmp_path)[0])
    experiment = hospital.experiment(deployed(*DISTRIBUTED).to_json(), 16)
    site = hospital.open(experiment, "run")
    sites.answer(experiment.method, request(), site)
    step = SumStep(request().digest, (0, 1), {0: b"", 1: b""})
    with pytest.raises(ProtocolError, match="has confirmed other names"):
        sites.take_step(site, step)
