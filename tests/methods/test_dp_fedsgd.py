"""DP-FedSGD: its sums, their noise to a coalition, its costs, and what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.card import planned_run, proven_epsilons
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.accounts.simulated import SimulatedLedger
from fed_dpsd.client import site as sites
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.client.site import Site
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.methods import dp_fedsgd
from fed_dpsd.privacy.clipped_gradients import ClippedGradients
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Quorum, with_shares
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.record_sums import MOST_NUMBERS, MOST_STEPS
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.streams import Streams
from tests.every import every
from tests.hospitals import Hospitals, answer, charges, federate, site_file, summing
from tests.ledgers import entries_of
from tests.methods.test_method_contract import equal, weights
from tests.privacy import planted
from tests.privacy.ideals import ideal
from tests.proofs import gaussian_epsilon
from tests.running import rounds, without

SUMS = ("method=dp_fedsgd", "answers=clipped_gradients", "model=scattering", "diagnostics=false")
FIVE = ("num_clients=5", "answers.noise_at=distributed", "answers.noise_multiplier=4")
FOUR_OF_FIVE = (*SUMS, *FIVE, "answers.quorum={threshold: 4, colluding: 1}")
ALLOWED = {"methods": ["dp_fedsgd"], "answers": ["clipped_gradients"], "models": ["scattering"]}
WEIGHTS = 10 * (64 + 1)  # of the classifier of `small`
FAILURE = 1e-6


def asked(number, count=WEIGHTS, size=0.05):
    at = np.random.Generator(np.random.PCG64(number)).normal(0, size, count).astype(np.float32)
    return Request.without_images("gradients", (1, 8, 8), 10, number, at)


def has_stddev(values, stddev):
    """Whether normal values have this standard deviation; else so with probability FAILURE."""
    least, most = stats.chi2(values.size).interval(1 - FAILURE)
    return least < np.square(values / stddev).sum() < most


# --- the noise ---


def unknown_noise(experiment, folder, known=1):
    """The noise in sums over `threshold` clients, less all that the first `known` of them know."""
    federation = LocalFederation(experiment, folder)
    there = range(experiment.answers.quorum.threshold)
    federation._recipients = lambda request: there
    noises = []
    for number in range(1, 5):
        drawn = {}

        def keep(ledger, _, values, noisy, drawn=drawn):
            drawn[ledger._client] = values

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimulatedLedger, "store_answer", keep)
            total = federation.total(asked(number))
        assert total.count == len(there)
        members = [federation._sites[client] for client in there]
        rest = total.sum - sum(site.sensitive_sum(asked(number))[0] for site in members[known:])
        noises.append(rest - sum(drawn[client] for client in there[:known]))
    return np.stack(noises)


def test_a_coalition_sees_the_proven_noise_and_no_less(small, tmp_path):
    """FAILURE is the probability. The controls: other noise by a share is rejected."""
    experiment = small(*FOUR_OF_FIVE, "rounds=4")
    noise = unknown_noise(experiment, tmp_path / "run")
    assert has_stddev(noise, 4.0)
    assert not has_stddev(noise, 4.0 * math.sqrt(3 / 4))
    assert not has_stddev(noise, 4.0 * math.sqrt(4 / 3))


@pytest.mark.slow
@every("known", [0, 2])
def test_an_outsider_and_a_client_that_reads_the_result_see_the_noise_that_is_planned_for_them(
    small, tmp_path, known
):
    """A client that reads knows its own part, besides the colluding client's. FAILURE each."""
    experiment = small(*FOUR_OF_FIVE, "rounds=4")
    noise = unknown_noise(experiment, tmp_path / f"{known}", known)
    for shares in (2, 3, 4):
        planned = with_shares(experiment.answers, shares).noise_multiplier
        assert has_stddev(noise, planned) == (shares == 4 - known)


def test_a_share_that_is_too_small_is_noticed(small, tmp_path, monkeypatch):
    """For the whole quorum: as if the colluding client's share helped."""
    scale = property(lambda self: self.noise_multiplier / math.sqrt(self.quorum.threshold))
    monkeypatch.setattr(ClippedGradients, "scale", scale)
    noise = unknown_noise(small(*FOUR_OF_FIVE, "rounds=4"), tmp_path / "run")
    assert not has_stddev(noise, 4.0)


