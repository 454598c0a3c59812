"""A hospital's node runs the hospital's own code, and quickly."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.supernode.runtime import run_clientapp

import client_app
from fed_dpsd.engines.flower import supernode
from fed_dpsd.errors import UserError
from fed_dpsd.models import fixed_features
from fed_dpsd.models.fixed_features import whitening
from tests.forks import finished, fork
from tests.hospitals import certificate, private_key, site_file
from tests.processes import wait_until

PREPARED = ("flwr.supernode", "fed_dpsd.engines.flower.client", "fed_dpsd.client.hospital")


def stub():
    """What runs in place of Flower's client; its first argument says what it does."""
    if sys.argv[1] == "prepared":
        before = set(sys.modules)
        from flwr.supernode.cli import flwr_clientapp  # noqa: F401

        print(whitening.cache_info().currsize, set(sys.modules) - before)
        return
    if sys.argv[1] == "broken":
        raise ValueError("this command fails")
    if sys.argv[1] == "exits":
        sys.exit(int(sys.argv[2]))
    print(sys.argv[1], os.environ["WORD"], os.getcwd(), flush=True)
    time.sleep(float(sys.argv[2]))
    print("ended", flush=True)


def environment(folder):
    return supernode.environment(folder / "commands", {**os.environ, "WORD": "one"})


@pytest.fixture
def settings(tmp_path):
    return environment(tmp_path)


def call(settings, *arguments, **options):
    command = [sys.executable, "-c", f"{supernode.import_line()}; forward()", *arguments]
    return subprocess.Popen(command, env=settings, text=True, **options)


@pytest.fixture(scope="module")
def keeper(tmp_path_factory):
    """A fork that keeps a stub ready for a site's file; its own forks print to a file."""
    folder = tmp_path_factory.mktemp("keeper")
    site = site_file(folder, models=["scattering"], shape=[1, 8, 8])

    def keep():
        for name in [name for name in sys.modules if name.startswith(PREPARED)]:
            del sys.modules[name]
        whitening.cache_clear()
        fixed_features._remembered.cache_clear()  # or features of an earlier test are found
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own
        supernode._client = stub
        os.environ.update(environment(folder))
        supernode.keep_ready(str(site))

    child = fork(keep, folder / "log")
    wait_until((folder / "commands" / "socket").exists)
    yield SimpleNamespace(folder=folder, settings=environment(folder))
    assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE  # no command ends it
    os.kill(child, signal.SIGKILL)
    finished(child)


@pytest.mark.slow
def test_each_command_is_a_fork_with_its_own_arguments_environment_and_folder(keeper):
    calls = [
        call({**keeper.settings, "WORD": word}, word, "0.2", cwd=keeper.folder / folder)
        for word, folder in (("one", "."), ("two", "commands"))
    ]
    assert [each.wait(30) for each in calls] == [0, 0]
    printed = (keeper.folder / "log").read_text()
    assert f"one one {keeper.folder}\n" in printed
    assert f"two two {keeper.folder}/commands\n" in printed
    assert printed.count("ended") == 2  # a command ends when its fork does


def test_a_command_that_is_ended_ends_its_fork(keeper):
    log = keeper.folder / "log"
    ended = log.read_text().count("ended")
    command = call(keeper.settings, "long", "60")
    wait_until(lambda: "long" in log.read_text())
    command.send_signal(signal.SIGTERM)
    assert command.wait(30) == 1
    assert log.read_text().count("ended") == ended


def test_a_command_that_fails_says_why(keeper):
    calls = [call(keeper.settings, *arguments) for arguments in (["broken"], ["exits", "3"])]
    assert [each.wait(30) for each in calls] == [1, 3]
    assert "ValueError: this command fails" in (keeper.folder / "log").read_text()


@pytest.mark.slow
def test_the_keeper_ends_with_its_parent(settings, tmp_path):
    def parent():
        if os.fork():
            time.sleep(60)
            return
        supernode.PARENT_CHECK_SECONDS = 0.05
        supernode._prepare = lambda site: print(os.getpid())
        os.environ.update(settings)
        supernode.keep_ready("site.yaml")

    child, log = fork(parent, tmp_path / "log"), tmp_path / "log"
    wait_until((tmp_path / "commands" / "socket").exists)
    kept = int(log.read_text())
    os.kill(child, signal.SIGKILL)
    finished(child)
    wait_until(lambda: not psutil.pid_exists(kept))


