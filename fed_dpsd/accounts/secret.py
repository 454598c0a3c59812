"""Secrets: a client derives its noise and its secure-sum key from a secret that it never sends."""

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fed_dpsd.errors import UserError, is_disk_full, one_line
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.noise import KEY_BYTES, SecretStreams


def ledger_folder(experiment: Experiment, run_folder: Path) -> Path:
    """Return the folder of simulated clients' ledgers: `ledger`, by default in the run folder."""
    return Path(experiment.config.ledger or run_folder / "ledger")


def noise_of(experiment: Experiment, run_folder: Path, name: str) -> SecretStreams | None:
    """Return the noise source of a simulated client or of a server; None for seeded noise.

    Its secret is stored in the ledgers' folder.
    """
    if experiment.seeded:
        return None
    return SecretStreams(
        load_or_create_secret(ledger_folder(experiment, run_folder) / f"{name}.secret")
    )


def has_secret(ledger: Path) -> bool:
    """Return whether the secret of a client, simulated or not, is stored with its ledger.

    Seeded noise needs no secret.
    """
    return ledger.with_suffix(".secret").exists() or (ledger.parent.parent / "secret").exists()


def load_or_create_secret(path: Path) -> bytes:
    """Return the secret at `path`; if there is none, draw and store one."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        if not path.exists():
            opener = functools.partial(os.open, mode=0o600)
            try:
                with open(temporary, "xb", opener=opener) as file:
                    file.write(secrets.token_bytes(KEY_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)  # one of several processes wins; all use its secret
            finally:
                temporary.unlink(missing_ok=True)
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path} can be read by others; run `chmod 600 {path}`")
        return path.read_bytes()
    except OSError as error:
        if is_disk_full(error):
            raise UserError(one_line(error)) from None
        raise UserError(
            f"the secret {path} cannot be read or written ({error}); give the service's user "
            "permission for both"
        ) from None


def exchange_key(secret: bytes) -> bytes:
    """Derive a client's private key for secure sums, 32 bytes, from its secret."""
    return hmac.digest(secret, b"secure sums", hashlib.sha256)
