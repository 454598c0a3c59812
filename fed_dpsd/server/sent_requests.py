"""The requests of a run, stored as sent.

A client is charged for the bytes of a request. A resumed run may compute different bytes, because
rounding depends on the processor and the number of threads, so it sends the stored request again.
"""

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.protocol import Request
from fed_dpsd.server.checkpoint import KEPT
from fed_dpsd.storage import npz_of, write_atomically


class SentRequests:
    """The requests in a folder, one file per id and kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given: dict[str, str] = {}  # digests of this process's requests, by file

    def get_or_store(self, request: Request) -> Request:
        """Return the request stored under this id and kind, or store this request and return it.

        The request is durable on return; it must not be sent earlier.

        Raises:
            ProtocolError: this process has stored a different request with this id and kind.
            UserError: the file cannot be read.
        """
        path = self._folder / f"{request.query_id:05d}_{request.kind}.npz"
        digest = request.digest()
        if self._given.setdefault(path.name, digest) != digest:
            raise ProtocolError(
                f"request {request.query_id} ({request.kind}) differs from the one that this "
                "run sent before"
            )
        if not path.exists():
            arrays = {name: getattr(request, name) for name in ("images", "predictions", "weights")}
            write_atomically(path, npz_of(arrays))
            return request
        try:
            with np.load(path, allow_pickle=False) as kept:
                return replace(request, **kept)
        except (OSError, ValueError, TypeError, zipfile.BadZipFile, ProtocolError) as error:
            raise UserError(
                f"the request {path} cannot be read ({error}); restore it, or delete it: clients "
                "then charge the request that replaces it, as the run's card will state"
            ) from None

    def prune(self, rounds: int) -> None:
        """Delete the requests that no checkpoint needs once this many rounds are saved."""
        for path in self._folder.glob("*.npz"):
            if 0 < int(path.name.partition("_")[0]) <= rounds - KEPT:
                path.unlink(missing_ok=True)
