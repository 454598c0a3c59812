"""Alternative readings of the paper's mechanisms: what they release, and what is proven."""

import math

import numpy as np
import pytest
from dp_accounting import NonPrivateDpEvent

from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from tests.every import every
from tests.proofs import gaussian_epsilon

REPLACED = "record", "replace_one"

# --- lies among all classes: Eq. 5 as printed ---


def test_lies_among_all_classes_follow_eq_5_and_prove_nothing():
    """A class in I is answered among all ten; one outside I uniformly in I."""
    mechanism = TopKRandomizedResponse(10, 1.0, 3, lies="classes")
    predictions = np.array([[0.5, 0.2, 0.1, *[0.2 / 7] * 7]] * 2, np.float32)
    law = mechanism.constrain_sensitivity(np.eye(10)[[1, 7]], predictions)
    truth, lie = math.e / (math.e + 9), 1 / (math.e + 9)
    assert law[0] == pytest.approx([lie, truth, *[lie] * 8])
    assert law[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3, *[0] * 7])
    # Outside I the ratio of the two laws has no bound; among candidates it is e^eps0.
    usual = TopKRandomizedResponse(10, 1.0, 3).constrain_sensitivity(
        np.eye(10)[[1, 2, 7]], predictions[[0, 0, 0]]
    )
    ratios = usual[:, None, :3] / usual[None, :, :3]
    assert ratios.max() == pytest.approx(math.e)
    for pair in UNITS_AND_RELATIONS:
        assert mechanism.event(*pair) == NonPrivateDpEvent()
    assert "the teacher's class is inside" in mechanism.reason
    assert published_epsilon(mechanism, 51_200, 1e-5) == 1
    whole = TopKRandomizedResponse(10, 1.0, None, lies="classes")
    assert whole.event("record", "add_remove") != NonPrivateDpEvent()
    assert whole.reason is None
    assert str(mechanism) != str(TopKRandomizedResponse(10, 1.0, 3))  # it keys charges
    votes = np.eye(10)[[9]]
    assert mechanism.admissible(votes, predictions[:1], 1).all()
    assert not TopKRandomizedResponse(10, 1.0, 3).admissible(votes, predictions[:1], 1).any()


def test_a_signed_mask_keeps_a_teachers_largest_entries():
    """M_k of the paper's text; by size the entry of the teacher's class would stay."""
    gradient = np.array([[-9.0, 3.0, 2.0, 1.0, 0.5, *[0.0] * 5]])
    predictions = np.full((1, 10), 0.1, np.float32)
    kept = {
        mask: np.flatnonzero(
            NormalizedGradient(10, 1.0, k=3, mask=mask).constrain_sensitivity(
                gradient, predictions
            )[0]
        ).tolist()
        for mask in ("signed", "private")
    }
    assert kept == {"signed": [1, 2, 3], "private": [0, 1, 2]}
    signed = NormalizedGradient(10, 1.0, k=3, mask="signed")
    noisy = signed.add_noise(np.zeros((1, 1, 10)), predictions, np.random.default_rng(0))
    assert (noisy != 0).all()  # its support reveals something about the teacher


# --- what noise on one teacher's answers proves: conf/experiment/data_sensitive_readings.yaml ---


@every(
    ("sigma", "expected"),
    [
        *[(100, 28.839), (20, 351.6), (7.07, 2_320), (3.79, 7_637), (2.02, 26_050)],
        *[(1, 104_330), (0.390625, 676_029)],
    ],
)
@every("bound", [1e-3, 5e-3])
def test_one_teachers_answers_prove_what_the_formula_of_gaussian_dp_states(sigma, expected, bound):
    """Whatever beta is: mu = 2 sqrt(E), E = N / sigma^2, for N = 51,200 answers."""
    stage = Stage(NormalizedGradient(10, sigma, bound), 200, 256)
    proven = prove([stage], 1e-5, *REPLACED).value
    by_hand = gaussian_epsilon(2 * math.sqrt(51_200) / sigma)
    assert proven == pytest.approx(by_hand, rel=1e-3)
    assert proven == pytest.approx(expected, rel=1e-3)


def test_lies_among_all_classes_are_not_saved_by_a_threshold():
    """Its candidates are some of the classes, so a response outside them reveals as much."""
    mechanism = TopKRandomizedResponse(10, 1.0, None, threshold=0.05, lies="classes")
    for pair in UNITS_AND_RELATIONS:
        assert mechanism.event(*pair) == NonPrivateDpEvent()
    assert mechanism.reason
