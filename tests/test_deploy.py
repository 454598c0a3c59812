"""The files in deploy/, as docs/deployment.md uses them."""

import subprocess
from pathlib import Path

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


def test_services_and_proxy_agree_with_the_guide():
    """The SuperLink is out of others' reach; nodes' routes alone are let through to it."""
    guide = (ROOT / "docs" / "deployment.md").read_text()
    superlink = (ROOT / "deploy" / "fed-dpsd-superlink.service").read_text()
    proxy = (ROOT / "deploy" / "nginx.conf").read_text()
    hospital = (ROOT / "deploy" / "fed-dpsd-hospital.service").read_text()
    assert "--host 127.0.0.1 --port 9093" in superlink
    assert "proxy_pass https://127.0.0.1:9093;" in proxy
    assert proxy.count("location ") == 2
    assert "location / {\n        return 403;" in proxy
    assert "127.0.0.1:9093" in guide
    assert "--superlink fl.example.org:9092" in hospital
    for name in ("fed-dpsd-superlink.service", "fed-dpsd-hospital.service", "nginx.conf"):
        assert f"APP/deploy/{name}" in guide
