"""The clients behind a Flower grid of nodes.

A node may host any number of logical clients, so a run works with one node or many.
"""

import json
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeGuard

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
    Shares,
    code_digest,
    pack_request,
    pack_steps,
    public_line,
    reject_malformed,
    unpack_replies,
)
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.class_counts import released_counts
from fed_dpsd.privacy.mechanism import quorum_of
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.protocol import (
    Absent,
    Refusal,
    Replies,
    Request,
    Response,
    SumStep,
    is_hospital_name,
    require_equal_classes,
)
from fed_dpsd.server.attendance import (
    Member,
    hospital_text,
    members_of,
    requests_of,
    revoked_nodes,
    store_members,
)
from fed_dpsd.server.federation import OF_ROUNDS, HostedFederation
from fed_dpsd.storage import append_line, run_name

ATTEMPTS = 3
OUT_OF_REACH = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
POLL_SECONDS = 0.5
HELLO_SECONDS = 10.0  # until a node that is no hospital of this run gets another hello
LAST_HELLO_SECONDS = 5.0  # for other nodes' replies to a hello once all hospitals are known
NOT_CONNECTED = "had not connected"
RETURN_SECONDS = 5.0  # between two looks whether a node that is gone has returned
SHOWN_SECONDS = 10.0  # between two lines about awaited hospitals
LATE, OTHER_CODE = "no answer in time", "runs different code from this server"
WAS_REVOKED = "its node was revoked"
DIAGNOSED_AT_ONCE = 64  # clients: each sends (n, N, K) floats
logger = logging.getLogger("fed_dpsd")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 0):.0f} s"


def _is_refusal(reply: object) -> TypeGuard[Refusal]:
    """Return whether a reply refuses for good, not only until a charge is acknowledged."""
    if not isinstance(reply, Refusal):
        return False
    return not (reply.statement and reply.statement.wanted)


@dataclass
class Node:
    """What is known about a node of the grid.

    Args:
        clients: the clients that it hosts; a hospital's node hosts one once it has reported which.
        client: the client that it reported to be, whether or not it is used.
        problem: why it is not used as that client; "" if it is, or has reported nothing.
        reason: the problem in words.
        keys: the digest of the keys that it lists for secure sums.
        online: whether it was connected when last checked.
        away: whether it did not answer the last request.
        last_seconds: how long its last reply took.
        hellos: its unanswered hellos, by message.
        hello_at: when to send it another hello.
    """

    clients: list[int] = field(default_factory=list)
    client: int = -1
    problem: Literal["", "rival", "other code", "refuses"] = ""
    reason: str = ""
    keys: str = ""
    online: bool = False
    away: bool = False
    last_seconds: float = 0.0
    hellos: set[str] = field(default_factory=set)
    hello_at: float = -math.inf

    @property
    def gone(self) -> bool:
        """Return whether it left, did not answer the last request, and has not returned."""
        return self.away and not self.online


