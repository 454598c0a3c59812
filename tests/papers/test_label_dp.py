"""Training that keeps labels private: exact laws, one draw a label, and controls that fail."""

import copy
import math

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from scipy import stats

from fed_dpsd.papers.alibi import ALIBI
from fed_dpsd.papers.lp_mst import LPMST
from fed_dpsd.privacy.accounting import pure_bound
from fed_dpsd.privacy.label_dp import IMAGES_NOTE, prove_label
from fed_dpsd.privacy.mechanism import top_k
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.training import TrainingMechanism, fixed_targets
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy.ideals import rng

TRAININGS = [LPMST(4, 1.0, 2), LPMST(4, 10.0, 3), ALIBI(4, 1.0)]


class Majority:
    """A learner whose network predicts one class for every image: its most frequent target.

    It remembers the targets of all records that each `fit` has shown it.
    """

    def __init__(self, num_classes=4):
        self.num_classes, self.fits = num_classes, []

    def fit(self, records, targets):
        logits = torch.zeros((len(records), self.num_classes))
        shown = targets(torch.from_numpy(records), logits)
        self.fits.append(dict(zip(records.tolist(), shown.tolist(), strict=True)))

    def probabilities(self, records):
        votes = np.bincount(list(self.fits[-1].values()), minlength=self.num_classes)
        return np.repeat(np.eye(self.num_classes)[[votes.argmax()]], len(records), axis=0)


# --- LP-MST ---


def priors(classes):
    """Priors of all kinds: flat, steep, certain, tied, with classes that are impossible."""
    drawn = [rng(n).dirichlet(np.full(classes, a)) for n, a in enumerate((0.02, 0.1, 0.3, 1, 9))]
    steps = np.arange(1, classes + 1) ** 2.0
    tied = np.where(np.arange(classes) < 2, 0.5, 0.0)
    return [np.full(classes, 1 / classes), np.eye(classes)[1], tied, steps / steps.sum(), *drawn]


