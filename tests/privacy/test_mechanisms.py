"""Every mechanism: its bounds, its noise law with a control that fails, and its edges."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent
from scipy import stats

from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import (
    UNITS_AND_RELATIONS,
    ExactCounts,
    Mechanism,
    Probabilities,
    Quorum,
    Shards,
    Weights,
    top_k,
)
from fed_dpsd.privacy.noise import SecureGenerator
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy.ideals import ideal, rng

UNIFORM = np.full((1, 4), 0.25, np.float32)
RELATIONS = ("add_remove", "replace_one")


def test_a_uniform_response_loses_what_the_draws_precision_costs():
    """The last class of ten gets the rest of 1 - 9 * 0.1 in float64, which is not 0.1."""
    event = TopKRandomizedResponse(10, 0.0).event("record", "replace_one")
    off = 2 * (10 + 2) * 2**-53 / 0.1  # in each world, relative to the probability of a lie
    assert best_bound(event, 1e-5).epsilon == pytest.approx(2 * off, abs=0)


# --- normalised gradients ---


@every("normalise", ["sample", "batch"])
@every("bound", [1e-3, 0.5, 1e4])
def test_clipping_shortens_longer_gradients_alone(normalise, bound):
    """The control, normalising, lengthens shorter ones."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 10)) * 10.0 ** rng.integers(-6, 6, (200, 1))
    predictions = np.full((200, 10), 0.1)
    clip = NormalizedGradient(10, 1.0, bound=bound, normalise=normalise, scaling="clip")
    axis = 1 if normalise == "sample" else None
    encoded = clip.constrain_sensitivity(rows, predictions)
    before = np.linalg.norm(rows, axis=axis, keepdims=True)
    after = np.linalg.norm(encoded, axis=axis, keepdims=True)
    assert (after <= bound).all()
    assert encoded == pytest.approx(rows * np.minimum(1, bound / before), rel=1e-8)
    usual = NormalizedGradient(10, 1.0, bound=bound, normalise=normalise)
    short = before < 1e-2 * bound
    lengths = np.linalg.norm(
        usual.constrain_sensitivity(rows, predictions), axis=axis, keepdims=True
    )
    assert (lengths[short] > after[short]).all()
    first, second = (
        clip.constrain_sensitivity(world[0], predictions[:1]) for world in clip.worst_case()
    )
    assert np.linalg.norm(first - second) == pytest.approx(2 * bound)
    assert clip.event("record", "replace_one") == usual.event("record", "replace_one")
    assert str(clip) != str(usual)  # else a ledger would take the answers of one for the other's


def test_a_small_gradient_is_shortened_by_the_stability_constant():
    """Eq. 3 divides by the norm plus h: a gradient of norm h gets half the bound, 9 h gets 0.9."""
    for normalise in ("sample", "batch"):
        gradient = NormalizedGradient(10, 1.0, bound=0.1, stability=0.5, normalise=normalise)
        for multiple, expected in ((1, 0.05), (9, 0.09)):
            row = np.zeros((1, 10))
            row[0, :2] = 0.5 * multiple * np.array([0.6, -0.8])
            encoded = gradient.constrain_sensitivity(row, np.full((1, 10), 0.1))
            assert np.linalg.norm(encoded) == pytest.approx(expected)


