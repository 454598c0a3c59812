"""Flower's ClientApp, with which a node answers for the clients that it hosts.

A message reaches the client half of a method through five calls: `answer_message`,
`_hospital_reply` (at a hospital), `_reply`, `client.site.answer` and `Method.client`.

A client's state is stored on disk, never in Flower's context, so any process can host the client.
"""

import functools
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fed_dpsd.client import site as sites
from fed_dpsd.client.hospital import Hospital, open_hospital
from fed_dpsd.client.request_log import describe_charge, describe_request
from fed_dpsd.client.site import Site
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.engines.clients import Clients
from fed_dpsd.engines.flower import shares
from fed_dpsd.engines.flower.codec import (
    ANSWER,
    DIAGNOSE,
    HELLO,
    STEP,
    Reply,
    Shares,
    code_digest,
    pack_replies,
    public_line,
    reject_malformed,
    unpack_request,
    unpack_step,
)
from fed_dpsd.errors import ProtocolError, UserError, one_line
from fed_dpsd.experiment import from_json
from fed_dpsd.methods.method import Method
from fed_dpsd.models import keep_freed_memory, torch_threads
from fed_dpsd.protocol import Refusal, Request, SumStep
from fed_dpsd.storage import print_any_text

NOT_SIMULATED = (
    "this node is not part of a simulation, and a client must not take its budget from a message; "
    "start its SuperNode with --node-config 'site=\"/path/to/site.yaml\"'"
)
KINDS = {ANSWER: "a request", STEP: "a step of a secure sum", DIAGNOSE: "exact diagnostics"}
LONGEST_RUN = 400  # characters of a run folder's name and its secret
app = ClientApp()
logger = logging.getLogger("fed_dpsd")


def answer_message(message: Message, context: Context) -> Message:
    """Answer a node's message for every client that it hosts.

    The configuration accompanies the message. A simulation's node accepts it unchanged. A
    hospital's node (`--node-config 'site="FILE"'`) accepts only what the hospital's file allows.
    Any other node refuses all requests.

    A failure is sent as one line. Its cause may depend on private data, so outside a simulation it
    appears only in the node's own log.
    """
    print_any_text()
    about: dict[str, Any] = {"code": code_digest(), "error": ""}
    replies: dict[int, Reply | Refusal] = {}
    is_hospital, failing = "site" in context.node_config, "this node"
    try:
        if is_hospital:
            hospital = open_hospital(Path(str(context.node_config["site"])))
            client = about["client"] = hospital.client
            failing = f"client {client}"
            if message.metadata.message_type == HELLO:
                about |= _introduce(message, hospital)
            else:
                replies[client] = _hospital_reply(message, hospital)
        elif {"partition-id", "simulation"} & set(context.node_config):
            meta: Any = message.content["meta"]
            if "shares" in meta:
                shares.take_share(Shares(**json.loads(meta["shares"])))
            text, run_folder = str(meta["experiment"]), Path(str(meta["run_folder"]))
            method, sites = _experiment(text).method, _clients(text, run_folder)
            with sites.charging():
                for client, request in _requests(message, meta["clients"]).items():
                    failing = f"client {client}"
                    replies[client] = _reply(request, method, sites[client])
                failing = "this node"
        else:
            raise ProtocolError(NOT_SIMULATED)
    except Exception as error:
        traced = not isinstance(error, UserError)
        logger.error("%s failed: %s", failing, one_line(error), exc_info=traced)
        cause = "see its log" if is_hospital else one_line(error)
        about["error"] = f"{failing} failed: {cause}"
        replies = {}
    content = pack_replies(replies)
    content["meta"] = ConfigRecord(about)
    return Message(content, reply_to=message)


for kind in (ANSWER, DIAGNOSE, HELLO, STEP):
    app.query(kind.removeprefix("query."))(answer_message)


