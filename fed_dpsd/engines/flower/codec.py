"""The protocol in Flower's records: requests and steps to a node's clients, and their replies."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from numpy.typing import NDArray

from fed_dpsd.errors import ProtocolError, printable
from fed_dpsd.protocol import NOTHING, Refusal, Request, Statement, SumStep

ANSWER, DIAGNOSE, HELLO, STEP = "query.answer", "query.diagnose", "query.hello", "query.step"
LONGEST_REASON, NO_REASON = 400, "no reason given"


def public_line(text: str) -> str:
    """Return text as one printable line of limited length, for logs and replies."""
    return printable(" ".join(text.split()))[:LONGEST_REASON] or NO_REASON


@contextlib.contextmanager
def reject_malformed() -> Iterator[None]:
    """Turn every error that occurs while reading a peer's content into a ProtocolError.

    Malformed bytes from a peer may break any parser.

    Raises:
        ProtocolError: the content is malformed.
    """
    try:
        yield
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"the message is malformed ({type(error).__name__})") from None


@dataclass(frozen=True)
class Reply:
    """A client's reply: an array, small pieces for other clients, and its statement of charges."""

    values: NDArray[Any] = field(default_factory=lambda: NOTHING)
    boxes: Mapping[str, bytes] = field(default_factory=dict)
    statement: Statement | None = None


@dataclass(frozen=True)
class Shares:
    """The GPU shares of a simulation's client processes, which each take one.

    Args:
        name: identifies the shares of one run on this machine.
        number: how many there are, and so how many processes may answer.
        gpus: how many GPUs the processes choose from; 1 if the configuration names it.
        teachers: bytes of a share that a process may use for teachers.
    """

    name: str
    number: int
    gpus: int
    teachers: int


def pack_request(request: Request) -> RecordDict:
    """Pack a request for any client."""
    arrays: dict[str, NDArray[Any]] = {
        "images": request.images,
        "predictions": request.predictions,
        "weights": request.weights,
    }
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    about: dict[str, Any] = {"query_id": request.query_id, "kind": request.kind}
    about |= {"acknowledged": json.dumps(request.acknowledged), "heard": json.dumps(request.heard)}
    return RecordDict({"arrays": record, "request": ConfigRecord(about)})


@reject_malformed()
def unpack_request(content: RecordDict) -> Request:
    """Unpack a request made by `pack_request`.

    Raises:
        ProtocolError: the content is not a well-formed request.
    """
    arrays, about = content.array_records["arrays"], content.config_records["request"]
    images, predictions, weights = (
        arrays[name].numpy() for name in ("images", "predictions", "weights")
    )
    query_id, kind = about["query_id"], about["kind"]
    if not isinstance(query_id, int) or not isinstance(kind, str):
        raise TypeError(f"query_id={query_id!r}, kind={kind!r}")
    acknowledged = json.loads(str(about["acknowledged"]))
    heard = {int(client): count for client, count in json.loads(str(about["heard"])).items()}
    return Request(query_id, images, predictions, kind, weights, acknowledged, heard)  # type: ignore[arg-type]


def pack_steps(steps: Mapping[int, SumStep]) -> RecordDict:
    """Pack steps of a secure sum, one for each client."""
    content = RecordDict()
    for client, step in steps.items():
        content[f"step {client}"] = ConfigRecord(
            {"request": step.request, "named": list(step.named)}
        )
        content[f"proofs {client}"] = _pack_bytes(step.proofs)
        content[f"sealed {client}"] = _pack_bytes(step.sealed)
    return content


@reject_malformed()
def unpack_step(content: RecordDict, client: int) -> SumStep:
    """Unpack a client's step from content made by `pack_steps`.

    Raises:
        ProtocolError: the content has no step for the client, or a malformed one.
    """
    about: Any = content.config_records[f"step {client}"]
    proofs, sealed = (
        {
            int(name): _as_bytes(box)
            for name, box in content.config_records[f"{part} {client}"].items()
        }
        for part in ("proofs", "sealed")
    )
    return SumStep(str(about["request"]), tuple(map(int, about["named"])), proofs, sealed)


def pack_replies(replies: Mapping[int, Reply | Refusal]) -> RecordDict:
    """Pack the replies and refusals of a node's clients."""
    content = RecordDict()
    answers = {c: reply for c, reply in replies.items() if isinstance(reply, Reply)}
    refused = {c: reply.reason for c, reply in replies.items() if isinstance(reply, Refusal)}
    content["values"] = ArrayRecord({str(c): Array(reply.values) for c, reply in answers.items()})
    content["refused"] = ConfigRecord({"reasons": json.dumps(refused)})
    statements = {str(c): json.dumps(vars(r.statement)) for c, r in replies.items() if r.statement}
    content["statements"] = ConfigRecord({**statements})
    for client, reply in answers.items():
        content[f"boxes {client}"] = _pack_bytes(reply.boxes)
    return content


@reject_malformed()
def unpack_replies(content: RecordDict, clients: Collection[int]) -> dict[int, Reply | Refusal]:
    """Unpack content made by `pack_replies`, for the `clients` in it.

    Raises:
        ProtocolError: the content is malformed.
    """
    refused = dict(json.loads(str(content.config_records["refused"]["reasons"])))
    values = content.array_records["values"]
    statements = content.config_records["statements"]
    replies: dict[int, Reply | Refusal] = {}
    for client in clients:
        text = statements.get(str(client))
        statement = None if text is None else Statement(**json.loads(str(text)))
        if str(client) in refused:
            reason = public_line(str(refused[str(client)]))
            replies[client] = Refusal(0, reason, statement)
        elif str(client) in values:
            record = content.config_records[f"boxes {client}"]
            boxes = {str(name): _as_bytes(box) for name, box in record.items()}
            array = np.asarray(values[str(client)].numpy())
            replies[client] = Reply(array, boxes, statement)
    return replies


def _as_bytes(box: Any) -> bytes:
    """Return a value after checking that it is bytes; `bytes(n)` would be n zeros."""
    if not isinstance(box, bytes):
        raise TypeError(f"{type(box).__name__} is not a box")
    return box


def _pack_bytes(boxes: Mapping[Any, bytes]) -> ConfigRecord:
    return ConfigRecord({str(name): box for name, box in boxes.items()})


def over_the_wire(content: RecordDict) -> RecordDict:
    """Serialise and parse a message's content, as Flower's sender and receiver do."""
    sent = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(sent))


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 of the names and contents of this library's source files."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if "_app" not in path.relative_to(package).parts:
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