@every("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_zero(bad):
    gradient = NormalizedGradient(4, 1.0, bound=1.0)
    values = np.array([[1.0, bad, 0, 0], [3.0, 4.0, 0, 0]])
    encoded = gradient.constrain_sensitivity(values, np.repeat(UNIFORM, 2, 0))
    assert (encoded[0] == 0).all()
    assert encoded[1] == pytest.approx([0.6, 0.8, 0, 0], abs=1e-4)


def test_zero_and_empty_inputs():
    gradient = NormalizedGradient(4, 1.0)
    assert (gradient.constrain_sensitivity(np.zeros((1, 4)), UNIFORM) == 0).all()
    assert gradient.constrain_sensitivity(np.zeros((0, 4)), np.zeros((0, 4), np.float32)).shape == (
        0,
        4,
    )
    assert gradient.add_noise(np.zeros((1, 0, 4)), np.zeros((0, 4), np.float32), rng()).shape == (
        0,
        4,
    )


def test_the_mask_is_public_and_noise_stays_inside():
    gradient = NormalizedGradient(4, 5.0, bound=1.0, k=2)
    predictions = np.array([[0.1, 0.4, 0.4, 0.1]], np.float32)
    encoded = gradient.constrain_sensitivity(np.array([[9.0, 3.0, 4.0, 9.0]]), predictions)
    assert encoded[0] == pytest.approx([0, 0.6, 0.8, 0], abs=1e-3)
    noisy = gradient.add_noise(encoded[None], predictions, rng())
    assert (noisy[0, [0, 3]] == 0).all()
    assert (noisy[0, [1, 2]] != encoded[0, [1, 2]]).all()


@every("noise_multiplier", [0.0, 1.0])
@every("source", [rng, lambda: SecureGenerator(bytes(32))])
def test_zeros_outside_a_public_mask_have_no_sign(source, noise_multiplier):
    """The control: a product with the mask keeps the signs of what the mask hides."""
    gradient = NormalizedGradient(4, noise_multiplier, bound=1.0, k=2)
    predictions = np.repeat(np.array([[0.4, 0.4, 0.1, 0.1]], np.float32), 50, axis=0)
    encoded = gradient.constrain_sensitivity(
        np.random.default_rng(0).normal(size=(50, 4)), predictions
    )
    released = gradient.add_noise(encoded[None], predictions, source())
    hidden = released[:, 2:]
    assert (hidden == 0).all()
    assert not np.signbit(hidden).any()
    assert np.signbit(encoded[:, 2:]).any()


def test_ties_in_the_mask_go_to_the_lower_class():
    assert top_k(np.array([[0.2, 0.2, 0.2, 0.4]]), 2).tolist() == [[True, False, False, True]]


def test_a_private_mask_keeps_the_largest_entries_and_costs_the_same():
    gradient = NormalizedGradient(4, 7.0, bound=1.0, k=2, mask="private")
    encoded = gradient.constrain_sensitivity(np.array([[0.1, -9.0, 0.2, 5.0]]), UNIFORM)
    assert (encoded[0] != 0).tolist() == [False, True, False, True]
    assert np.linalg.norm(encoded) < 1
    assert ideal(gradient.event("record", "add_remove")) == GaussianDpEvent(3.5)


def test_a_batch_is_bounded_as_a_whole():
    gradient = NormalizedGradient(10, 1.0, bound=0.1, stability=1e-12, normalise="batch")
    values = rng().normal(size=(64, 10)) * 10.0 ** rng(1).uniform(-200, 200, (64, 1))
    predictions = np.full((64, 10), 0.1, np.float32)
    whole = np.linalg.norm(gradient.constrain_sensitivity(values, predictions))
    assert 0.0999 < whole <= 0.1 * (1 + 4e-16)
    by_row = NormalizedGradient(10, 1.0, bound=0.1, stability=1e-12)
    assert (
        np.linalg.norm(by_row.constrain_sensitivity(values, predictions)) > 0.5
    )  # the control: up to 0.8
    assert (gradient.releases(3, 64), by_row.releases(3, 64)) == (3, 192)
    assert gradient.row_norm(np.full((64, 10), 0.1)) == pytest.approx(0.1 / 8)
    with pytest.raises(ValueError, match="1,310,720 gradient entries in a request"):
        gradient.add_noise(np.zeros((1, 2**17, 10)), predictions, rng())
    empty = np.zeros((0, 10))
    assert gradient.constrain_sensitivity(empty, empty).shape == (0, 10)
    assert (gradient.constrain_sensitivity(np.full((2, 10), math.nan), predictions[:2]) == 0).all()


def test_the_server_sees_through_answers_that_no_client_could_have_given():
    gradient = NormalizedGradient(4, 1.0, bound=0.5, noise_at="server", shards=Shards(2))
    values = np.array([[1.0, 0, 0, 0], [0.6, 0.8, 0, 0], [1.1, 0, 0, 0], [1e200, 0, 0, 0]])
    predictions = np.repeat(UNIFORM, 4, 0)
    assert gradient.admissible(values, predictions, 2).tolist() == [True, True, False, False]
    whole = NormalizedGradient(4, 1.0, bound=0.5, noise_at="server", normalise="batch")
    assert not whole.admissible(values, predictions, 2).any()
    assert whole.admissible(values[:1], predictions[:1], 2).all()
    noisy_at_client = NormalizedGradient(4, 1.0, bound=0.5)
    assert noisy_at_client.admissible(values, predictions, 2).tolist() == [True] * 3 + [False]
    masked = NormalizedGradient(4, 1.0, bound=0.5, k=2)
    assert masked.admissible(values[:, ::-1], predictions, 2).tolist() == [False] * 4
    assert masked.admissible(values, predictions, 2).tolist() == [True] * 3 + [False]
    votes = NoisyVotes(4, 1.0, noise_at="server")
    counts = np.array([[2.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0], [0.5, 0, 0, 0]])
    accepted = votes.admissible(counts, np.repeat(UNIFORM, 5, 0), 2)
    assert accepted.tolist() == [True, True, True, False, False]
    for law, farthest in (("gaussian", 9.0), ("laplace", 40.5)):
        noisy = NoisyVotes(4, 1.0, noise_law=law)
        assert noisy.admissible(counts, np.repeat(UNIFORM, 5, 0), 2).all()
        edges = np.diag([-farthest, -farthest - 1, 2 + farthest, 3 + farthest])
        accepted = noisy.admissible(edges, np.repeat(UNIFORM, 4, 0), 2)
        assert accepted.tolist() == [True, False, True, False]
    responses = TopKRandomizedResponse(4, 1.0, 2)
    ranked = np.repeat(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32), 5, 0)
    counts = np.array([[1, 1, 0, 0], [2, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0], [3, -1, 0, 0]])
    accepted = responses.admissible(counts, ranked, 2)
    assert accepted.tolist() == [True, True, False, False, False]
    clear = np.array([[0.5, 1.5, 0, 0], [1.0, 0, 0, 0], [3.0, -1, 0, 0]])
    assert Probabilities().admissible(clear, predictions[:3], 2).tolist() == [True, False, False]


