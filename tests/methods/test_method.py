"""What methods share: class shares from noisy counts, the resulting weights, and images."""

from dataclasses import replace

import numpy as np
import pytest

from fed_dpsd.errors import UserError
from fed_dpsd.methods.class_counts import KnownCounts, average_by_class, fetch_class_weights
from fed_dpsd.methods.method import counts_of
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.protocol import Aggregate, Refusal, Replies, Request, Response
from fed_dpsd.streams import Streams

PRIVATE = ("training=dp_sgd", "answers=probabilities", "training.steps=1", "data.num_classes=10")


class Counting:
    """A federation whose clients answer with given rows; a row of None is a refusal."""

    def __init__(self, *rows):
        self.rows, self.requests = rows, []

    def each(self, request):
        self.requests.append(request)
        replies = {
            client: Refusal(0, "spent") if row is None else Response(0, np.array([row]))
            for client, row in enumerate(self.rows)
        }
        return Replies(request, replies)

    def total(self, request):
        self.requests.append(request)
        return Aggregate(request, np.zeros(request.predictions.shape), 0, {})


class Answering(Counting):
    """The same clients, which answer images with given rows."""

    def __init__(self, answers, *rows):
        super().__init__(*rows)
        self.answers = answers

    def each(self, request):
        return super().each(request) if request.kind == "counts" else Replies(request, self.answers)


def with_classes(experiment, number):
    """The public side of an experiment on data of so many classes."""
    config = experiment.config
    config = replace(config, data=replace(config.data, num_classes=number))
    return replace(experiment.public, config=config)


@pytest.fixture
def context(small):
    return with_classes(small(*PRIVATE), 3)


def test_shares_are_parts_of_each_class_and_an_empty_class_is_everybodys(context):
    """The middle class: 30 of 40 records, and of the last nobody seems to have one."""
    federation = Counting([10.0, 30.0, -4.0], [90.0, 10.0, 0.0], [-50.0, 0.0, -1.0])
    shares = fetch_class_weights(federation, context)
    assert shares[0] == pytest.approx([0.1, 0.75, 1 / 3])
    assert shares[1] == pytest.approx([0.9, 0.25, 1 / 3])
    assert shares[2] == pytest.approx([0.0, 0.0, 1 / 3])
    assert sum(shares.values()) == pytest.approx(np.ones(3))
    (request,) = federation.requests
    assert (request.kind, request.images.shape, request.predictions.shape) == (
        "counts",
        (0, 1, 8, 8),
        (0, 3),
    )


def test_one_client_has_all_and_a_refusing_one_no_share(context):
    assert fetch_class_weights(Counting([5.0, 0.0, -1.0]), context)[0].tolist() == [1, 1, 1]
    shares = fetch_class_weights(Counting([1.0, 1.0, 1.0], None, [3.0, 1.0, 0.0]), context)
    assert list(shares) == [0, 2]
    assert shares[0] == pytest.approx([0.25, 0.5, 1])
    assert fetch_class_weights(Counting(None, None), context) == {}


def test_no_lie_about_counts_makes_shares_that_are_not_finite(context):
    """A liar may claim every class; the others' labels must stay probabilities."""
    for lie in (1e300, np.finfo(float).max, np.finfo(float).tiny):
        shares = fetch_class_weights(Counting([lie] * 3, [lie] * 3, [1.0, 0.0, 2.0]), context)
        assert all(np.isfinite(share).all() for share in shares.values()), lie
        assert sum(shares.values()) == pytest.approx(np.ones(3))
        rows = {client: np.full((2, 3), 1 / 3) for client in shares}
        assert average_by_class(rows, shares) == pytest.approx(np.full((2, 3), 1 / 3))


def test_counts_that_nobody_releases_are_not_requested(small):
    for settings in (
        ("training=plain", "answers=label"),
        (*PRIVATE, "training.count_fraction=null"),
    ):
        experiment = small(*settings)
        federation, context = Counting(), experiment.public
        assert not experiment.plan.releases_class_counts
        with pytest.raises(UserError, match="no client answers"):
            next(experiment.method.server(federation, context, Streams(0), None))
        assert [request.kind for request in federation.requests] == ["answers"]


def test_a_client_is_believed_about_the_classes_that_it_holds():
    """By hand: the first holds all of class 0 and a quarter of class 1."""
    shares = {0: np.array([1.0, 0.25]), 1: np.array([0.0, 0.75])}
    values = {0: np.array([[0.6, 0.4], [0.0, 0.0]]), 1: np.array([[0.8, 0.2], [0.0, 0.0]])}
    weighted = average_by_class(values, shares)
    assert weighted[0] == pytest.approx([0.6 / 0.85, 0.25 / 0.85])
    assert weighted[1] == pytest.approx([0.5, 0.5])  # nobody answers
    assert average_by_class({1: values[1]}, shares)[0] == pytest.approx([0, 1])
    plain = average_by_class(values, {0: np.full(2, 0.5), 1: np.full(2, 0.5)})
    assert plain[0] == pytest.approx([0.7, 0.3])  # the control: equal shares give the mean


def test_a_total_is_weighted_and_who_has_no_counts_is_left_out_with_the_reason(small, caplog):
    experiment = small(*PRIVATE)
    method = experiment.method
    context = with_classes(experiment, 2)
    predictions = np.full((1, 2), 0.5, np.float32)
    request = Request(1, np.zeros((1, 1, 8, 8), np.uint8), predictions)
    answers = {
        0: Response(1, np.array([[1.2, 0.8]]), 2),
        1: Refusal(1, "spent"),
        2: Response(1, np.array([[1.6, 0.4]]), 2),
        3: Response(1, np.array([[0.0, 2.0]]), 2),
    }

    def collected(*rows, requested=True, context=context):
        federation = Answering(answers, *rows)
        counts = KnownCounts(federation, context, requested)
        total = method.collect(federation, request, context, counts)
        kinds = [each.kind for each in federation.requests]
        assert kinds.count("counts") == requested  # who refuses is not asked again
        return total

    rows = [4.0, 10.0], [0.0, 0.0], [0.0, 30.0], None
    total = collected(*rows)
    assert total.sum == pytest.approx(4 * np.array([[0.6 / 0.85, 0.25 / 0.85]]))
    assert (total.count, total.refused) == (4, {1: "spent", 3: "no class counts: spent"})
    assert caplog.messages == ["client 3: no class counts: spent"]
    for equal in (None, None, None, None), (None, [4.0, 10.0], None, None):
        total = collected(*equal)  # who answers has no counts
        assert total.sum == pytest.approx(6 * np.array([[1.4 / 3, 1.6 / 3]]))
        assert (total.count, total.refused) == (6, {1: "spent"})
    assert collected(*rows, requested=False).count == 0  # the control: the plain sum
    signed = replace(context, answers=NormalizedGradient(2, 1.0))
    answers[0] = Response(1, np.array([[-1.2, 0.8]]), 2)
    total = collected(*rows, context=signed)
    assert total.sum == pytest.approx(4 * np.array([[-0.6, 0.25 * 0.4 + 0.75 * 0.2]]))
    answers.update({client: Refusal(1, "spent") for client in answers})
    nobody = collected(*rows)
    assert (nobody.count, nobody.sum.tolist()) == (0, [[0, 0]])


def test_counts_are_whole_where_floats_lie_just_below():
    assert counts_of({"areas": 0.29, "lines": 0.7}, 100) == {"areas": 29, "lines": 70}
    assert counts_of({"areas": 0.299}, 100) == {"areas": 29}
