"""Training on canaries: records with gradients that an adversary can distinguish from all others.

If the unit of training is the patient, a canary is a patient with all of their records.

As in the proof of DP-SGD, the adversary chose the records and sees the noisy sum of every step. It
does not know which records the coins included.
"""

import dataclasses
import hashlib
import itertools
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

MOST_CLASSES = 10  # of a canary's teacher
LOUD = 2.0  # weights of the canaries' network, in units of the bound
STILL = 1e-12  # a learning rate at which weights hardly move, so gradients stay constant
PILOT = 100  # training runs that set thresholds
FAINT = 1e-3  # noise multiplier at which a sum reveals who is in it
TINY = 1e-30  # added to differences of sums before taking logarithms


@dataclass(frozen=True)
class Canaries:
    """Canaries of one kind, and the teacher that they are made for."""

    # makes the untrained teacher that has gradients along `directions`
    teacher: Callable[[], nn.Module]
    inputs: torch.Tensor  # (m, D) float32 features
    labels: torch.Tensor  # (m,) int64 classes
    # (m, P) float64 unit vectors along the canaries' gradients with respect to the parameters, in
    # the parameters' order. They are computed by torch, independently of the audited code.
    directions: NDArray[np.float64]
    kinds: NDArray[np.int64]  # (m,) int64, the kind of each gradient

    @classmethod
    def of(
        cls,
        teacher: Callable[[], nn.Module],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        kinds: NDArray[np.int64] | None = None,
    ) -> "Canaries":
        """Compute the directions of canaries' gradients under cross-entropy."""
        directions = []
        for each, label in zip(inputs, labels, strict=True):
            model = teacher().double()
            nn.functional.cross_entropy(model(each[None].double()), label[None]).backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            directions.append(nn.functional.normalize(torch.cat(parts), dim=0).numpy())
        kinds = np.zeros(len(labels), np.int64) if kinds is None else kinds
        return cls(teacher, inputs, labels, np.stack(directions), kinds)

    @property
    def groups(self) -> list[NDArray[np.bool_]]:
        """Return the (m,) masks of each class, and of each kind if there are several."""
        labels = self.labels.numpy()
        kinds = np.unique(self.kinds)
        masks = [labels == label for label in np.unique(labels)]
        return masks + [self.kinds == kind for kind in kinds if len(kinds) > 1]

    def __len__(self) -> int:
        return len(self.labels)


def of_weights(count: int, num_classes: int) -> Canaries:
    """Make canaries for a linear layer, each with its own strong feature.

    Weights are zero, so the teacher gives all classes equal probability. Gradients are orthogonal
    except for the bias, which has a hundredth of their squared length.
    """

    def teacher() -> nn.Module:
        layer = nn.Linear(count, num_classes)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        return layer

    labels = torch.arange(count) % num_classes
    return Canaries.of(teacher, torch.eye(count) * LARGEST_INPUT, labels)


def of_bias(num_classes: int) -> Canaries:
    """Make canaries for a linear layer's bias: they have no features.

    The teacher is sure of class 0, and each canary has another class, so its gradient has length
    sqrt(2) and lies only in the bias.
    """

    def teacher() -> nn.Module:
        layer = nn.Linear(1, num_classes)
        nn.init.zeros_(layer.weight)
        with torch.no_grad():
            layer.bias.copy_(40.0 * torch.eye(num_classes)[0])
        return layer

    return Canaries.of(teacher, torch.zeros(num_classes - 1, 1), torch.arange(1, num_classes))