@every(
    "mechanism",
    [
        NormalizedGradient(4, 2.0, shards=Shards(2)),
        NormalizedGradient(4, 2.0, normalise="batch", shards=Shards(2)),
        NormalizedGradient(4, 2.0, k=2, shards=Shards(2)),
        NormalizedGradient(4, 2.0, k=2, mask="private", shards=Shards(2)),
        NoisyVotes(4, 2.0, shards=Shards(2)),
        NoisyVotes(4, 2.0, noise_law="laplace", shards=Shards(2)),
    ],
)
@every("seed", [0, 1, 2])
def test_honest_noise_is_always_admissible(mechanism, seed):
    """For 50,000 rows; each is refused with a probability of about 1e-18."""
    worst = mechanism.worst_case()[0]
    predictions = np.tile(np.array([0.4, 0.3, 0.2, 0.1], np.float32), (50_000, 1))
    whole = np.repeat(worst, 50_000, 1)
    encoded = np.stack([mechanism.constrain_sensitivity(teacher, predictions) for teacher in whole])
    values = mechanism.add_noise(encoded, predictions, rng(seed))
    assert mechanism.admissible(values, predictions, 2).all()
    assert not mechanism.admissible(values * 100, predictions, 2).all()


# --- votes ---


def test_votes_are_one_hot_and_ties_and_silence_are_settled():
    votes = NoisyVotes(3, 1.0)
    rows = np.array([[0.2, 0.4, 0.4], [math.nan, 1, 0], [0, math.inf, 0], [0, 0, 1]])
    encoded = votes.constrain_sensitivity(rows, np.full((4, 3), 1 / 3, np.float32))
    assert encoded.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    empty = np.zeros((0, 3))
    assert votes.add_noise(votes.constrain_sensitivity(empty, empty)[None], empty, rng()).shape == (
        0,
        3,
    )