def test_numbers_of_many_clients_fit_in_63_bits_and_lie_on_one_lattice():
    mechanism = ClippedGradients(10, 1e-3, 1.0, noise_at="distributed", quorum=Quorum(4, 1))
    huge = mechanism.constrain_sensitivity(np.array([[1e300], [np.nan], [-1e300]]), None)
    rng = SecretStreams(bytes(32)).numpy("noise")
    units = mechanism.add_noise(huge[None], None, rng) / mechanism.lattice
    assert np.array_equal(units, np.rint(units))
    assert np.abs(units[[0, 2]]).min() > 0.99 * MOST_STEPS
    assert np.abs(units).max() * 2**14 < 2**63
    assert mechanism.admissible(units * mechanism.lattice, None, 1).all()
    with pytest.raises(ValueError, match="numbers; a release covers"):
        mechanism.add_noise(np.zeros((1, MOST_NUMBERS + 1, 1)), None, rng)


# --- what a record moves ---


def summed(experiment, records, at):
    ids = np.arange(len(records))
    teachers = Teachers(experiment.config, experiment.answers.step, 0, records, ids)
    return teachers.sensitive_sum(experiment.answers, at)[0]


PATIENTS = ("answers.unit=patient", "answers.records_per_patient=3", "data.records_per_patient=3")


@every(("settings", "left_out"), [((), [7]), (("answers.copies=3",), [7]), (PATIENTS, [6, 7, 8])])
@every("size", [0.0, 0.05, 1e3, 1e38])
def test_a_record_or_patient_moves_a_sum_by_at_most_its_event(
    small, records, settings, left_out, size
):
    """At any weights, of records that are all longer than the bound, on a coarse lattice."""
    bound = "answers.max_grad_norm=0.01", f"answers.noise_multiplier={2.0**20}"
    mechanism = (experiment := small(*SUMS, *bound, *settings)).answers
    at = np.clip(asked(1, size=size).weights, -3e38, 3e38)
    whole, less = (
        summed(experiment, records, at),
        summed(experiment, without(records, left_out), at),
    )
    moved = np.linalg.norm(whole - less)
    assert moved <= 1
    assert moved > 0.5 or size > 1  # large weights are sure of this record's class
    cut = [np.trunc(total / mechanism.lattice) * mechanism.lattice for total in (whole, less)]
    moved = np.linalg.norm(cut[0] - cut[1])
    event = ideal(mechanism.event(mechanism.unit, "add_remove"))
    assert moved <= mechanism.noise_multiplier / event.noise_multiplier


def test_a_sum_of_unclipped_gradients_is_noticed(small, records, monkeypatch):
    planted.gradients_keep_their_length(monkeypatch)
    experiment = small(*SUMS, "answers.max_grad_norm=0.01")
    at = asked(1).weights
    assert (
        np.linalg.norm(
            summed(experiment, records, at) - summed(experiment, without(records, [7]), at)
        )
        > 1
    )


# --- costs ---


@every("unit", ["record", "patient"])
def test_a_plan_costs_what_its_steps_do(small, unit):
    """Independently of the proofs here. The control: as if all five clients' noise counted."""
    settings = PATIENTS if unit == "patient" else ()
    experiment = small(*FOUR_OF_FIVE, *settings, "rounds=30")
    for moved, changed, relation in (
        *((1, unit, "add_remove"), (2, unit, "replace_one"), (2, "record", "replace_one")),
    ):
        claim = proven_epsilons(experiment, experiment.plan, changed, relation)["answers"]
        expected = gaussian_epsilon(moved * math.sqrt(30) / 4)
        assert expected < claim.value < expected * (1 + 1e-3)
        assert claim.trust == "threshold"
        assert claim.value > 1.1 * gaussian_epsilon(moved * math.sqrt(30 * 3 / 5) / 4)
    claim = proven_epsilons(experiment, experiment.plan, "client", "add_remove")["answers"]
    assert math.isinf(claim.value)
    record = proven_epsilons(experiment, experiment.plan, "patient", "add_remove")["answers"]
    assert math.isinf(record.value) == (unit == "record")


