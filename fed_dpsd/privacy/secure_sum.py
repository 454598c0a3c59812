"""Secure sums: cancelling masks hide each party's values, and parties may drop out.

Bonawitz et al.: "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
Figure 4, against a malicious server. Parties know each other's keys beforehand, from a source other
than the server, so they skip the figure's rounds for advertising and sharing keys, and send secret
shares with the masked values. A sum takes three messages:

1. `mask`: to its values, each party adds its own mask and, for each other party, a mask that the
   other party subtracts. The keys of all these masks are sent along as secret shares, so that
   `threshold` parties can reconstruct a key.
2. `confirm`: the server names the parties with values that arrived. Each named party proves to
   every other named party which names it received.
3. `unmask`: a party checks that `threshold` parties received the same names. It then opens secret
   shares of two kinds: for the named parties' own masks, and for the masks between named parties
   and the other parties. It never opens both a party's own mask and its masks with named parties.

Guarantee: if c of m parties work for the server and 2 * threshold > m + c, the server learns one
sum, over at least threshold - c honest parties, and nothing else about them. Proof sketch:
docs/proofs.md, Theorem 9. All arithmetic is modulo 2^64.
"""

import hashlib
import hmac
import io
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from fed_dpsd.privacy.noise import SecureGenerator

# Sizes in bytes: a mask's key, a secret share of it, a nonce, and a box's authentication tag.
_SEED, _SHARE, _NONCE, _MAC = 32, 32, 12, 16


class SumError(RuntimeError):
    """An error that aborts a sum. Nothing was unmasked; the message is public."""


@dataclass(frozen=True)
class Masked:
    """A party's first message."""

    values: NDArray[np.uint64]  # uint64, which look uniform to everyone except the party
    # for each party, a box with its secret shares of this party's keys; only that party can open it
    sealed: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """Return the message in npz format."""
        arrays: dict[str, Any] = {"values": self.values}
        arrays |= {str(party): np.frombuffer(box, np.uint8) for party, box in self.sealed.items()}
        content = io.BytesIO()
        np.savez(content, **arrays)
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Masked":
        """Read the result of `to_bytes`."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            boxes = {int(name): arrays[name].tobytes() for name in arrays.files if name != "values"}
            return cls(arrays["values"], boxes)


@dataclass(frozen=True)
class Opened:
    """A party's third message: the secret shares that it opens."""

    own: Mapping[int, bytes]  # for each named party, a share of the key of that party's own mask
    # for each named party and each unnamed one, a share of the key of their mask
    between: Mapping[tuple[int, int], bytes]

    def to_named(self) -> dict[str, bytes]:
        """Return the shares as sent: "A" is a party's own mask, "A B" the mask of two parties."""
        own = {str(party): share for party, share in self.own.items()}
        return own | {f"{a} {b}": share for (a, b), share in self.between.items()}

    @classmethod
    def from_named(cls, shares: Mapping[str, bytes]) -> "Opened":
        """Read the result of `to_named`."""
        own = {int(name): share for name, share in shares.items() if " " not in name}
        pairs = {tuple(map(int, n.split())): share for n, share in shares.items() if " " in n}
        return cls(own, pairs)  # type: ignore[arg-type]  # mypy cannot see that each is a pair