def _requests(message: Message, clients: Iterable[int]) -> dict[int, Request | SumStep | None]:
    """Return a message's request to each client; None requests exact diagnostics."""
    kind, content = message.metadata.message_type, message.content
    if kind == STEP:
        return {client: unpack_step(content, client) for client in clients}
    return dict.fromkeys(clients, None if kind == DIAGNOSE else unpack_request(content))


def _hospital_reply(message: Message, hospital: Hospital) -> Reply | Refusal:
    """Return a hospital's reply; any problem with the message leads to a refusal with a reason.

    A coordinator that runs different code is refused before its request is read, because it might
    misinterpret an answer. The hospital's own log has a line for every request.
    """
    run, request, site, outcome = "a run", None, None, "failed"
    kind = message.metadata.message_type
    try:
        with reject_malformed():
            meta = message.content.config_records["meta"]
            name = _name_of_run(meta)
            run = f"run {name}" if name else run
            if kind not in (ANSWER, STEP):
                raise NotAllowed("exact diagnostics are refused outside a simulation")
            if meta.get("code") != code_digest():
                raise NotAllowed("the coordinator runs different code from this site")
            if not name:
                raise NotAllowed("the run's name is empty, too long, or not printable")
            text = str(meta["experiment"])
            request = _requests(message, [hospital.client])[hospital.client]
        images = len(request.images) if isinstance(request, Request) else 0
        experiment = hospital.experiment(text, images)
        site = hospital.open(experiment, name)
        reply = _reply(request, experiment.method, site)
        outcome = f"refused: {reply.reason}" if isinstance(reply, Refusal) else "answered"
        return reply
    except ProtocolError as error:
        reason = public_line(str(error))
        outcome = f"refused: {reason}"
        return Refusal(0, reason)
    finally:
        level = logging.INFO if outcome == "answered" else logging.WARNING
        asked = describe_request(request) or KINDS.get(kind, "an unknown kind of message")
        text = f"{run}: {asked}: {outcome}; {describe_charge(hospital, site)}"
        logger.log(level, "%s", text)


def _reply(request: Request | SumStep | None, method: Method, site: Site) -> Reply | Refusal:
    """Return the reply of a client that is allowed to answer the request."""
    keep_freed_memory()
    torch.set_flush_denormal(True)  # as in a run without Flower, for the same bits
    with torch_threads(site.config.threads_client):
        if request is None:
            return Reply(site.diagnose())
        if isinstance(request, SumStep):
            return Reply(boxes=sites.take_step(site, request))
        response = sites.answer(method, request, site)
    if isinstance(response, Refusal):
        return response
    boxes = {str(other): box for other, box in response.sealed.items()}
    return Reply(response.values, boxes, response.statement)


def _name_of_run(meta: ConfigRecord) -> str:
    """Return the name of a message's run; "" if it is empty, too long, or not printable."""
    name = Path(str(meta.get("run_folder", ""))).name
    return name if name.isprintable() and len(name) <= LONGEST_RUN else ""


def _introduce(message: Message, hospital: Hospital) -> dict[str, Any]:
    """Return what a hospital reports about itself, and why it would refuse the run, if so.

    The coordinator compares the classes, too, and the digests of the hospitals' lists of keys.
    """
    own = {"classes": list(hospital.classes), "hospital": hospital.hospital, "refusal": ""}
    name = ""
    try:
        with reject_malformed():
            meta = message.content.config_records["meta"]
            name, text = _name_of_run(meta), str(meta["experiment"])
        logger.info("hospital %d was asked to identify itself for run %s", hospital.client, name)
        if meta.get("code") == code_digest():  # otherwise the coordinator excludes this node
            own["keys"] = hospital.require_whole_run(text, name)
    except ProtocolError as error:
        own["refusal"] = public_line(str(error))
        logger.warning("refused run %s: %s", name, own["refusal"])
    return own


_experiment = functools.lru_cache(maxsize=2)(from_json)  # bound once per process


@functools.lru_cache(maxsize=2)
def _clients(experiment: str, run_folder: Path) -> Clients:
    """Return a run's clients that this process hosts, which stay open between messages."""
    return Clients(_experiment(experiment), run_folder)
