"""What a run folder reveals; with `noise=secure`, it may be shared."""

import base64
import dataclasses
import shutil

import numpy as np
import pytest

from fed_dpsd import api
from fed_dpsd.accounts.secret import draw_secret, ledger_folder, noise_of, simulated_key
from fed_dpsd.accounts.simulated import SimulatedLedger, entries_in
from fed_dpsd.engines import clients
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import load_data, partition_digest, partitions
from fed_dpsd.protocol import Request
from fed_dpsd.server import checkpoint
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.storage import home
from tests.conftest import contents
from tests.forks import finished as finished_child
from tests.forks import fork

GRADIENTS = ("training=plain", "model=scattering", "method.class_counts=false", "answers=gradient")
GRADIENTS += ("queries_per_round=16",)
SUMS = "answers.noise_at=distributed", "answers.quorum={threshold: 2, colluding: 0}"
ANSWERS = {}
PLACES = pytest.mark.parametrize(
    "more", [(), ("answers.noise_at=server",), SUMS], ids=["client", "server", "distributed"]
)


def work(experiment, folder):
    return run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)


@pytest.fixture(scope="module")
def _runs():
    return {}


@pytest.fixture
def finished(small, _runs):
    """Runs a small experiment, once for all tests; its experiment and folder, not to be changed.

    ANSWERS has each client's answers, as they leave it.
    """

    def make(*overrides):
        if overrides not in _runs:
            experiment = small(*GRADIENTS, *overrides)
            folder, drawn = new_run_folder(experiment), ([], [])

            def keep(ledger, _, values, noisy):
                drawn[ledger._client].append(values)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SimulatedLedger, "store_answer", keep)
                work(experiment, folder)
            _runs[overrides], ANSWERS[folder] = (experiment, folder), drawn
        return _runs[overrides]

    return make


def reproduced(experiment, folder, secret, place, monkeypatch, left_out=0):
    """How many rounds of a run folder an attacker with a guess at the data reproduces, to the bit.

    The attacker has the folder and all records except for the `left_out` first ones of client 0.
    `secret` is the stolen secret, or None to draw one.
    """
    place.mkdir()
    shutil.copy(folder / "name", place)  # noise at the server depends on it
    ledger = place.with_name(f"{place.name}, ledger")
    config = dataclasses.replace(experiment.config, ledger=str(ledger))
    guess = dataclasses.replace(experiment, config=config)
    draw_secret(guess, place)
    if secret is not None:
        (ledger / "secret").write_bytes(secret)
    first, *others = partitions(experiment)
    found = 0
    with monkeypatch.context() as patch:
        patch.setattr(clients, "partitions", lambda _: [first[left_out:], *others])
        federation = LocalFederation(guess, place)
        for number, part in enumerate(checkpoint.load(folder / "checkpoint").buffer, start=1):
            total = federation.total(Request(number, part.images, part.predictions))
            labels = guess.method.noisy_labels(guess.public, total)
            found += np.array_equal(labels.astype(np.float32), part.labels)
    return found


@PLACES
def test_only_the_secret_shows_whether_a_record_was_in_the_data(
    finished, more, tmp_path, monkeypatch
):
    """The attack on a shared folder fails; with the secret, its control, it is always right."""
    experiment, folder = finished("noise=secure", *more)
    secret = (ledger_folder(experiment, folder) / "secret").read_bytes()
    attack = experiment, folder
    assert reproduced(*attack, None, tmp_path / "no secret", monkeypatch) == 0
    assert reproduced(*attack, secret, tmp_path / "true", monkeypatch) == 3
    assert reproduced(*attack, secret, tmp_path / "neighbour", monkeypatch, left_out=1) == 0


# --- the bytes of a folder ---


def holds(folder, needle):
    """Whether a file below a folder contains bytes, as they are, in hexadecimal or in base64."""
    forms = {needle, needle.hex().encode(), needle.hex().upper().encode()}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        # Their place in a longer text changes the first and the last digits.
        forms |= {encode(bytes(before) + needle)[4:-4] for before in range(3)}
    return any(form in content for content, _ in contents(folder).values() for form in forms)


def keys_of(experiment, folder):
    """Every secret of a run and every key that is derived from one."""
    found = {(ledger_folder(experiment, folder) / "secret").read_bytes()}
    found |= {path.read_bytes() for path in home().rglob("*secret") if path.is_file()}
    for name in ("server", "client_000", "client_001"):
        found |= {noise_of(experiment, folder, name).secret}
        found |= {simulated_key(experiment, folder, name)}
    return found


def digests_of(experiment):
    """Digests of the records, which would confirm a guess at the data."""
    config = experiment.config
    digests = load_data(config.data, config.cache).digests
    return [digest.encode() for digest in (*digests.values(), partition_digest(experiment))]


