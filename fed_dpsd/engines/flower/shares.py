"""The GPU shares of client processes in `flwr run`.

By default, Flower requests no GPU for clients. Ray then hides all GPUs and starts as many processes
as it has processors for. So before Ray starts, environment variables are set to keep the GPUs
visible and to limit Ray's processors. Each process takes one of the shares before its first answer.
"""

import functools
import json
import os
import secrets
import socket

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.engines.clients import prepare_clients
from fed_dpsd.engines.placement import Placement, joins_cluster
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment

SHARES = "FED_DPSD_SHARES"  # value: their name, their number, and the number of GPUs
VISIBLE = "CUDA_VISIBLE_DEVICES"
CPUS_EACH = 2  # processors that Flower requests for a client by default
_taken: list[socket.socket] = []


def place_clients(experiment: Experiment, nodes: int) -> str:
    """Check a simulation's clients and place them on this machine's devices, before Ray starts.

    Returns:
        The placement as one line.

    Raises:
        UserError: as for `prepare_clients`.
    """
    placement = prepare_clients(experiment, nodes)
    if placement.devices and joins_cluster():
        return (
            "the running Ray cluster (RAY_ADDRESS) gives clients no GPU unless "
            f'--federation-config "{placement.federation_config}" requests it'
        )
    offer_shares(placement)
    return str(placement)


def offer_shares(placement: Placement) -> None:
    """Offer the shares of a placement to the processes that Ray starts from now on.

    If `--federation-config` requests GPUs, Ray itself assigns them as usual.
    """
    if not placement.devices:
        return
    gpus = 1 if placement.pinned else len(placement.devices)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": CPUS_EACH * placement.processes})
    os.environ.setdefault(TEACHER_BYTES, str(placement.teachers))
    os.environ[SHARES] = f"{secrets.token_hex(8)} {placement.processes} {gpus}"


@functools.cache
def take_share() -> None:
    """Take a share for the lifetime of this process, once, if shares are offered.

    The process holds an operating system name, which becomes free when the process ends.

    Raises:
        UserError: other processes hold all shares.
    """
    if not (offered := os.environ.get(SHARES)) or _assigned_by_ray():
        return
    name, number, gpus = offered.split()
    for share in range(int(number)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0fed-dpsd-{name}-{share}")
        except OSError:
            claim.close()
            continue
        _taken.append(claim)
        if int(gpus) > 1:
            known = os.environ.get(VISIBLE, ",".join(map(str, range(int(gpus)))))
            os.environ[VISIBLE] = known.split(",")[share % int(gpus)]
        return
    raise UserError(
        f"the GPUs have room for {number} client processes, but Flower has started more; leave "
        "client-resources-num-cpus out of --federation-config, or also give "
        "client-resources-num-gpus"
    )


def _assigned_by_ray() -> bool:
    """Return whether `--federation-config` made Ray assign a GPU to this process."""
    import ray  # only simulations need it

    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