def test_noise_for_a_patient_is_calibrated_to_a_patient(small):
    for settings, unit in (((), "record"), (PATIENTS, "patient")):
        experiment = small(*FOUR_OF_FIVE, *settings, "privacy.target_epsilon=2")
        claim = proven_epsilons(experiment, experiment.plan, unit, "add_remove")["answers"]
        assert 1.9 < claim.value <= 2


def test_trusting_nobody_costs_the_same_and_is_noisier(small):
    shares, alone = small(*FOUR_OF_FIVE), small(*SUMS, "answers.noise_multiplier=4")
    assert alone.answers.scale == shares.answers.scale * math.sqrt(3)
    for pair in UNITS_AND_RELATIONS[:2]:
        (one, other) = (ideal(e.answers.event(*pair)).noise_multiplier for e in (shares, alone))
        assert one == pytest.approx(other, rel=1e-3)
    claim = proven_epsilons(alone, alone.plan, "record", "add_remove")["answers"]
    assert claim.trust == "nobody"


# --- runs ---


def test_a_resumed_run_repeats_its_sums_and_charges_nothing_twice(small, tmp_path):
    """In its own folder: masks and noise differ between runs."""
    experiment = small(*FOUR_OF_FIVE, "rounds=3")

    def finish(resume):
        federation = LocalFederation(experiment, tmp_path / "run")
        server = experiment.method.server(federation, experiment.public, Streams(0), resume)
        found = [(each.state, weights(each)) for each in server]
        charged = [len(entries_of(site.ledger)) for site in federation._sites.values()]
        return found, charged

    whole, charged = finish(None)
    assert charged == [3] * 5
    assert not equal(whole[0][1], whole[-1][1])
    for state, _ in whole[:-1]:
        again, charged = finish(state)
        assert len(again) == 3 - state.round
        assert equal(again[-1][1], whole[-1][1])
        assert charged == [3] * 5


def test_a_spent_budget_ends_a_run_before_its_first_step(small, tmp_path):
    experiment = small(*SUMS, "privacy.budget=0.01")
    with pytest.raises(UserError, match="no client answers: the client's privacy budget is spent"):
        next(rounds(experiment, tmp_path / "run"))


def test_a_classifier_that_no_sum_covers_ends_a_run_before_a_client_is_charged(
    small, tmp_path, monkeypatch
):
    monkeypatch.setattr(dp_fedsgd, "MOST_NUMBERS", WEIGHTS - 1)
    with pytest.raises(UserError, match=r"650 weights; a sum covers 649; .* \(model.teacher_width"):
        next(rounds(small(*SUMS), tmp_path / "run"))
    assert not list(tmp_path.rglob("*.sqlite"))
    monkeypatch.setattr(dp_fedsgd, "MOST_NUMBERS", WEIGHTS)
    next(rounds(small(*SUMS), tmp_path / "run"))
    assert list(tmp_path.rglob("*.sqlite"))


def test_too_few_clients_open_no_sum(small, tmp_path):
    federation = LocalFederation(small(*FOUR_OF_FIVE), tmp_path / "run")
    federation._recipients = lambda request: range(3)
    with pytest.raises(UserError, match="3 clients answered; 4 are needed; no part of it was"):
        federation.total(asked(1))


