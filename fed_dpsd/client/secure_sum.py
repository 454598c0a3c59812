"""The client's half of a secure sum, in which a client takes part at most once.

The arithmetic is in privacy/secure_sum.py; the server's half is server/secure_sum.py. A client
stores its masked answer and its confirmed names with its charges, so it continues with the same
ones after a crash.
"""

import hashlib
import json
from dataclasses import replace

import numpy as np

from fed_dpsd.accounts.ledger import Ledger
from fed_dpsd.errors import ProtocolError
from fed_dpsd.privacy.mechanism import Mechanism, Shards, SupportsSecureSum
from fed_dpsd.privacy.secure_sum import Masked, Party
from fed_dpsd.protocol import Request, Response, SumStep


class SecureSums:
    """A client's part in the secure sums of a run.

    Args:
        party: the client's keys.
        mechanism: the mechanism of its answers; each answer holds a noise share.
        ledger: the ledger that stores masked answers and confirmed names.
        run: the coordinator's name for the run; masks and noise differ between runs.
    """

    def __init__(self, party: Party, mechanism: Mechanism, ledger: Ledger, run: str) -> None:
        assert isinstance(mechanism, SupportsSecureSum)
        self._party, self._mechanism, self._ledger, self._run = party, mechanism, ledger, run

    def masked(self, response: Response, request: Request) -> Response:
        """Mask a released answer, which contains a noise share, so that it may leave.

        A request of a run always gets the same mask: a repeated request gets the same bytes as
        before.
        """
        tag = self.tag(request.digest)
        with self._ledger.transaction():
            kept = self._ledger.stored_note(f"{tag}-masked")
            if kept is None:
                units = response.values.astype(np.float64) / self._mechanism.lattice
                masked = self._party.mask(np.rint(units).astype(np.int64), tag.encode())
                kept = masked.to_bytes()
                self._ledger.store_note(f"{tag}-masked", kept)
        masked = Masked.from_bytes(kept)
        return replace(response, values=masked.values, sealed=masked.sealed)

    def step(self, step: SumStep) -> dict[str, bytes]:
        """Return the client's second or third message: proofs, or opened secret shares.

        Proofs are keyed by their recipient, to which the server forwards them. Opened shares are
        keyed by a client, or by two clients "A B".

        Raises:
            ProtocolError: the client does not take part in the sum, or confirmed other names.
            SumError: see `Party`; nothing was opened.
        """
        tag, names = self.tag(step.request), json.dumps(sorted(set(step.named))).encode()
        with self._ledger.transaction():
            if self._ledger.stored_note(f"{tag}-masked") is None:
                raise ProtocolError("this client does not take part in that sum")
            confirmed = self._ledger.stored_note(f"{tag}-named")
            if confirmed != names and (confirmed is not None or step.proofs):
                raise ProtocolError("this client has confirmed other names for that sum")
            if not step.proofs:
                proofs = self._party.confirm(tag.encode(), step.named)
                self._ledger.store_note(f"{tag}-named", names)
                return {str(other): proof for other, proof in proofs.items()}
        return self._party.unmask(tag.encode(), step.named, step.proofs, step.sealed).to_named()

    def tag(self, request: str) -> str:
        """Return the tag of the sum of all answers to a request, which is the same at every client.

        It does not depend on a client's shards, which are by record or by patient, nor on whether
        its teachers come from files.
        """
        shards = Shards(self._mechanism.shards.teachers)
        mechanism = replace(self._mechanism, shards=shards)  # type: ignore[type-var]
        keys = [key.hex() for _, key in sorted(self._party.public_keys.items())]
        content = [self._run, request, str(mechanism), keys]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