def largest_loss(law):
    """The largest log ratio between two rows of (K, K) probabilities, one row a label."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(law[:, None] / law[None])
    return np.nanmax(ratios)  # outcomes impossible for both labels reveal nothing


def lies_anywhere(mechanism, labels, prior):
    """Eq. 5 of DPSD in its place: a label among the candidates is answered by any class."""
    law, classes = mechanism.law(labels, prior), mechanism.num_classes
    whole = LPMST(classes, mechanism.epsilon, 1).law(labels, np.full(prior.shape, 1 / classes))
    inside = law[np.arange(len(labels)), labels] > law.min(1)
    return np.where(inside[:, None], whole, law)


def as_many_as_the_label_needs(mechanism, labels, prior):
    """The candidates are those down to the label itself."""
    order = np.argsort(-prior, axis=1, kind="stable")
    needed = 1 + (order == labels[:, None]).argmax(1)
    lie = 1 / (math.exp(mechanism.epsilon) + needed - 1)
    law = np.stack([top_k(p[None], k)[0] * x for p, k, x in zip(prior, needed, lie, strict=True)])
    law[np.arange(len(labels)), labels] = 1 - (needed - 1) * lie
    return law


@every("epsilon", [0.1, 1.0, 3.0, 10.0])
@every("classes", [2, 3, 10])
def test_a_response_loses_no_more_than_epsilon_whatever_the_prior_is(classes, epsilon):
    """Every pair of labels, and every response, is enumerated. The flat prior attains epsilon."""
    mechanism, labels = LPMST(classes, epsilon, 2), np.arange(classes)
    losses = []
    for prior in priors(classes):
        law = mechanism.law(labels, np.tile(prior, (classes, 1)))
        assert law.sum(1) == pytest.approx(np.ones(classes))
        losses.append(largest_loss(law))
    assert max(losses) <= epsilon * (1 + 1e-9)
    assert losses[0] == pytest.approx(epsilon)
    assert losses[1] == 0  # one candidate, whatever the label is


@every("broken", [lies_anywhere, as_many_as_the_label_needs])
def test_a_response_that_reveals_whether_the_label_is_a_candidate_is_rejected(broken):
    mechanism, labels = LPMST(10, 1.0, 2), np.arange(10)
    tiled = [np.tile(prior, (10, 1)) for prior in priors(10)]
    assert max(largest_loss(mechanism.law(labels, prior)) for prior in tiled) <= 1 + 1e-9
    assert max(largest_loss(broken(mechanism, labels, prior)) for prior in tiled) > 1.5


@every("epsilon", [0.1, 1.0, 4.0])
def test_a_response_among_the_candidates_is_most_probably_true(epsilon):
    """Algorithm 2, line by line: w_k is the chance that a label of the prior is answered truly."""
    mechanism = LPMST(5, epsilon, 2)
    for prior in priors(5):
        largest = sorted(prior, reverse=True)
        w = [
            math.exp(epsilon) / (math.exp(epsilon) + k - 1) * sum(largest[:k]) for k in range(1, 6)
        ]
        (chosen,) = mechanism.best_k(prior[None])
        assert w[chosen - 1] == pytest.approx(max(w))
        law = mechanism.law(np.arange(5), np.tile(prior, (5, 1)))
        assert (law > 0).any(0).sum() == chosen
        assert prior @ np.diag(law) == pytest.approx(max(w))


@every("secret", [False, True])
def test_responses_are_drawn_from_their_law(secret):
    """30,000 draws each: a class is farther than 5 deviations off for one seed in 10^5."""
    mechanism, count = LPMST(4, 1.0, 2), 30_000
    source = SecretStreams(bytes(32)).numpy("test") if secret else rng(3)
    for label, prior in enumerate(np.array([[0.4, 0.3, 0.2, 0.1], [0.9, 0.04, 0.03, 0.03]])):
        labels, tiled = np.full(count, label), np.tile(prior, (count, 1))
        drawn = np.bincount(mechanism.respond(labels, tiled, source), minlength=4) / count
        law = mechanism.law(labels[:1], prior[None])[0]
        assert (np.abs(drawn - law) <= 5 * np.sqrt(law * (1 - law) / count)).all()


class Redrawing(LPMST):
    """LP-MST that randomises all labels so far again in each stage: T responses per label."""

    def teach(self, learner, labels, rng):
        for stage in range(1, self.stages + 1):
            part = np.arange(len(labels) * stage // self.stages)
            flat = np.full((len(part), self.num_classes), 1 / self.num_classes)
            learner.fit(part, fixed_targets(self.respond(labels[part], flat, rng)))


def asked(mechanism, labels, monkeypatch):
    """Every label that training draws a response for, in ascending order."""
    labels_asked, respond = [], LPMST.respond

    def remembering(self, labels, prior, rng):
        labels_asked.extend(labels.tolist())
        return respond(self, labels, prior, rng)

    monkeypatch.setattr(LPMST, "respond", remembering)
    mechanism.teach(Majority(mechanism.num_classes), labels, rng())
    return sorted(labels_asked)


@every("stages", [1, 2, 4, 15])
def test_each_label_is_randomised_exactly_once(stages, monkeypatch):
    """Twelve records have a class each, so a label says whose it is."""
    labels = rng(1).permutation(12)
    assert asked(LPMST(12, 1.0, stages), labels, monkeypatch) == list(range(12))
    if stages > 1:
        assert asked(Redrawing(12, 1.0, stages), labels, monkeypatch) != list(range(12))


# --- ALIBI ---


def worst_alibi_loss(scale):
    """The largest log ratio of the densities of noisy vectors, over labels, exactly.

    A density is piecewise exponential with corners at 0 and 1, so the largest ratio is attained at
    corners or beyond them.
    """
    points = np.array([-2.0, 0.0, 0.5, 1.0, 3.0])
    grid = np.stack(np.meshgrid(points, points, points), axis=-1).reshape(-1, 3)
    logs = -np.abs(grid[:, None] - np.eye(3)[None]).sum(-1) / scale  # (points, labels)
    return (logs.max(1) - logs.min(1)).max()


@every("epsilon", [0.1, 1.0, 10.0])
def test_two_labels_noisy_vectors_lose_epsilon_and_less_noise_is_rejected(epsilon):
    scale = ALIBI(3, epsilon).votes.scale
    assert worst_alibi_loss(scale) == pytest.approx(epsilon)
    assert worst_alibi_loss(1 / epsilon) > 1.9 * epsilon  # scale for an L1 norm of 1
    assert pure_bound(ALIBI(3, epsilon).event()).epsilon == pytest.approx(epsilon, rel=1e-9)


@every("secret", [False, True])
def test_the_noise_of_a_vector_is_laplaces_and_drawn_once(secret, monkeypatch):
    """Kolmogorov and Smirnov's test of 8,000 numbers: a p-value below 1e-6 for one seed in 10^6."""
    drawn, noise = [], NoisyVotes.add_noise
    monkeypatch.setattr(
        NoisyVotes, "add_noise", lambda *given: drawn.append(noise(*given)) or drawn[-1]
    )
    mechanism, labels = ALIBI(4, 0.5), rng(1).integers(0, 4, 2_000)
    source = SecretStreams(bytes(32)).numpy("test") if secret else rng(2)
    mechanism.teach(Majority(), labels, source)
    (noisy,) = drawn
    numbers = (noisy - np.eye(4)[labels]).ravel()
    assert stats.kstest(numbers, stats.laplace(scale=4).cdf).pvalue > 1e-6
    assert stats.kstest(numbers, stats.laplace(scale=2).cdf).pvalue < 1e-6