@pytest.mark.slow
def test_hospitals_sum_gradients_once(deployed, tmp_path):
    """They repeat a masked sum, whatever the records are then, and charge for other weights."""
    quorum = "num_clients=3", "answers.quorum={threshold: 2, colluding: 0}"
    experiment = deployed(*SUMS, *FIVE[1:], *quorum)
    files = summing(tmp_path, **ALLOWED)
    federation = federate(experiment, Hospitals(files))
    first = federation.total(asked(1))
    assert first.sum.shape == (WEIGHTS, 1)
    assert first.count == 3
    assert np.array_equal(federation.total(asked(1)).sum, first.sum)
    hospital, text = open_hospital(files[0]), experiment.to_json()
    assert len(charges(hospital)) == 1
    one, same = (answer(hospital, text, asked(2)) for _ in range(2))
    assert np.array_equal(one.values, same.values)
    assert one.values.dtype == np.uint64
    assert len(charges(hospital)) == 2
    with pytest.raises(ProtocolError, match="this client was sent 5 weights instead of 650"):
        answer(hospital, text, asked(3, count=5))
    patient = deployed(*SUMS, *FIVE[1:], *quorum, "answers.unit=patient").to_json()
    refused = answer(hospital, patient, asked(1))
    assert isinstance(refused, Refusal)
    assert "answers.unit=patient: this site has no patient column; use" in refused.reason
    named = replace(hospital, files=replace(hospital.files, patient_column="patient"))
    refused = answer(named, text, asked(3))
    assert "answers.unit=record: this site trains only by patient, because" in refused.reason
    assert len(charges(hospital)) == 2


@every("answers, same", [(PATIENTS[:2], False), (("answers.unit=record",), True)])
def test_records_that_change_hands_end_a_run_by_patient(small, records, answers, same):
    experiment, ledger = small(*SUMS, *answers, *PATIENTS[2:]), MemoryLedger()
    others = np.arange(len(records)) % 20
    for number, patients, answered in ((1, records.patients, True), (2, others, same)):
        account = Account(ledger, experiment.config.privacy, experiment.plan, "run")
        site = Site(
            *(experiment.config, experiment.training, experiment.answers, 0),
            *(replace(records, patients=patients), np.arange(len(records)), None, account),
        )
        response = sites.answer(experiment.method, asked(number), site)
        assert isinstance(response, Response) == answered
    assert same or "records changed" in response.reason


def test_equal_weights_in_two_rounds_have_other_noise(deployed, tmp_path):
    """So have other weights in one. FAILURE is the probability. The control: a repeated request."""
    hospital = open_hospital(site_file(tmp_path / "hospital", **ALLOWED))
    experiment = deployed(*SUMS, "num_clients=2")
    near = np.nextafter(asked(1).weights, 1)
    first, again, later, others = (
        answer(hospital, experiment.to_json(), request).values
        for request in (
            *(asked(1), asked(1), replace(asked(1), query_id=2), replace(asked(1), weights=near)),
        )
    )
    assert np.array_equal(first, again)
    for other in (later, others):
        assert has_stddev(first - other, experiment.answers.scale * math.sqrt(2))
    assert len(charges(hospital)) == 3


def test_a_spent_budget_is_refused_before_a_gradient_is_computed(deployed, tmp_path, monkeypatch):
    """A refusal's time would depend on the records. The control: a budget pays for a sum."""
    text, computed = deployed(*SUMS, "num_clients=2").to_json(), []
    monkeypatch.setattr(
        Teachers,
        "sensitive_sum",
        lambda self, mechanism, weights: computed.append(1) or np.zeros((1, len(weights), 1)),
    )
    for budget, sums in ((0.01, 0), (100.0, 1)):
        hospital = open_hospital(site_file(tmp_path / f"{budget}", budget=budget, **ALLOWED))
        refused = isinstance(answer(hospital, text, asked(1)), Refusal)
        assert (refused, len(computed), len(charges(hospital))) == (not sums, sums, sums)


def test_a_hospital_limits_the_copies_that_a_message_requests(deployed, tmp_path):
    hospital = open_hospital(site_file(tmp_path / "hospital", **ALLOWED))
    text = deployed(*SUMS, "num_clients=2", "answers.copies=6").to_json()
    assert "answers.copies is at most 5" in answer(hospital, text, asked(1)).reason
    assert not charges(hospital)


def test_a_plan_counts_sums_and_not_queries(small):
    assert "\nsums per client: " in str(planned_run(small(*SUMS)))
    assert "\nqueries per client: " in str(planned_run(small()))


def test_the_unit_is_the_patient_if_the_data_name_patients(small):
    by_default = small(*SUMS, "data.records_per_patient=2").answers
    assert (by_default.unit, by_default.records_per_patient) == ("patient", 6)
    control = small(*SUMS).answers
    assert (control.unit, control.records_per_patient) == ("record", 1)
