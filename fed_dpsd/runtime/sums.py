"""Secure sums of answers: a client's part, which it never plays twice, and the server's.

The arithmetic is privacy/secure_sum.py. What a client masks, and whose names it has confirmed, is
noted beside its charges, so a process that is killed goes on with the same.
"""

import hashlib
import hmac
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.config import UserError
from fed_dpsd.privacy.mechanism import Shared
from fed_dpsd.privacy.secure_sum import (
    Masked,
    Opened,
    Party,
    SumError,
    combine,
    public_key,
    sealed_size,
)
from fed_dpsd.protocol import Answer, Ask, ProtocolError, SumStep
from fed_dpsd.runtime.checkpoint import npz_of, write_atomically
from fed_dpsd.runtime.experiment import Experiment
from fed_dpsd.runtime.ledger import Ledger
from fed_dpsd.runtime.secret import ledger_folder, name_of, secret_of

# --- client ---


class Summing:
    """One client's part in the secure sums of a run.

    Args:
        party: its keys.
        mechanism: it answers with; its noise comes in shares.
        ledger: where it notes what it must not forget.
        run: the coordinator's name of the run; sums of other runs have other masks and other noise.
    """

    def __init__(self, party: Party, mechanism: Shared, ledger: Ledger, run: str) -> None:
        self._party, self._mechanism, self._ledger, self._run = party, mechanism, ledger, run

    def masked(self, answer: Answer, ask: Ask) -> Answer:
        """A released answer, which holds a share of the noise, as it may leave.

        One ask of one run has one mask, for ever: what is asked again is what left before.
        """
        tag = self.tag(ask.digest())
        with self._ledger.transaction():
            kept = self._ledger.noted(f"{tag}-masked")
            if kept is None:
                units = answer.values.astype(np.float64) / self._mechanism.grid
                masked = self._party.mask(np.rint(units).astype(np.int64), tag.encode())
                kept = _pack(masked)
                self._ledger.note(f"{tag}-masked", kept)
        found = _unpack(kept)
        return replace(answer, values=found.values, sealed=found.sealed)

    def step(self, step: SumStep) -> dict[str, bytes]:
        """Its second or third message: by client, or by two, what the server is to pass on.

        Raises:
            ProtocolError: it has no part in the sum, or has confirmed other names.
            SumError: see `Party`; nothing was opened.
        """
        tag, names = self.tag(step.ask), json.dumps(sorted(set(step.named))).encode()
        with self._ledger.transaction():
            if self._ledger.noted(f"{tag}-masked") is None:
                raise ProtocolError("this client has no part in that sum")
            confirmed = self._ledger.noted(f"{tag}-named")
            if confirmed != names and (confirmed is not None or step.proofs):
                raise ProtocolError("this client has confirmed other names for that sum")
            if not step.proofs:
                proofs = self._party.confirm(tag.encode(), step.named)
                self._ledger.note(f"{tag}-named", names)
                return {str(other): proof for other, proof in proofs.items()}
        opened = self._party.unmask(tag.encode(), step.named, step.proofs, step.sealed)
        own = {str(client): share for client, share in opened.own.items()}
        return own | {f"{a} {b}": share for (a, b), share in opened.between.items()}

    def tag(self, ask: str) -> str:
        """Of the sum of the answers to an ask: who takes part in it has the same.

        Who share their records out by patient and who do not may be summed.
        """
        shards = replace(self._mechanism.shards, by="record")
        mechanism = replace(self._mechanism, shards=shards)  # type: ignore[type-var]
        keys = [key.hex() for _, key in sorted(self._party.public_keys.items())]
        what = [self._run, ask, str(mechanism), keys]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def exchange_key(secret: bytes) -> bytes:
    """A client's private key for secure sums, 32 bytes, from its secret."""
    return hmac.digest(secret, b"secure sums", hashlib.sha256)


