"""A client: its teacher, its cache, and its one door."""

import numpy as np
import pytest

from fed_dpsd.data.datasets import Split
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal
from fed_dpsd.runtime.ledger import MemoryLedger
from fed_dpsd.runtime.site import Site, load_data, open_site, shares


def ask(query_id=1, seed=0, shape=(1, 8, 8)):
    rng = np.random.Generator(np.random.PCG64(seed))
    images = rng.integers(0, 256, (32, *shape), dtype=np.uint8)
    return Ask(query_id, images, rng.dirichlet(np.ones(10), 32).astype(np.float32))


@pytest.fixture
def records(small):
    config = small().config
    return load_data(config.data, config.cache).train.take(np.arange(60))


def make(experiment, records, ledger=None):
    return Site(
        *(experiment.config, experiment.mechanism, 0, records, np.arange(len(records))),
        *(records, ledger or MemoryLedger()),
    )


def answer(site, question):
    return site.release(site.mechanism, site.sensitive_probabilities(question.images), question)


def test_a_charge_comes_before_the_noise(small, records):
    class Watching(TopKRandomizedResponse):
        def noise(self, value, predictions, rng):
            assert len(ledger.entries()) == 1
            return super().noise(value, predictions, rng)

    ledger = MemoryLedger()
    site = make(small(), records, ledger)
    assert isinstance(site.release(Watching(10, 1.0, 3), np.full((1, 32, 10), 0.1), ask()), Answer)
    entry = ledger.entries()[0]
    assert (entry.query_id, entry.queries, entry.digest) == (1, 32, ask().digest())


def test_the_same_ask_returns_the_stored_answer_and_charges_once(small, records):
    site = make(small("privacy=gradient"), records)
    first, again = answer(site, ask()), answer(site, ask())
    assert (first.values == again.values).all()
    assert len(site.ledger.entries()) == 1


def test_the_same_id_with_other_content_is_a_new_charge_with_other_noise(small, records):
    site = make(small("privacy=gradient"), records)
    one, other = answer(site, ask(seed=0)), answer(site, ask(seed=1))
    assert len(site.ledger.entries()) == 2
    noise = [
        a.values - site.mechanism.encode(np.zeros((32, 10)), ask().predictions)
        for a in (one, other)
    ]
    assert np.abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.3


def test_a_crash_between_charge_and_answer_costs_nothing_more(small, records):
    """The noise is a function of the ask, so the answer after the crash is the one before it."""
    ledger = MemoryLedger()
    site = make(small("privacy=gradient"), records, ledger)
    first = answer(site, ask())
    ledger._answers.clear()
    again = answer(make(small("privacy=gradient"), records, ledger), ask())
    assert (first.values == again.values).all()
    assert len(ledger.entries()) == 1


def test_over_budget_nothing_is_drawn_and_nothing_charged(small, records):
    site = make(
        small("privacy.epsilon_per_answer=1.0", "privacy.k=3", "privacy.budget=65"), records
    )
    answers = [answer(site, ask(query_id=i, seed=i)) for i in range(4)]
    assert [type(a) for a in answers] == [Answer, Answer, Refusal, Refusal]
    assert "budget" in answers[-1].reason
    assert len(site.ledger.entries()) == 2
    assert isinstance(answer(site, ask(query_id=0, seed=0)), Answer)  # an old answer is free


def test_a_zero_budget_refuses_everything(small, records):
    site = make(small("privacy=non_private", "privacy.budget=0"), records)
    assert isinstance(answer(site, ask()), Refusal)


@pytest.mark.parametrize(
    "labels", [np.zeros(60, np.int64), np.array([3]), np.arange(5)], ids=["one class", "one", "few"]
)
def test_a_client_with_one_class_or_few_records_works(small, records, labels):
    few = Split(records.images[: len(labels)], labels)
    site = make(small("teacher.batch_size=64"), few)
    assert np.isfinite(site.sensitive_probabilities(ask().images)).all()
    assert isinstance(answer(site, ask()), Answer)


def test_diagnostics_are_refused_outside_a_simulation(small, records):
    assert make(small(), records).diagnose().shape == (1, 60, 10)
    with pytest.raises(ProtocolError, match="refused outside a simulation"):
        make(small("federation.simulation=false"), records).diagnose()


def test_images_of_a_wrong_shape_are_refused(small, records):
    with pytest.raises(ProtocolError, match=r"images have shape \[1, 12, 12\]"):
        make(small(), records).sensitive_probabilities(ask(shape=(1, 12, 12)).images)


def test_simulated_clients_hold_their_share(small, tmp_path):
    experiment = small("num_clients=3")
    parts = shares(experiment)
    assert len(np.unique(np.concatenate(parts))) == 1_437
    site = open_site(experiment, 2, tmp_path)
    assert len(site._teachers._records) == len(parts[2])
