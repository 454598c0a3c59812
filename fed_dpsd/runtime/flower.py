"""Flower as an engine: one message a node and round, carrying the clients the node hosts.

The only library file that imports Flower. A node may host any number of logical clients, so a run
works with one node or many; a client's state lies on disk, never in Flower's context.
"""

import functools
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fed_dpsd.config import UserError, from_run_config
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal
from fed_dpsd.runtime import run as runs
from fed_dpsd.runtime import site as sites
from fed_dpsd.runtime.experiment import Experiment, from_json, set_up
from fed_dpsd.runtime.federation import HostedFederation, client_threads
from fed_dpsd.runtime.site import Site, open_site

NOT_SIMULATED = (
    "this node is no simulation's, and a client must not take its budget from a message: start its "
    "SuperNode with --node-config 'simulation=true' if its data is not private"
)
ANSWER, DIAGNOSE = "query.answer", "query.diagnose"
logger = logging.getLogger("fed_dpsd")


class RunFailed(Exception):
    """What the Flower run fails with: the cause in one line. Flower's log shows no traceback."""

    __traceback__ = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


@functools.cache
def code_digest(client_app: Path) -> str:
    """SHA-256 over this library's source files and the client app's, by name and content."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if "_app" not in path.relative_to(package).parts:
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    digest.update(client_app.read_bytes())
    return digest.hexdigest()


# --- server ---


def serve(grid: Grid, run_config: Mapping[str, Any], client_app: Path) -> None:
    """Run the experiment that `flwr run --run-config` asks for, and print its result.

    Raises:
        RunFailed: with the cause in one line; Flower then reports the run as failed.
    """
    try:
        experiment = set_up(from_run_config(run_config), base=None)
        folder = runs.new_run_folder(experiment)
    except UserError as error:
        print(f"error: {error}", flush=True)
        raise RunFailed(runs.one_line(error)) from None
    try:
        federation = GridFederation(experiment, grid, folder, client_app)
        summary = runs.run(experiment, federation, folder, _print_round)
    except Exception as error:
        if not isinstance(error, UserError | ProtocolError):
            logger.exception("the server failed")
        if not (folder / "summary.json").exists():
            runs.write_failure(experiment, folder, GridFederation.engine, error)
        print(f"error: {runs.one_line(error)}\nrun folder: {folder}", flush=True)
        raise RunFailed(runs.one_line(error)) from None
    print(f"result: {runs.result_line(experiment, summary)}", flush=True)
    print(f"run folder: {folder}", flush=True)


def _print_round(line: Mapping[str, Any]) -> None:
    print(runs.round_text(line), flush=True)


class GridFederation(HostedFederation):
    """The clients behind a Flower grid.

    Raises:
        UserError: no node connects within federation.node_timeout_seconds.
    """

    engine = "flower"

    def __init__(
        self, experiment: Experiment, grid: Grid, run_folder: Path, client_app: Path
    ) -> None:
        super().__init__(experiment)
        self._grid = grid
        self._run_folder = run_folder
        self._code = code_digest(client_app)
        if hasattr(grid, "pull_interval"):  # the simulation's grid polls every 0.1 s otherwise
            grid.pull_interval = 0.005
        nodes = self._wait_for_nodes(experiment.config.federation.node_timeout_seconds)
        self._hosts: dict[int, list[int]] = {}
        for client in range(experiment.config.num_clients):
            self._hosts.setdefault(nodes[client % len(nodes)], []).append(client)

    def _wait_for_nodes(self, timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        while not (nodes := sorted(self._grid.get_node_ids())):
            if time.monotonic() > deadline:
                raise UserError(
                    f"no node connected within federation.node_timeout_seconds={timeout:g}; "
                    "start a SuperNode, or the simulation, and try again"
                )
            time.sleep(0.1)
        return nodes

    def _deliver(self, ask: Ask) -> dict[int, Answer | Refusal]:
        arrays = {
            "images": Array(ask.images),
            "predictions": Array(ask.predictions),
            "weights": Array(ask.weights),
        }
        answers: dict[int, Answer | Refusal] = {}
        for client, values, refusal in self._exchange(ANSWER, ask.query_id, arrays, ask.kind):
            if refusal:
                answers[client] = Refusal(ask.query_id, refusal)
            else:
                teachers = self.experiment.config.teachers_per_client
                answers[client] = Answer(ask.query_id, values, teachers)
        return answers

    def diagnose(self) -> dict[int, NDArray[np.float32]]:
        """Exact probabilities of every teacher on the test split."""
        replies = {client: values for client, values, _ in self._exchange(DIAGNOSE, 0, {})}
        return dict(sorted(replies.items()))

    def _exchange(
        self, kind: str, query_id: int, arrays: dict[str, Array], asked: str = ""
    ) -> list[tuple[int, NDArray[Any], str]]:
        """Send one message to each node; what came back, client by client."""
        messages = []
        for node, clients in self._hosts.items():
            meta = ConfigRecord(
                {
                    "experiment": self.experiment.to_json(),
                    "run_folder": str(self._run_folder),
                    "clients": clients,
                    "query_id": query_id,
                    "asked": asked,
                }
            )
            content = RecordDict({"meta": meta, "ask": ArrayRecord(arrays)})
            messages.append(
                Message(content, dst_node_id=node, message_type=kind, group_id=str(query_id))
            )
        timeout = self.experiment.config.federation.round_timeout_seconds
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        received = [row for reply in replies for row in self._read(reply)]
        missing = set(range(self.experiment.config.num_clients)) - {row[0] for row in received}
        if missing:
            raise UserError(
                f"clients {sorted(missing)} did not answer within "
                f"federation.round_timeout_seconds={timeout:g}; raise it, or see the nodes' logs"
            )
        return received

    def _read(self, reply: Message) -> list[tuple[int, NDArray[Any], str]]:
        """Check one node's reply and take it apart."""
        node = reply.metadata.src_node_id
        clients = self._hosts.get(node, [])
        if reply.has_error():
            cause = " ".join(reply.error.reason.split())[-200:].lstrip("^ ")
            raise ProtocolError(f"the node that hosts clients {clients} failed: {cause}")
        meta = reply.content.config_records.get("meta")
        values = reply.content.array_records.get("answers")
        if meta is None or values is None or meta.get("code") != self._code:
            raise ProtocolError(
                f"the node that hosts clients {clients} runs other code than this server; a "
                "Flower process of another checkout answers here: stop it (`fed-dpsd doctor` "
                "finds it) or use `fed-dpsd run --engine flower`"
            )
        if meta["error"]:
            raise ProtocolError(str(meta["error"]))
        refusals = json.loads(str(meta["refusals"]))
        rows: list[tuple[int, NDArray[Any], str]] = []
        for client in clients:
            if str(client) in refusals:
                rows.append((client, np.empty(0), refusals[str(client)]))
            elif str(client) in values:
                rows.append((client, values[str(client)].numpy(), ""))
        return rows