def test_targets_are_the_posterior_of_the_label_under_the_networks_own_prior():
    """Bayes' rule in full, without the shortcut of the code."""
    mechanism = ALIBI(3, 1.5)
    noisy, logits = torch.randn((6, 3)).double() * 2, torch.randn((6, 3)).double()
    likelihood = torch.stack(
        [torch.exp(-(noisy - torch.eye(3)[label]).abs().sum(1) * 1.5 / 2) for label in range(3)],
        dim=1,
    )
    joint = likelihood * logits.softmax(1)
    expected = joint / joint.sum(1, keepdim=True)
    assert torch.allclose(mechanism.posterior(noisy, logits), expected)


# --- all of them ---


@every("training", TRAININGS)
def test_the_epsilon_is_a_labels_and_is_named_so(training):
    assert not isinstance(training, TrainingMechanism)  # it covers no answer
    claim = prove_label(training, ("per run",), 1)
    assert (claim.unit, claim.relation) == ("label", "replace_one")
    assert (claim.trust, claim.delta) == ("nobody", 0.0)
    assert claim.accountant == "pure"
    assert claim.value == pytest.approx(training.epsilon, rel=1e-9)
    assert claim.value <= training.epsilon * (1 + 1e-14)  # with the loss by finite precision
    assert claim.notes == (IMAGES_NOTE, "per run")


@every("training", TRAININGS)
def test_what_the_network_sees_of_labels_went_through_the_mechanism(training, monkeypatch):
    """With the mechanism's output held fixed, other labels change nothing."""
    monkeypatch.setattr(LPMST, "respond", lambda self, labels, prior, rng: labels * 0 + 1)
    monkeypatch.setattr(NoisyVotes, "add_noise", lambda self, value, *_: np.ones(value.shape[1:]))

    def seen(training, labels):
        learner = Majority()
        training.teach(learner, labels, rng())
        return learner.fits

    class Revealing(LPMST):
        """LP-MST that fits the labels themselves."""

        def teach(self, learner, labels, rng):
            learner.fit(np.arange(len(labels)), fixed_targets(labels))

    zeros, threes = np.zeros(9, np.int64), np.full(9, 3)
    assert seen(training, zeros) == seen(training, threes)
    assert seen(Revealing(4, 1.0, 2), zeros) != seen(Revealing(4, 1.0, 2), threes)


