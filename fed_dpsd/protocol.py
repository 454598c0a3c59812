"""What travels between server and clients: frozen dataclasses over NumPy arrays, no Flower.

B is the number of queries in an ask, K the number of classes, (C, H, W) the image shape.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Kind = Literal["answers", "counts", "weights"]


class ProtocolError(RuntimeError):
    """A peer sent something it must not; the message names the peer, the field and the value."""


@dataclass(frozen=True)
class Ask:
    """One round's question to every client: synthetic images and the student's predictions.

    Args:
        query_id: round number, >= 0; with the content it identifies the ask.
        images: (B, C, H, W) uint8, so both sides see the same pixels.
        predictions: (B, K) float32 probabilities of the student on `images`.
        kind: "answers"; "counts" for the class counts that a private training released; or
            "weights" for the teachers' parameters, which a client gives only for a method that says
            so in its own configuration, at epsilon = inf. The last two carry no image.
    """

    query_id: int
    images: NDArray[np.uint8]
    predictions: NDArray[np.float32]
    kind: Kind = "answers"

    @classmethod
    def without_images(cls, kind: Kind, image_shape: tuple[int, ...], num_classes: int) -> "Ask":
        """An ask for counts or weights."""
        empty = np.empty((0, *image_shape), np.uint8), np.empty((0, num_classes), np.float32)
        return cls(0, *empty, kind)

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ProtocolError(
                f"ask {self.query_id}: images are {self.images.dtype} of shape "
                f"{self.images.shape}; they must be uint8 of shape (B, C, H, W)"
            )
        if self.predictions.dtype != np.float32 or self.predictions.ndim != 2:
            raise ProtocolError(
                f"ask {self.query_id}: predictions are {self.predictions.dtype} of shape "
                f"{self.predictions.shape}; they must be float32 of shape (B, K)"
            )
        if self.kind not in get_args(Kind):
            raise ProtocolError(f"ask {self.query_id}: kind={self.kind!r} is unknown")
        if self.kind != "answers" and len(self.images):
            raise ProtocolError(f"ask {self.query_id}: {self.kind} are asked for without images")
        if len(self.images) != len(self.predictions):
            raise ProtocolError(
                f"ask {self.query_id}: {len(self.images)} images but {len(self.predictions)} "
                "predictions; there must be one prediction per image"
            )
        if not np.isfinite(self.predictions).all():
            raise ProtocolError(f"ask {self.query_id}: predictions hold NaN or infinity")

    @property
    def nbytes(self) -> int:
        """Payload in bytes, as sent to one client."""
        return self.images.nbytes + self.predictions.nbytes

    def digest(self) -> str:
        """SHA-256 of the whole ask: the idempotency key (same id, other content: another key)."""
        digest = hashlib.sha256(f"{self.kind} {self.query_id} {self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).tobytes())
        digest.update(np.ascontiguousarray(self.predictions).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Answer:
    """One client's released answer.

    Args:
        query_id: the ask's id.
        values: (B, K), summable over clients: noisy gradients or votes (float64), counts of votes
            (uint8, uint16) or probabilities (float32); (1, K) counts or (P, 1) weights, float32.
        teachers: number of local teachers summed in `values`, a public constant >= 1.
    """

    query_id: int
    values: Array
    teachers: int = 1


@dataclass(frozen=True)
class Refusal:
    """A client's "no": nothing was drawn and nothing left. `reason` is one public line."""

    query_id: int
    reason: str


@dataclass(frozen=True)
class Total:
    """The sum of the answers to one ask.

    Args:
        sum: (B, K) float64.
        count: number of teachers in the sum.
        refused: reason by client, for the clients that refused.
    """

    sum: NDArray[np.float64]
    count: int
    refused: dict[int, str] = field(default_factory=dict)


def misfit(ask: Ask, answer: Answer) -> str:
    """Why `answer` does not fit `ask` in id, shape or type, in one line; "" where it does."""
    problem = ""
    if answer.query_id != ask.query_id:
        problem = f"query_id={answer.query_id}, asked {ask.query_id}"
    elif ask.kind == "answers" and answer.values.shape != ask.predictions.shape:
        problem = f"values of shape {answer.values.shape}, asked {ask.predictions.shape}"
    elif ask.kind == "counts" and answer.values.shape != (1, ask.predictions.shape[1]):
        problem = f"values of shape {answer.values.shape}, asked (1, {ask.predictions.shape[1]})"
    elif ask.kind == "weights" and (answer.values.ndim, *answer.values.shape[1:]) != (2, 1):
        problem = f"values of shape {answer.values.shape}, asked (P, 1)"
    elif answer.values.dtype not in (np.float64, np.float32, np.uint16, np.uint8):
        problem = f"values of type {answer.values.dtype}"
    return problem
