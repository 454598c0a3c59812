"""Checks of a hospital's draws and charges, with what its sites release and train.

Two clients share a secret here, and two secrets a client's number: none may use another's draws.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from fed_dpsd.audits import victims
from fed_dpsd.audits.black_box import cost_in_answers, public_rows, rows_are_separate
from fed_dpsd.audits.canaries import Watched
from fed_dpsd.audits.checks import (
    Check,
    Count,
    check_counts,
    check_lags,
    check_repeats,
    law_of_most_votes,
    law_of_response,
)
from fed_dpsd.audits.claims import Say, audit_secrets
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.errors import counted
from fed_dpsd.experiment import Experiment
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import Additive, Values
from fed_dpsd.privacy.noise import SecretStreams, lattice_spacing, truncate
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse

TEACHERS = 2
MOST_SITES = 1_000  # numbers of sites that are one client, with secure sums
NUMBERS, LABELS = 2**14, 2**14  # noisy numbers in a client's answers, and labels
NUMBERS_AT_ONCE, REQUESTS = 2**20, 16  # in a request, and requests after the first
ZERO = 2.0**-25  # more than the probability that a draw is zero
STEPS, STEPPED = (8, 64), 2**17  # fewest and most steps of a watched training, and its numbers
PART = 2**9  # numbers that are examined in each part of a step

Secrets = Sequence[tuple[int, SecretStreams]]  # clients' numbers and secrets


class _Unidentified(SecretStreams):
    """A secret with the same identity as all others, so that only its draws differ."""

    @property
    def identity(self) -> str:
        return "0" * 64


def drawing_secrets(experiment: Experiment, purpose: str) -> Secrets:
    """Return three clients: the second has the first's secret, and the third its number."""
    one, other = (
        _Unidentified(own.secret) for own in islice(audit_secrets(experiment.config, purpose), 2)
    )
    return [(1, one), (0, one), (0, other)]


# --- checks of answers ------------------------------------------------------------------------


def check_answers(
    experiment: Experiment, broken: victims.Broken | None, say: Say
) -> Iterator[Check]:
    """Check that answers are charged, and that no draw is used twice."""
    claimed: Any = experiment.answers
    say("answers: draws and charges")
    yield _check_charges(experiment)
    secrets = drawing_secrets(experiment, "draws")
    if isinstance(claimed, Additive):
        noise = answer_noise(experiment, claimed, victims.break_noise(claimed, broken), secrets)
        if rows_are_separate(claimed):
            noise = noise[:, noise.any(axis=0)]  # the others are outside a public mask
            noiseless = Count("numbers without noise", int((noise == 0).sum()), noise.size, ZERO)
            yield check_counts("answers: every number has noise", [noiseless])
        width = int(np.clip(np.count_nonzero(noise[0]), 2, 3))
        yield check_repeats("answers: no draw is used twice", noise, width)
    else:
        yield from _check_labels(experiment, broken, secrets)


def _check_charges(experiment: Experiment) -> Check:
    """Check that a request costs what its changed rows require, and that it is answered once."""
    mechanism: Any = experiment.answers
    queries = max(s.queries for s in experiment.plan.stages if s.mechanism == mechanism)
    queries = max(queries, 2)
    values = np.repeat(mechanism.worst_case()[0], queries, axis=1)
    public = np.repeat(public_rows(mechanism.num_classes)[-1:], queries, axis=0)
    due = cost_in_answers(mechanism, queries)
    charged, same = victims.release_twice(experiment.config, mechanism, values, public)
    wrong = "" if same else "the second time it has another answer"
    if not math.isclose(charged, due, rel_tol=1e-3):
        wrong = f"it is charged as {charged:,}"
    title = f"a request of {queries:,} images, sent twice, costs {counted(round(due), 'answer')}"
    return Check(title, wrong, "the ledger")