def of_network(count: int, num_classes: int, bound: float = 1.0) -> Canaries:
    """Make canaries for a network of three layers, each with its own hidden units.

    A canary activates only its own two units, which makes the network sure of a wrong class. Its
    gradient therefore lies in its own coordinates, except for the last bias, which has at most a
    hundredth of its squared length. Gradients of one kind are spread evenly over three layers; the
    others lie mostly in the first bias. All lengths are at least 50 and at least 50 times `bound`.
    """
    number, loud = torch.arange(count), LOUD * max(bound, 1.0)
    spread, labels = number % 2 == 0, number // 2 % num_classes
    feature = torch.where(spread, 1.0, 0.2)
    first_out = torch.where(spread, 4 * loud, 1.0)  # of an active unit
    second_weight = torch.where(spread, ((1 + 16 * loud**2) / 2) ** 0.5, 10 * loud)

    def teacher() -> nn.Module:
        sizes = ((count, count), (count, count), (count, num_classes))
        first, second, third = (nn.Linear(*size) for size in sizes)
        classes = torch.eye(num_classes)
        with torch.no_grad():  # inactive units stay inactive under small weight changes
            first.weight.copy_(torch.diag(2 * first_out / feature))
            first.bias.copy_(-first_out)
            second.weight.copy_(torch.diag(second_weight))
            second.bias.copy_(-second_weight * first_out / 2)
            third.weight.copy_(loud * (classes[(labels + 1) % num_classes] - classes[labels]).T)
            nn.init.zeros_(third.bias)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    return Canaries.of(teacher, torch.diag(feature), labels, (~spread).long().numpy())


@dataclass(frozen=True)
class Watched(DPSGD):
    """DP-SGD that records its noisy sums of gradients."""

    # the sum of each step and parameter, in step order
    seen: list[NDArray[np.float64]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def like(cls, mechanism: DPSGD, **changed: object) -> "Watched":
        """Return a copy of `mechanism` that releases no class counts and records its sums."""
        fields = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(DPSGD)}
        return cls(**(fields | {"count_fraction": None} | changed))

    def sums(self) -> NDArray[np.float64]:
        """Return (T, P) noisy sums of all parameters, in units of the bound."""
        parts = len(self.seen) // self.steps
        steps = [self.seen[first : first + parts] for first in range(0, len(self.seen), parts)]
        flat = [np.concatenate([part.ravel() for part in step]) for step in steps]
        return np.stack(flat) / self.max_grad_norm

    def _noisy(self, total: torch.Tensor, size: int, rng: Rng) -> torch.Tensor:
        noisy = super()._noisy(total, size, rng)
        self.seen.append(noisy.double().numpy().copy())
        return noisy


def watch(
    mechanism: DPSGD, canaries: Canaries, included: NDArray[np.bool_], rng: Rng
) -> NDArray[np.float64]:
    """Train on the included canaries; return the (T, m) components of the sums along all gradients.

    A canary that takes part in a step adds 1 to its own component if its gradient is clipped
    correctly.
    """
    watched = Watched.like(mechanism, learning_rate=STILL)
    chosen = torch.from_numpy(included)
    inputs = canaries.inputs[chosen][:, None].repeat(1, mechanism.places, 1)
    labels = canaries.labels[chosen]
    if mechanism.unit == "patient":
        labels = labels[:, None].repeat(1, mechanism.places)
    watched.train(canaries.teacher(), inputs, labels, rng)
    return watched.sums() @ canaries.directions.T


def guess_steps(
    mechanism: DPSGD,
    claimed: DPSGD,
    canaries: Canaries,
    streams: Iterator[SecretStreams],
    runs: int,
) -> tuple[Guesses, Guesses]:
    """Train on canaries `runs` times, and guess each twice from the noisy sums of all steps.

    A canary's first score is the log-likelihood ratio of its components of the sums, (1 - q) N(0,
    z^2) + q N(1, z^2) against N(0, z^2). Its second score is the length of the differences between
    consecutive steps: noise shared by steps cancels, which reveals the steps that a canary took
    part in.
    """

    def score(included: NDArray[np.bool_], secret: SecretStreams) -> NDArray[np.float64]:
        parts = watch(mechanism, canaries, included, secret.numpy("private training"))
        ratios = _log_ratio(claimed, parts).sum(axis=0)
        moves = np.log(np.abs(np.diff(parts, axis=0)).sum(axis=0) + TINY)
        # Centred, since with noise other than claimed all may lie on one side of 0.
        return np.stack([ratios - ratios.mean(), moves - (moves.min() + moves.max()) / 2])

    included, scores = _run(score, len(canaries), streams, runs)
    return Guesses(included, scores[:, 0]), Guesses(included, scores[:, 1])


