"""Report noisy max: the label's law, its bound by post-processing, and what leaves."""

import math

import numpy as np
import pytest
from dp_accounting import NonPrivateDpEvent
from scipy import stats

from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Additive, Shards
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.votes import NoisyVotes


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def votes_for(classes, num_classes, queries):
    """Return (n, B, K) votes of n teachers, each for one class in all queries."""
    return np.repeat(np.eye(num_classes)[list(classes)][:, None], queries, axis=1)


def loses(lead, scale):
    """Return the probability that the difference of two Laplace draws is beyond a lead >= 0."""
    return (1 / 2 + lead / (4 * scale)) * math.exp(-lead / scale)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_label_has_the_law_of_a_noisy_maximum_and_no_other(seed):
    """Rejects the right law with probability 1e-6; wrong scales are 20 standard errors away."""
    mechanism, queries = NoisyMax(2, 3.0, shards=Shards(5)), 50_000
    votes = votes_for((0, 0, 0, 0, 1), 2, queries)
    labels = mechanism.noise(votes, np.empty((queries, 2)), rng(seed))
    assert set(np.unique(labels)) == {0, 5}
    assert (labels.sum(1) == 5).all()
    second = int((labels[:, 1] == 5).sum())

    def accepts(scale):
        return stats.binomtest(second, queries, loses(3, scale)).pvalue > 1e-6

    assert accepts(3.0)
    assert not accepts(1.5)
    assert not accepts(6.0)


def test_no_label_tells_more_than_the_two_counts_that_a_changed_vote_moves():
    """Enumerates two classes: a changed vote moves the lead by 2; half the scale breaks it."""
    scale, bound = 3.0, 2 / 3.0
    for leads in range(-20, 20):
        laws = []
        for scale in (3.0, 1.5):
            first, second = (
                1 - loses(lead, scale) if lead >= 0 else loses(-lead, scale)
                for lead in (leads, leads + 2)
            )
            laws.append(
                max(abs(math.log(second / first)), abs(math.log((1 - second) / (1 - first))))
            )
        right, broken = laws
        assert right <= bound
        if leads == -1:
            assert broken > right
    assert loses(20, 1.5) / loses(22, 1.5) > math.exp(bound)


def test_its_guarantee_is_that_of_the_noisy_counts():
    for law in ("laplace", "gaussian"):
        shards = Shards(3)
        label = NoisyMax(4, 6.0, law, shards)
        counts = NoisyVotes(4, 6.0, law, shards=shards)
        for pair in UNITS_AND_RELATIONS:
            assert label.event(*pair) == counts.event(*pair)
    none = NoisyMax(4, 0.0)
    assert none.event("record", "add_remove") == NonPrivateDpEvent()


@pytest.mark.parametrize(
    ("queries", "published", "proven"), [(27, 1.314, 0.644), (1_300, 11.901, 5.780)]
)
def test_dgds_queries_cost_what_the_design_says(queries, published, proven):
    mechanism = NoisyMax(10, 40.0, shards=Shards(250))
    claim = prove([Stage(mechanism, 1, queries)], 1e-5, "record", "add_remove")
    assert claim.value == pytest.approx(proven, abs=1e-3)
    assert claim.trust == "nobody"
    assert published_epsilon(mechanism, queries, 1e-5) == pytest.approx(published, abs=1e-3)


def test_only_whole_votes_for_one_class_are_admissible():
    mechanism = NoisyMax(3, 1.0, shards=Shards(2))
    rows = np.array([[2, 0, 0], [0, 0, 2], [1, 1, 0], [0, 0, 0], [2, 2, 0], [-2, 2, 2], [3, 0, 0]])
    fits = mechanism.admissible(rows, np.empty((7, 3)), 2)
    assert fits.tolist() == [True, True, False, False, False, False, False]


def test_a_label_is_no_unbiased_count():
    assert not isinstance(NoisyMax(3, 1.0), Additive)
    assert isinstance(NoisyVotes(3, 1.0), Additive)


@pytest.mark.parametrize(("field", "value"), [("noise_multiplier", -1.0), ("noise_law", "cauchy")])
def test_parameters_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        NoisyMax(**({"num_classes": 3, "noise_multiplier": 1.0} | {field: value}))
