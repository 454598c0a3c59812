"""The GPU shares of client processes in `flwr run`.

Flower starts these processes before the server knows the run, and by default requests no GPU for
them. Ray then leaves all GPUs visible (see `QUIET`), and each process takes a share before its
first answer. The server sends messages to no more nodes than there are shares, so Flower keeps no
more processes busy.
"""

import functools
import os
import secrets
import socket

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.engines.clients import prepare_clients
from fed_dpsd.engines.flower.codec import Shares
from fed_dpsd.engines.placement import Placement, joins_cluster
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment

VISIBLE = "CUDA_VISIBLE_DEVICES"
_taken: list[socket.socket] = []


def place_clients(experiment: Experiment, nodes: int) -> tuple[str, Shares | None]:
    """Check a simulation's clients and place them on this machine's devices.

    Returns:
        The placement as one line, and the shares of its GPUs, if any.

    Raises:
        UserError: as for `prepare_clients`.
    """
    placement = prepare_clients(experiment, nodes)
    if placement.devices and joins_cluster():
        line = (
            "the running Ray cluster (RAY_ADDRESS) gives clients no GPU unless "
            f'--federation-config "{placement.federation_config}" requests it'
        )
        return line, None
    return str(placement), shares_of(placement)


def shares_of(placement: Placement) -> Shares | None:
    """Return the shares of a placement; None without GPUs."""
    if not placement.devices:
        return None
    gpus = 1 if placement.pinned else len(placement.devices)
    return Shares(secrets.token_hex(8), placement.processes, gpus, placement.teachers)


@functools.cache
def take_share(shares: Shares) -> None:
    """Take a share for the lifetime of this process, once, unless Ray has assigned a GPU.

    The process holds an operating system name, which becomes free when the process ends.

    Raises:
        UserError: other processes hold all shares.
    """
    os.environ.setdefault(TEACHER_BYTES, str(shares.teachers))
    if _assigned_by_ray():
        return
    for number in range(shares.number):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0fed-dpsd-{shares.name}-{number}")
        except OSError:
            claim.close()
            continue
        _taken.append(claim)
        if shares.gpus > 1:
            known = os.environ.get(VISIBLE, ",".join(map(str, range(shares.gpus))))
            os.environ[VISIBLE] = known.split(",")[number % shares.gpus]
        return
    raise UserError(
        f"the GPUs have room for {shares.number} client processes, but Flower uses more; give "
        "client-resources-num-gpus in --federation-config"
    )


def _assigned_by_ray() -> bool:
    """Return whether `--federation-config` made Ray assign a GPU to this process."""
    import ray  # only simulations need it

    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
