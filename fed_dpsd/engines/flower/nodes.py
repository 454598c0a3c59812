"""The coordinator's registered nodes, through the public commands of Flower."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fed_dpsd.errors import UserError, one_line

SECONDS = 60.0


def node_states(connection: str) -> dict[int, str]:
    """Return the state of each registered node: registered, online, offline or unregistered.

    Args:
        connection: name of the SuperLink in Flower's configuration.

    Raises:
        UserError: Flower does not list its nodes.
    """
    nodes = _flwr("list", connection)["nodes"]
    return {int(node["node-id"]): str(node["status"]) for node in nodes}


def unregister(node: int, connection: str) -> None:
    """End a node's right to connect; it stays unregistered with the same key.

    Raises:
        UserError: Flower refuses.
    """
    _flwr("unregister", str(node), connection)


def _flwr(*arguments: str) -> dict[str, Any]:
    program = shutil.which("flwr") or str(Path(sys.executable).with_name("flwr"))
    command = ["flwr", "supernode", *arguments, "--format", "json"]
    said = ""
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        said = " ".join((done.stdout + done.stderr).split())[-200:]
        reply: dict[str, Any] = json.loads(done.stdout[done.stdout.find("{") :])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{' '.join(command)}` failed: {said or one_line(error)}") from None
    if not reply.get("success"):
        text = " ".join(str(reply.get("error-message") or reply).split())
        raise UserError(f"`{' '.join(command)}`: {text}")
    return reply
