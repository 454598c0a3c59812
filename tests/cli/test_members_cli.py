"""The coordinator's list of hospitals, with a stub in place of Flower's command."""

import json

import pytest

from fed_dpsd.server.attendance import Member, revoked_nodes, store_members
from fed_dpsd.storage import append_line

MEMBERS = (
    *(Member(0, "St Mary's", 100), Member(1, "Charité", 101)),
    *(Member(2, "St Mary's", 102), Member(3, "", 103)),
)


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """A `flwr` that prints what a test sets, and keeps what it was asked."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "flwr"
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/reply\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def run(tmp_path):
    """A run in which hospitals 0 and 1 have answered."""
    folder = tmp_path / "RUN"
    store_members(folder, MEMBERS)
    line = {"at": "2026-01-31T12:00:00Z", "answered": [0, 1], "refused": {}}
    append_line(folder / "asks.jsonl", json.dumps(line))
    return folder


def reply(folder, **content):
    (folder / "reply").write_text(f"Listing all nodes...\n{json.dumps(content)}\n")


def test_a_list_joins_names_with_what_flower_knows(flwr, run, fed_dpsd):
    """A node that no hospital has named is listed too, unless it is unregistered."""
    states = {100: "online", 101: "unregistered", 103: "registered", 104: "unregistered"}
    states[105] = "registered"
    reply(flwr, success=True, nodes=[{"node-id": f"{n}", "status": s} for n, s in states.items()])
    code, out, err = fed_dpsd("site", "list", str(run))
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("│")] for line in out if "10" in line]
    assert [row[1:-1] for row in rows] == [
        ["0", "St Mary's", "100", "online", "2026-01-31 12:00:00"],
        ["1", "Charité", "101", "unregistered", "2026-01-31 12:00:00"],
        ["2", "St Mary's", "102", "unknown", "-"],
        ["3", "-", "103", "registered", "-"],
        ["-", "-", "105", "registered", "-"],
    ]
    assert (flwr / "asked").read_text().split() == [
        *("supernode", "list", "federation", "--format", "json")
    ]


def test_a_narrow_list_has_whole_names(flwr, run, fed_dpsd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    name = "K" * 60
    store_members(run, [Member(0, name, 100)])
    reply(flwr, success=True, nodes=[])
    _, out, _ = fed_dpsd("site", "list", str(run))
    assert "".join(out).count("K") == len(name)


@pytest.mark.parametrize("name", ["Charité", "1"])
def test_a_hospital_is_revoked_by_its_name_or_number(flwr, run, fed_dpsd, name):
    reply(flwr, success=True)
    code, out, err = fed_dpsd("site", "revoke", str(run), name, "--connection", "here")
    assert (code, out) == (0, ["hospital 1 (Charité): node 101 is unregistered"]), err
    assert (flwr / "asked").read_text().split()[:4] == ["supernode", "unregister", "101", "here"]
    assert revoked_nodes(run) == {101}


def test_a_name_that_is_not_one_hospitals_revokes_none(flwr, run, fed_dpsd):
    known = "hospitals 0 (St Mary's), 1 (Charité), 2 (St Mary's), 3"
    for name, number in (("St Mary's", 2), ("Charite", 0), ("100", 0), ("-", 0)):
        code, _, err = fed_dpsd("site", "revoke", str(run), name)
        assert (code, f"names {number} hospitals of" in err, known in err) == (1, True, True), err
    assert not (flwr / "asked").exists()


def test_a_refusal_of_flower_is_one_line(flwr, run, fed_dpsd):
    reply(flwr, success=False, **{"error-message": "the node\nis unknown"})
    code, _, err = fed_dpsd("site", "revoke", str(run), "0")
    command = "`flwr supernode unregister 100 federation --format json`"
    assert (code, err.strip()) == (1, f"error: {command}: the node is unknown")
    (flwr / "reply").write_text("no JSON")
    code, _, err = fed_dpsd("site", "list", str(run))
    assert (code, "`flwr supernode list federation --format json` failed" in err) == (1, True), err


def test_a_folder_without_hospitals_is_refused(flwr, tmp_path, fed_dpsd):
    code, _, err = fed_dpsd("site", "list", str(tmp_path / "none"))
    assert (code, "has no hospitals.json" in err) == (1, True), err
    assert not (flwr / "asked").exists()
