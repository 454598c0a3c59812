"""Class statistics: its sums, what a record moves in them, its cost, and what the server fits."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from fed_dpsd.accounts.card import proven_epsilons
from fed_dpsd.client import site as client_site
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.methods import class_statistics
from fed_dpsd.methods.class_statistics import gaussian_classifier
from fed_dpsd.protocol import Request
from tests.every import every
from tests.hospitals import Hospitals, answer, charges, federate, site_file, summing
from tests.methods.test_dp_fedsgd import has_stddev
from tests.privacy import planted
from tests.privacy.ideals import ideal
from tests.proofs import gaussian_epsilon
from tests.running import finish, not_refused, rounds, without

STATISTICS = (
    *("method=class_statistics", "answers=class_statistics", "model=scattering", "rounds=1"),
    "diagnostics=false",
)
FIVE = ("num_clients=5", "answers.noise_at=distributed", "answers.noise_multiplier=4")
FOUR_OF_FIVE = (*STATISTICS, *FIVE, "answers.quorum={threshold: 4, colluding: 1}")
PATIENTS = ("answers.unit=patient", "answers.records_per_patient=3", "data.records_per_patient=3")
ALLOWED = {
    "methods": ["class_statistics"],
    "answers": ["class_statistics"],
    "models": ["scattering"],
}
FEATURES = 64  # of `small`
REPLACED = math.sqrt(2 + 2 * (1 - 0.6**2 - 0.3**2))
NUMBERS = FEATURES * (FEATURES + 1) // 2 + 10 * (FEATURES + 1)


def asked(number=1, centre=0.0, count=FEATURES):
    at = np.full(count, centre, np.float32)
    return Request.without_images("statistics", (1, 8, 8), 10, number, at)


# --- what a record moves ---


def teachers_of(experiment, records):
    return Teachers(experiment.config, experiment.answers.step, 0, records, np.arange(len(records)))


def summed(experiment, records, centre=0.0):
    at = asked(centre=centre).weights
    return teachers_of(experiment, records).sensitive_sum(experiment.answers, at)[0, :, 0]


@every(("settings", "left_out"), [((), [7]), (("answers.copies=3",), [7]), (PATIENTS, [6, 7, 8])])
@every("centre", [0.0, 1.0, 1e3, 1e38])
def test_a_record_or_patient_moves_a_sum_by_at_most_its_event(
    small, records, settings, left_out, centre
):
    """Whatever centre a server sends, also one at which features overflow, on a coarse lattice."""
    mechanism = (
        experiment := small(*STATISTICS, f"answers.noise_multiplier={2.0**20}", *settings)
    ).answers
    whole = summed(experiment, records, centre)
    less = summed(experiment, without(records, left_out), centre)
    moved = np.linalg.norm(whole - less)
    assert 0.5 < moved <= 1
    cut = [np.trunc(total / mechanism.lattice) * mechanism.lattice for total in (whole, less)]
    event = ideal(mechanism.event(mechanism.unit, "add_remove"))
    assert np.linalg.norm(cut[0] - cut[1]) <= mechanism.noise_multiplier / event.noise_multiplier


def broken_rules(small, records, settings):
    """The rules of Theorem 24 that the sums over the first of these records break."""
    experiment, records = small(*STATISTICS, *settings), records.take(np.arange(18))
    each = experiment.answers.records_per_patient
    units = np.arange(len(records)).reshape(-1, each)
    whole, parts = summed(experiment, records), []
    for unit in units:
        parts.append(summed(experiment, records.take(unit)))
        if not np.array_equal(whole - summed(experiment, without(records, unit)), parts[-1]):
            yield "a part depends on other records"
    if not np.array_equal(sum(parts), whole):
        yield "the sum is not exact"
    if np.linalg.norm(parts, axis=1).max() > 1:
        yield "a part is too long"


@every("settings", [(), ("answers.copies=3",), PATIENTS])
def test_a_sum_adds_up_short_parts_of_one_record_each(small, records, settings):
    assert not set(broken_rules(small, records, settings))


@pytest.mark.slow
@every(
    ("fault", "settings", "broken"),
    [
        (planted.features_keep_their_length, (), "a part is too long"),
        (planted.pairs_of_features_count_twice, (), "a part is too long"),
        (planted.copies_are_added, ("answers.copies=3",), "a part is too long"),
        (planted.copies_are_added, PATIENTS, "a part is too long"),
        (planted.features_centred_on_the_records_own_mean, (), "a part depends on other records"),
        (planted.moments_in_single_precision, (), "the sum is not exact"),
    ],
)
def test_a_planted_fault_breaks_a_rule(small, records, monkeypatch, fault, settings, broken):
    fault(monkeypatch)
    assert broken in set(broken_rules(small, records, settings))


@pytest.mark.slow
@every("settings", [(), ("answers.copies=3",), PATIENTS])
def test_a_replaced_record_or_patient_moves_a_sum_by_at_most_its_event(small, records, settings):
    """Between all pairs, and between opposite features, which are farther apart than sqrt(2)."""
    experiment = small(*STATISTICS, *settings)
    each = experiment.answers.records_per_patient
    parts = [
        summed(experiment, records.take(np.arange(first, first + each)), centre)
        for centre in (0.0, -1e3, 1e3)
        for first in range(0, len(records), each)
    ]
    most = max(np.linalg.norm(one - other) for one in parts for other in parts)
    assert (1 if each > 1 else math.sqrt(2)) < most <= REPLACED  # patients have several labels
    event = ideal(experiment.answers.event(experiment.answers.unit, "replace_one"))
    assert most <= experiment.answers.noise_multiplier / event.noise_multiplier < REPLACED + 1e-3


def test_a_sum_is_the_same_in_any_order(small, records):
    experiment = small(*STATISTICS)
    shuffled = records.take(np.random.Generator(np.random.PCG64(0)).permutation(len(records)))
    assert np.array_equal(summed(experiment, shuffled), summed(experiment, records))


def test_every_number_has_the_whole_noise(small, tmp_path):
    """With probability at least 1 - 1e-6 for each kind of number. The control: half is rejected."""
    experiment = small(*STATISTICS, "num_clients=1", "rounds=1")
    federation = LocalFederation(experiment, tmp_path / "run")
    (site,) = federation._sites.values()
    noise = federation.total(asked()).sum - site.sensitive_sum(asked())[0]
    for part in np.split(noise, [NUMBERS - 10 * (FEATURES + 1), NUMBERS - 10]):
        assert has_stddev(part, experiment.answers.noise_multiplier)
        assert part.all()
    assert not has_stddev(noise, experiment.answers.noise_multiplier / 2)


def test_statistics_are_the_records_own(small, records):
    experiment = small(*STATISTICS)
    shard = teachers_of(experiment, records)._linear
    inputs = shard.inputs[:, 0].double() - 0.5
    rows = inputs / inputs.norm(dim=1, keepdim=True)
    of_classes = torch.nn.functional.one_hot(shard.labels, 10).double()
    moments, sums, counts = experiment.answers.statistics(summed(experiment, records, 0.5))
    assert moments == pytest.approx((rows.T @ rows).numpy(), abs=0.1)
    assert sums == pytest.approx((of_classes.T @ rows).numpy(), abs=0.1)
    assert counts == pytest.approx(of_classes.sum(0).numpy(), rel=1e-3)
    assert min(np.abs(each).max() for each in (moments, sums)) > 1  # the tolerance is small


# --- costs ---


@every("unit", ["record", "patient"])
def test_a_plan_costs_what_one_gaussian_release_does(small, unit):
    """Independently of the proofs here. The control: as if all five clients' noise counted."""
    experiment = small(*FOUR_OF_FIVE, *(PATIENTS if unit == "patient" else ()))
    rounding = 2.0**10 * 2.0 ** (math.ceil(math.log2(4 / math.sqrt(3))) - 26)  # of the share
    for moved, changed, relation in ((1, unit, "add_remove"), (REPLACED, unit, "replace_one")):
        claim = proven_epsilons(experiment, experiment.plan, changed, relation)["answers"]
        assert claim.value == pytest.approx(gaussian_epsilon(moved * (1 + rounding) / 4), rel=1e-6)
        assert claim.value > gaussian_epsilon(moved / 4) * (1 + 1e-6)
        assert (claim.unit, claim.relation) == (changed, relation)
        assert claim.trust == "threshold"
        assert claim.value > 1.1 * gaussian_epsilon(moved * math.sqrt(3 / 5) / 4)
    claim = proven_epsilons(experiment, experiment.plan, "client", "add_remove")["answers"]
    assert math.isinf(claim.value)