def test_vote_events_match_the_largest_moves():
    """All moves of up to three votes among four counts, against the events' own shifts."""
    moves = [
        np.bincount(after, minlength=4) - np.bincount(before, minlength=4)
        for before in itertools.product(range(4), repeat=3)
        for after in itertools.product(range(4), repeat=3)
    ]
    gone = [np.bincount(before, minlength=4) for before in itertools.product(range(4), repeat=3)]
    gaussian = NoisyVotes(4, 6.0, "gaussian", shards=Shards(3))
    laplace = NoisyVotes(4, 6.0, "laplace", shards=Shards(3))
    for relation, shifts in (("replace_one", moves), ("add_remove", gone)):
        largest = max(np.linalg.norm(shift) for shift in shifts)
        noise = ideal(gaussian.event("client", relation)).noise_multiplier
        assert noise == pytest.approx(6.0 / largest)
        parts = laplace.event("client", relation).events
        law = LaplaceDpEvent(pytest.approx(2.0))
        assert parts == [law] * (2 if relation == "replace_one" else 1)
        assert sum(3 for _ in parts) == max(np.abs(shift).sum() for shift in shifts)
    noise = ideal(gaussian.event("record", "add_remove")).noise_multiplier
    assert noise == pytest.approx(6 / 2**0.5)
    assert laplace.event("record", "add_remove").events == [LaplaceDpEvent(pytest.approx(6.0))] * 2


# --- randomised response ---


def response_law(mechanism, predictions, teacher_class):
    teacher = np.eye(mechanism.num_classes)[[teacher_class]]
    return mechanism.constrain_sensitivity(teacher, predictions)[0]


@every(("k", "epsilon_per_answer"), list(itertools.product([2, 3, 10], [0.0, 0.1, 1.0, 10.0])))
def test_one_response_is_private_by_enumeration(k, epsilon_per_answer):
    """The whole output matrix: no ratio above e^eps0, e^eps0 attained, no response outside I."""
    mechanism = TopKRandomizedResponse(10, epsilon_per_answer, k)
    predictions = np.linspace(0, 1, 10, dtype=np.float32)[None]
    members = top_k(predictions, k)[0]
    laws = np.array([response_law(mechanism, predictions, c) for c in range(10)])
    assert laws.sum(1) == pytest.approx(1)
    assert (laws[:, ~members] == 0).all()
    least = mechanism.add_noise(laws[:, None], predictions, SimpleNamespace(random=np.zeros))
    assert (least[:, ~members] == 0).all()
    inside = laws[:, members]
    ratio = (inside[:, None] / inside[None]).max()
    assert ratio == pytest.approx(math.exp(epsilon_per_answer), rel=1e-9)
    assert (laws[~members][:, members] == pytest.approx(1 / k)) or k == 10


@every("source", [rng, lambda: rng(1), lambda: SecureGenerator(bytes(32))])
def test_responses_are_drawn_from_their_law(source):
    """Chi-square at level 1e-6; the control is the law of another epsilon."""
    mechanism = TopKRandomizedResponse(4, 1.0, 3)
    law = mechanism.constrain_sensitivity(
        np.eye(4)[[1]], np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)
    )
    drawn = mechanism.add_noise(np.repeat(law, 20_000, 0)[None], UNIFORM, source())
    assert drawn.dtype == np.uint8
    assert (drawn.sum(1) == 1).all()
    counts = drawn.sum(0)
    assert counts[3] == 0
    assert stats.chisquare(counts[:3], 20_000 * law[0, :3]).pvalue > 1e-6
    other = TopKRandomizedResponse(4, 1.5, 3)
    wrong = other.constrain_sensitivity(
        np.eye(4)[[1]], np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)
    )
    assert stats.chisquare(counts[:3], 20_000 * wrong[0, :3]).pvalue < 1e-20


def test_a_threshold_keeps_what_is_probable_and_at_least_two_classes():
    mechanism = TopKRandomizedResponse(4, 1.0, threshold=0.2)
    predictions = np.array(
        [[0.97, 0.01, 0.01, 0.01], [0.3, 0.25, 0.25, 0.2], [0.1, 0.1, 0.4, 0.4]], np.float32
    )
    assert mechanism.members(predictions).sum(1).tolist() == [2, 3, 2]
    law = mechanism.constrain_sensitivity(np.eye(4)[[0, 1, 0]], predictions)
    lies = [1 / (math.e + 1), 1 / (math.e + 2)]
    assert law[0] == pytest.approx([1 - lies[0], lies[0], 0, 0])
    assert law[1] == pytest.approx([lies[1], 1 - 2 * lies[1], lies[1], 0])
    assert law[2] == pytest.approx([0, 0, 0.5, 0.5])
    binary = TopKRandomizedResponse(4, 1.0, 2).event("record", "add_remove")
    assert ideal(mechanism.event("record", "add_remove")) == ideal(binary)
    with pytest.raises(ValueError, match=r"threshold=0.2 .* k=3"):
        TopKRandomizedResponse(4, 1.0, k=3, threshold=0.2)


