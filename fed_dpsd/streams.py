"""Keyed random streams: every draw has its own generator, which is never shared or reused.

A stream depends only on (seed, purpose, client, query_id), so results are bit-identical on any
engine, in any order of the clients' answers, and after a resume. Runs with the same seed but other
settings share their draws.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Streams:
    """Random streams of a run, derived from its public `seed`."""

    seed: int

    def numpy(self, purpose: str, client: int = 0, query_id: int = 0) -> np.random.Generator:
        """Return a fresh NumPy generator for `purpose`; equal arguments give equal draws."""
        key = [self.seed, zlib.crc32(purpose.encode()), client, query_id]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def noise(self, purpose: str, client: int, query_id: int, hides: str) -> np.random.Generator:
        """Return the generator of seeded noise, whatever the noise `hides`.

        Seeded noise guarantees nothing, so it may be added to different values. Another processor
        computes slightly different values, and then adds the same noise to them.
        """
        return self.numpy(purpose, client, query_id)

    def torch(self, purpose: str, client: int = 0, query_id: int = 0) -> torch.Generator:
        """Return a fresh torch CPU generator for `purpose`; equal arguments give equal draws."""
        seed = self.numpy(purpose, client, query_id).integers(2**63)
        return torch.Generator().manual_seed(int(seed))
