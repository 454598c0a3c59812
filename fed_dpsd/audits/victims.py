"""Hospitals to attack, which release answers with the code of a deployment.

They use a deployment's sites, sampler, ledgers and messages. A victim may add less noise than it
claims.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.audits.black_box import Client
from fed_dpsd.audits.one_run import Guesses
from fed_dpsd.client.site import Site
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.config import Config
from fed_dpsd.data.intake import Records
from fed_dpsd.models import procedural
from fed_dpsd.models.inference import to_unit
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import Mechanism, Probabilities, Values, quorum_of
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.randomized_response import LARGEST_EPSILON
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.training import ClassCounts, Plain, Training
from fed_dpsd.progress import listening
from fed_dpsd.protocol import Request

Broken = Literal["half", "none"]

ALMOST_NONE = 1e-3  # the remaining fraction of the noise
CANARIES, CANDIDATES = 8, 500  # images to query, and images to choose them from
PILOT = 40  # training runs that set thresholds
OTHERS = 20  # records or patients in a sum besides the canary


def break_noise(mechanism: Any, broken: Broken | None) -> Any:
    """Weaken a mechanism's noise to a half or a thousandth; None leaves it unchanged.

    If a thousandth is less than the mechanism allows, it is doubled until it is allowed. A
    randomised response gets twice its epsilon, or an epsilon at which about two responses in a
    billion are lies.
    """
    if broken is None:
        return mechanism
    field = mechanism.calibrated_by
    value = getattr(mechanism, field)
    if field == "epsilon_per_answer":
        changed = min(2 * value, LARGEST_EPSILON) if broken == "half" else LARGEST_EPSILON
    else:
        changed = value * (0.5 if broken == "half" else ALMOST_NONE)
    while changed < value / 4:
        with contextlib.suppress(ValueError):
            return dataclasses.replace(mechanism, **{field: changed})
        changed *= 2
    return dataclasses.replace(mechanism, **{field: changed})


def make_client(
    config: Config,
    mechanism: Mechanism,
    secrets: Iterator[SecretStreams],
    seeded: bool,
    first: int = 0,
) -> Client:
    """Return a client for `audit`, made of sites that use a mechanism; `first` is its number.

    Answers pass through `Site.release` and the bytes of Flower's messages. Every call uses new
    sites with new ledgers and noise; with `seeded`, they draw from seeds, as in a simulation. With
    a quorum, the adversary sees the sum over honest sites, because masks cancel, and the other
    sites' teachers have no preference. The server's noise is added here.
    """
    quorum = quorum_of(mechanism)
    tiny = dataclasses.replace(config.data, shape=(1, 8, 8))
    config = dataclasses.replace(config, data=tiny)

    def client(requests: Sequence[Values], public: Values) -> Iterator[Values]:
        secret = next(secrets)
        own = dataclasses.replace(config, seed=int(secret.identity[:15], 16))
        sites = [
            _site(own, Plain(), mechanism, None if seeded else secret, first + number)
            for number in range(quorum.honest if quorum else 1)
        ]
        for number, values in enumerate(requests, start=1):
            queries = values.shape[1]
            predictions = public[:queries]
            request = Request(number, np.zeros((queries, *tiny.shape), np.uint8), predictions)
            nothing = np.broadcast_to(np.nan, values.shape)
            answers = [
                site.release(mechanism, values if site is sites[0] else nothing, request)
                for site in sites
            ]
            arrived = np.stack(_through_flower([response.values for response in answers]))
            if mechanism.noise_at == "server":
                noise = secret.numpy("server noise", 0, number)
                yield mechanism.add_noise(arrived, predictions, noise)
            else:
                yield arrived.sum(axis=0)

    return client


def guess_answers(
    config: Config, training: DPSGD, secrets: Iterator[SecretStreams], runs: int
) -> Guesses:
    """Train on canaries, query a site with them and guess which were included, `runs` times.

    A canary's score is the logarithm of the answer for its label, minus the mean logarithm of the
    other classes, minus the median over a pilot. Its own clipped gradients raise this logarithm.
    """
    images, labels = _canaries(config)
    pilot = [_query_canaries(config, training, images, labels, next(secrets)) for _ in range(PILOT)]
    threshold = np.median([score for _, score in pilot], axis=0)
    results = [
        _query_canaries(config, training, images, labels, next(secrets)) for _ in range(runs)
    ]
    included, scores = (np.stack(each) for each in zip(*results, strict=True))
    return Guesses(included, scores - threshold)


def _canaries(config: Config) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Choose images with features as far from parallel as possible, and a label for each."""
    rng = np.random.Generator(np.random.PCG64(0))
    candidates = procedural.areas(CANDIDATES, config.data.shape, rng)
    with torch.inference_mode():
        teacher = make_teacher(config, 0, 0)
        pixels = to_unit(candidates, torch.device("cpu"))
        features = teacher.features(pixels) if teacher.fixed else pixels.flatten(1) - 0.5
    directions = torch.nn.functional.normalize(features, dim=1)
    parallel = (directions @ directions.T).abs()
    chosen = [0]
    while len(chosen) < CANARIES:
        chosen.append(int(parallel[chosen].amax(0).argmin()))
    return candidates[chosen], np.arange(CANARIES) % config.data.num_classes


