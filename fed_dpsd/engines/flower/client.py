"""Flower's ClientApp side: a node answers for the clients that it hosts.

A client's state lies on disk, never in Flower's context, so any process may host it next.
"""

import functools
import logging
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message

from fed_dpsd.client import site as sites
from fed_dpsd.client.hospital import Hospital, open_file
from fed_dpsd.client.site import Site
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.engines.clients import open_site
from fed_dpsd.engines.flower.codec import (
    ANSWER,
    DIAGNOSE,
    HELLO,
    STEP,
    Reply,
    code_digest,
    pack_replies,
    public_line,
    reading,
    unpack_ask,
    unpack_step,
)
from fed_dpsd.errors import ProtocolError, UserError, one_line
from fed_dpsd.experiment import Experiment, from_json
from fed_dpsd.models import torch_threads
from fed_dpsd.protocol import Refusal, Request, SumStep
from fed_dpsd.storage import print_any_text

NOT_SIMULATED = (
    "this node is no simulation's, and a client must not take its budget from a message: start its "
    "SuperNode with --node-config 'site=\"/path/to/site.yaml\"'"
)
LONGEST_RUN = 400  # a folder's name, and a secret's
logger = logging.getLogger("fed_dpsd")


def answer(message: Message, context: Context, client_app: Path) -> Message:
    """Answer a node's message for every client that it hosts.

    The configuration comes with the message. A node of a simulation takes it as it is. A
    hospital's node (`--node-config 'site="FILE"'`) takes only what the hospital's own file allows.
    A node that is neither answers nothing.

    A failure travels as one line. It may depend on private data, so outside a simulation the line
    names no cause; the cause stays in the node's own log.
    """
    print_any_text()
    about: dict[str, str | int | list[str]] = {"code": code_digest(client_app), "error": ""}
    replies: dict[int, Reply | Refusal] = {}
    client, cause_is_public = -1, True
    try:
        if "site" in context.node_config:
            cause_is_public = False
            hospital = open_file(Path(str(context.node_config["site"])))
            client = hospital.client
            about["client"] = client
            if message.metadata.message_type == HELLO:
                about["classes"] = list(hospital.classes)
                _compare_classes(message, hospital, str(about["code"]))
            else:
                replies[client] = _answer_hospital(message, hospital, str(about["code"]))
        elif {"partition-id", "simulation"} & set(context.node_config):
            meta = message.content["meta"]
            text, run_folder = str(meta["experiment"]), str(meta["run_folder"])
            experiment = _experiment(text)
            with torch_threads(experiment.config.threads_client):
                for client, request in _requests(message, meta["clients"]).items():
                    site = _site(text, client, run_folder)
                    replies[client] = _answer(request, experiment, site)
        else:
            raise ProtocolError(NOT_SIMULATED)
    except Exception as error:
        if isinstance(error, UserError):
            logger.error("client %s failed: %s", client, one_line(error))
        else:
            logger.exception("client %s failed", client)
        cause = one_line(error) if cause_is_public else "see its log"
        about["error"] = f"client {client} failed: {cause}"
        replies = {}
    content = pack_replies(replies)
    content["meta"] = ConfigRecord(about)
    return Message(content, reply_to=message)


def _requests(message: Message, clients: Iterable[int]) -> dict[int, Request | SumStep | None]:
    """Return a message's request to each of some clients; None stands for exact diagnostics."""
    kind, content = message.metadata.message_type, message.content
    if kind == STEP:
        return {client: unpack_step(content, client) for client in clients}
    return dict.fromkeys(clients, None if kind == DIAGNOSE else unpack_ask(content))


def _answer(
    request: Request | SumStep | None, experiment: Experiment, site: Site
) -> Reply | Refusal:
    """Return the reply of a client that may answer the request."""
    if request is None:
        return Reply(site.diagnose())
    if isinstance(request, SumStep):
        return Reply(boxes=sites.take_step(site, request))
    response = sites.answer(experiment.method, request, site)
    if isinstance(response, Refusal):
        return response
    boxes = {str(other): box for other, box in response.sealed.items()}
    return Reply(response.values, boxes, response.statement)


def _answer_hospital(message: Message, hospital: Hospital, code: str) -> Reply | Refusal:
    """Return a hospital's reply; any problem with the message becomes a refusal with its reason.

    A coordinator that runs other code is refused before anything is read, since it might take an
    answer for something else.
    """
    try:
        if message.metadata.message_type not in (ANSWER, STEP):
            raise NotAllowed("exact diagnostics are refused outside a simulation")
        with reading():
            meta = message.content.config_records["meta"]
            if meta.get("code") != code:
                raise NotAllowed("the coordinator runs other code than this site")
            text, run = str(meta["experiment"]), Path(str(meta["run_folder"])).name
            if not run or not run.isprintable() or len(run) > LONGEST_RUN:
                raise NotAllowed("the run's name is empty, too long, or cannot be printed")
            request = _requests(message, [hospital.client])[hospital.client]
        images = len(request.images) if isinstance(request, Request) else 0
        experiment = hospital.experiment(text, images)
        with torch_threads(experiment.config.threads_client):
            return _answer(request, experiment, hospital.open(experiment, run))
    except ProtocolError as error:
        reason = public_line(str(error))
        logger.warning("refused: %s", reason)
        return Refusal(0, reason)


def _compare_classes(message: Message, hospital: Hospital, code: str) -> None:
    """Log that an experiment has other classes than this hospital, which answers none of its asks.

    The coordinator compares the same lists when it reads the reply.
    """
    try:
        with reading():
            meta = message.content.config_records["meta"]
            if meta.get("code") == code:  # else the coordinator leaves this hospital out
                hospital.check_classes(str(meta["experiment"]))
    except ProtocolError as error:
        logger.warning("refused: %s", public_line(str(error)))


@functools.lru_cache(maxsize=2)
def _experiment(text: str) -> Experiment:
    """Return a simulation's experiment, which is bound once in a process."""
    return from_json(text)


@functools.lru_cache(maxsize=10_000)
def _site(experiment: str, client: int, run_folder: str) -> Site:
    """Return a simulated client's site, which stays open between the messages of a process.

    All state that must last is on disk.
    """
    return open_site(_experiment(experiment), client, Path(run_folder))