def simulated_party(experiment: Experiment, client: int, run_folder: Path) -> Party | None:
    """A simulated client's keys, made beside the ledgers; None where there are no secure sums."""
    mechanism = experiment.mechanism
    quorum = mechanism.quorum if isinstance(mechanism, Shared) else None
    if quorum is None:
        return None
    folder = ledger_folder(experiment, run_folder)
    keys = {
        number: exchange_key(secret_of(folder / f"{name_of(number)}.secret"))
        for number in range(experiment.config.num_clients)
    }
    public = {number: public_key(key) for number, key in keys.items()}
    return Party(client, keys[client], public, quorum.threshold)


def _pack(masked: Masked) -> bytes:
    boxes = {str(client): np.frombuffer(box, np.uint8) for client, box in masked.sealed.items()}
    return npz_of({"values": masked.values, **boxes})


def _unpack(content: bytes) -> Masked:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        boxes = {int(name): arrays[name].tobytes() for name in arrays.files if name != "values"}
        return Masked(arrays["values"], boxes)


# --- server ---

Steps = Callable[[Mapping[int, SumStep]], Mapping[int, Mapping[str, bytes]]]


def secure_sum(
    experiment: Experiment,
    ask: Ask,
    answers: Mapping[int, Answer],
    notes: Path,
    deliver: Steps,
) -> tuple[NDArray[np.float64], tuple[int, ...]]:
    """The sum of masked answers, and whose they are.

    Args:
        experiment: whose mechanism.
        ask: what was asked.
        answers: those that arrived.
        notes: folder where a sum's names and masked answers are kept: clients confirm one set of
            names only, so a run that is killed goes on with it, whoever is there then.
        deliver: brings a step to each of some clients; of those that took it, what came back.

    Raises:
        UserError: too few clients are left; nothing was unmasked.
    """
    mechanism, digest = experiment.mechanism, ask.digest()
    assert isinstance(mechanism, Shared)
    assert mechanism.quorum is not None
    threshold, parties = mechanism.quorum.threshold, experiment.config.num_clients
    masked = {c: Masked(a.values, a.sealed) for c, a in answers.items() if _fits(a, ask, parties)}
    path = notes / f"{digest}.npz"
    try:
        if path.exists():  # the run was killed after some may have confirmed
            with np.load(path, allow_pickle=False) as kept:
                masked = {int(name): _unpack(kept[name].tobytes()) for name in kept.files}
        elif len(masked) < threshold:
            raise SumError(f"{len(masked)} clients answered; {threshold} are needed")
        else:
            packed = {str(c): np.frombuffer(_pack(m), np.uint8) for c, m in masked.items()}
            write_atomically(path, npz_of(packed))
        named = tuple(sorted(masked))
        confirmed = deliver({client: SumStep(digest, named) for client in named})
        steps = {}
        for client in confirmed:
            proofs = {c: p[str(client)] for c, p in confirmed.items() if str(client) in p}
            sealed = {other: masked[other].sealed[client] for other in named}
            steps[client] = SumStep(digest, named, proofs, sealed)
        opened = {c: _opened(shares) for c, shares in deliver(steps).items()}
        total = combine(masked, opened, parties, threshold)
    except (SumError, KeyError, ValueError) as error:
        raise UserError(
            f"the sum of ask {ask.query_id} cannot be opened: {error}; nothing of it was seen: "
            "resume the run when the clients are back or, where one's shares were tampered with, "
            "begin another without it"
        ) from None
    return total * mechanism.grid, named


def _fits(answer: Answer, ask: Ask, parties: int) -> bool:
    """Whether a masked answer is of the right shape; what it hides nobody can check."""
    sizes = {client: len(box) for client, box in answer.sealed.items()}
    whole = sizes == dict.fromkeys(range(parties), sealed_size(parties))
    return (
        whole and answer.values.dtype == np.uint64 and answer.values.shape == ask.predictions.shape
    )


def _opened(shares: Mapping[str, bytes]) -> Opened:
    own = {int(name): share for name, share in shares.items() if " " not in name}
    pairs = {tuple(map(int, name.split())): share for name, share in shares.items() if " " in name}
    return Opened(own, pairs)  # type: ignore[arg-type]  # of two numbers each
