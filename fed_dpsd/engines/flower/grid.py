"""The clients behind a Flower grid of nodes.

A node may host any number of logical clients, so a run works with one node or many.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fed_dpsd.engines.flower.codec import (
    ANSWER,
    DIAGNOSE,
    HELLO,
    NO_REASON,
    STEP,
    Reply,
    code_digest,
    pack_request,
    pack_steps,
    public_line,
    reading,
    unpack_replies,
)
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.protocol import Refusal, Request, Response, SumStep, compare_classes
from fed_dpsd.server.federation import HostedFederation
from fed_dpsd.storage import append_line

ATTEMPTS = 3
OUT_OF_REACH = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
POLL_SECONDS = 0.5
PATIENCE = 300.0  # seconds for a node to report its client: its first process may start slowly
LATE = "no answer within"
DIAGNOSED_AT_ONCE = 64  # clients: each sends (n, N, K) floats
logger = logging.getLogger("fed_dpsd")


class Absent(Refusal):
    """A missing answer: no readable reply arrived in time."""


class GridFederation(HostedFederation):
    """The clients behind a Flower grid.

    In a simulation nodes host clients in turn, and all must answer. In a deployment a node is one
    hospital, which reports its own client number. A round continues without clients that do not
    answer, as long as federation.min_clients do. The outcome of each request is a line of the run's
    asks.jsonl.

    Raises:
        UserError: too few nodes connect within federation.node_timeout_seconds.
    """

    engine = "flower"

    def __init__(self, experiment: Experiment, grid: Grid, run_folder: Path) -> None:
        super().__init__(experiment, run_folder)
        self._grid = grid
        self._run_folder = run_folder
        self._run = str(run_folder)
        if not experiment.config.federation.simulation and isinstance(self._noise, SecretStreams):
            self._run += f" {self._noise.identity}"  # other noise is another run
        self._code = code_digest()
        self._settings = experiment.config.federation
        everyone = experiment.config.num_clients
        self._least = self._settings.min_clients or everyone
        if hasattr(grid, "pull_interval"):  # otherwise the simulation's grid polls every 0.1 s
            grid.pull_interval = 0.005 if self._settings.simulation else 1.0
        self._hosts: dict[int, list[int]] = {}
        self._refused: dict[int, tuple[int, str]] = {}  # nodes with other classes: client, reason
        self._took: dict[int, float] = {}
        self._away: set[int] = set()  # nodes that did not answer the last request
        deadline = time.monotonic() + self._settings.node_timeout_seconds
        while not self._discover_nodes() and time.monotonic() < deadline:
            time.sleep(0.1)
        if len(self._clients) < self._least:
            known = f"only clients {sorted(self._clients)}" if self._hosts else "no node"
            raise UserError(
                f"{known} connected within federation.node_timeout_seconds="
                f"{self._settings.node_timeout_seconds:g}; start the SuperNodes, or the "
                "simulation, and try again"
            )

    @property
    def _clients(self) -> set[int]:
        """Return the clients that a known node hosts."""
        return {client for clients in self._hosts.values() for client in clients}

    def _hosts_of(self, clients: Collection[int]) -> dict[int, list[int]]:
        """Return the known nodes that host some of these clients, with the clients of each."""
        hosts = {node: [c for c in own if c in clients] for node, own in self._hosts.items()}
        return {node: own for node, own in hosts.items() if own}

    def _discover_nodes(self) -> bool:
        """Ask new nodes which clients they host; return whether all clients are known.

        A node is the client that it reports, unless another node of this run already is. A client
        whose classes differ from the experiment's is refused; it refuses the experiment, too.

        Raises:
            UserError: too few clients are left, since some are refused.
        """
        nodes, everyone = sorted(self._grid.get_node_ids()), self.experiment.config.num_clients
        if self._settings.simulation:
            if nodes and not self._hosts:
                self._host(nodes)
            return bool(self._hosts)
        known = {*self._hosts, *self._refused}
        unknown = {node: RecordDict() for node in nodes if node not in known}
        for node, reply in self._send(HELLO, 0, unknown, PATIENCE, {}).items():
            meta = {} if reply.has_error() else reply.content.config_records.get("meta", {})
            client = meta.get("client")
            if type(client) is not int or client not in range(everyone):
                logger.warning("node %d is not a hospital of this federation", node)
            elif client in self._clients:
                logger.warning("node %d claims to be client %d, as another node does", node, client)
            elif meta.get("code") != self._code:
                logger.warning("client %d runs different code from this server", client)
            elif reason := self._other_classes(meta.get("classes")):
                logger.warning("client %d is refused: %s", client, reason)
                self._refused[node] = client, reason
            else:
                self._hosts[node] = [client]
        refused = {c: r for c, r in self._refused.values() if c not in self._clients}
        if everyone - len(refused) < self._least:
            reasons = "; ".join(f"client {client}: {reason}" for client, reason in refused.items())
            raise UserError(
                f"{reasons}. Agree on one list, in one order: data.classes here, and classes in "
                "the hospital's file"
            )
        return len(self._clients) + len(refused) == everyone

    def _host(self, nodes: list[int]) -> None:
        """Let a simulation's nodes host its clients, in turn.

        With one client for each node, a client is the partition of its node's configuration, if all
        nodes have one.

        Raises:
            UserError: the partitions are not those of the run's clients.
        """
        everyone = self.experiment.config.num_clients
        found = self._partitions_of(nodes) if len(nodes) == everyone else {}
        if len(found) == everyone:
            if sorted(found.values()) != [(client, everyone) for client in range(everyone)]:
                pairs = ", ".join(f"{client} of {number}" for client, number in found.values())
                raise UserError(
                    f"partition-id and num-partitions of the nodes are {pairs}; with "
                    f"num_clients={everyone} they must be 0 to {everyone - 1} of {everyone}"
                )
            nodes = sorted(found, key=found.__getitem__)
        for client in range(everyone):
            self._hosts.setdefault(nodes[client % len(nodes)], []).append(client)

    def _partitions_of(self, nodes: list[int]) -> dict[int, tuple[int, int]]:
        """Return `partition-id` and `num-partitions` of the nodes whose configuration has both."""
        found = {}
        nothing = {node: RecordDict() for node in nodes}
        for node, reply in self._send(HELLO, 0, nothing, PATIENCE, {}).items():
            meta = {} if reply.has_error() else reply.content.config_records.get("meta", {})
            pair = meta.get("partition"), meta.get("partitions")
            if type(pair[0]) is int and type(pair[1]) is int:
                found[node] = pair
        return found

    def _other_classes(self, classes: object) -> str:
        """Return how a hospital's list of classes differs from the experiment's; "" if equal."""
        try:
            compare_classes(classes, self.experiment.config.data.class_names)
        except ProtocolError as error:
            return str(error)
        return ""

    def _deliver(self, request: Request) -> dict[int, Response | Refusal]:
        """Send a request to every client; a client that does not answer in time is absent.

        Raises:
            UserError: fewer clients answered than the federation needs.
        """
        started, timeout = time.monotonic(), self._settings.round_timeout_seconds
        if not self._settings.simulation:
            self._refused.clear()  # a hospital may have corrected its file
            self._discover_nodes()
        asked = self._asked(request)
        hosts = self._hosts_of(set(asked))
        packed = {}
        for node, clients in hosts.items():
            heard = {client: n for client, n in request.heard.items() if client in clients}
            packed[node] = pack_request(replace(request, heard=heard))  # of its own clients only
        replies = self._exchange(ANSWER, request.query_id, packed, hosts)
        teachers = self.experiment.config.teachers_per_client
        answers: dict[int, Response | Refusal] = {}
        refused = dict(self._refused.values())
        for client in asked:
            reason = public_line(refused.get(client, f"{LATE} {timeout:g} s"))
            reply = replies.get(client, Absent(request.query_id, reason))
            if isinstance(reply, Reply):
                sealed = {
                    int(c): box for c, box in reply.boxes.items() if re.fullmatch("[0-9]{1,6}", c)
                }
                answers[client] = Response(
                    request.query_id, reply.values, teachers, sealed, reply.statement
                )
            else:
                answers[client] = reply
        self._log(request, answers, time.monotonic() - started)
        absent = {c: a.reason for c, a in answers.items() if isinstance(a, Absent)}
        if len(answers) - len(absent) < min(self._least, len(asked)):
            reasons = "; ".join(f"client {client}: {reason}" for client, reason in absent.items())
            self._charge_log.take(answers)
            few = f"{len(absent)} of {len(answers)} clients did not answer ({reasons})"
            raise UserError(f"{few}; {self._remedy}")
        return answers

    def _step(self, steps: Mapping[int, SumStep]) -> dict[int, Mapping[str, bytes]]:
        hosts = self._hosts_of(steps)
        contents = {node: pack_steps({c: steps[c] for c in own}) for node, own in hosts.items()}
        replies = self._exchange(STEP, 0, contents, hosts)
        for client, reply in replies.items():
            if isinstance(reply, Refusal) and not isinstance(reply, Absent):
                logger.warning("client %d takes no part in a sum: %s", client, reply.reason)
        return {client: r.boxes for client, r in replies.items() if isinstance(r, Reply)}

    def _log(
        self, request: Request, answers: Mapping[int, Response | Refusal], seconds: float
    ) -> None:
        """Write a line of asks.jsonl: the clients that answered, and the others' reasons."""
        line = {
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "query_id": request.query_id,
            "kind": request.kind,
            "ask": request.digest(),
            "answered": sorted(
                c for c, response in answers.items() if isinstance(response, Response)
            ),
            "refused": {c: a.reason for c, a in answers.items() if isinstance(a, Refusal)},
            "seconds": round(seconds, 3),
        }
        append_line(self._run_folder / "asks.jsonl", json.dumps(line))

    def diagnose(self) -> Iterator[NDArray[np.float32]]:
        """Yield the exact probabilities of each client's teachers on the test split.

        Raises:
            UserError: a client did not answer.
        """
        everyone = sorted(self._clients)
        for start in range(0, len(everyone), DIAGNOSED_AT_ONCE):
            some = set(everyone[start : start + DIAGNOSED_AT_ONCE])
            hosts = self._hosts_of(some)
            replies = self._exchange(DIAGNOSE, 0, {node: RecordDict() for node in hosts}, hosts)
            values = {client: r.values for client, r in replies.items() if isinstance(r, Reply)}
            if missing := some - set(values):
                raise UserError(f"clients {sorted(missing)} did not answer; {self._remedy}")
            yield from (values[client] for client in sorted(some))

    @property
    def _remedy(self) -> str:
        """Return the remedy for clients that did not answer."""
        timeout = self._settings.round_timeout_seconds
        return f"raise federation.round_timeout_seconds={timeout:g}, or see the nodes' logs"

    def _exchange(
        self,
        kind: str,
        query_id: int,
        contents: Mapping[int, RecordDict],
        hosts: Mapping[int, list[int]],
    ) -> dict[int, Reply | Refusal]:
        """Send a message to each node, and return the replies that arrive in time, by client."""
        timeout = self._settings.round_timeout_seconds
        messages = self._send(kind, query_id, contents, timeout, hosts)
        replies: dict[int, Reply | Refusal] = {}
        for node, message in messages.items():
            replies |= self._read(node, message)
        return replies

    def _send(
        self,
        kind: str,
        query_id: int,
        contents: Mapping[int, RecordDict],
        timeout: float,
        hosts: Mapping[int, list[int]],
    ) -> dict[int, Message]:
        """Send a message to each node, and return the replies that arrive in time, by node."""
        experiment = self.experiment.to_json()

        def message(node: int) -> Message:
            meta = {
                "experiment": experiment,
                "run_folder": self._run,
                "clients": hosts.get(node, []),
                "code": self._code,
            }
            content = RecordDict({**contents[node], "meta": ConfigRecord(meta)})
            return Message(content, dst_node_id=node, message_type=kind, group_id=str(query_id))

        if self._settings.simulation:
            messages = [message(node) for node in contents]
            replies = self._grid.send_and_receive(messages, timeout=timeout) if messages else ()
            return {reply.metadata.src_node_id: reply for reply in replies}
        if kind != ANSWER:
            return self._send_with_retries(contents, message, timeout)
        enough = min(self._least, len(contents))
        replies = self._send_with_retries(contents, message, timeout, enough)
        self._away = {n for n in contents if n not in replies or replies[n].has_error()}
        return replies

    def _send_with_retries(
        self,
        nodes: Iterable[int],
        message: Callable[[int], Message],
        timeout: float,
        enough: float = math.inf,
    ) -> dict[int, Message]:
        """Send messages to nodes until each has replied or the time is up.

        Once `enough` nodes have replied, the nodes that did not answer the last request have only
        federation.retry_seconds left. Otherwise every round would wait the whole timeout for a
        hospital that left.

        A message may be lost with the process that received it, so it is sent again: to a silent
        node after twice the time of its last reply, doubling each time; to an unreachable node at
        regular intervals; and to a node whose process failed immediately. The request is the same,
        so nothing is charged twice.
        """
        started, first = time.monotonic(), self._settings.retry_seconds
        due = dict.fromkeys(nodes, started)
        pause = {node: max(first, 2 * self._took.get(node, 0)) for node in due}
        attempts = dict.fromkeys(due, ATTEMPTS)
        pushed: dict[str, int] = {}
        replies: dict[int, Message] = {}
        while due:
            now = time.monotonic()
            for node in [node for node, when in due.items() if when <= now]:
                due[node], pause[node] = now + pause[node], 2 * pause[node]
                pushed[next(iter(self._grid.push_messages([message(node)])))] = node
            # The grid's own loop would sleep for 3 s.
            for reply in self._grid.pull_messages(list(pushed)):
                node = pushed.pop(reply.metadata.reply_to_message_id)
                if node not in due:
                    continue
                replies[node] = reply
                if reply.has_error() and reply.error.code in OUT_OF_REACH:
                    pause[node] = first
                    continue
                attempts[node] -= 1 if reply.has_error() else ATTEMPTS
                self._took[node] = now - started
                if attempts[node] > 0:
                    due[node] = now
                else:
                    del due[node]
            waited = now - started
            many = sum(not reply.has_error() for reply in replies.values()) >= enough
            if waited > timeout or (waited > first and many and self._away.issuperset(due)):
                break
            time.sleep(POLL_SECONDS if due else 0)
        return replies

    def _read(self, node: int, reply: Message) -> dict[int, Reply | Refusal]:
        """Check and unpack a node's reply; in a deployment, clients with a bad reply are absent.

        Raises:
            ProtocolError: the reply is bad, in a simulation.
        """
        clients = self._hosts[node]
        try:
            self._check(clients, reply)
            return unpack_replies(reply.content, clients)
        except ProtocolError as error:
            if self._settings.simulation:
                raise
            problem = public_line(str(error))
        logger.warning("clients %s: %s", clients, problem)
        return {client: Absent(0, problem) for client in clients}

    @reading()
    def _check(self, clients: list[int], reply: Message) -> None:
        if reply.has_error():
            cause = " ".join((reply.error.reason or NO_REASON).split())[-100:].lstrip("^ ")
            raise ProtocolError(f"the node that hosts clients {clients} failed: {cause}")
        meta = reply.content.config_records.get("meta", {})
        if meta.get("code") != self._code:
            stale = (
                "a Flower process of another checkout answers here: stop it (`fed-dpsd doctor` "
                "finds it) or use `fed-dpsd run --engine flower`"
            )
            remedy = stale if self._settings.simulation else "install one version at both"
            raise ProtocolError(
                f"the node that hosts clients {clients} runs different code from this server; "
                f"{remedy}"
            )
        if meta.get("error"):
            raise ProtocolError(str(meta["error"]))