def _query_canaries(
    config: Config,
    training: DPSGD,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    secret: SecretStreams,
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Train on the canaries that coins include, and query all; return the coins and the scores."""
    included = secret.numpy("coins").random(CANARIES) < 0.5
    with tempfile.TemporaryDirectory() as cache, listening(None):  # the audit reports
        records = Records(images[included], labels[included], np.flatnonzero(included))
        own = dataclasses.replace(config, cache=cache)
        site = _site(own, training, Probabilities(), secret, records=records)
        num_classes = config.data.num_classes
        request = Request(1, images, np.full((CANARIES, num_classes), 1 / num_classes, np.float32))
        site.pay_for_training()
        response = site.release(site.answers, site.sensitive_probabilities(images), request)
    (values,) = _through_flower([response.values])
    logs = np.log(np.maximum(values.astype(np.float64), 1e-30))
    scores = logs[np.arange(CANARIES), labels]
    return included, (scores - logs.mean(axis=1)) * num_classes / (num_classes - 1)


def guess_sums(config: Config, mechanism: RecordSums, secret: SecretStreams, runs: int) -> Guesses:
    """Release a sum over records `runs` times and guess whether it includes a canary.

    The canary is a record, or a patient with equal records. The adversary knows the sum without it
    and the canary's part, along which the score is measured. With a quorum, it sees the sum over
    the honest clients.
    """
    sizes = config.data.shape, config.data.num_classes
    width = mechanism.size_of_request(make_teacher(config, 0, 0).classifier)
    each = mechanism.records_per_patient
    rng = np.random.Generator(np.random.PCG64(0))
    images = procedural.areas(1 + OTHERS, config.data.shape, rng)
    labels = rng.integers(0, config.data.num_classes, 1 + OTHERS)
    whole = Records(images, labels, np.arange(1 + OTHERS))
    whole = whole.take(np.arange(1 + OTHERS).repeat(each))
    others = whole.take(np.arange(each, len(whole)))
    sites = [_site(config, Plain(), mechanism, secret, records=own) for own in (others, whole)]
    honest = mechanism.quorum.honest if mechanism.quorum else 1
    helpers = [_site(config, Plain(), mechanism, secret, client) for client in range(1, honest)]

    def asked(number: int) -> Request:
        return Request.without_images(mechanism.kind, *sizes, number, np.zeros(width, np.float32))

    sums = [site.sensitive_sum(asked(0)) for site in sites]
    part = (sums[1] - sums[0])[0]
    included = secret.numpy("coins").random((runs, 1)) < 0.5
    scores = np.empty((runs, 1))
    for number, coin in enumerate(included[:, 0].astype(int)):
        request = asked(number)
        answers = [sites[coin].release(mechanism, sums[coin], request)]
        answers += [site.release(mechanism, 0 * sums[0], request) for site in helpers]
        arrived = np.sum(_through_flower([answer.values for answer in answers]), axis=0)
        scores[number] = np.sum((arrived - sums[0][0] - part / 2) * part)
    return Guesses(included, scores)


def train_without_records(
    config: Config, training: DPSGD, secret: SecretStreams, client: int, teachers: int
) -> list[NDArray[np.float64]]:
    """Train a client's teachers without records, as its site does.

    Returns:
        The noise of each teacher's (K,) class counts in units of its scale, if they are released.
    """
    with tempfile.TemporaryDirectory() as cache, listening(None):  # the audit reports
        own = dataclasses.replace(config, cache=cache, teachers_per_client=teachers)
        site = _site(own, training, Probabilities(), secret, client)
        site.pay_for_training()
        site.sensitive_probabilities(np.zeros((1, *config.data.shape), np.uint8))
        if not training.counts_classes:
            return []
        request = Request.without_images("counts", config.data.shape, config.data.num_classes)
        return list(site.class_counts(request)[:, 0] / training.count_noise)


def release_twice(
    config: Config, mechanism: Mechanism, values: Values, public: Values
) -> tuple[int, bool]:
    """Release the teachers' (n, B, K) values at a site for one request, twice.

    Returns:
        The releases that the ledger charges, and whether both answers are equal.
    """
    tiny = dataclasses.replace(config, data=dataclasses.replace(config.data, shape=(1, 8, 8)))
    site = _site(tiny, Plain(), mechanism, SecretStreams(bytes(32)))
    request = Request(1, np.zeros((len(public), *tiny.data.shape), np.uint8), public)
    one, two = (site.release(mechanism, values, request).values for _ in range(2))
    return sum(entry.releases for entry in site.ledger.entries()), np.array_equal(one, two)


def _site(
    config: Config,
    training: Training,
    answers: Mechanism,
    secret: SecretStreams | None,
    client: int = 0,
    records: Records | None = None,
) -> Site:
    """Return a site with these records, or none, and an account that pays for a whole audit.

    Its teachers are trained here, not read from a file.
    """
    if records is None:
        nobody = np.zeros(0, np.int64)
        records = Records(np.zeros((0, *config.data.shape), np.uint8), nobody, nobody)
    privacy = dataclasses.replace(config.privacy, budget=None)
    stages = [Stage(answers, requests=10**12, queries=1)]
    if isinstance(training, DPSGD) and training.counts_classes:
        stages.append(Stage(ClassCounts(training), requests=1, queries=0))
    plan = Plan(training, tuple(stages))
    account = Account(MemoryLedger(), privacy, plan, run="audit")
    teacher = dataclasses.replace(config.teacher, path=None, arch=None)
    config = dataclasses.replace(config, privacy=privacy, teacher=teacher)
    return Site(config, training, answers, client, records, records.ids, None, account, secret)


def _through_flower(answers: Sequence[Values]) -> list[Values]:
    """Pass the clients' answers through the bytes of a Flower message."""
    from fed_dpsd.engines.flower import codec

    content = codec.pack_replies({c: codec.Reply(each) for c, each in enumerate(answers)})
    replies = codec.unpack_replies(codec.over_the_wire(content), range(len(answers)))
    return [reply.values for reply in replies.values() if isinstance(reply, codec.Reply)]