def test_a_teacher_without_a_class_answers_uniformly():
    mechanism = TopKRandomizedResponse(4, 3.0, 2)
    law = mechanism.constrain_sensitivity(
        np.full((1, 4), math.nan), np.array([[0.1, 0.5, 0.3, 0.1]], np.float32)
    )
    assert law[0].tolist() == [0, 0.5, 0.5, 0]


def test_each_teacher_responds_on_its_own():
    """Three teachers with three classes: the sum contains a response from each.

    With eps0 = 20 a lie has probability 6e-9 a response.
    """
    mechanism = TopKRandomizedResponse(4, 20.0, shards=Shards(3))
    laws = np.stack([mechanism.constrain_sensitivity(np.eye(4)[[c]], UNIFORM) for c in (0, 2, 2)])
    votes = mechanism.add_noise(laws, UNIFORM, rng())
    assert votes.tolist() == [[1, 0, 2, 0]]
    assert mechanism.add_noise(np.repeat(laws, 100, 0), UNIFORM, rng()).dtype == np.uint16


# --- several teachers at a client ---


def test_a_client_is_all_its_teachers_and_a_record_is_one():
    gradient = NormalizedGradient(4, 3.0, bound=0.5, stability=1e-9, shards=Shards(5))
    rows = [np.array([[sign, 0.0, 0, 0]]) for sign in (1.0, -1.0)]
    up, down = (gradient.constrain_sensitivity(row, UNIFORM) for row in rows)
    zero = np.zeros_like(up)

    def moved(before, after):
        return np.linalg.norm(np.sum(before, 0) - np.sum(after, 0))

    worst = {
        ("record", "add_remove"): moved([up] * 5, [up] * 4 + [down]),
        ("record", "replace_one"): moved([up] * 5, [up] * 4 + [down]),
        ("client", "add_remove"): moved([up] * 5, [zero] * 5),
        ("client", "replace_one"): moved([up] * 5, [down] * 5),
    }
    worst |= {("patient", relation): worst["client", "replace_one"] for relation in RELATIONS}
    for (unit, relation), change in worst.items():
        assert gradient.sensitivity(unit, relation) == pytest.approx(change), (unit, relation)
        assert ideal(gradient.event(unit, relation)).noise_multiplier == pytest.approx(1.5 / change)


def test_a_clients_responses_all_count():
    one, many = TopKRandomizedResponse(4, 1.0), TopKRandomizedResponse(4, 1.0, shards=Shards(5))
    for relation in ("add_remove", "replace_one"):
        assert many.event("record", relation) == one.event("record", relation)
        event = many.event("client", relation)
        assert (event.event, event.count) == (one.event("client", relation), 5)


# --- the rest ---


@every("mechanism", [Probabilities(), Weights(), ExactCounts()])
def test_what_leaves_in_the_clear_is_the_value_itself(mechanism):
    value = mechanism.constrain_sensitivity(np.array([[0.25, 0.75]]), UNIFORM)
    assert mechanism.add_noise(value[None], UNIFORM, rng()).tolist() == [[0.25, 0.75]]
    assert (mechanism.releases(3, 4), mechanism.event("record", "add_remove")) == (
        12,
        NonPrivateDpEvent(),
    )
    assert mechanism.releases(3, 0) == 3  # a request without images is a release too
    encoded = mechanism.constrain_sensitivity(np.array([[math.nan, 1.0]]), UNIFORM)
    # A teacher may have no probabilities; the server refuses weights that are not finite.
    uniform = isinstance(mechanism, Probabilities)
    assert np.array_equal(encoded, [[0.5, 0.5] if uniform else [math.nan, 1.0]], equal_nan=True)
    assert mechanism.constrain_sensitivity(value, UNIFORM).dtype == np.float32


NOISELESS = [
    NormalizedGradient(4, 0.0, shards=Shards(2)),
    NoisyVotes(4, 0.0, shards=Shards(2)),
    NoisyVotes(4, 0.0, "laplace", shards=Shards(2)),
    TopKRandomizedResponse(4, math.inf, shards=Shards(2)),
]