# --- client ---


def answer(message: Message, context: Context, client_app: Path) -> Message:
    """Answer a node's message for every client that it hosts.

    The configuration comes with the message, so a node answers only where its own operator says
    that it is a simulation's: Flower's simulation does (`partition-id`), and a SuperNode may, with
    `--node-config "simulation=true"`.

    A failure travels as one line. It may depend on private data, so outside a simulation it says
    that there was one, and the rest stays in the node's own log.
    """
    reply = {"code": code_digest(client_app), "error": "", "refusals": "{}"}
    values: dict[str, Array] = {}
    refusals: dict[str, str] = {}
    client, simulation = -1, False
    try:
        if not {"partition-id", "simulation"} & set(context.node_config):
            raise ProtocolError(NOT_SIMULATED)
        meta = message.content["meta"]
        experiment = from_json(str(meta["experiment"]))
        simulation = experiment.config.federation.simulation
        with client_threads(experiment):
            for client in meta["clients"]:
                result = _answer_one(message, experiment, int(client))
                if isinstance(result, Refusal):
                    refusals[str(client)] = result.reason
                else:
                    values[str(client)] = Array(result)
    except Exception as error:
        logger.exception("client %s failed", client)
        told = simulation or str(error) == NOT_SIMULATED
        cause = runs.one_line(error) if told else "see its log"
        reply["error"] = f"client {client} failed: {cause}"
    reply["refusals"] = json.dumps(refusals)
    content = RecordDict({"meta": ConfigRecord(reply), "answers": ArrayRecord(values)})
    return Message(content, reply_to=message)


def _answer_one(message: Message, experiment: Experiment, client: int) -> NDArray[Any] | Refusal:
    meta = message.content["meta"]
    site = _site(experiment.to_json(), client, str(meta["run_folder"]))
    if message.metadata.message_type == DIAGNOSE:
        return site.diagnose()
    arrays = message.content["ask"]
    ask = Ask(
        int(meta["query_id"]),
        arrays["images"].numpy(),
        arrays["predictions"].numpy(),
        str(meta["asked"]),  # type: ignore[arg-type]  # Ask checks it
        arrays["weights"].numpy(),
    )
    result = sites.answer(experiment.method, ask, site)
    return result if isinstance(result, Refusal) else result.values


@functools.lru_cache(maxsize=256)
def _site(experiment: str, client: int, run_folder: str) -> Site:
    """A site stays open between messages of a process; all that must last is on disk."""
    return open_site(from_json(experiment), client, Path(run_folder))