@dataclass(frozen=True)
class Party:
    """A party that takes part in all sums of one federation.

    Args:
        number: the party's number, from 0.
        private_key: the party's X25519 private key, 32 bytes.
        public_keys: the public keys of all m parties, including this party's, by number from 0 to m
            - 1.
        threshold: the number of parties whose secret shares reconstruct a key.

    Raises:
        ValueError: the keys do not belong to parties 0 to m - 1, the party's public key does not
            match its private key, a key is invalid (or of low order), or the threshold is not above
            m / 2 and at most m.
    """

    number: int
    private_key: bytes
    public_keys: Mapping[int, bytes]
    threshold: int

    def __post_init__(self) -> None:
        parties = len(self.public_keys)
        if set(self.public_keys) != set(range(parties)):
            raise ValueError(
                f"public keys are numbered {sorted(self.public_keys)} instead of 0 to {parties - 1}"
            )
        if self.public_keys.get(self.number) != public_key(self.private_key):
            raise ValueError(
                f"the public key of party {self.number} does not match its private key"
            )
        if not parties < 2 * self.threshold <= 2 * parties:
            raise ValueError(
                f"threshold={self.threshold} must be above {parties / 2:g} and at most {parties}"
            )
        _ = self._pairs  # raises on a bad key before anything is masked

    @cached_property
    def _pairs(self) -> dict[int, bytes]:
        """Derive a key shared with each other party, and a key for this party alone."""
        mine = X25519PrivateKey.from_private_bytes(self.private_key)
        pairs = {self.number: _derive(self.private_key, b"own")}
        for other in set(self.public_keys) - {self.number}:
            try:
                key = X25519PublicKey.from_public_bytes(self.public_keys[other])
                pairs[other] = mine.exchange(key)
            except ValueError as error:
                raise ValueError(f"the public key of party {other} is invalid: {error}") from None
        return pairs

    def mask(self, values: NDArray[np.int64], tag: bytes) -> Masked:
        """Make the first message: masked values, and secret shares of the masks' keys.

        Args:
            values: an array of the same shape at all parties; the whole sum must fit in 63 bits.
            tag: the tag of this sum, the same for all parties. Two messages for one tag would
                reveal the difference of their values, so the caller must send only one.
        """
        own = os.urandom(_SEED)
        keys = {other: self._mask_key(other, tag) for other in self._pairs}
        total = values.astype(np.uint64).ravel() + _stream(own, values.size)
        for other in set(keys) - {self.number}:
            total += _signed(self.number, other, _stream(keys[other], values.size))
        shared = [_split(keys[o] if o != self.number else own, self) for o in sorted(keys)]
        sealed = {}
        for other in self.public_keys:
            nonce = os.urandom(_NONCE)
            content = b"".join(shares[other] for shares in shared)
            box = self._box(self.number, other, tag)
            sealed[other] = nonce + box.encrypt(nonce, content, None)
        return Masked(total.reshape(values.shape), sealed)

    def confirm(self, tag: bytes, named: Collection[int]) -> dict[int, bytes]:
        """Make the second message: for each named party, a proof of the names received.

        The caller must not confirm different names for the same tag.

        Raises:
            SumError: this party is not named, or too few parties are.
        """
        self._check(named)
        return {other: self._proof(self.number, other, tag, named) for other in named}

    def unmask(
        self,
        tag: bytes,
        named: Collection[int],
        proofs: Mapping[int, bytes],
        sealed: Mapping[int, bytes],
    ) -> Opened:
        """Make the third message: the secret shares that open the sum.

        Args:
            tag: the tag of this sum.
            named: the parties with values that arrived, as confirmed by this party.
            proofs: each party's confirmation for this party.
            sealed: each named party's box for this party.

        Raises:
            SumError: too few parties received the same names, or secret shares were tampered with.
        """
        self._check(named)
        same = [
            other
            for other in set(proofs) & set(named)
            if hmac.compare_digest(proofs[other], self._proof(other, self.number, tag, named))
        ]
        if len(same) < self.threshold:
            raise SumError(
                f"{len(same)} parties received these names; {self.threshold} are needed, with the "
                "keys that are listed for them"
            )
        others = sorted(set(self.public_keys) - set(named))
        own: dict[int, bytes] = {}
        between: dict[tuple[int, int], bytes] = {}
        for party in named:
            shares = self._open(party, tag, sealed.get(party, b""))
            own[party] = shares[party]
            between |= {(party, other): shares[other] for other in others}
        return Opened(own, between)

    def _check(self, named: Collection[int]) -> None:
        if not set(named) <= set(self.public_keys) or self.number not in named:
            raise SumError(
                f"parties {sorted(named)} lack party {self.number} or include an unknown one"
            )
        if len(set(named)) < self.threshold:
            raise SumError(f"{len(set(named))} parties are left; {self.threshold} are needed")

    def _mask_key(self, other: int, tag: bytes) -> bytes:
        """Derive the key of the mask with another party.

        It depends on both numbers. Otherwise, a party that publishes a copy of another party's
        public key would have the same mask keys, which are opened if it drops out.
        """
        numbers = json.dumps(sorted([self.number, other])).encode()
        return _derive(self._pairs[other], b"mask", tag, numbers)

    def _proof(self, sender: int, receiver: int, tag: bytes, named: Collection[int]) -> bytes:
        other = receiver if sender == self.number else sender
        names = json.dumps([sender, receiver, sorted(set(named))]).encode()
        return _derive(self._pairs[other], b"confirm", tag, names)

    def _box(self, sender: int, receiver: int, tag: bytes) -> ChaCha20Poly1305:
        other = receiver if sender == self.number else sender
        return ChaCha20Poly1305(
            _derive(self._pairs[other], b"seal", tag, f"{sender} {receiver}".encode())
        )

    def _open(self, sender: int, tag: bytes, sealed: bytes) -> list[bytes]:
        """Open the box with secret shares of its keys that `sender` sealed for this party."""
        try:
            box = self._box(sender, self.number, tag)
            content = box.decrypt(sealed[:_NONCE], sealed[_NONCE:], None)
        except (InvalidTag, ValueError):
            raise SumError(
                f"the shares of party {sender} were tampered with, or its key and the one listed "
                "for it differ (fed-dpsd site key)"
            ) from None
        size = _SHARE * len(self.public_keys)
        if len(content) != size:
            raise SumError(f"party {sender} sealed {len(content)} bytes instead of {size}")
        return [content[start : start + _SHARE] for start in range(0, len(content), _SHARE)]