def test_the_app_is_the_installed_one_whatever_a_coordinator_sends(monkeypatch):
    """Flower's own functions, the control, would install and load the sent app."""
    for name in ("install_from_fab", "get_load_client_app_fn"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    loaded = []

    def run():
        run_clientapp.install_from_fab(b"not even a bundle", skip_prompt=True)
        load = run_clientapp.get_load_client_app_fn(
            default_app_ref="", app_path=None, multi_app=True
        )
        loaded.append(load("evil/app", "1.0", "00"))

    with pytest.raises(Exception, match=r"zip|bundle|FAB"):
        run()
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", run)
    monkeypatch.setattr(supernode, "_log_to_console", lambda: None)  # would redirect later tests
    supernode._client()
    assert loaded == [client_app.app]


def test_every_other_kind_of_process_is_refused(settings):
    for name in supernode.REFUSED:
        done = subprocess.run([name], env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "this site runs client processes only" in done.stderr


def test_what_is_prepared_is_what_a_site_allows(keeper):
    """Before a command comes: fixed features are computed, and Flower's client is imported."""
    assert call(keeper.settings, "prepared").wait(30) == 0
    assert "1 set()\n" in (keeper.folder / "log").read_text().splitlines(keepends=True)


# --- files that Flower cannot use, and would retry forever ---

ECDSA = ec.generate_private_key(ec.SECP384R1())
PUBLIC = ECDSA.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
KEYS = [
    PUBLIC,
    private_key(rsa.generate_private_key(65_537, 2_048)),
    private_key(ed25519.Ed25519PrivateKey.generate()),
    certificate(ECDSA),
    b"\x00\xff not a key",
    b"",
]


def test_a_key_that_flower_cannot_use_is_named_with_the_command_that_makes_one(tmp_path):
    path = tmp_path / "my keys" / "node_key.pub"
    path.parent.mkdir()
    new = path.with_name("node_key_ecdsa")
    for content in KEYS:
        path.write_bytes(content)
        with pytest.raises(UserError) as refused:
            supernode.check_key(path)
        said = str(refused.value)
        assert said.startswith(f"--node-key {path} is not an ECDSA key in OpenSSH's private format")
        command = said.partition("as made by ")[2].partition("; ")[0]
        assert command == f"ssh-keygen -t ecdsa -b 384 -N \"\" -f '{new}'"
    if shutil.which("ssh-keygen"):
        subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)
        supernode.check_key(new)
    for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()):
        path.write_bytes(private_key(ec.generate_private_key(curve)))
        supernode.check_key(path)


@pytest.mark.parametrize(
    "address", ["https://fl:9092", "fl", "fl:", ":9092", "fl:9092/x", "fl:99999"]
)
def test_an_address_that_flower_would_never_reach_is_named(tmp_path, address):
    with pytest.raises(UserError, match=f"^--superlink {address} must be HOST:PORT, such as "):
        supernode.serve(tmp_path, tmp_path / "state", address, tmp_path, tmp_path, None)
    assert not (tmp_path / "state").exists()
    for known in ("fl.example.org:9092", "127.0.0.1:443", "[::1]:9092"):
        supernode.check_address(known)


def test_a_certificate_that_is_none_is_named(tmp_path):
    path = tmp_path / "ca.crt"
    for content in (certificate(ECDSA), certificate(ECDSA, -1), certificate(ECDSA) * 2):
        path.write_bytes(content)  # Flower refuses an expired one
        supernode.check_certificate(path)
    for content in (b"", b"text", private_key(ECDSA)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"--certificate {path} is not a certificate in PEM"):
            supernode.check_certificate(path)
    for check in (supernode.check_certificate, supernode.check_key):
        with pytest.raises(UserError, match=f"{tmp_path} cannot be read .Is a directory"):
            check(tmp_path)


def test_nothing_is_started_or_drawn_for_a_key_that_is_none(tmp_path, monkeypatch):
    ended = Mock(wait=Mock(side_effect=KeyboardInterrupt))
    expired = subprocess.TimeoutExpired
    processes = SimpleNamespace(Popen=Mock(return_value=ended), TimeoutExpired=expired)
    monkeypatch.setattr(supernode, "subprocess", processes)
    site, key = site_file(tmp_path / "site"), tmp_path / "key"
    (tmp_path / "ca.crt").write_bytes(certificate(ECDSA))
    key.write_bytes(b"")
    where = (site, tmp_path / "state", "host:1", tmp_path / "ca.crt", key, 9_094)
    with pytest.raises(UserError, match="is not an ECDSA key"):
        supernode.serve(*where)
    processes.Popen.assert_not_called()
    assert not (tmp_path / "state").exists()
    key.write_bytes(private_key(ECDSA))
    with pytest.raises(KeyboardInterrupt):  # the control: a key that is one
        supernode.serve(*where)
    assert processes.Popen.call_count == 2
    ended.terminate.assert_called_once()


