"""The Flower engine, in the only files of the library that import Flower.

client.py and supernode.py are the PRIVATE side, server.py and grid.py the PUBLIC one. They exchange
the messages of codec.py alone. simulation.py starts a process with both sides, simulated.py;
shares.py deals the GPUs to the client processes of `flwr run`.
"""

import os
from collections.abc import Iterable, Mapping

# The environment of Flower's processes: no telemetry, no packages installed at run time.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Flower's actors have an environment of their own, so prestarted workers would stay idle.
    "RAY_prestart_worker_first_driver": "0",
}

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def proxies(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that name a proxy."""
    names = (name for name, value in environment.items() if value)
    return sorted(
        n for n in names if n.lower().endswith("_proxy") and not n.lower().startswith("no")
    )


def direct(environment: Mapping[str, str], addresses: Iterable[str] = ()) -> dict[str, str]:
    """Return variables to set so that loopback addresses, and these, are reached without a proxy.

    Flower's processes on one machine talk to each other at 127.0.0.1, through gRPC and HTTP, which
    would ask the proxy to connect to itself. The result is empty if nothing needs to change.
    """
    changed = {}
    names = ["no_proxy", "NO_PROXY", *(["no_grpc_proxy"] if "no_grpc_proxy" in environment else [])]
    usual = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    for name in names if proxies(environment) else ():
        listed = [each.strip() for each in environment.get(name, usual).split(",") if each.strip()]
        lacking = [each for each in (*LOOPBACK, *addresses) if each not in listed]
        if lacking and "*" not in listed:
            changed[name] = ",".join((*listed, *lacking))
    return changed


def quieten() -> None:
    """Set the environment of `QUIET`, except what is set already."""
    os.environ.update({name: QUIET[name] for name in QUIET.keys() - os.environ.keys()})