def guess_clipping(
    mechanism: DPSGD, canaries: Canaries, streams: Iterator[SecretStreams], runs: int
) -> Guesses:
    """Train on canaries at rate 1, `runs` times after a pilot; guess each from its own components.

    Thresholds are the pilot's medians, so that canaries may share coordinates.
    """

    def score(included: NDArray[np.bool_], secret: SecretStreams) -> NDArray[np.float64]:
        rng = secret.numpy("private training")
        return watch(mechanism, canaries, included, rng).sum(axis=0)

    _, pilot = _run(score, len(canaries), streams, PILOT)
    included, scores = _run(score, len(canaries), streams, runs)
    return Guesses(included, scores - np.median(pilot, axis=0))


def participation(
    mechanism: DPSGD, steps: int, count: int, linear: bool, secret: SecretStreams
) -> NDArray[np.bool_]:
    """Train on canaries with hardly any noise; return the (steps, count) mask of participation."""
    faint = dataclasses.replace(mechanism, steps=steps, noise_multiplier=FAINT)
    everyone = np.ones(count, bool)
    kind = of_weights(count, 2) if linear else of_network(count, 2, mechanism.max_grad_norm)
    return watch(faint, kind, everyone, secret.numpy("private training")) > 0.5


def guess_counts(
    mechanism: DPSGD, canaries: int, streams: Iterator[SecretStreams], runs: int
) -> Guesses:
    """Release class counts `runs` times, with one canary per class."""

    def score(included: NDArray[np.bool_], secret: SecretStreams) -> NDArray[np.float64]:
        labels = np.flatnonzero(included)
        if mechanism.unit == "patient":
            labels = labels[:, None].repeat(mechanism.records_per_patient, axis=1)
        return mechanism.count(labels, canaries, secret.numpy("class counts")) - 0.5

    return Guesses(*_run(score, canaries, streams, runs))


def _run(
    score: Callable[[NDArray[np.bool_], SecretStreams], NDArray[np.float64]],
    canaries: int,
    streams: Iterator[SecretStreams],
    runs: int,
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Include each canary by a fair coin and score all canaries, in runs with separate secrets.

    The coins are seeded with a digest of the secret. They are the auditor's own, independent of the
    audited generator.
    """
    included, scores = [], []
    for secret in itertools.islice(streams, runs):
        included.append(toss_coins(secret, canaries))
        scores.append(score(included[-1], secret))
    return np.stack(included), np.stack(scores)


def toss_coins(secret: SecretStreams, count: int) -> NDArray[np.bool_]:
    """Toss (count,) fair coins with the auditor's own generator, which no client uses."""
    digest = hashlib.sha256(b"coins" + secret.secret).digest()
    return np.random.default_rng(int.from_bytes(digest, "big")).random(count) < 0.5


def steps_advantage(mechanism: DPSGD) -> float:
    """Bound the total variation distance of the training's steps with and without one unit.

    The distance is delta at epsilon 0. At rate 1 it is the distance of one Gaussian mechanism.
    """
    multiplier, steps = mechanism.noise_multiplier, mechanism.steps
    if mechanism.sample_rate == 1:
        step: DpEvent = GaussianDpEvent(multiplier)
    else:
        step = PoissonSampledDpEvent(mechanism.sample_rate, GaussianDpEvent(multiplier))
    return laws.discretised_delta([(step, steps)], 0.0)


def _log_ratio(mechanism: DPSGD, parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the log-likelihood ratio of sums that may include a canary, in units of the bound."""
    rate, variance = mechanism.sample_rate, mechanism.noise_multiplier**2
    whole = (parts - 0.5) / variance
    if rate == 1:
        return whole
    return np.logaddexp(math.log1p(-rate), math.log(rate) + whole)