FAILED = "Failed to initialize the connection to the SuperLink."
CERTIFICATE = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
RETRY = "WARNING :   Connection attempt failed, retrying in 0.99 seconds"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["INFO :      Starting Flower SuperNode", FAILED], []),
        (["INFO :      SuperNode ID: 12"], ["connected to fl:1: node 12"]),
        (
            ["[code: 2004] Failed to activate SuperNode."],
            ["the coordinator does not admit the key of --node-key k"],
        ),
        (
            [f"{CERTIFICATE}unable to get local issuer certificate (_ssl.c:1006)"],
            ["the authority of --certificate a has not signed the coordinator's certificate"],
        ),
        (
            [f"{CERTIFICATE}Hostname mismatch, certificate is not valid for 'fl'. (_ssl.c:1006)"],
            ["the coordinator's certificate is not for the host of --superlink fl:1"],
        ),
        ([RETRY] * 2, []),
        ([RETRY] * 9, ["no coordinator answers at --superlink fl:1"]),
        (["Failed to activate SuperNode."] * 9, ["the coordinator does not admit the key"]),
        (
            [*["Failed to activate SuperNode.", "SuperNode ID: 1"] * 2],
            [*["the coordinator does not admit the key", "connected to fl:1: node 1"] * 2],
        ),
        (
            [*[RETRY] * 4, "INFO :      Connection successful after 9.00 seconds and 4 tries."] * 2,
            [*["no coordinator answers at", "connected to fl:1 again"] * 2],
        ),
        (["INFO :      Connection successful after 1.00 seconds and 2 tries."], []),
        (
            ["Traceback (most recent call last):", "mark 2026-11-29 INFO: run r: answered"],
            ["a process of this node failed; see ", "2026-11-29 INFO: run r: answered"],
        ),
        (
            [
                f"mark 2026-11-29 19:35:{n} INFO: {'refused' if n % 2 else 'hello'}"
                for n in range(6)
            ],
            ["2026-11-29 19:35:0 INFO: hello", "2026-11-29 19:35:1 INFO: refused"],
        ),
        (["2026-11-29 19:35:33,906 INFO: run r: answered", "[ROUND SuperNode ID: 9 ...]"], []),
        (
            ["flwr-serverapp: this site runs client processes only"] * 2,
            ["a process of another kind was refused: this site runs client processes only"],
        ),
    ],
)
def test_an_administrator_sees_a_line_for_each_event_and_the_log_has_all(
    lines, said, tmp_path, capsys
):
    """Flower 1.42 wrote these lines when the key, the authority, the host or nothing was wrong."""
    read, write = os.pipe()
    os.write(write, "\n".join([*lines, ""]).encode())
    os.close(write)
    console = console_of(tmp_path / "log")
    console.follow(read)
    written = (tmp_path / "log").read_text().splitlines()
    assert written == [line.removeprefix("mark ") for line in lines]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(said)
    assert all(line.startswith(start) for line, start in zip(shown, said, strict=True))


def console_of(log):
    return supernode.Console(log, "mark ", {"superlink": "fl:1", "authority": "a", "key": "k"})


def test_a_large_log_is_moved_and_one_that_cannot_be_written_stops_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(supernode, "LARGEST_LOG", 20)
    log = tmp_path / "state" / "log"
    with pytest.raises(UserError, match="cannot be written"):
        console_of(log)
    log.parent.mkdir()
    console = console_of(log)
    assert log.stat().st_mode & 0o777 == 0o600
    for number in range(3):
        read, write = os.pipe()
        os.write(write, f"a line of Flower's {number}\n".encode())
        os.close(write)
        console.follow(read)
    assert log.read_text() == "a line of Flower's 2\n"
    assert log.with_name("log.1").read_text() == "a line of Flower's 1\n"
    log.unlink()
    log.mkdir()
    read, write = os.pipe()
    os.write(write, b"mark one\nmark two\n")
    os.close(write)
    console.follow(read)
    warning, *lines = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {log} cannot be written (")
    assert lines == ["one", "two"]


def test_a_state_whose_socket_no_process_could_open_is_refused(tmp_path):
    """The longest allowed path is one that the operating system allows."""
    fitting = supernode.LONGEST_SOCKET - len(os.fsencode(tmp_path / "x/commands/socket")) + 1
    folder = tmp_path / ("é" + "d" * (fitting - 2))
    supernode.check_state(folder)
    path = supernode.environment(folder / "commands", {})[supernode.SOCKET]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="too long"):
        listener.bind(path + "d")
    (tmp_path / "ca.crt").write_bytes(certificate(ECDSA))
    (tmp_path / "key").write_bytes(private_key(ECDSA))
    longer = tmp_path / f"{folder.name}d"
    where = (tmp_path / "site.yaml", longer, "host:1", tmp_path / "ca.crt", tmp_path / "key", None)
    with pytest.raises(UserError) as refused:
        supernode.serve(*where)
    assert str(refused.value) == (
        f"state={longer} is too long: the path of its socket has 108 bytes, and a Unix socket "
        "allows at most 107; give a folder with a shorter path"
    )
    assert not longer.exists()


def test_a_node_ends_with_its_parent_even_if_that_is_killed(tmp_path, monkeypatch):
    """Otherwise it would stay connected, and a new `site serve` would not be admitted."""

    def parent():
        if os.fork():
            time.sleep(60)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own
        supernode.PARENT_CHECK_SECONDS = 0.05
        import flwr.supernode.cli as flower

        flower.flower_supernode = lambda: (print(os.getpid(), flush=True), time.sleep(60))
        supernode.node(os.getppid())

    child, log = fork(parent, tmp_path / "log"), tmp_path / "log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    started = psutil.Process(int(log.read_text()))
    assert started.is_running()  # as long as its parent lives
    os.kill(child, signal.SIGKILL)
    finished(child)
    wait_until(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE)