@every("mechanism", NOISELESS)
def test_no_noise_leaves_the_sum_as_it_is_and_proves_nothing(mechanism):
    """For teachers trained with DP; an experiment refuses it for others."""
    predictions = np.tile(UNIFORM, (3, 1))
    teachers = rng().dirichlet(np.ones(4), (2, 3))
    encoded = np.stack([mechanism.constrain_sensitivity(own, predictions) for own in teachers])
    values = mechanism.add_noise(encoded, predictions, rng(1))
    np.testing.assert_array_equal(values, encoded.sum(0))
    assert mechanism.admissible(values, predictions, 2).all()
    assert not mechanism.admissible(values + 2, predictions, 2).any()
    for unit, relation in UNITS_AND_RELATIONS:
        assert mechanism.event(unit, relation) == NonPrivateDpEvent()
    assert mechanism.releases(3, 4) == 12


@every(
    ("make", "field", "places"),
    [
        (NormalizedGradient, "noise_multiplier", ("server", "distributed")),
        (NoisyVotes, "noise_multiplier", ("server", "distributed")),
        (TopKRandomizedResponse, "epsilon_per_answer", ("distributed",)),
    ],
)
def test_where_others_are_trusted_with_noise_there_is_some(make, field, places):
    none = math.inf if field == "epsilon_per_answer" else 0.0
    for place in places:
        quorum = Quorum(3) if place == "distributed" else None
        with pytest.raises(ValueError, match=f"{field}={none:g} adds no noise"):
            make(4, noise_at=place, quorum=quorum, **{field: none})


@every("show", [str, repr, "{}".format, "{:.1f}".format, lambda e: f"{e}"])
def test_an_epsilon_cannot_be_printed_without_its_meaning(show):
    text = show(Epsilon(28.8388, 1e-5, "record", "replace_one", "nobody", "pld", 51_200))
    assert text == "28.9 (record, replace_one, trust nobody, delta 1e-05, pld)"


def test_an_infinite_epsilon_is_the_string_inf():
    epsilon = Epsilon(math.inf, 1e-5, "client", "add_remove", "server", "none", 1)
    assert str(epsilon).startswith("inf (client, add_remove, trust server")
    assert epsilon.to_json()["epsilon"] == "inf"


# --- decoding ---


def test_a_measured_norm_of_gradients_is_the_bound():
    """What a plug-in's mechanism has without a word about its bound."""
    for rows, settings in itertools.product(
        (1, 64),
        ({}, {"normalise": "batch"}, {"scaling": "clip"}, {"k": 2}, {"k": 2, "mask": "private"}),
    ):
        mechanism = NormalizedGradient(4, 1.0, bound=0.5, **settings)
        predictions = np.repeat(UNIFORM, rows, axis=0)
        known = mechanism.row_norm(predictions)
        assert Mechanism.row_norm(mechanism, predictions) == pytest.approx(known, rel=1e-3)


def test_a_loss_is_least_for_the_truth_given_the_mean_of_the_answers():
    """Teachers choose class c with probability truth[c]. The control: another mechanism's loss."""
    truth, predictions = np.array([[0.1, 0.5, 0.3, 0.1]]), np.array([[0.2, 0.4, 0.3, 0.1]])
    others = np.random.default_rng(0).dirichlet(np.ones(4), 100)
    others = np.concatenate([others, 0.9 * truth + 0.1 * others])
    teachers = np.eye(4)[:, None]

    def is_least(mechanism, decoded_by):
        answers = [mechanism.constrain_sensitivity(own, predictions) for own in teachers]
        mean = np.tensordot(truth[0], answers, 1)
        labels = torch.from_numpy(mechanism.labels(3 * mean, 3, predictions))
        loss = decoded_by.student_loss(predictions)

        def of(p):
            return loss(torch.from_numpy(p).log(), labels, np.array([0])).item()

        return of(truth) < min(of(other[None]) for other in others)

    responses = TopKRandomizedResponse(4, 1.0, k=3)
    for mechanism in (
        responses,
        TopKRandomizedResponse(4, 1.0),
        TopKRandomizedResponse(4, 1.0, threshold=0.25),
        NoisyVotes(4, 1.0),
        NoisyMax(4, 0.0),
        Probabilities(),
    ):
        assert is_least(mechanism, mechanism), mechanism
    assert not is_least(responses, NoisyVotes(4, 1.0))
    assert not is_least(responses, Probabilities())