# --- runs ---


def test_a_classifier_has_the_log_odds_of_gaussians():
    rng = np.random.Generator(np.random.PCG64(0))
    means, labels = rng.normal(size=(3, 6)), np.repeat(np.arange(3), (10, 20, 40))
    inputs = means[labels] + rng.normal(size=(70, 6))
    counts = np.bincount(labels)
    sums = np.stack([inputs[labels == label].sum(0) for label in range(3)])
    own = sums / counts[:, None]
    within = inputs - own[labels]
    covariance = (within.T @ within + 2 * np.eye(6)) / 70
    logs = [multivariate_normal(mean, covariance).logpdf(inputs) for mean in own]
    expected = np.stack(logs, 1) + np.log(counts / 70)
    weights, bias = gaussian_classifier(inputs.T @ inputs, sums, counts, 2.0)
    logits = inputs @ weights.T + bias
    assert logits - logits[:, :1] == pytest.approx(expected - expected[:, :1])


def test_noise_may_make_a_covariance_indefinite_and_counts_negative():
    negative = np.diag([-5.0, 1.0])
    clipped, sums = np.diag([0.0, 1.0]), np.zeros((2, 2))
    for counts in ((3.0, 3.0), (-7.0, 3.0)):
        one, other = (
            gaussian_classifier(each, sums, np.array(counts), 2.0) for each in (negative, clipped)
        )
        for own, same in zip(one, other, strict=True):
            assert np.isfinite(own).all()
            assert own == pytest.approx(same)