class Sorting(LPMST):
    """LP-MST whose stages follow labels."""

    def teach(self, learner, labels, rng):
        order = np.argsort(labels + rng.random(len(labels)), kind="stable")
        for done in (len(labels) // 2, len(labels)):
            learner.fit(order[:done], fixed_targets(labels * 0))


class InOrder(ALIBI):
    """ALIBI that takes records as they are numbered."""

    def teach(self, learner, labels, rng):
        learner.fit(np.arange(len(labels)), fixed_targets(labels * 0))


def orders(training, labels, seed=0):
    """The records of each fit, in their order."""

    class Ordered(Majority):
        def fit(self, records, targets):
            seen.append(records.tolist())
            super().fit(records, targets)

    seen = []
    training.teach(Ordered(), labels, rng(seed))
    return seen


@every("training", TRAININGS)
def test_the_order_of_records_follows_no_label(training):
    """Two lists of labels that differ in one, and the same random numbers."""
    labels = np.tile([0, 1, 2, 3, 2], 8)
    other = labels.copy()
    other[7] = 0
    assert orders(training, labels) == orders(training, other)
    assert orders(Sorting(4, 1.0, 2), labels) != orders(Sorting(4, 1.0, 2), other)


@every("training", TRAININGS)
def test_the_order_of_records_is_random_since_their_numbers_may_follow_labels(training):
    """A mean place is 5 deviations off for one list of seeds in 10^6."""
    labels = np.zeros(40, np.int64)
    first = [orders(training, labels, seed)[0] for seed in range(100)]
    assert len({tuple(order) for order in first}) == 100
    places = [order.index(record) for order in first for record in (0, 39) if record in order]
    assert abs(np.mean(places) - (len(first[0]) - 1) / 2) < 5 * 12 / math.sqrt(len(places))
    (fixed_order,) = orders(InOrder(4, 1.0), labels)
    assert fixed_order == sorted(fixed_order)


def test_stages_share_no_noise(monkeypatch):
    """The control: stages that start from one copy of the generator draw the same."""
    drawn = []

    def remembering(self, labels, prior, rng):
        drawn.append(rng.random(len(labels)))
        return labels * 0

    monkeypatch.setattr(LPMST, "respond", remembering)
    LPMST(4, 1.0, 3).teach(Majority(), np.zeros(30, np.int64), rng())
    assert len(set(np.concatenate(drawn))) == 30

    class Sharing(LPMST):
        def teach(self, learner, labels, rng):
            for _ in range(self.stages):
                self.respond(labels, None, copy.deepcopy(rng))

    drawn.clear()
    Sharing(4, 1.0, 3).teach(Majority(), np.zeros(10, np.int64), rng())
    assert len(set(np.concatenate(drawn))) == 10


def test_gaussian_noise_has_no_pure_bound():
    event = ComposedDpEvent([ALIBI(3, 1.0).event(), GaussianDpEvent(5.0)])
    assert pure_bound(event).epsilon == math.inf
    assert pure_bound(SelfComposedDpEvent(ALIBI(3, 1.0).event(), 3)).epsilon == pytest.approx(3)


@every(
    ("make", "wrong"),
    [
        (lambda: LPMST(4, 0.0, 2), "epsilon=0.0 must be between 1e-6 and 20"),
        (lambda: LPMST(4, 21.0, 2), "epsilon=21.0"),
        (lambda: LPMST(4, math.nan, 2), "epsilon=nan"),
        (lambda: LPMST(4, 1.0, 0), "stages=0 must be >= 1"),
        (lambda: LPMST(4, 1.0, 2, 0.0), "temperature=0.0 must be between"),
        (lambda: ALIBI(4, 0.0), "epsilon=0.0 must be between"),
        (lambda: ALIBI(4, math.inf), "epsilon=inf"),
    ],
)
def test_a_parameter_out_of_range_is_named(make, wrong):
    with pytest.raises(ValueError, match=wrong):
        make()
