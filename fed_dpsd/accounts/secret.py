"""What only a client knows: noise is drawn from it, and its key for secure sums."""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fed_dpsd.config import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.noise import KEY_BYTES, SecretStreams


def ledger_folder(experiment: Experiment, run_folder: Path) -> Path:
    """Where simulated clients' accounts are: in the run folder, or where `ledger` says."""
    return Path(experiment.config.ledger or run_folder / "ledger")


def noise_of(experiment: Experiment, run_folder: Path, name: str) -> SecretStreams | None:
    """What a simulated client, or any server, draws noise from; None for the seeds.

    Its secret lies beside the ledgers.
    """
    if experiment.seeded:
        return None
    return SecretStreams(secret_of(ledger_folder(experiment, run_folder) / f"{name}.secret"))


def secret_of(path: Path) -> bytes:
    """The secret at `path`, drawn by the operating system where there is none yet.

    Raises:
        UserError: the file cannot be read or written, or others may read it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        if not path.exists():
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(file, secrets.token_bytes(KEY_BYTES))
                os.fsync(file)
            finally:
                os.close(file)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # one of several processes wins, and all use its secret
            temporary.unlink()
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path} can be read by others; do `chmod 600 {path}`")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"the secret {path} cannot be read or written ({error})") from None


def exchange_key(secret: bytes) -> bytes:
    """A client's private key for secure sums, 32 bytes, from its secret."""
    return hmac.digest(secret, b"secure sums", hashlib.sha256)