class GridFederation(HostedFederation):
    """The clients behind a Flower grid.

    In a simulation, nodes host clients in turn, and all must answer. In a deployment, a node is one
    hospital, which reports its own client number. The run waits for all hospitals; after
    federation.node_timeout_seconds, federation.min_clients of them suffice. A round continues
    without hospitals that have not answered federation.grace_seconds after federation.min_clients
    have. Each request's outcome is a line in the run's asks.jsonl; hospitals.json has the names and
    nodes of hospitals that have connected.

    Args:
        experiment: the experiment of the run.
        grid: Flower's nodes.
        run_folder: the folder of the run.
        say: called with each line about hospitals that connect, are awaited, are absent or return.
        shares: the GPU shares of a simulation's client processes; None if Ray assigns GPUs.

    Raises:
        UserError: too few nodes connect within federation.node_timeout_seconds.
    """

    engine = "flower"

    def __init__(
        self,
        experiment: Experiment,
        grid: Grid,
        run_folder: Path,
        say: Callable[[str], None] = logger.info,
        shares: Shares | None = None,
    ) -> None:
        super().__init__(experiment, run_folder)
        self._grid, self._say = grid, say
        self._run_folder = run_folder
        self._settings, self._code = experiment.config.federation, code_digest()
        simulated = self._settings.simulation
        self._run = str(run_folder) if simulated else run_name(run_folder)
        if not simulated and isinstance(self._noise, SecretStreams):
            self._run += f" {self._noise.identity}"  # with a new secret, it is a different run
        self._text = experiment.to_json() if simulated else experiment.for_hospitals()
        self._everyone = experiment.config.num_clients
        self._least = self._settings.min_clients or self._everyone
        if hasattr(grid, "pull_interval"):  # otherwise the simulation's grid polls every 0.1 s
            grid.pull_interval = 0.005 if self._settings.simulation else 1.0
        self._shares = shares
        self._nodes: defaultdict[int, Node] = defaultdict(Node)
        self._missing: dict[int, str] = {}  # clients that did not answer last time: why
        self._heard_from: set[int] = set()  # clients that have answered a request
        self._warned: set[str] = set()
        self._members = members_of(run_folder)
        self._stated: dict[int, float] = {}  # clients' numbers of records, by their class counts
        self._keys = ""  # the digest of the keys that all hospitals listed at the start
        self._shown, self._shown_at, self._until = "", 0.0, 0.0
        self._connect()

    def _connect(self) -> None:
        """Wait until every client is known or the time is up; show the awaited clients.

        Raises:
            UserError: too few are connected, too many refuse the run, two nodes claim to be the
                same client, or the hospitals list different keys.
        """
        timeout = self._settings.node_timeout_seconds
        self._until = time.monotonic() + timeout
        complete = False
        while not complete and time.monotonic() < self._until:
            complete = self._discover_nodes()
            if complete or self._too_many_refuse:
                self._wait_for_others()
            self._check_introductions()
            if not complete:
                self._show(self._connected(), at_once=True)
                time.sleep(0.1)
        self._keys = next((node.keys for node in self._nodes.values() if node.clients), "")
        if len(self._clients) < self._least:
            limit = f"within federation.node_timeout_seconds={timeout:g}"
            if self._settings.simulation:
                raise UserError(
                    f"no node connected {limit}; num-supernodes must be at least 1, as in "
                    "--federation-config num-supernodes=5"
                )
            fewer = f", or set federation.min_clients={len(self._clients)} to run without them"
            raise UserError(
                f"{self._connected()} {limit}. Check that `fed-dpsd site serve` runs there, and "
                f"try again{fewer if self._clients else ''}"
            )
        if not self._settings.simulation:
            self._say(self._connected())

    def _wait_for_others(self) -> None:
        """Wait a little for other nodes that were asked, which may be the same clients."""
        last = min(time.monotonic() + LAST_HELLO_SECONDS, self._until)
        others = [node for node in self._nodes.values() if node.online and not node.clients]
        while any(node.hellos for node in others) and time.monotonic() < last:
            time.sleep(0.1)
            self._discover_nodes()
            self._read_hellos()  # even if every client is known

    def _check_introductions(self) -> None:
        self._require_no_rivals()
        self._require_equal_keys()
        self._require_willing()

    def _require_no_rivals(self) -> None:
        """Check that no two online nodes claim to be the same client, since no key proves it.

        Raises:
            UserError: two nodes do.
        """
        rivals = {n: node for n, node in self._nodes.items() if node.problem == "rival"}
        for number, node in rivals.items():
            (first,) = self._hosts_of({node.client})
            if node.online and self._nodes[first].online:
                raise UserError(
                    f"nodes {first} and {number} both claim to be {self._text_of(node.client)}. "
                    "Find the wrong one (`flwr supernode list federation`). Correct `client` in "
                    "its file, stop it or unregister it (`flwr supernode unregister`); see "
                    "docs/deployment.md"
                )

    def _require_equal_keys(self) -> None:
        """Check that all hospitals list the same keys; a secure sum of others cannot be opened.

        Raises:
            UserError: two lists differ.
        """
        lists: defaultdict[str, list[int]] = defaultdict(list)
        for node in self._nodes.values():
            if node.clients:
                lists[node.keys] += node.clients
        if len(lists) > 1:
            groups = (f"{self._text_of(*own)}: {keys[:16]}" for keys, own in lists.items())
            raise UserError(
                f"the lists of keys differ, in content or order ({'; '.join(groups)}). "
                f"{self._charged_so_far}. Correct `keys` in the hospitals' files; `fed-dpsd site "
                "check` prints the digest"
            )

    def _require_willing(self) -> None:
        """Check that enough clients do not refuse the run.

        Raises:
            UserError: too few clients are left because some refuse.
        """
        if not self._too_many_refuse:
            return
        refused = self._refused
        reasons = "; ".join(f"{self._text_of(c)}: {refused[c]}" for c in sorted(refused))
        remedy = "Change the run's settings or the hospital's file"
        if self._begun:  # then it keeps its settings
            remedy = f"Correct this{self._without(len(refused), self._everyone)}"
        raise UserError(
            f"{reasons}. {self._charged_so_far}. {remedy}; `fed-dpsd site check` with these "
            "settings shows there what it allows"
        )

    @property
    def _too_many_refuse(self) -> bool:
        return self._everyone - len(self._refused) < self._least

    @property
    def _begun(self) -> bool:
        """Return whether the run has sent requests, before it was resumed."""
        return bool(requests_of(self._run_folder))

    @property
    def _charged_so_far(self) -> str:
        return "Nothing more was charged" if self._begun else "Nothing was charged"

    def _connected(self) -> str:
        """Describe in one line how many hospitals are connected, and which are awaited."""
        there = self._clients
        waiting = [client for client in range(self._everyone) if client not in there]
        text = f"{len(there)} of {self._everyone} hospitals connected"
        if waiting:
            text += f"; waiting for {self._text_of(*waiting)}"
        problems = self._problems
        reasons = [f"{self._text_of(c)} {problems[c]}" for c in waiting if c in problems]
        return f"{text} ({'; '.join(reasons)})" if reasons else text

    def _text_of(self, *clients: int) -> str:
        text = hospital_text(self._members, *clients)
        return text.replace("hospital", "client", 1) if self._settings.simulation else text

    def _show(self, text: str, at_once: bool = False) -> None:
        """Show the awaited hospitals every few seconds, or `at_once` when they change."""
        if self._settings.simulation:
            return
        now = time.monotonic()
        if (at_once and text != self._shown) or now >= self._shown_at + SHOWN_SECONDS:
            self._shown, self._shown_at = text, now
            self._say(f"{text} ({_duration(self._until - now)} left)")

    @property
    def _problems(self) -> dict[int, str]:
        """Return why clients are not used, although a node reports to be them."""
        found = [node for node in self._nodes.values() if node.problem not in ("", "rival")]
        found.sort(key=lambda node: node.problem == "refuses")  # this reason counts more
        return {node.client: node.reason for node in found}

    @property
    def _refused(self) -> dict[int, str]:
        """Return why clients refuse the run, or were revoked; no other node is such a client."""
        there = self._clients
        return {
            node.client: node.reason
            for node in self._nodes.values()
            if node.problem == "refuses" and node.client not in there
        }

    @property
    def _hosts(self) -> dict[int, list[int]]:
        """Return the clients of each node that hosts any."""
        return {number: node.clients for number, node in self._nodes.items() if node.clients}

    @property
    def _clients(self) -> set[int]:
        """Return the clients that a known node hosts."""
        return {client for clients in self._hosts.values() for client in clients}

    def _hosts_of(self, clients: Collection[int]) -> dict[int, list[int]]:
        """Return the known nodes that host any of these clients, with the clients of each."""
        hosts = {node: [c for c in own if c in clients] for node, own in self._hosts.items()}
        return {node: own for node, own in hosts.items() if own}

    def _discover_nodes(self) -> bool:
        """Send hellos to unknown nodes while clients are missing; return whether none is missing.

        This never waits: a later call reads the replies. A node is the client that it reports to
        be, unless another node of this run already is that client. A client that would refuse the
        run, or whose classes or keys differ, is left out before it is asked anything. So is one
        that was revoked, until it connects with another key.
        """
        numbers = sorted(self._grid.get_node_ids())
        if self._settings.simulation:
            if self._shares:  # each node keeps at most one process busy
                numbers = numbers[: self._shares.number]
            for client in range(self._everyone if numbers and not self._hosts else 0):
                self._nodes[numbers[client % len(numbers)]].clients.append(client)  # in turn
            return bool(self._hosts)
        for node in (self._nodes[number] for number in numbers):
            node.away &= node.online  # rounds wait again for nodes that have returned
        for number, node in self._nodes.items():
            node.online = number in numbers
        self._drop_revoked()
        if len(self._clients) == self._everyone:
            return True
        now = time.monotonic()
        for number in numbers:
            node = self._nodes[number]
            if not node.clients and node.hello_at <= now:
                node.hello_at = now + self._settings.retry_seconds
                if sent := self._push(self._message(HELLO, 0, number)):
                    node.hellos.add(sent)
        self._read_hellos()
        return len(self._clients) + len(self._refused) == self._everyone

    def _drop_revoked(self) -> None:
        """Use no node that was revoked, in this process or before the run was resumed."""
        revoked = revoked_nodes(self._run_folder)
        for client, member in self._members.items():
            if member.node in revoked:
                node = self._nodes[member.node]
                node.client, node.clients = client, []
                node.problem, node.reason = "refuses", WAS_REVOKED

    def _read_hellos(self) -> None:
        """Read which clients the nodes that have answered a hello are."""
        sent = {message: n for n, node in self._nodes.items() for message in node.hellos}
        for reply in self._grid.pull_messages(list(sent)) if sent else ():
            number = sent[reply.metadata.reply_to_message_id]
            node = self._nodes[number]
            node.hellos.remove(reply.metadata.reply_to_message_id)
            node.hello_at = time.monotonic() + HELLO_SECONDS
            if not node.clients:
                self._meet(number, reply)

    def _meet(self, number: int, reply: Message) -> None:
        """Record the client that a node reports to be, or why it is not used."""
        node = self._nodes[number]
        if reply.has_error():
            if reply.error.code not in OUT_OF_REACH:
                reason = public_line(reply.error.reason or NO_REASON)
                self._warn(f"node {number} does not report which hospital it is: {reason}")
            return
        meta = reply.content.config_records.get("meta", ConfigRecord())
        client = meta.get("client")
        node.problem, node.reason = "", ""  # its file may have been corrected
        if type(client) is not int or client not in range(self._everyone):
            self._warn(f"node {number} is not a hospital of this federation")
            return
        node.client = client
        name = meta.get("hospital")
        member = Member(client, str(name) if is_hospital_name(name) else "", number)
        said = hospital_text({client: member}, client)
        if client in self._clients:
            self._warn(f"node {number} claims to be {said}, as another node does")
            if meta.get("code") == self._code and not self._refusal(meta):
                node.problem = "rival"  # otherwise it may belong to another federation
        elif meta.get("code") != self._code:
            self._warn(f"{said} {OTHER_CODE}")
            node.problem, node.reason = "other code", OTHER_CODE
        elif reason := self._refusal(meta):
            self._warn(f"{said} cannot take part: {reason}")
            node.problem, node.reason = "refuses", reason
        else:
            summed = quorum_of(self.experiment.answers) is not None
            node.clients, node.keys = [client], str(meta.get("keys", "")) if summed else ""
            self._members[client] = member
            store_members(self._run_folder, self._members.values())
            for other in self._nodes.values():
                if other.client == client and other.problem != "rival":
                    other.problem = ""

    def _warn(self, text: str) -> None:
        """Log a warning only once, because a node with a problem is asked repeatedly."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _refusal(self, meta: Mapping[str, Any]) -> str:
        """Return why a hospital that has introduced itself cannot take part; "" if it can."""
        if error := meta.get("error"):
            return public_line(str(error))
        try:
            require_equal_classes(meta.get("classes"), self.experiment.config.data.class_names)
        except ProtocolError as error:
            return str(error)
        if refusal := meta.get("refusal"):
            return public_line(str(refusal))
        if self._keys and meta.get("keys") != self._keys:
            return (
                "keys: its list differs from the others', in content or order; compare the digests "
                "that `fed-dpsd site check` prints"
            )
        return ""

    def each(self, request: Request) -> Replies:
        """Return the clients' checked answers; in a deployment, show new class counts."""
        replies = super().each(request)
        if request.kind == "counts" and not self._settings.simulation:
            self._show_shares(
                {client: own.sum() for client, own in released_counts(replies).items()}
            )
        return replies

    def _show_shares(self, stated: Mapping[int, float]) -> None:
        """Show each hospital's share of the stated records; warn about more than half of them."""
        if stated.items() <= self._stated.items():
            return
        self._stated |= stated
        total = sum(self._stated.values()) or 1
        shares = {client: own / total for client, own in sorted(self._stated.items())}
        listed = (f"{self._text_of(client)} {share:.1%}" for client, share in shares.items())
        self._say(f"shares of the stated records: {', '.join(listed)}")
        for client, share in shares.items():
            if share > 0.5 and len(shares) > 2:
                self._warn(f"{self._text_of(client)} states more records than all others together")

    def _deliver(self, request: Request) -> dict[int, Response | Refusal]:
        """Send a request to every client; clients that do not answer in time are absent.

        Raises:
            UserError: fewer clients answered than the federation needs.
        """
        started = time.monotonic()
        if not self._settings.simulation:
            for known in self._nodes.values():
                if not known.hellos:  # an unknown one gets a hello at once
                    known.hello_at = -math.inf
            self._discover_nodes()
        asked = self._recipients(request)
        refused = self._refused
        if len(asked) - len(refused.keys() & set(asked)) < min(self._least, len(asked)):
            away = [client for client in asked if client not in self._clients]
            gone = {client: refused.get(client, NOT_CONNECTED) for client in away}
            raise self._too_few(gone, len(asked), "refuse this run or are gone")
        hosts = self._hosts_of(set(asked))
        packed = {}
        for node, clients in hosts.items():
            heard = {client: n for client, n in request.heard.items() if client in clients}
            packed[node] = pack_request(replace(request, heard=heard))  # of its own clients only
        replies = self._exchange(ANSWER, request.query_id, packed, hosts)
        teachers = self.experiment.config.teachers_per_client
        answers: dict[int, Response | Refusal] = {}
        reasons = self._silent([client for client in asked if client not in replies])
        for client in asked:
            reply = replies.get(client) or Absent(request.query_id, reasons[client])
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
        self._show_changes(request, answers)
        absent = {client for client, own in answers.items() if isinstance(own, Absent)}
        if len(answers) - len(absent) < min(self._least, len(asked)):
            self._charge_log.take(answers)
            missing = {c: own.reason for c, own in answers.items() if _is_refusal(own)}
            few = "refused or did not answer" if missing.keys() - absent else "did not answer"
            raise self._too_few(missing, len(answers), few)
        return answers

    def _deliver_and_log(self, request: Request) -> dict[int, Response | Refusal]:
        """Deliver a request; in a deployment, federation.min_clients must answer, not refuse.

        Raises:
            UserError: too few hospitals have answered; their answers stay on disk.
        """
        answers = super()._deliver_and_log(request)
        refused = {c: a.reason for c, a in answers.items() if isinstance(a, Refusal)}
        enough = len(answers) - len(refused) >= min(self._least, len(answers))
        if enough or self._settings.simulation:
            return answers
        raise self._too_few(refused, len(answers), "refused or did not answer")

    def _too_few(self, missing: Mapping[int, str], everyone: int, verb: str) -> UserError:
        listed = "; ".join(f"{self._text_of(c)}: {reason}" for c, reason in missing.items())
        who = "clients" if self._settings.simulation else "hospitals"
        remedy = self._remedy(len(missing), everyone)
        return UserError(f"{len(missing)} of {everyone} {who} {verb} ({listed}); {remedy}")

    def _silent(self, clients: Sequence[int]) -> dict[int, str]:
        """Return a public reason for each client that has not replied."""
        if not clients:
            return {}
        self._drop_revoked()
        problems = self._problems
        online = set(self._grid.get_node_ids())
        for number, node in self._nodes.items():  # one that has returned is new to the next request
            node.online &= number in online
        connected = self._hosts_of(clients).keys() & online
        present = {client for number in connected for client in self._nodes[number].clients}
        reasons = {}
        for client in clients:
            away = f"disconnected; {LATE}" if client in self._clients else NOT_CONNECTED
            reasons[client] = LATE if client in present else problems.get(client, away)
        return {client: public_line(reason) for client, reason in reasons.items()}

    def _show_changes(self, request: Request, answers: Mapping[int, Response | Refusal]) -> None:
        """Show which hospitals have stopped answering and which have returned."""
        if self._settings.simulation:
            return
        where = f"round {request.query_id}" if request.kind in OF_ROUNDS else request.kind
        for client, response in sorted(answers.items()):
            reason = response.reason if isinstance(response, Refusal) else ""
            if reason and reason != self._missing.get(client):
                verb = "does not answer" if isinstance(response, Absent) else "refuses"
                self._say(f"{where}: {self._text_of(client)} {verb}: {reason}")
            elif not reason and client in self._missing:
                back = "is back" if client in self._heard_from else "has joined"
                self._say(f"{where}: {self._text_of(client)} {back}")
            self._missing.pop(client, None)
            if reason:
                self._missing[client] = reason
            else:
                self._heard_from.add(client)

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
        """Write a line of asks.jsonl with the clients that answered and the others' reasons."""
        line = {
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "query_id": request.query_id,
            "kind": request.kind,
            "ask": request.digest,
            "answered": sorted(
                c for c, response in answers.items() if isinstance(response, Response)
            ),
            "refused": {c: a.reason for c, a in answers.items() if isinstance(a, Refusal)},
            "unconnected": sorted(
                client
                for client, response in answers.items()
                if client not in self._clients
                and response == Absent(request.query_id, NOT_CONNECTED)
            ),
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
                remedy = self._remedy(len(missing), len(some))
                raise UserError(f"clients {sorted(missing)} did not answer; {remedy}")
            yield from (values[client] for client in sorted(some))

    def _remedy(self, missing: int, everyone: int) -> str:
        """Return the remedy if some of a request's clients are missing."""
        if self._settings.simulation:
            timeout = self._settings.round_timeout_seconds
            return f"raise federation.round_timeout_seconds={timeout:g}, or see the nodes' logs"
        return f"see their logs, then resume the run{self._without(missing, everyone)}"

    def _without(self, missing: int, everyone: int) -> str:
        """Name the override with which a resumed run needs no missing clients, if there is one."""
        fewer, quorum = everyone - missing, quorum_of(self.experiment.answers)
        if fewer < (quorum.threshold if quorum else 1):
            return ""
        return f", or resume it without them with overrides federation.min_clients={fewer}"

    def _exchange(
        self,
        kind: str,
        query_id: int,
        contents: Mapping[int, RecordDict],
        hosts: Mapping[int, list[int]],
    ) -> dict[int, Reply | Refusal]:
        """Send a message to each node, and return the replies that arrive in time, by client."""

        def message(node: int, seconds: float) -> Message:
            return self._message(kind, query_id, node, contents[node], hosts[node], seconds)

        timeout = self._settings.round_timeout_seconds
        if self._settings.simulation:
            messages = [message(node, timeout) for node in hosts]
            arrived = self._grid.send_and_receive(messages, timeout=timeout) if messages else ()
            replies = {reply.metadata.src_node_id: reply for reply in arrived}
        elif kind == ANSWER:
            replies = self._send_with_retries(hosts, message, min(self._least, len(hosts)))
            answered = {number for number, reply in replies.items() if not self._failed(reply)}
            for number in hosts:
                self._nodes[number].away = number not in answered
        else:
            replies = self._send_with_retries(hosts, message)
        found: dict[int, Reply | Refusal] = {}
        for node, reply in replies.items():
            found |= self._read(node, reply)
        return found

    def _message(
        self,
        kind: str,
        query_id: int,
        node: int,
        content: Mapping[str, Any] | None = None,
        clients: Sequence[int] = (),
        seconds: float | None = None,
    ) -> Message:
        """Return a message to a node, with the experiment and the run's identity.

        Args:
            kind: the message's type.
            query_id: the request's number.
            node: the receiver.
            content: the request.
            clients: the node's clients.
            seconds: until Flower no longer delivers it; None keeps Flower's own limit.
        """
        meta: dict[str, Any] = {
            "experiment": self._text,
            "run_folder": self._run,
            "clients": list(clients),
            "code": self._code,
        }
        if self._shares:
            meta["shares"] = json.dumps(asdict(self._shares))
        record = RecordDict({**(content or {}), "meta": ConfigRecord(meta)})
        return Message(
            record, dst_node_id=node, message_type=kind, group_id=str(query_id), ttl=seconds
        )

    def _push(self, message: Message) -> str | None:
        """Send a message; return its number, or None if Flower rejects it (and logs the reason)."""
        return next(iter(self._grid.push_messages([message])), None)

    def _send_with_retries(
        self,
        nodes: Iterable[int],
        message: Callable[[int, float], Message],
        enough: float = math.inf,
    ) -> dict[int, Message]:
        """Send messages to nodes until each has replied or the time is up.

        Once `enough` nodes have answered, the others have federation.grace_seconds left. If all of
        these are gone, the time is up at once.

        A message may be lost with the process that received it, so it is sent again: to a silent
        node after twice the time of its last reply, doubling each time; to an unreachable node at
        regular intervals; and immediately to a node with a failed process. The request is the same,
        so nothing is charged twice. No message outlives the timeout. One to a node that did not
        answer the last request ends with the round, or when the next one is due, and one that is
        gone gets none until it returns, so that it answers hardly more than one closed round.
        """
        started, first = time.monotonic(), self._settings.retry_seconds
        latest = until = started + self._settings.round_timeout_seconds
        self._shown_at, self._until = started, until  # a fast round needs no line
        due = dict.fromkeys(nodes, started)
        pause = {node: max(first, 2 * self._nodes[node].last_seconds) for node in due}
        attempts = dict.fromkeys(due, ATTEMPTS)
        pushed: dict[str, int] = {}
        replies: dict[int, Message] = {}
        answered: set[int] = set()
        while due:
            now = time.monotonic()
            if now >= until:
                break
            for node in [node for node, when in due.items() if when <= now]:
                known = self._look_for(node)
                if known.gone:
                    due[node] = now + RETURN_SECONDS
                    continue
                ends = min(until, now + pause[node]) if known.away else latest
                due[node], pause[node] = now + pause[node], 2 * pause[node]
                if number := self._push(message(node, ends - now)):
                    pushed[number] = node
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
                self._nodes[node].last_seconds = now - started
                if enough < math.inf and self._is_answer(node, reply):
                    answered.add(node)
                if attempts[node] > 0:
                    due[node] = now
                else:
                    del due[node]
            if len(answered) >= enough:
                all_gone = all(self._nodes[node].gone for node in due)
                until = now if all_gone else min(until, now + self._settings.grace_seconds)
                self._until = until
            for node in revoked_nodes(self._run_folder) & due.keys():
                del due[node]
            if due:
                clients = [client for node in due for client in self._nodes[node].clients]
                self._show(f"waiting for the reply of {self._text_of(*clients)}")
            time.sleep(POLL_SECONDS if due else 0)
        return {
            node: reply
            for node, reply in replies.items()
            if not (reply.has_error() and reply.error.code in OUT_OF_REACH)
        }

    def _look_for(self, number: int) -> Node:
        """Return a node; note that it has returned if it was gone and is connected again."""
        node = self._nodes[number]
        if node.gone and number in self._grid.get_node_ids():
            node.away, node.online = False, True
        return node

    def _is_answer(self, node: int, reply: Message) -> bool:
        """Return whether a hospital answers, or will once an unplanned charge is acknowledged."""
        if self._failed(reply):
            return False
        try:
            read = unpack_replies(reply.content, self._nodes[node].clients)
        except ProtocolError:
            return False
        return any(not _is_refusal(own) for own in read.values())

    def _failed(self, reply: Message) -> bool:
        """Return whether a reply is neither an answer nor a refusal."""
        if reply.has_error():
            return True
        meta = reply.content.config_records.get("meta", ConfigRecord())
        return bool(meta.get("error")) or meta.get("code") != self._code

    def _read(self, node: int, reply: Message) -> dict[int, Reply | Refusal]:
        """Check and unpack a node's reply; in a deployment, clients with bad replies are absent.

        Raises:
            ProtocolError: the reply is bad, in a simulation.
        """
        clients = self._nodes[node].clients
        try:
            self._check(clients, reply)
            return unpack_replies(reply.content, clients)
        except ProtocolError as error:
            if self._settings.simulation:
                raise
            problem = public_line(str(error))
        logger.warning("clients %s: %s", clients, problem)
        return {client: Absent(0, problem) for client in clients}

    @reject_malformed()
    def _check(self, clients: list[int], reply: Message) -> None:
        if reply.has_error():
            cause = " ".join((reply.error.reason or NO_REASON).split())[-100:].lstrip("^ ")
            raise ProtocolError(f"the node that hosts clients {clients} failed: {cause}")
        meta = reply.content.config_records.get("meta", ConfigRecord())
        if self._settings.simulation and "client" in meta:
            raise ProtocolError(
                f"node {reply.metadata.src_node_id} is a hospital; run with federation=deployment"
            )
        if meta.get("code") != self._code:
            stale = (
                "a Flower process of another checkout answers here; stop it (`fed-dpsd doctor` "
                "finds it) or use `fed-dpsd run --engine flower`"
            )
            remedy = stale if self._settings.simulation else "install the same version at both"
            raise ProtocolError(
                f"the node that hosts clients {clients} runs different code from this server; "
                f"{remedy}"
            )
        if meta.get("error"):
            raise ProtocolError(str(meta["error"]))
