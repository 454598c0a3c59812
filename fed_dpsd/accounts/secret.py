"""Secrets: a client derives its noise and its secure-sum key from a secret that it never sends.

A run folder holds no secret, so it may be shared. Simulated clients and the server of a run derive
theirs from one secret, which is stored with the ledgers.
"""

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fed_dpsd.errors import UserError, is_disk_full, one_line
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.noise import KEY_BYTES, SecretStreams
from fed_dpsd.storage import home

LEDGER = "ledger"  # in a run folder: the folder of its ledgers, or a file with that folder's path
SECRET = "secret"


def ledger_folder(experiment: Experiment, run_folder: Path) -> Path:
    """Return the folder of simulated clients' ledgers: `ledger`, by default the run's own."""
    return Path(experiment.config.ledger or own_ledger_folder(run_folder))


def own_ledger_folder(run_folder: Path) -> Path:
    """Return the folder of a run's own ledgers.

    It is inside the run folder if the noise is seeded. The ledgers of secret noise hold a digest of
    the records too, so they are next to the secret, in the folder whose path is in RUN/ledger.
    """
    place = run_folder / LEDGER
    return Path(os.fsdecode(place.read_bytes())) if place.is_file() else place


def draw_secret(experiment: Experiment, run_folder: Path) -> dict[Path, bytes]:
    """Draw and store the secret of a new run; return the files that lead its folder there.

    Seeded noise has no secret, nor has a coordinator that adds no noise.

    Raises:
        UserError: the secret cannot be written, or `ledger` is in the run folder.
    """
    if not _needs_secret(experiment):
        return {}
    name = f"{run_folder.name}-{secrets.token_hex(4)}"
    folder = Path(experiment.config.ledger or home() / "ledgers" / name)
    if folder.is_relative_to(run_folder):
        raise UserError(
            f"ledger={folder} is in run_folder={run_folder}, which should hold no secret; choose a "
            "folder outside it"
        )
    load_or_create_secret(folder / SECRET)
    return {} if experiment.config.ledger else {run_folder / LEDGER: os.fsencode(folder)}


def require_secret(experiment: Experiment, run_folder: Path) -> None:
    """Check that the secret of a run that has started is still there.

    Raises:
        UserError: it is missing or cannot be read. Another secret would draw other noise for the
            same answers, which would reveal them.
    """
    if _needs_secret(experiment):
        _secret_of(experiment, run_folder)


def noise_of(experiment: Experiment, run_folder: Path, name: str) -> SecretStreams | None:
    """Return the noise source of a simulated client or of a server; None for seeded noise.

    Raises:
        UserError: as for `require_secret`.
    """
    if experiment.seeded:
        return None
    return SecretStreams(_derive(_secret_of(experiment, run_folder), name))


def simulated_key(experiment: Experiment, run_folder: Path, name: str) -> bytes:
    """Return the private key for secure sums of a simulated client, 32 bytes.

    Raises:
        UserError: as for `require_secret`.
    """
    if experiment.seeded:  # such a run guarantees nothing, so its keys stay in its folder
        keys = load_or_create_secret(ledger_folder(experiment, run_folder) / "keys")
    else:
        keys = _secret_of(experiment, run_folder)
    return exchange_key(_derive(keys, name))


def _needs_secret(experiment: Experiment) -> bool:
    draws = experiment.config.federation.simulation or experiment.answers.noise_at == "server"
    return draws and not experiment.seeded


def _secret_of(experiment: Experiment, run_folder: Path) -> bytes:
    folder = ledger_folder(experiment, run_folder)
    with _accessing(folder / SECRET):
        try:
            return _read(folder / SECRET)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{folder / SECRET}, from which the noise of {run_folder} is drawn, is missing; "
                f"copy {folder} from the machine where the run started, or start a new run"
            ) from None


def _derive(secret: bytes, name: str) -> bytes:
    return hmac.digest(secret, name.encode(), hashlib.sha256)


def has_secret(ledger: Path) -> bool:
    """Return whether the secret of a client, simulated or not, is stored with its ledger.

    Seeded noise needs no secret.
    """
    return any((folder / SECRET).exists() for folder in (ledger.parent, ledger.parent.parent))


def load_or_create_secret(path: Path) -> bytes:
    """Return the secret at `path`; if there is none, draw and store one."""
    with _accessing(path):
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
        return _read(path)


def _read(path: Path) -> bytes:
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by others; run `chmod 600 {path}`")
    return path.read_bytes()


@contextlib.contextmanager
def _accessing(path: Path) -> Iterator[None]:
    """Report errors of a secret's file in one line with the remedy."""
    try:
        yield
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