def test_the_student_learns_however_the_records_are_spread(small, tmp_path):
    """With next to no noise, the same student from one client and from three skewed ones."""
    found = []
    for count, skew in ((1, ()), (3, ("partition.alpha=0.1",))):
        settings = (*STATISTICS, f"num_clients={count}", *skew, "answers.noise_multiplier=0.001")
        settings += (f"method.ridge={1000 / math.sqrt(count)}",)  # of the noise of all clients
        _, (finished,) = finish(small(*settings), tmp_path / f"{count}")
        found.append(finished.student)
    weights = [student.classifier.weight.detach().numpy() for student in found]
    assert weights[0] == pytest.approx(weights[1], abs=0.02 * float(np.abs(weights[0]).max()))


@pytest.mark.slow
def test_hospitals_are_charged_once_and_limit_what_they_answer(deployed, tmp_path):
    quorum = "num_clients=3", "answers.quorum={threshold: 2, colluding: 0}"
    experiment = deployed(*STATISTICS, *FIVE[1:], *quorum)
    files = summing(tmp_path, **ALLOWED)
    federation = federate(experiment, Hospitals(files))
    first = federation.total(asked())
    assert first.sum.shape == (NUMBERS, 1)
    assert np.array_equal(federation.total(asked()).sum, first.sum)
    hospital, text = open_hospital(files[0]), experiment.to_json()
    assert len(charges(hospital)) == 1
    with pytest.raises(ProtocolError, match="this client was sent 5 weights instead of 64"):
        answer(hospital, text, asked(count=5))


def test_a_spent_budget_ends_a_run(small, tmp_path):
    with pytest.raises(UserError, match="no client answers: the client's privacy budget is spent"):
        next(rounds(small(*STATISTICS, "privacy.budget=0.01"), tmp_path / "run"))


def test_too_many_features_end_a_run_before_a_client_is_charged(small, tmp_path, monkeypatch):
    monkeypatch.setattr(class_statistics, "MOST_NUMBERS", NUMBERS - 1)
    with pytest.raises(UserError, match=r"64 features have 2,730 numbers; a release covers 2,729"):
        next(rounds(small(*STATISTICS), tmp_path / "run"))
    assert not list(tmp_path.rglob("*.sqlite"))


@every("most", [NUMBERS - 1, NUMBERS])
def test_a_hospital_rejects_sums_that_no_release_covers_before_it_reads_or_charges(
    deployed, tmp_path, monkeypatch, most
):
    """The control: it answers sums of the largest size."""
    monkeypatch.setattr(client_site, "MOST_NUMBERS", most)
    read = Mock(side_effect=Teachers.sensitive_sum)
    monkeypatch.setattr(Teachers, "sensitive_sum", lambda *given: read(*given))
    hospital = open_hospital(site_file(tmp_path / "hospital", **ALLOWED))
    text = deployed(*STATISTICS, "num_clients=2").to_json()
    if most < NUMBERS:
        with pytest.raises(ProtocolError, match="asked for 2,730 numbers; a release covers 2,729"):
            answer(hospital, text, asked())
    else:
        answer(hospital, text, asked())
    assert read.called == bool(charges(hospital)) == (most == NUMBERS)


def test_a_hospital_that_does_not_allow_the_method_is_not_charged(deployed, tmp_path):
    hospital = open_hospital(site_file(tmp_path / "hospital", answers=["class_statistics"]))
    refused = answer(hospital, deployed(*STATISTICS, "num_clients=2").to_json(), asked())
    assert "this site allows only method=" in refused.reason
    assert not charges(hospital)


def test_what_does_not_fit_is_refused_before_data_are_read(small):
    table = (
        ("answers=gradient", "answers=gradient: method=class_statistics needs sums over records"),
        ("model=cnn", "model.teacher=cnn: .* a linear classifier on fixed features; use model="),
        ("teachers_per_client=2", "teachers_per_client=2: .* use teachers_per_client=1"),
        ("rounds=2", "rounds=2: method=class_statistics needs another value; use rounds=1"),
        ("method.ridge=0", "method.ridge=0 must be > 0"),
        ("answers.noise_at=server", "noise_at=server: no server may see these sums; use"),
        ("method=dp_fedsgd", "answers=class_statistics releases .*; use method=class_statistics"),
    )
    assert not_refused(small, table, *STATISTICS) == {}


def test_a_simulation_of_secure_sums_gives_the_same_shape(small, tmp_path):
    federation = LocalFederation(small(*FOUR_OF_FIVE), tmp_path / "run")
    assert federation.total(asked()).sum.shape == (NUMBERS, 1)
