"""Trainings on canaries: records whose gradients an adversary can tell from all the others'.

Where patients are the unit of a training, a canary is a patient with all their records.

The adversary is the one that the proof of DP-SGD is about: it chose the records, and it sees the
noisy sum of every step. It does not know which records the coins put in.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.audits.one_run import Guesses
from fed_dpsd.privacy import laws
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.lattice import LARGEST_INPUT
from fed_dpsd.privacy.noise import Rng, SecretStreams

LOUD = 1e3  # a canary's feature for a network, in units of the bound
STILL = 1e-12  # a learning rate at which weights hardly move, so gradients stay as they are


@dataclass(frozen=True)
class _Watched(DPSGD):
    """DP-SGD whose noisy sums of gradients can be seen."""

    seen: list[NDArray[np.float64]] = field(default_factory=list, repr=False, compare=False)

    def _noisy(self, total: torch.Tensor, size: int, rng: Rng) -> torch.Tensor:
        noisy = super()._noisy(total, size, rng)
        self.seen.append(noisy.double().numpy().copy())
        return noisy


def guess_steps(
    mechanism: DPSGD,
    claimed: DPSGD,
    canaries: int,
    linear: bool,
    streams: Iterator[SecretStreams],
    runs: int,
) -> Guesses:
    """Train on canaries, `runs` times, and guess each from the noisy sums of all steps.

    A canary is one loud coordinate of a feature vector, its own, so that clipped gradients are
    orthogonal, except for the bias, and as long as the bound: the worst case of the proof. Weights
    start at zero and hardly move, so gradients stay so. A canary's score is the log-likelihood
    ratio of what it added to the steps' sums, (1 - q) N(0, z^2) + q N(1, z^2) against N(0, z^2).

    Args:
        mechanism: the mechanism whose `train` runs; its class counts are not part of this.
        claimed: the mechanism whose rate and noise the adversary believes in.
        canaries: m of a run.
        linear: whether a linear layer is trained; otherwise a network, whose gradients Opacus forms
            record by record.
        streams: secrets of the runs.
        runs: R, independent ones.
    """
    fields = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(DPSGD)}
    fields |= {"learning_rate": STILL, "count_fraction": None}

    def score(included: NDArray[np.bool_], secret: SecretStreams) -> NDArray[np.float64]:
        watched = _Watched(**fields)
        loud = LARGEST_INPUT if linear else LOUD * mechanism.max_grad_norm
        records = torch.eye(canaries)[torch.from_numpy(included)] * loud
        inputs = records[:, None].repeat(1, mechanism.places, 1)
        layer = nn.Linear(canaries, 2, bias=linear)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        teacher = layer if linear else nn.Sequential(layer)
        shape = inputs.shape[: 1 if mechanism.unit == "record" else 2]
        labels = torch.zeros(shape, dtype=torch.long)
        watched.train(teacher, inputs, labels, secret.numpy("private training"))
        sums = np.stack([part for part in watched.seen if part.shape == (2, canaries)])
        parts = (sums[:, 1] - sums[:, 0]) / math.sqrt(2) / mechanism.max_grad_norm  # (T, m)
        ratios = _log_ratio(claimed, parts).sum(axis=0)
        # Centred, for with other noise than claimed all may lie below 0.
        return ratios - ratios.mean()

    return _guess(score, canaries, streams, runs)


def guess_counts(
    mechanism: DPSGD, canaries: int, streams: Iterator[SecretStreams], runs: int
) -> Guesses:
    """Release class counts, `runs` times, each canary the only one of its class.

    Args:
        mechanism: the mechanism whose `count` runs.
        canaries: m of a run.
        streams: secrets of the runs.
        runs: R, independent ones.
    """

    def score(included: NDArray[np.bool_], secret: SecretStreams) -> NDArray[np.float64]:
        labels = np.flatnonzero(included)
        if mechanism.unit == "patient":
            labels = labels[:, None].repeat(mechanism.records_per_patient, axis=1)
        return mechanism.count(labels, canaries, secret.numpy("class counts")) - 0.5

    return _guess(score, canaries, streams, runs)


def _guess(
    score: Callable[[NDArray[np.bool_], SecretStreams], NDArray[np.float64]],
    canaries: int,
    streams: Iterator[SecretStreams],
    runs: int,
) -> Guesses:
    """Include canaries by fair coins and score them, in runs with secrets of their own."""
    included = np.empty((runs, canaries), bool)
    scores = np.empty((runs, canaries))
    for run in range(runs):
        secret = next(streams)
        included[run] = secret.numpy("coins").random(canaries) < 0.5
        scores[run] = score(included[run], secret)
    return Guesses(included, scores)


def steps_advantage(mechanism: DPSGD) -> float:
    """Bound the total variation distance of a training's steps, one added unit apart.

    The distance is delta at epsilon 0. At rate 1 it is that of one Gaussian mechanism.
    """
    multiplier, steps = mechanism.noise_multiplier, mechanism.steps
    if mechanism.sample_rate == 1:
        step: DpEvent = GaussianDpEvent(multiplier)
    else:
        step = PoissonSampledDpEvent(mechanism.sample_rate, GaussianDpEvent(multiplier))
    return laws.discretised_delta([(step, steps)], 0.0)


def _log_ratio(mechanism: DPSGD, parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the log-likelihood ratio of sums, in units of the bound, that may hold a canary."""
    rate, variance = mechanism.sample_rate, mechanism.noise_multiplier**2
    whole = (parts - 0.5) / variance
    if rate == 1:
        return whole
    return np.logaddexp(math.log1p(-rate), math.log(rate) + whole)
