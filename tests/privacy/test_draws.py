"""The laws of every sampler, and what noise must not reveal; planted faults are the controls.

Draws of a site, with a secret, are compared with the laws in docs/proofs.md, which are computed
here. Each check fails for correct code with probability at most 1e-5; seeds are fixed. A Gaussian
truncated at up to 4.05 standard deviations is found.
"""

import hashlib
import itertools

import numpy as np
import pytest
from scipy.stats import laplace, norm

from fed_dpsd.audits import draws
from fed_dpsd.audits.checks import Count, check_counts
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import Shards
from fed_dpsd.privacy.noise import SecretStreams, lattice_spacing, noisy_sum
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from tests.every import every
from tests.privacy import planted

MANY, FEW = 2**20, 2**16
LOW_BITS = 12  # examined; noise has at least 25
LAWS = {"gaussian": norm, "laplace": laplace}
# The far ones are not integers: noise truncated at an integer piles up there.
TAILS = {"gaussian": (0.0, 0.5, 1.0, 2.0, 3.05, 4.05), "laplace": (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)}


def secret(number=0):
    return SecretStreams(hashlib.sha256(f"draws {number}".encode()).digest())


# --- checks of arrays ---


def tails(drawn, law):
    """Counts of draws of unit scale beyond each distance, on both sides."""
    sides = itertools.product(TAILS[law], (1, -1))
    return check_counts(
        "tails",
        [
            Count(f"beyond {sign * far}", np.sum(sign * drawn > far), drawn.size, LAWS[law].sf(far))
            for far, sign in sides
        ],
    )


