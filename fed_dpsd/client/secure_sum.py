"""Secure sums of answers: a client's part, which it never plays twice, and the server's.

The arithmetic is privacy/secure_sum.py. What a client masks, and whose names it has confirmed, is
noted beside its charges, so a process that is killed goes on with the same.
"""

import hashlib
import json
from dataclasses import replace

import numpy as np

from fed_dpsd.accounts.ledger import Ledger
from fed_dpsd.privacy.mechanism import Shared
from fed_dpsd.privacy.secure_sum import (
    Masked,
    Party,
)
from fed_dpsd.protocol import Answer, Ask, ProtocolError, SumStep


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
                units = answer.values.astype(np.float64) / self._mechanism.lattice
                masked = self._party.mask(np.rint(units).astype(np.int64), tag.encode())
                kept = masked.to_bytes()
                self._ledger.note(f"{tag}-masked", kept)
        found = Masked.from_bytes(kept)
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


# --- server ---
