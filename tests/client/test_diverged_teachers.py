"""Diverging teachers: an error in a simulation; at a hospital, nothing is revealed."""

import dataclasses
import itertools
import logging
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd.client import learning as module
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.errors import Diverged
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.protocol import Response
from fed_dpsd.server.federation import HostedFederation
from tests.client.test_site import make, request
from tests.every import every
from tests.hospitals import Hospitals, federate, site_file
from tests.ledgers import entries_of

PLAIN, DP = ("training=plain",), ("training=dp_sgd", "training.steps=3")
TOO_LONG = {"plain": "teacher.learning_rate=1e30", "dp_sgd": "training.learning_rate=1e30"}
CENTRAL = "method=central", "num_clients=1", "answers=probabilities"
# The training, its own settings, the key to lower, and whether its losses may be looked at.
TRAININGS = [
    ("plain", (), "teacher.learning_rate", True),
    ("dp_sgd", ("training.steps=3",), "training.learning_rate", False),
    ("output_gradient", (*CENTRAL, "training.steps=3"), "training.learning_rate", False),
    ("lp_2st", CENTRAL, "teacher.learning_rate", False),
    ("alibi", CENTRAL, "teacher.learning_rate", False),
]


def at_a_hospital(experiment):
    """The experiment as a hospital binds it, which is no simulation."""
    federation = dataclasses.replace(experiment.config.federation, simulation=False)
    config = dataclasses.replace(experiment.config, federation=federation)
    return dataclasses.replace(experiment, config=config)


def trained(experiment, records):
    ids = np.arange(len(records))
    return Teachers(experiment.config, experiment.training, 0, records, ids).models


@pytest.mark.slow
@every(("training", "settings", "key", "by_loss"), TRAININGS)
def test_a_simulation_names_the_teacher_and_the_key(
    small, records, training, settings, key, by_loss
):
    """The control trains as usual; nothing of a diverged teacher is cached."""
    settings = f"training={training}", *settings
    (teacher,) = trained(small(*settings), records)
    assert to_vector(teacher).isfinite().all()
    experiment = small(*settings, f"{key}=1e30")
    kept = Path(experiment.config.cache) / "teachers"
    before = set(kept.glob("*"))
    with pytest.raises(Diverged) as caught:
        trained(experiment, records)
    text = str(caught.value)
    assert text.endswith(f"; lower {key} (now 1e+30)")
    loss = "the loss of client 0's teacher is NaN after step"
    private = "weights or predictions of client 0's teacher are NaN or infinite"
    assert (loss if by_loss else private) in text
    assert set(kept.glob("*")) == before


@pytest.mark.parametrize(
    "rows", [TRAININGS[:2], pytest.param(TRAININGS[2:], marks=pytest.mark.slow)]
)
def test_losses_on_private_records_are_never_looked_at(small, records, monkeypatch, subtests, rows):
    """Only a plain teacher's losses in a simulation are, as its exact scores are."""
    looked = []
    monkeypatch.setattr(module, "check_losses", lambda losses, *_: looked.append(len(losses)))
    for training, settings, _, by_loss in rows:
        with subtests.test(training=training):
            looked.clear()
            trained(small(f"training={training}", *settings, "teacher.seed=5"), records)
            assert looked == ([20] if by_loss else [])
            hospital = small(f"training={training}", *settings, "teacher.seed=6")
            trained(at_a_hospital(hospital), records)
            assert len(looked) == by_loss


def test_one_teacher_of_several_is_named(small, records):
    experiment = small(*PLAIN, "teachers_per_client=3", TOO_LONG["plain"])
    with pytest.raises(Diverged, match="client 0's teacher 0 is NaN after step 1;"):
        trained(experiment, records)


def test_a_retraining_names_its_keys(small, records, subtests):
    def retrained(*settings):
        experiment = small(*settings)
        context = experiment.public
        query = context.request("train", 2, to_vector(context.make_teacher(0)).numpy())
        return make(experiment, records)[0].retrain(query, 3)

    own = "method=fedavg", "teacher.same_start=true", "answers=probabilities"
    for training in (PLAIN, DP):
        with subtests.test(training=training):
            too_long = TOO_LONG[training[0].removeprefix("training=")]
            assert np.isfinite(retrained(*training, *own)).all()
            with pytest.raises(Diverged) as caught:
                retrained(*training, *own, too_long)
            assert str(caught.value).endswith(f"lower {too_long[:-5]} (now 1e+30)")


ANSWERS = [
    ("answers=label",),
    ("answers=label", "answers.k=3"),
    ("answers=label", "answers.threshold=0.05"),
    ("answers=label", "answers.lies=classes", "answers.k=3"),
    ("answers=gradient",),
    ("answers=gradient", "answers.normalise=batch"),
    ("answers=gradient", "answers.scaling=clip"),
    # With method.balance=0 only the class of a teacher counts, and its gradient is negative.
    ("answers=gradient", "answers.k=3", "answers.mask=signed", "method.balance=8"),
    ("answers=gradient", "answers.noise_at=server"),
    ("answers=gradient", "method.distillation=classic"),
    ("answers=gradient_sum", "method=dpdfd"),
    ("answers=votes",),
    ("answers=votes", "answers.noise_law=laplace"),
    ("answers=noisy_max",),
    ("answers=noisy_max", "answers.noise_law=gumbel"),
    ("answers=probabilities",),
]


