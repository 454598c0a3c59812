"""The protocol between server and clients: frozen dataclasses of NumPy arrays, without Flower.

B is the number of queries in a request, K the number of classes, (C, H, W) the image shape.
"""

import functools
import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.classes import look_of, text_of
from fed_dpsd.errors import ProtocolError

Array = NDArray[Any]
Kind = Literal["answers", "counts", "weights", "baseline", "train", "gradients", "statistics"]
# kinds of requests whose responses a secure sum may add up
SUMMED = ("answers", "gradients", "statistics")
OF_WEIGHTS = ("weights", "baseline", "train")  # kinds of requests answered with parameters
NOTHING = np.empty(0, np.float32)


Releases = Mapping[str, int]
MOST_NAMES, LONGEST_NAME = 16, 64


def is_hospital_name(name: object) -> bool:
    """Return whether a hospital may have this name; "" is none, and digits are a number's."""
    return (
        isinstance(name, str)
        and len(name) <= LONGEST_NAME
        and name.isprintable()
        and not name.isdigit()
    )


def check_releases(field: str, releases: Releases) -> None:
    """Raise ProtocolError unless `releases` maps a few mechanisms' names to counts >= 0."""
    fits = isinstance(releases, Mapping) and len(releases) <= MOST_NAMES
    for name, count in releases.items() if fits else ():
        fits &= isinstance(name, str) and len(name) <= LONGEST_NAME
        fits &= type(count) is int and count >= 0
    if not fits:
        raise ProtocolError(f"{field}={releases!r:.100} must be counts >= 0 by mechanism")


MOST_CLASSES, LONGEST_CLASS = 10_000, 255
LONGEST_LISTS, LONGEST_SHOWN, MOST_SHOWN = 160, 30, 5


def is_class_list(names: Any) -> bool:
    """Return whether a value is a list of two or more different, printable class names.

    Names that look the same are not different.
    """
    return (
        isinstance(names, list | tuple)
        and 2 <= len(names) <= MOST_CLASSES
        and all(isinstance(name, str) and name.isprintable() for name in names)
        and all(0 < len(name) <= LONGEST_CLASS and name == name.strip() for name in names)
        and len({look_of(text_of(name)) for name in names}) == len(names)
    )


def require_equal_classes(hospital: Any, experiment: Any) -> None:
    """Check that a hospital and an experiment list the same classes in the same order.

    A label is an index into this list. If the orders differed, teachers and student would use the
    same number for different classes, so both ends of a deployment compare the whole lists.

    Raises:
        ProtocolError: a list is malformed, or the peer's list differs.
            The message has both lists or, if they are long, the first difference, and the names
            that occur in only one.
    """
    lists = {"the hospital": hospital, "the experiment": experiment}
    for who, names in lists.items():
        if not is_class_list(names):
            raise ProtocolError(
                f"{who}'s classes must be a list of 2 to {MOST_CLASSES:,} different, printable "
                f"names of at most {LONGEST_CLASS} characters"
            )
    # Accented letters have several encodings, which look the same on a screen.
    ours, theirs = ([unicodedata.normalize("NFC", n) for n in names] for names in lists.values())
    if ours == theirs:
        return
    reason = f"the hospital's classes are {ours}, the experiment's are {theirs}"
    if len(reason) > LONGEST_LISTS:
        pairs = enumerate(zip_longest(ours, theirs, fillvalue="(none)"))
        place, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        reason = (
            f"class {place} is {_short(one)} at the hospital, {_short(other)} in the experiment"
        )
    for who, own, others in zip(lists, (ours, theirs), (set(theirs), set(ours)), strict=True):
        if only := [_short(name) for name in own if name not in others]:
            more = ", ..." if len(only) > MOST_SHOWN else ""
            reason += f"; only {who} has {', '.join(only[:MOST_SHOWN])}{more}"
    raise ProtocolError(reason)


def _short(name: str) -> str:
    return repr(name if len(name) <= LONGEST_SHOWN else f"{name[: LONGEST_SHOWN - 3]}...")


