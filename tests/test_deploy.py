"""The files in deploy/, as docs/deployment.md uses them.

No container is started: no runtime is assumed. What images would run is run without one.
"""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from fed_dpsd.engines.flower import QUIET
from tests.hospitals import site_file
from tests.processes import MARK, end_marked, free_port, wait_until

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "deploy" / "certificates.sh"


def certify(folder):
    command = [SCRIPT, folder, "fl.example.org", "127.0.0.1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fits(folder, certificate):
    command = ["openssl", "verify", "-CAfile", folder / "ca.crt", certificate]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_certificates_are_renewed_and_the_authority_stays(tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    assert certify(folder).returncode == 0
    authority, first = (folder / "ca.crt").read_text(), (folder / "server.pem").read_text()
    assert certify(folder).returncode == 0
    assert (folder / "ca.crt").read_text() == authority
    assert (folder / "server.pem").read_text() != first
    assert fits(folder, folder / "server.pem")
    assert certify(other).returncode == 0
    assert not fits(folder, other / "server.pem")
    assert {file.stat().st_mode & 0o077 for file in folder.iterdir()} == {0}
    (folder / "ca.key").unlink()  # an authority whose key is offline is not replaced
    again = certify(folder)
    assert again.returncode == 1
    assert "ca.key does not exist; bring it back" in again.stderr
    assert (folder / "ca.crt").read_text() == authority


# --- containers ---

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BIN = Path(sys.executable).parent


def joined(path):
    return path.read_text().replace("\\\n", "")


def commands_of(stage):
    """The CMD and the HEALTHCHECK of an image."""
    (text,) = re.findall(
        rf"^FROM installed AS {stage}\n(.*?)(?=^FROM|\Z)", joined(DOCKERFILE), re.M | re.S
    )
    found = re.findall(r"^(CMD|HEALTHCHECK)\b[^\[]*(\[.*\])$", text, re.M)
    return {name: json.loads(words) for name, words in found}


def started_by(unit):
    program, *arguments = shlex.split(
        re.search(r"^ExecStart=(.+)$", joined(ROOT / "deploy" / unit), re.M)[1]
    )
    return [Path(program).name, *arguments]


def test_images_run_the_commands_of_the_services():
    coordinator, hospital = commands_of("coordinator")["CMD"], commands_of("hospital")["CMD"]
    assert coordinator == started_by("fed-dpsd-superlink.service")
    # The health check needs to know the port.
    assert hospital == [*started_by("fed-dpsd-hospital.service"), "--port", "9094"]
    installed = {each.name for each in metadata.entry_points(group="console_scripts")}
    assert {coordinator[0], hospital[0]} <= installed
    files = re.findall(r"/app/fed-dpsd/(\S+)", joined(DOCKERFILE))
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_images_end_as_an_ordinary_user():
    for stage in re.split(r"^FROM ", joined(DOCKERFILE), flags=re.M)[1:]:
        users = re.findall(r"^USER (.+)$", stage, re.M)
        assert users[-1:] == (["49999"] if stage.startswith("flwr/base:") else [])


def test_the_rehearsals_containers_can_write_to_nothing_but_their_volume():
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    assert services.keys() == {"coordinator", "proxy", "hospital0", "hospital1", "hospital2"}
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp"]
        assert not {"privileged", "ports"} & service.keys()
        writable = [each for each in service["volumes"] if not each.endswith(":ro")]
        assert writable == ([] if name == "proxy" else [f"{name}:/var/lib/fed-dpsd"])
        for source in (each.split(":")[0] for each in service["volumes"] if each.startswith(".")):
            assert (ROOT / "deploy" / source).is_file()
        if name.startswith("hospital"):  # reaches the coordinator only, and sees no other's records
            assert service["networks"] == [name]
            sources = " ".join(service["volumes"])
            assert set(re.findall(r"\d", sources)) == {name[-1]}
    assert services["proxy"]["network_mode"] == "service:coordinator"


def proxys_check(folder, port):
    """Whether the proxy's health check passes, with its port and certificate here."""
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    kind, text = services["proxy"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    text = text.replace("127.0.0.1:9092", f"127.0.0.1:{port}").replace("/etc/fed-dpsd", str(folder))
    return subprocess.run(["sh", "-c", text], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_a_proxy_without_a_superlink_is_not_healthy(tmp_path):
    certify(tmp_path)
    status = 401

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path.startswith("/v1/fleet/") else 403)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Proxy)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert proxys_check(tmp_path, server.server_port)  # the control
    status = 502
    assert not proxys_check(tmp_path, server.server_port)
    server.shutdown()
    server.server_close()
    assert not proxys_check(tmp_path, server.server_port)


@pytest.mark.slow(seconds=20)  # starts a SuperLink and a SuperNode
def test_the_images_commands_become_healthy_and_connect(tmp_path):
    """After the steps of compose.yaml, with paths and ports of this test and no container."""
    state, ports = tmp_path / "var", (free_port(), free_port())
    settings = os.environ | QUIET | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    settings |= {"FLWR_HOME": str(state / "flower"), MARK: f"images-{tmp_path.name}"}

    def here(text, side="coordinator"):
        for old, new in {
            "fl.example.org:9092": f"127.0.0.1:{ports[0]}",
            "9093": ports[0],
            "9094": ports[1],
            "/etc/fed-dpsd": str(tmp_path / side),
            "/var/lib/fed-dpsd": str(state),
        }.items():
            text = text.replace(old, new)
        return text

    def call(*words):
        return subprocess.run(words, env=settings, capture_output=True, text=True, check=False)

    def healthy(side):
        return call(*(here(word) for word in commands_of(side)["HEALTHCHECK"])).returncode == 0

    steps = re.findall(r"^#   (.*)$", (ROOT / "deploy" / "compose.yaml").read_text(), re.M)
    script = "\n".join(steps[: steps.index("done") + 1])
    prepared = call(
        "bash", "-ec", script.replace("APP", str(ROOT)).replace("/FOLDER", str(tmp_path))
    )
    assert prepared.returncode == 0, prepared.stderr
    assert not [*tmp_path.glob("*/ca.key")]  # those folders are mounted
    site_file(tmp_path / "hospital0")  # replaces the template
    (state / "flower").mkdir(parents=True)
    config = (ROOT / "deploy" / "flower.toml").read_text()
    (state / "flower" / "config.toml").write_text(here(config))
    try:
        for side, folder in (("coordinator", "coordinator"), ("hospital", "hospital0")):
            assert not healthy(side)
            command = [here(word, folder) for word in commands_of(side)["CMD"]]
            process = subprocess.Popen(command, env=settings, cwd=state)
            wait_until(lambda side=side: healthy(side), process)
            if side == "coordinator":
                assert proxys_check(tmp_path / "coordinator", ports[0])
                key = tmp_path / "coordinator" / "hospital0.pub"
                done = call("flwr", "supernode", "register", str(key), "federation")
                assert done.returncode == 0, done.stdout
        wait_until(
            lambda: "online" in call("flwr", "supernode", "ls", "federation").stdout, process
        )
    finally:
        end_marked(settings[MARK])