def answer_noise(
    experiment: Experiment, claimed: Any, attacked: Any, secrets: Secrets
) -> NDArray[np.float64]:
    """Release answers in both worlds, row by row; return the (R, K) noise in units of its scale.

    Numbers outside a public mask have no noise.
    """
    rows = _rows_at_once(claimed, NUMBERS // claimed.num_classes // 2)
    worlds = np.concatenate(claimed.worst_case(), axis=1)
    values = np.tile(worlds, (1, math.ceil(rows / 2), 1))[:, :rows]
    requests = [values] + [values[:, : max(1, rows // REQUESTS)]] * REQUESTS
    noisy, exact = released_rows(experiment, claimed, attacked, requests, secrets)
    return (noisy - exact) / noise_scale(claimed)


def noise_scale(mechanism: Any) -> float:
    """Return the scale of the noise that one site adds."""
    return float(getattr(mechanism, "scale", mechanism.noise_multiplier))


def released_rows(
    experiment: Experiment, claimed: Any, attacked: Any, requests: list[Values], secrets: Secrets
) -> tuple[Values, Values]:
    """Release the teachers' (n, B, K) values of each request; the first is the largest.

    Returns:
        (R, K) released rows, and the exact sums that noise was added to, on its lattice.
    """
    spacing = lattice_spacing(noise_scale(claimed))
    predictions = np.tile(public_rows(claimed.num_classes)[-1:], (requests[0].shape[1], 1))
    exact = []
    for values in requests:
        public = predictions[: values.shape[1]]
        bounded = [claimed.constrain_sensitivity(own, public) for own in values]
        exact.append(truncate(np.stack(bounded), spacing).sum(axis=0))
    answers = _released(experiment, attacked, requests, predictions, secrets)
    times = len(answers) // len(requests)
    return np.concatenate(answers), np.concatenate(exact * times)


def _released(
    experiment: Experiment,
    attacked: Any,
    requests: list[Values],
    predictions: Values,
    secrets: Secrets,
) -> list[Values]:
    """Return the answers of sites with each client's number and secret.

    If the server adds the noise, it draws with a client's secret, and only client 0 is asked.
    """
    answers: list[Values] = []
    for client, secret in secrets:
        if client == 0 or attacked.noise_at != "server":
            first = client * MOST_SITES
            site = victims.make_client(
                experiment.config, attacked, iter([secret]), seeded=False, first=first
            )
            answers += site(requests, predictions)
    return answers


def _rows_at_once(mechanism: Any, most: int) -> int:
    """Return how many rows to send in a request; `most` holds if the rows are separate."""
    if not rows_are_separate(mechanism):
        return 64
    held = NUMBERS_AT_ONCE // mechanism.num_classes // len(mechanism.worst_case()[0])
    return int(np.clip(held, 8, max(most, 8)))


# --- checks of labels -------------------------------------------------------------------------


def _check_labels(
    experiment: Experiment, broken: victims.Broken | None, secrets: Secrets
) -> Iterator[Check]:
    """Check labels at the run's noise, and at noise whose half shows in few labels."""
    own: Any = experiment.answers
    if isinstance(own, TopKRandomizedResponse):
        # Each site's own responses, before a secure sum.
        own = dataclasses.replace(own, quorum=None, noise_at="client")
        revealing = dataclasses.replace(own, epsilon_per_answer=1.0)
    else:
        revealing = dataclasses.replace(own, noise_multiplier=2.0)
    for claimed, words in ((own, "answers"), (revealing, "answers with more revealing noise")):
        labels = released_labels(experiment, claimed, victims.break_noise(claimed, broken), secrets)
        law, repeats = label_checks(claimed, labels, words)
        yield dataclasses.replace(law, tests_noise=claimed is revealing)
        yield repeats


def label_checks(claimed: Any, labels: NDArray[np.int64], words: str) -> tuple[Check, Check]:
    """Check the law and the independence of (R, K) labels, by position after a row's first class.

    A row has n responses, each with its own draw, or the label of a noisy maximum n times.
    """
    teachers = claimed.shards.teachers
    if isinstance(claimed, NoisyMax):
        labels, law, teachers = labels // teachers, law_of_most_votes(claimed), 1
    else:
        law = law_of_response(claimed)
    counts = [
        Count(f"class at position {place}", int(hits), int(labels.sum()), float(chance))
        for place, (hits, chance) in enumerate(zip(labels.sum(axis=0), law, strict=True))
    ]
    usual = max(1, int(binom.median(teachers, law[0])))
    hits, chance = labels[:, 0] >= usual, float(binom.sf(usual - 1, teachers, law[0]))
    what = f"rows with at least {usual} at position 0"
    counts.append(Count(what, int(hits.sum()), len(hits), chance))
    return (
        check_counts(f"{words}: each class occurs as often as claimed", counts),
        check_lags(f"{words}: no draw is used twice", hits, chance),
    )


def released_labels(
    experiment: Experiment, claimed: Any, attacked: Any, secrets: Secrets
) -> NDArray[np.int64]:
    """Release answers to rows of every shift of the worst case; neighbours have the same shift.

    Returns:
        (R, K) labels by position after a row's first class.
    """
    worst, num_classes = claimed.worst_case()[0], claimed.num_classes
    rows = _rows_at_once(claimed, LABELS // REQUESTS)
    shifts = np.arange(rows)[:, None] * num_classes // rows
    order = (np.arange(num_classes) + shifts) % num_classes  # class by position
    falling = np.linspace(1, 0, num_classes)
    if getattr(claimed, "threshold", None) is not None:
        falling = np.where(np.arange(num_classes) < 2, falling + 1, 0)
    public, values = np.zeros((rows, num_classes)), np.zeros((len(worst), rows, num_classes))
    np.put_along_axis(public, order, np.tile(falling / falling.sum(), (rows, 1)), axis=1)
    np.put_along_axis(values, np.tile(order, (len(worst), 1, 1)), np.tile(worst, (1, rows, 1)), 2)
    requests = [values] * math.ceil(LABELS / rows)
    answers = _released(experiment, attacked, requests, public.astype(np.float32), secrets)
    by_position = [np.take_along_axis(each, order, axis=1) for each in answers]
    return np.concatenate(by_position).astype(np.int64)


# --- checks of training -----------------------------------------------------------------------


def check_steps(experiment: Experiment, say: Say) -> Check:
    """Check that no draw in the training of clients' teachers is used twice."""
    training, config = experiment.training, experiment.config
    assert isinstance(training, DPSGD)
    steps = int(np.clip(STEPPED // len(to_vector(make_teacher(config, 0, 0))), *STEPS))
    say(f"the noise of training: {steps} steps")
    noise = [
        part.ravel()[:PART].copy()
        for secret in drawing_secrets(experiment, "steps")
        for part in step_noise(experiment, training, secret, steps)
    ]
    return check_repeats("training: no draw is used twice", np.concatenate(noise))


def step_noise(
    experiment: Experiment, attacked: DPSGD, own: tuple[int, SecretStreams], steps: int
) -> list[NDArray[np.float64]]:
    """Train a client's teachers without records; return the noise in each part of a step.

    The noise is in units of its scale, in the order of the draws. Class counts come last.
    """
    watched = Watched.like(attacked, steps=steps, count_fraction=attacked.count_fraction)
    client, secret = own
    counts = victims.train_without_records(experiment.config, watched, secret, client, TEACHERS)
    scale = attacked.noise_multiplier * attacked.max_grad_norm
    return [part / scale for part in watched.seen] + counts
