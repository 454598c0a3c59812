"""The server's half of a secure sum, which learns only the sum of the answers.

The arithmetic is in privacy/secure_sum.py; the clients' half is client/secure_sum.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.mechanism import SupportsSecureSum
from fed_dpsd.privacy.secure_sum import Masked, Opened, SumError, combine, sealed_size
from fed_dpsd.protocol import Request, Response, SumStep
from fed_dpsd.storage import to_npz, write_atomically

Steps = Callable[[Mapping[int, SumStep]], Mapping[int, Mapping[str, bytes]]]


def secure_sum(
    experiment: Experiment,
    request: Request,
    answers: Mapping[int, Response],
    folder: Path,
    deliver: Steps,
) -> tuple[NDArray[np.float64], tuple[int, ...]]:
    """Return the sum of masked answers, and the clients in it.

    Args:
        experiment: the experiment with the mechanism.
        request: the request that was answered.
        answers: the masked answers that arrived, by client.
        folder: where masked answers are stored. Clients confirm only one set of names per sum, so a
            resumed run must use the same answers, regardless of which clients are connected.
        deliver: sends a step to some clients, and returns the replies that arrive.

    Raises:
        UserError: too few clients are left; nothing was unmasked.
    """
    mechanism, digest = experiment.answers, request.digest
    assert isinstance(mechanism, SupportsSecureSum)
    assert mechanism.quorum is not None
    threshold, parties = mechanism.quorum.threshold, experiment.config.num_clients
    masked = {
        c: Masked(a.values, a.sealed) for c, a in answers.items() if _fits(a, request, parties)
    }
    path = folder / f"{digest}.npz"
    try:
        if path.exists():  # the run was killed after some clients may have confirmed
            with np.load(path, allow_pickle=False) as kept:
                masked = {int(name): Masked.from_bytes(kept[name].tobytes()) for name in kept.files}
        elif len(masked) < threshold:
            raise SumError(f"{len(masked)} clients answered; {threshold} are needed")
        else:
            packed = {str(c): np.frombuffer(m.to_bytes(), np.uint8) for c, m in masked.items()}
            write_atomically(path, to_npz(packed))
        named = tuple(sorted(masked))
        confirmed = deliver({client: SumStep(digest, named) for client in named})
        steps = {}
        for client in confirmed:
            proofs = {c: p[str(client)] for c, p in confirmed.items() if str(client) in p}
            sealed = {other: masked[other].sealed[client] for other in named}
            steps[client] = SumStep(digest, named, proofs, sealed)
        opened = {c: Opened.from_named(shares) for c, shares in deliver(steps).items()}
        total = combine(masked, opened, parties, threshold)
    except (SumError, KeyError, ValueError) as error:
        raise UserError(
            f"the sum of request {request.query_id} cannot be opened: {error}; no part of it was "
            "revealed. Resume the run when the clients are back. If the clients' logs name a key, "
            "compare the keys in all hospitals' files, and start another run; if shares were "
            "tampered with, without that client"
        ) from None
    return np.asarray(total * mechanism.lattice, np.float64), named


def _fits(response: Response, request: Request, parties: int) -> bool:
    """Return whether a masked answer has the right shape; masked values cannot be checked."""
    sizes = {client: len(box) for client, box in response.sealed.items()}
    whole = sizes == dict.fromkeys(range(parties), sealed_size(parties))
    return (
        whole
        and response.values.dtype == np.uint64
        and response.values.shape == request.summed_shape
    )
