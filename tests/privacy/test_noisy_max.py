"""Report noisy max: the label's law, its bound by post-processing, and what leaves."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NonPrivateDpEvent
from scipy import stats
from scipy.special import softmax

from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.events import BoundedRangeDpEvent
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Additive, Shards
from fed_dpsd.privacy.noise import SecureGenerator
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy.ideals import rng


def votes_for(classes, num_classes, queries):
    """Return (n, B, K) votes of n teachers, each for one class in all queries."""
    return np.repeat(np.eye(num_classes)[list(classes)][:, None], queries, axis=1)


def loses(lead, scale):
    """Return the probability that the difference of two Laplace draws exceeds a lead >= 0."""
    return (1 / 2 + lead / (4 * scale)) * math.exp(-lead / scale)


@every("seed", [0, 1, 2])
def test_the_label_has_the_law_of_a_noisy_maximum_and_no_other(seed):
    """Rejects the right law with probability 1e-6; wrong scales are 20 standard errors away."""
    mechanism, queries = NoisyMax(2, 3.0, shards=Shards(5)), 50_000
    votes = votes_for((0, 0, 0, 0, 1), 2, queries)
    labels = mechanism.add_noise(votes, np.empty((queries, 2)), rng(seed))
    assert set(np.unique(labels)) == {0, 5}
    assert (labels.sum(1) == 5).all()
    second = int((labels[:, 1] == 5).sum())

    def accepts(scale):
        return stats.binomtest(second, queries, loses(3, scale)).pvalue > 1e-6

    assert accepts(3.0)
    assert not accepts(1.5)
    assert not accepts(6.0)


def test_its_guarantee_is_that_of_the_noisy_counts():
    for law in ("laplace", "gaussian"):
        shards = Shards(3)
        label = NoisyMax(4, 6.0, law, shards)
        counts = NoisyVotes(4, 6.0, law, shards=shards)
        for pair in UNITS_AND_RELATIONS:
            assert label.event(*pair) == counts.event(*pair)
    none = NoisyMax(4, 0.0)
    assert none.event("record", "add_remove") == NonPrivateDpEvent()


# --- Gumbel noise: the exponential mechanism ---

GENERATORS = every("generator", [rng(), SecureGenerator(bytes(32))])


@GENERATORS
@every(("scale", "num_classes"), [(0.7, 3), (2.0, 4), (25.0, 2), (0.25, 2)])
def test_with_gumbel_noise_classes_are_drawn_in_proportion_to_exp_votes(
    generator, scale, num_classes
):
    """Rejects the right law with probability 1e-6, and the law of half the scale always.

    At the scale of 0.25 a class has probability e^-4 / (1 + e^-4).
    """
    mechanism = NoisyMax(num_classes, scale, "gumbel", Shards(5))
    classes, queries = (0, 0, 0, 1, 1), 200_000
    votes = votes_for(classes, num_classes, queries)
    labels = mechanism.add_noise(votes, np.empty((queries, num_classes)), generator)
    assert (labels.max(axis=1) == 5).all()
    assert (labels.sum(axis=1) == 5).all()
    seen = np.bincount(labels.argmax(axis=1), minlength=num_classes)
    counts = np.bincount(classes, minlength=num_classes)

    def accepts(scale):
        return stats.chisquare(seen, queries * softmax(counts / scale)).pvalue > 1e-6

    assert accepts(scale)
    assert not accepts(0.5 * scale)


def test_a_lattice_coarser_than_a_vote_reveals_nothing():
    mechanism = NoisyMax(2, 2.0**40, "gumbel", Shards(1))
    labels = mechanism.add_noise(
        votes_for([0], 2, 10_000), np.empty((10_000, 2)), SecureGenerator(bytes(32))
    )
    assert abs(int((labels[:, 0] > 0).sum()) - 5_000) < 300  # 6 standard errors
    # Nor do many votes, which together exceed a step: a moved vote would move both counts by one.
    votes = np.tile([[3.0, 0.0]], (1_000, 1))
    drawn = SecureGenerator(bytes(32)).noisy_argmax(votes, 1e8)
    assert (drawn == SecureGenerator(bytes(32)).noisy_argmax(np.zeros_like(votes), 1e8)).all()


def changes(counts, moved, vanish):
    """Yield counts after `moved` teachers changed to any votes or, if they vanish, to none."""
    num_classes = len(counts)
    for left in itertools.combinations_with_replacement(range(num_classes), moved):
        after = np.array(counts)
        np.subtract.at(after, list(left), 1)
        if (after < 0).any():
            continue
        choices = [()] if vanish else itertools.product([None, *range(num_classes)], repeat=moved)
        for joined in choices:
            again = after.copy()
            np.add.at(again, [c for c in joined if c is not None], 1)
            yield again


@every(
    ("teachers", "unit", "relation", "votes"),
    [
        (4, "record", "add_remove", 2),
        (4, "record", "replace_one", 2),
        (2, "client", "add_remove", 2),
        (2, "client", "replace_one", 4),
        (3, "client", "replace_one", 6),
        (3, "patient", "add_remove", 6),
    ],
)
@every("num_classes", [2, 3])
def test_the_range_of_a_label_by_enumeration(teachers, unit, relation, votes, num_classes):
    """All votes of all teachers, and all changes. The range is attained; four fifths are not."""
    scale = 1.7
    mechanism = NoisyMax(num_classes, scale, "gumbel", Shards(teachers))
    event = mechanism.event(unit, relation)
    assert event == BoundedRangeDpEvent(pytest.approx(votes / scale, rel=1e-12))
    moved = mechanism.shards.changed(unit)
    vanish = mechanism.shards.vanish(unit, relation)
    worst = 0.0
    for classes in itertools.combinations_with_replacement(range(num_classes), teachers):
        counts = np.bincount(classes, minlength=num_classes)
        for after in changes(counts, moved, vanish):
            ratios = np.log(softmax(counts / scale)) - np.log(softmax(after / scale))
            worst = max(worst, np.ptp(ratios))
    assert worst == pytest.approx(event.loss_range, rel=1e-9)
    assert worst <= event.loss_range * (1 + 1e-12)


def test_teachers_that_are_never_silent_are_replaced_and_no_noise_proves_nothing():
    silent, other = (NoisyMax(3, 8.0, "gumbel", Shards(5, silent=s)) for s in (True, False))
    half, whole = (m.event("client", "add_remove").loss_range for m in (silent, other))
    assert whole == pytest.approx(2 * half)
    none = NoisyMax(3, 0.0, "gumbel")
    assert none.event("record", "add_remove") == NonPrivateDpEvent()


@every(
    ("queries", "laplace", "gumbel"),
    [(27, 0.644, 0.409), (400, 2.924, 1.793), (1_300, 5.780, 3.485)],
)
def test_gumbel_noise_of_dgds_variance_costs_less(queries, laplace, gumbel):
    scale = 40 * math.sqrt(12) / math.pi
    for law, size, expected in (("laplace", 40.0, laplace), ("gumbel", scale, gumbel)):
        mechanism = NoisyMax(10, size, law, Shards(250))
        claim = prove([Stage(mechanism, 1, queries)], 1e-5, "record", "add_remove")
        assert claim.value == pytest.approx(expected, abs=1e-3)
        assert claim.trust == "nobody"
    assert math.isinf(published_epsilon(mechanism, queries, 1e-5))


# --- what leaves ---


def test_only_whole_votes_for_one_class_are_admissible():
    mechanism = NoisyMax(3, 1.0, shards=Shards(2))
    rows = np.array([[2, 0, 0], [0, 0, 2], [1, 1, 0], [0, 0, 0], [2, 2, 0], [-2, 2, 2], [3, 0, 0]])
    fits = mechanism.admissible(rows, np.empty((7, 3)), 2)
    assert fits.tolist() == [True, True, False, False, False, False, False]


def test_a_label_is_no_unbiased_count():
    assert not isinstance(NoisyMax(3, 1.0), Additive)
    assert isinstance(NoisyVotes(3, 1.0), Additive)