def low_bits(numbers, spacing):
    """Low bits of (R, C) lattice points are fair and independent; a column has one exact value."""
    steps = np.rint(numbers / spacing).astype(np.int64)
    off = Count("off the lattice", np.sum(steps * spacing != numbers), numbers.size, 0.0)
    bits = (steps[..., None] >> np.arange(LOW_BITS)) & 1
    pairs = [
        bits[..., one] ^ bits[..., other]
        for one, other in itertools.combinations(range(LOW_BITS // 2), 2)
    ]
    hits = np.concatenate([bits, np.stack(pairs, axis=-1)], axis=-1).sum(axis=0)
    fair = [Count("bit", hit, len(steps), 0.5) for hit in hits.ravel()]
    return check_counts("low bits", [off, *fair])


def residues(numbers, exact, spacing):
    """Low bits of lattice points agree neither with the exact values' bits nor with their signs."""
    moved = exact != 0
    steps, values = (np.rint(each[moved] / spacing).astype(np.int64) for each in (numbers, exact))
    counts = []
    for bit in range(LOW_BITS):
        own = (steps >> bit) & 1
        for other in ((values >> bit) & 1, values > 0):
            counts.append(Count(f"bit {bit}", np.sum(own == other), steps.size, 0.5))
    return check_counts("residues", counts)


def independence(drawn, law):
    """Signs and sizes of (R, C) draws agree by chance with the next row, column and half."""
    half, median = len(drawn) // 2, LAWS[law].ppf(0.75)  # of the sizes
    counts = []
    for one, other in (
        (drawn[: 2 * half : 2], drawn[1 : 2 * half : 2]),
        (drawn[:half], drawn[half : 2 * half]),
        (drawn[:, 0:-1:2], drawn[:, 1::2]),
    ):
        agree = (one > 0) == (other > 0), (np.abs(one) > median) == (np.abs(other) > median)
        counts += [Count("agreeing", each.sum(), one.size, 0.5) for each in agree]
    return check_counts("independence", counts)


# --- checks of code ---


def uniform(small, size):
    words = (secret().numpy("draws").random(size) * 2.0**53).astype(np.int64)
    bits = [Count(f"bit {bit}", np.sum(words >> bit & 1), size, 0.5) for bit in range(53)]
    return [check_counts("uniform draws have 53 fair bits", bits)]


def alone(law):
    def check(small, size):
        drawn = noisy_sum(np.zeros((1, size // 16, 16)), 1.0, law, secret().numpy(law))
        bits = low_bits(drawn, lattice_spacing(1.0))
        return [tails(drawn, law), bits, independence(drawn, law)]

    return check


def answers(*settings):
    """Noise of released answers, on the same values in each row and on different ones."""

    def check(small, size):
        experiment = small("training=plain", *settings)
        claimed = experiment.answers
        rows = size // claimed.num_classes
        rng = np.random.default_rng(0)
        alike = np.repeat(claimed.worst_case()[0], rows, axis=1)
        found, drawn = [], []
        for number, values in enumerate((alike, rng.normal(size=alike.shape))):
            noisy, exact = draws.released_rows(
                *(experiment, claimed, claimed, [values]), [(0, secret(number))]
            )
            kept = np.any(noisy != 0, axis=0)  # outside a public mask there is none
            noisy, exact = noisy[:, kept], exact[:, kept]
            found.append(
                residues(noisy, exact, claimed.lattice)
                if number
                else low_bits(noisy, claimed.lattice)
            )
            drawn.append((noisy - exact) / draws.noise_scale(claimed))
        honest = claimed.quorum.honest if claimed.quorum else 1
        drawn = np.concatenate(drawn) / np.sqrt(honest)
        return [*found, tails(drawn, claimed.noise_law), independence(drawn, claimed.noise_law)]

    return check


def labels(claimed):
    """Released labels, by position; a site's code draws them, with the experiment's own keys."""

    def check(small, size):
        experiment = small("training=plain", "answers=label")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draws, "LABELS", size)
            drawn = draws.released_labels(experiment, claimed, claimed, [(0, secret())])
        return draws.label_checks(claimed, drawn, "labels")

    return check


def steps(*settings):
    """Noise of training without records."""

    def check(small, size):
        experiment = small("training=dp_sgd", *settings)
        training = experiment.training
        few = draws.step_noise(experiment, training, (0, secret()), 2)
        count = size // sum(part.size for part in few) * 2
        parts = draws.step_noise(experiment, training, (0, secret()), max(2, count))
        flat = np.concatenate([part.ravel() for part in parts])
        rows = flat[: len(flat) // 16 * 16].reshape(-1, 16)
        return [tails(flat, "gaussian"), independence(rows, "gaussian")]

    return check


def counts(small, size):
    """Noise of class counts, with zero, one and two records of each class in turn."""
    claimed = DPSGD(4.4, 1.0, 10, 1.0, 0.02, count_fraction=1.0)
    classes = size // 3 * 3
    known = np.arange(classes) % 3
    released = claimed.count(np.arange(classes).repeat(known), classes, secret().numpy("counts"))
    noise = (released - known) / claimed.count_noise
    return [
        tails(noise, "gaussian"),
        low_bits(released.reshape(-1, 3), lattice_spacing(claimed.count_noise)),
    ]


GRADIENT = answers("answers=gradient")
MASKED = answers("answers=gradient", "answers.k=3")
SHARES = answers(
    "answers=votes", "num_clients=4",
    "answers.noise_at=distributed", "answers.quorum={threshold: 3, colluding: 1}",
)  # fmt: skip
VOTES = answers("answers=votes")
LAPLACE = answers("answers=votes", "answers.noise_law=laplace")
SERVER = answers("answers=gradient", "answers.noise_at=server")
RESPONSES = labels(TopKRandomizedResponse(10, 1.0, 3))
RARE = labels(TopKRandomizedResponse(10, 10.0))
MANY_TEACHERS = labels(TopKRandomizedResponse(10, 1.0, shards=Shards(3)))
SELECTIVE = labels(TopKRandomizedResponse(10, 1.0, threshold=0.05))
MAXIMA = {
    law: labels(NoisyMax(10, 3.0, law, Shards(5))) for law in ("laplace", "gaussian", "gumbel")
}
LINEAR = steps("model=scattering")
NETWORK = steps()
RIGHT = [
    *(uniform, alone("gaussian"), alone("laplace"), counts),
    *(GRADIENT, MASKED, SHARES, VOTES, LAPLACE, SERVER),
    *(RESPONSES, RARE, MANY_TEACHERS, SELECTIVE, *MAXIMA.values(), LINEAR, NETWORK),
]
FAULTS = [
    (planted.uniform_draws_of_8_bits, uniform),
    (planted.half_scale, alone("gaussian")),
    (planted.root_of_half_the_scale, alone("laplace")),
    (planted.laplace_of_half_the_units, alone("laplace")),
    (planted.rounded_to_zero, counts),
    (planted.root_of_half_the_scale, counts),
    (planted.value_in_the_low_bits_of_the_noise, GRADIENT),
    (planted.sign_in_the_low_bits_of_the_noise, VOTES),
    (planted.rows_share_noise, GRADIENT),
    (planted.root_of_half_the_scale, MASKED),
    (planted.root_of_half_the_scale, LAPLACE),
    (planted.root_of_half_the_scale, SERVER),
    (planted.share_of_one_client_is_missing, SHARES),
    (planted.responses_from_draws_of_8_bits, RARE),
    (planted.lies_half_as_often, RESPONSES),
    (planted.responses_among_one_class_more, RESPONSES),
    (planted.responses_among_one_class_more, SELECTIVE),
    (planted.teachers_share_a_draw, MANY_TEACHERS),
    *((planted.root_of_half_the_scale, MAXIMA[law]) for law in ("laplace", "gaussian")),
    (planted.gumbel_of_root_of_half_the_scale, MAXIMA["gumbel"]),
    (planted.half_the_noise_in_steps, LINEAR),
    (planted.half_the_noise_in_steps, NETWORK),
]
TRUNCATED = [  # rare draws, so many are needed
    (planted.noise_cut_at_4_sigma, alone("gaussian")),
    (planted.noise_of_steps_cut_at_4_sigma, LINEAR),
]


@pytest.mark.slow(seconds=20)
def test_draws_have_their_laws_and_reveal_nothing_else(small):
    """Correct code fails with probability at most 0.001 in total."""

    @every("check", RIGHT)
    def of_row(check):
        assert not [str(found) for found in check(small, FEW) if found.contradicts]

    of_row()


@pytest.mark.slow(seconds=20)
def test_a_fault_in_a_sampler_is_found(small, monkeypatch):
    """All are so large that seeds hardly matter."""

    @every(("fault", "check"), FAULTS)
    def of_row(fault, check, monkeypatch):
        fault(monkeypatch)
        assert any(found.contradicts for found in check(small, FEW))

    of_row(monkeypatch=monkeypatch)


@pytest.mark.slow(seconds=20)
def test_noise_truncated_at_four_standard_deviations_is_found(small, monkeypatch):
    """The controls: without the fault, the same checks find nothing."""

    @every(("fault", "check"), TRUNCATED)
    def of_row(fault, check, monkeypatch):
        assert not [str(found) for found in check(small, MANY) if found.contradicts]
        fault(monkeypatch)
        assert any(found.contradicts for found in check(small, MANY))

    of_row(monkeypatch=monkeypatch)