@PLACES
def test_a_shared_folder_has_no_key_no_digest_and_no_answer_before_its_noise(finished, more):
    experiment, folder = finished("noise=secure", *more)
    private = ledger_folder(experiment, folder)
    assert not private.is_relative_to(folder)
    assert private.stat().st_mode & 0o777 == 0o700
    keys = keys_of(experiment, folder)
    assert len(keys) >= 7
    assert not any(holds(folder, key) for key in keys)
    assert holds(private, (private / "secret").read_bytes())  # the control
    assert not any(holds(folder, digest) for digest in digests_of(experiment))
    answers = ANSWERS[folder]
    assert [len(own) for own in answers] == [3, 3]
    for own in (*answers[0], *answers[1], *(sum(both) for both in zip(*answers, strict=True))):
        rows = [row.astype(dtype).tobytes() for row in own for dtype in (np.float64, np.float32)]
        assert not any(holds(place, row) for row in rows for place in (folder, private))
    part, *_ = checkpoint.load(folder / "checkpoint").buffer
    assert holds(folder, part.predictions[0].tobytes())  # the control


def test_a_seeded_run_keeps_its_ledgers_in_its_folder(finished):
    """It shows which records there were, and guarantees nothing."""
    experiment, folder = finished("answers.noise_at=server")
    assert all(holds(folder, digest) for digest in digests_of(experiment))
    assert {path.stem for path in entries_in(folder / "ledger")} == {"client_000", "client_001"}


def test_text_forms_of_a_key_are_found(tmp_path):
    key = bytes(range(200, 232))
    for number, form in enumerate(
        [key, key.hex().encode(), base64.b64encode(b"x" + key), base64.urlsafe_b64encode(key)]
    ):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "file").write_bytes(b"before" + form + b"after")
        assert holds(tmp_path / f"{number}", key)
    assert not holds(tmp_path, bytes(32))


# --- a folder without its secret ---


def test_two_runs_of_one_name_have_a_secret_each(small, tmp_path):
    secrets = set()
    for place in ("one", "two"):
        experiment = small("noise=secure", f"run_folder={tmp_path}/{place}/run")
        folder = new_run_folder(experiment)
        secrets |= {(ledger_folder(experiment, folder) / "secret").read_bytes()}
    assert len(secrets) == 2


def test_a_ledger_inside_the_run_folder_is_refused(small, tmp_path):
    for noise in ("seeded", "secure"):
        folder = tmp_path / noise
        experiment = small(f"noise={noise}", f"run_folder={folder}", f"ledger={folder}/own")
        if noise == "seeded":
            assert new_run_folder(experiment) == folder
        else:
            with pytest.raises(UserError, match=f"^ledger={folder}/own is in run_folder={folder},"):
                new_run_folder(experiment)
            assert not folder.exists()


def test_the_coordinator_of_hospitals_keeps_the_secret_of_its_noise_elsewhere(small):
    """It adds the noise itself with noise_at=server; otherwise, it needs no secret."""
    deployed = "federation=deployment", "training=plain", "answers=gradient"
    experiment = small(*deployed, "answers.noise_at=server")
    folder = new_run_folder(experiment)
    assert not any(holds(folder, key) for key in keys_of(experiment, folder))
    assert not (new_run_folder(small(*deployed)) / "ledger").exists()


@pytest.mark.parametrize("noise", ["secure", "seeded"])
def test_copies_of_a_run_run_at_once_only_without_a_secret(small, tmp_path, noise):
    """With one, they share ledgers, and neither would know what the other charges."""
    experiment = small(*GRADIENTS, f"noise={noise}")
    folder = new_run_folder(experiment)
    copy = shutil.copytree(folder, tmp_path / "copy")
    first = LocalFederation(experiment, folder)
    child = fork(lambda: LocalFederation(experiment, copy), tmp_path / "log")
    refused = finished_child(child) != 0
    assert refused == (noise == "secure")
    assert ("another process is running " in (tmp_path / "log").read_text()) == refused
    del first


@pytest.mark.parametrize("given", [False, True])
def test_a_run_whose_secret_is_elsewhere_is_not_continued(small, tmp_path, given):
    """Fresh noise on answers that have left would reveal them; with its secret, it continues."""
    ledger = [f"ledger={tmp_path}/life"] * given
    experiment = small(*GRADIENTS, "noise=secure", "rounds=2", *ledger)
    folder = new_run_folder(experiment)
    private = ledger_folder(experiment, folder)

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, LocalFederation(experiment, folder), folder, stop)
    charged = [len(entries) for entries in entries_in(private).values()]
    assert charged == [1, 1]

    other = private.rename(tmp_path / "other machine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"^{private}/secret, .*copy {private} from the machine"):
        api.resumed_job(folder)
    with pytest.raises(UserError, match=f"^{private}/secret, from which"):
        LocalFederation(experiment, folder)
    with pytest.raises(UserError, match=f"^{private}/secret, from which"):
        clients.Clients(experiment, folder)[0]
    assert not private.exists()
    assert contents(tmp_path) == before  # nothing was charged

    other.rename(private)
    assert api.resumed_job(folder).run(lambda line: None).summary["status"] == "completed"
    charged = [len(entries) for entries in entries_in(private).values()]
    assert charged == [2, 2]