def answered(experiment, records, caplog):
    """A hospital's answer, its mechanism's input, its charges and its log."""
    bounded, mechanism = [], experiment.answers
    encode = type(mechanism).constrain_sensitivity

    def watched(own, value, predictions):
        encoded = encode(own, value, predictions)
        bounded.append((np.array(value), encoded))
        return encoded

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.ERROR):
        caplog.clear()
        patch.setattr(type(mechanism), "constrain_sensitivity", watched)
        site, reply = make(experiment, records)
        response = reply(request())
    return response, bounded, entries_of(site.ledger), caplog.text


PAIRS = list(itertools.product(ANSWERS, (PLAIN, (*DP, "training.count_fraction=null"))))


# Each kind of answer with one training.
@pytest.mark.parametrize(
    ("answers", "training"), [PAIRS[2 * n + n % 2] for n in range(len(ANSWERS))]
)
def test_a_hospital_answers_from_a_diverged_teacher_within_the_bound_and_for_the_same_charge(
    small, records, caplog, training, answers
):
    """An error, or a value without a bound, would be a fact about records that no noise covers.

    The value is the same as for a teacher without records. The control: a trained teacher.
    """
    name = training[0].removeprefix("training=")
    if "dpdfd" in " ".join(answers):
        answers += ("num_clients=1",)
    good = at_a_hospital(small(*training, *answers))
    lost = at_a_hospital(small(*training, *answers, TOO_LONG[name]))
    _, sound, paid, silence = answered(good, records, caplog)
    response, broken, charged, log = answered(lost, records, caplog)
    assert isinstance(response, Response)
    assert np.isfinite(np.asarray(response.values, np.float64)).all()
    assert "training diverged: weights or predictions of client 0's teacher" in log
    assert f"lower {TOO_LONG[name][:-5]} (now 1e+30)" in log
    assert not silence
    ((given, encoded),) = broken
    assert np.isnan(given).all()
    none = np.full((32, 10), np.nan)  # what a teacher without records predicts
    assert np.array_equal(encoded, lost.answers.constrain_sensitivity(none, request().predictions))
    if isinstance(lost.answers, NormalizedGradient):
        assert not encoded.any()
    assert np.isfinite(sound[0][0]).all()
    assert not np.array_equal(sound[0][1], encoded)

    def facts(entries):
        return [(e.kind, e.queries, e.releases, e.costs) for e in entries]

    assert facts(charged) == facts(paid)


def test_a_nan_that_is_not_bounded_is_noticed(small, records, caplog, monkeypatch):
    """The control of the test above: a mechanism that lets NaN through."""
    lost = at_a_hospital(small(*PLAIN, "answers=gradient", TOO_LONG["plain"]))
    monkeypatch.setattr(
        NormalizedGradient, "constrain_sensitivity", lambda own, value, _: np.asarray(value)
    )
    response, *_ = answered(lost, records, caplog)
    assert np.isnan(response.values).all()


def test_weights_that_diverged_at_a_hospital_are_refused_by_the_coordinator(
    small, records, tmp_path
):
    """They have no noise of their own, so NaN says no more than they do."""
    settings = *PLAIN, "method=fedavg", "answers=probabilities", "teacher.same_start=true"
    lost = at_a_hospital(small(*settings, TOO_LONG["plain"]))

    class One(HostedFederation):
        engine = "one hospital"

        def _deliver(self, query):
            return {0: make(self.experiment, records)[1](query)}

        def _step(self, steps):
            raise NotImplementedError

        def diagnose(self):
            raise NotImplementedError

    query = lost.public.request("weights")
    reply = One(lost, tmp_path / "lost").each(query)[0]
    assert reply.reason == "invalid weights: values hold NaN or infinity"
    kept = One(at_a_hospital(small(*settings)), tmp_path / "kept").each(query)[0]
    assert isinstance(kept, Response)


def test_a_hospitals_node_sends_an_answer_and_no_word_of_it(deployed, tmp_path, caplog):
    """Its reply, size and statement are the same as for a trained teacher."""
    settings = "training=plain", "answers=label"
    sent = {}
    for rate in ("1e30", "0.002"):
        files = [site_file(tmp_path / rate / f"{n}", n, budget=1e6) for n in (0, 1)]
        federation = federate(
            deployed(*settings, f"teacher.learning_rate={rate}"), Hospitals(files)
        )
        caplog.clear()
        sent[rate] = federation.each(request())
        assert ("training diverged" in caplog.text) == (rate == "1e30")
    for client in (0, 1):
        lost, kept = (sent[rate][client] for rate in ("1e30", "0.002"))
        assert isinstance(lost, Response)
        assert (lost.nbytes, lost.teachers) == (kept.nbytes, kept.teachers)
        assert lost.statement == kept.statement
