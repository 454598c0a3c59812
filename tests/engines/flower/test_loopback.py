"""Flower's processes on one machine reach each other without a proxy."""

import os
import subprocess
import sys

import pytest

from fed_dpsd.engines.flower import direct

OURS = "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("given", "listed", "changed"),
    [
        ({"http_proxy": "http://p"}, (), {"no_proxy": OURS, "NO_PROXY": OURS}),
        ({"ALL_PROXY": "socks5://p", "NO_PROXY": ".corp"}, ("10.77.0.1",), {
            name: f".corp,{OURS},10.77.0.1" for name in ("no_proxy", "NO_PROXY")
        }),
        ({"grpc_proxy": "p", "no_grpc_proxy": ".corp", "no_proxy": OURS, "NO_PROXY": "*"}, (), {
            "no_grpc_proxy": f".corp,{OURS}"
        }),
        ({"https_proxy": "p", "no_proxy": OURS, "NO_PROXY": "localhost, ::1 ,127.0.0.1"}, (), {}),
        ({"http_proxy": "", "NO_PROXY": ".corp"}, ("10.77.0.1",), {}),  # no proxy
    ],
)  # fmt: skip
def test_loopback_addresses_use_no_proxy(given, listed, changed):
    assert direct(given, listed) == changed
    assert not direct(given | changed, listed)


@pytest.mark.slow
def test_grpc_and_http_reach_a_server_on_this_machine():
    """In a new process, where a proxy that does not exist is named."""
    program = """
import sys, grpc, requests
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
web = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
Thread(target=web.serve_forever, daemon=True).start()
try:
    grpc.channel_ready_future(grpc.insecure_channel(f"127.0.0.1:{port}")).result(float(sys.argv[1]))
    print(requests.get(f"http://127.0.0.1:{web.server_port}").status_code)
except (grpc.FutureTimeoutError, requests.RequestException) as error:
    print(type(error).__name__)
"""
    own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    own |= {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": ".corp"}
    for changed, seconds, said in (({}, "1", "FutureTimeoutError"), (direct(own), "30", "501")):
        command = [sys.executable, "-c", program, seconds]
        done = subprocess.run(command, env=own | changed, capture_output=True, check=True)
        assert done.stdout.decode().split() == [said]