@dataclass(frozen=True)
class Request:
    """A round's query to every client: synthetic images and the student's predictions.

    Args:
        query_id: round number, >= 0; with the content it identifies the request.
        images: (B, C, H, W) uint8, so that both sides see the same pixels.
        predictions: (B, K) float32 probabilities of the student on `images`.
        kind: "answers"; "counts" for class counts; "weights" for the teachers' parameters,
            "baseline" for the parameters of one classifier trained on all of the client's records,
            "train" for the parameters after more local training that starts from `weights`, or
            "gradients" for the sum of the records' gradients at `weights`, or "statistics" for the
            class counts and the sums of the records' features minus `weights`, and of their
            products. Only "answers" carries
            images. A client answers the other kinds only if the method in its own
            configuration does. Parameters are released at epsilon = inf unless private training was
            charged.
        weights: (P,) float32 weights of a model for "train", optionally followed by other public
            numbers, and for "gradients"; the (F,) centre of the features for "statistics"; empty
            otherwise.
        acknowledged: releases by mechanism that the coordinator's card counts in addition to its
            plan; not part of the digest.
        heard: for each client, the releases that the run has charged to it, by the client's own
            statement; not part of the digest.
    """

    query_id: int
    images: NDArray[np.uint8]
    predictions: NDArray[np.float32]
    kind: Kind = "answers"
    weights: NDArray[np.float32] = field(default_factory=lambda: NOTHING)
    acknowledged: Releases = field(default_factory=dict)
    heard: Mapping[int, Releases] = field(default_factory=dict)

    @classmethod
    def without_images(
        cls,
        kind: Kind,
        image_shape: tuple[int, ...],
        num_classes: int,
        query_id: int = 0,
        weights: NDArray[np.float32] = NOTHING,
    ) -> "Request":
        """Return a request of any kind except answers to images."""
        empty = np.empty((0, *image_shape), np.uint8), np.empty((0, num_classes), np.float32)
        return cls(query_id, *empty, kind, weights)

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ProtocolError(f"request {self.query_id}: {problem}")
        check_releases(f"request {self.query_id}: acknowledged", self.acknowledged)
        for client, releases in self.heard.items():
            check_releases(f"request {self.query_id}: heard of client {client}", releases)

    def _problem(self) -> str:
        """Return the problem with the arrays, or with the kind; "" if there is none."""
        for name, dtype, shape in (
            ("images", "uint8", "(B, C, H, W)"),
            ("predictions", "float32", "(B, K)"),
            ("weights", "float32", "(P,)"),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != len(shape.strip("(),").split(",")):
                found = f"{array.dtype} of shape {array.shape}"
                return f"{name} are {found}; they must be {dtype} of shape {shape}"
        images, predictions, weights = len(self.images), len(self.predictions), len(self.weights)
        if self.kind not in get_args(Kind):
            return f"kind={self.kind!r} is unknown"
        for needing, name, count in (
            (("answers",), "images", images),
            (("train", "gradients", "statistics"), "weights", weights),
        ):
            if (self.kind in needing) != bool(count):
                needed = f"{' and '.join(map(repr, needing))} need {name}, other kinds have none"
                return f"{self.kind} with {count} {name}; {needed}"
        if images != predictions:
            found = f"{images} images but {predictions} predictions"
            return f"{found}; there must be one prediction per image"
        for name in ("weights", "predictions"):
            if not np.isfinite(getattr(self, name)).all():
                return f"{name} hold NaN or infinity"
        return ""

    @property
    def nbytes(self) -> int:
        """Payload in bytes, as sent to a client."""
        return self.images.nbytes + self.predictions.nbytes + self.weights.nbytes

    @property
    def queries(self) -> int:
        """Number of queries that an answer is charged for; class counts come with training."""
        return 1 if self.kind in (*OF_WEIGHTS, "gradients", "statistics") else len(self.images)

    @property
    def summed_shape(self) -> tuple[int, ...]:
        """Shape of a response to a request of `SUMMED`: (B, K), or (P, 1) for gradients.

        Statistics of F features have a triangle of F rows, and F + 1 numbers for each class.
        """
        if self.kind == "answers":
            return self.predictions.shape
        size, num_classes = len(self.weights), self.predictions.shape[1]
        statistics = size * (size + 1) // 2 + num_classes * (size + 1)
        return (statistics if self.kind == "statistics" else size, 1)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the whole request, in hexadecimal: the idempotency key.

        Requests with the same id but different content have different keys.
        """
        digest = hashlib.sha256(f"{self.kind} {self.query_id} {self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).tobytes())
        digest.update(np.ascontiguousarray(self.predictions).tobytes())
        digest.update(np.ascontiguousarray(self.weights).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Statement:
    """A client's own account of a run.

    If a run goes as planned, these numbers follow from the plan and reveal nothing about the
    records.

    Args:
        charged: releases by mechanism that this run has cost the client so far. A charge of an
            earlier run counts if this run reuses it.
        forgotten: the charged releases that its ledger has lost because its state was rolled back.
            The client learns of them from the request's field `heard`.
        changed: how many times the client's records have changed since it joined the run.
        wanted: the releases that the coordinator must acknowledge before the client answers a
            request that it has refused as unplanned; empty otherwise.
    """

    charged: Releases = field(default_factory=dict)
    forgotten: Releases = field(default_factory=dict)
    changed: int = 0
    wanted: Releases = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_releases("charged", self.charged)
        check_releases("forgotten", self.forgotten)
        check_releases("wanted", self.wanted)
        check_releases("changed", {"": self.changed})


@dataclass(frozen=True)
class Response:
    """A client's released answer.

    Args:
        query_id: the request's id.
        values: (B, K), summable over clients: noisy gradients or votes (float64), counts of votes
            (uint8, uint16) or probabilities (float32); (1, K) counts or (P, 1) weights, float32;
            (P, 1) noisy sums of gradients, float64.
        teachers: number of local teachers summed in `values`, a public constant >= 1.
        sealed: in a secure sum, sealed secret shares for each client, and `values` are masked
            (uint64); empty otherwise.
        statement: the client's account of the run; None if it makes no statement.
    """

    query_id: int
    values: Array
    teachers: int = 1
    sealed: Mapping[int, bytes] = field(default_factory=dict)
    statement: Statement | None = None

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return self.values.nbytes + sum(map(len, self.sealed.values()))


@dataclass(frozen=True)
class SumStep:
    """The second or, with `proofs`, the third message of a secure sum to a client.

    Args:
        request: digest of the request with the answers to be summed.
        named: clients with masked answers that arrived.
        proofs: for each client, a proof to the recipient of the names that the client confirmed.
        sealed: for each client, the secret shares that it sealed for the recipient.
    """

    request: str
    named: tuple[int, ...]
    proofs: Mapping[int, bytes] = field(default_factory=dict)
    sealed: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return len(self.request) + sum(map(len, [*self.proofs.values(), *self.sealed.values()]))


@dataclass(frozen=True)
class Refusal:
    """A client's refusal to answer; no noise was drawn and nothing was sent.

    `reason` is one public line.
    """

    query_id: int
    reason: str
    statement: Statement | None = None


class Absent(Refusal):
    """A missing answer, because no readable reply arrived in time."""


@dataclass(frozen=True)
class Aggregate:
    """The sum of all answers to one request.

    Args:
        request: the request that the clients answered. A resumed run repeats its earlier request,
            so a server must learn from this request.
        sum: float64, of the request's `summed_shape`.
        count: number of teachers in the sum.
        refused: the reason of each client that refused.
    """

    request: Request
    sum: NDArray[np.float64]
    count: int
    refused: dict[int, str] = field(default_factory=dict)


class Replies(dict[int, Response | Refusal]):
    """The clients' replies to `request`, by client; a resumed run may have sent it earlier."""

    def __init__(self, request: Request, replies: Mapping[int, Response | Refusal]) -> None:
        super().__init__(replies)
        self.request = request

    @property
    def answers(self) -> dict[int, Response]:
        """Return the replies that are not refusals."""
        return {client: own for client, own in self.items() if isinstance(own, Response)}

    @property
    def refused(self) -> dict[int, str]:
        """Return the reason of each client that refused."""
        return {client: own.reason for client, own in self.items() if isinstance(own, Refusal)}


def mismatch(request: Request, response: Response) -> str:
    """Return why `response` does not fit `request` in id, shape or type; "" if it fits."""
    if response.query_id != request.query_id:
        return f"query_id={response.query_id} instead of {request.query_id}"
    shape = response.values.shape
    counts_shape = (1, request.predictions.shape[1])
    if request.kind in SUMMED and shape != request.summed_shape:
        return f"values of shape {shape} instead of {request.summed_shape}"
    if request.kind == "counts" and shape != counts_shape:
        return f"values of shape {shape} instead of {counts_shape}"
    if request.kind in OF_WEIGHTS and (len(shape) != 2 or shape[1] != 1):
        return f"values of shape {shape} instead of (P, 1)"
    if response.values.dtype not in (np.float64, np.float32, np.uint16, np.uint8):
        return f"values of type {response.values.dtype}"
    return ""