def combine(
    masked: Mapping[int, Masked], opened: Mapping[int, Opened], parties: int, threshold: int
) -> NDArray[np.int64]:
    """Sum, at the server, the values of all parties with a first message that arrived.

    Raises:
        SumError: there are too few secret shares.
    """
    if len(opened) < threshold:
        raise SumError(f"{len(opened)} parties opened their shares; {threshold} are needed")
    helpers = sorted(opened)[:threshold]
    first = next(iter(masked.values())).values
    total = np.zeros(first.size, np.uint64)
    for party, message in masked.items():
        total += message.values.ravel()
        own = _join({helper: opened[helper].own[party] for helper in helpers})
        total -= _stream(own, first.size)
        for other in set(range(parties)) - set(masked):
            key = _join({helper: opened[helper].between[party, other] for helper in helpers})
            total -= _signed(party, other, _stream(key, first.size))
    return total.astype(np.int64).reshape(first.shape)


def sealed_size(parties: int) -> int:
    """Return the bytes of the box that one of `parties` parties seals for another."""
    return _NONCE + _SHARE * parties + _MAC


def public_key(private_key: bytes) -> bytes:
    """Return the 32-byte public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def _derive(key: bytes, *names: bytes) -> bytes:
    """Derive a key for the purpose that `names` describe."""
    content = b"".join(len(name).to_bytes(4, "big") + name for name in (b"fed-dpsd", *names))
    return hmac.digest(key, content, hashlib.sha256)


def _stream(key: bytes, count: int) -> NDArray[np.uint64]:
    return SecureGenerator(key).words(count)


def _signed(party: int, other: int, mask: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Give a mask the sign that `party` adds it with; `other` uses the opposite sign."""
    return mask if party < other else np.uint64(0) - mask


def _split(key: bytes, party: Party) -> list[bytes]:
    """Split a key into a secret share for each party."""
    count = len(party.public_keys)
    halves = (Shamir.split(party.threshold, count, key[i : i + 16], False) for i in (0, 16))
    return [low[1] + high[1] for low, high in zip(*halves, strict=True)]


def _join(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct a key from secret shares, by party."""
    numbered = [(party + 1, share) for party, share in shares.items()]
    halves = ([(n, share[i : i + 16]) for n, share in numbered] for i in (0, 16))
    return b"".join(Shamir.combine(half, False) for half in halves)
