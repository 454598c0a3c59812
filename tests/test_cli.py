"""The command line: data on stdout, words on stderr, exit code 1 with one clear line."""

import json
import sys

import pytest

from fed_dpsd import cli
from fed_dpsd.runtime import doctor, simulation
from tests.conftest import SMALL


@pytest.fixture
def fed_dpsd(tmp_path, monkeypatch, capsys):
    """Run the command; returns its exit code, the lines of stdout, and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fed-dpsd", *arguments])
        monkeypatch.setattr(cli, "console", cli.Console(stderr=True, highlight=False, width=200))
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err

    return call


def test_run_prints_the_folder_last_and_the_result_before(fed_dpsd, tmp_path):
    code, out, err = fed_dpsd("run", *SMALL)
    assert code == 0
    (folder,) = out
    assert folder.startswith(f"{tmp_path}/runs/")
    assert json.loads((tmp_path / folder / "summary.json").read_text())["status"] == "completed"
    assert "round 3/3 · student" in err
    assert "published 10 (label) · proven 1,920 (record, replace_one, trust nobody" in err


def test_resume_goes_on_in_the_same_folder(fed_dpsd):
    _, (folder,), _ = fed_dpsd("run", *SMALL)
    code, out, err = fed_dpsd("resume", folder)
    assert (code, out) == (0, [folder])
    assert "student" in err


def test_a_failing_run_still_prints_its_folder_and_says_why_in_one_line(
    fed_dpsd, monkeypatch, tmp_path
):
    def broken(*_):
        raise RuntimeError("something\nunforeseen")

    monkeypatch.setattr(cli.runs, "run", broken)
    code, out, err = fed_dpsd("run", *SMALL)
    assert code == 1
    assert out[-1].startswith(f"{tmp_path}/runs/")
    assert "error: RuntimeError: something unforeseen (traceback: " in err
    assert "Traceback" not in err
    assert "Traceback" in (tmp_path / out[-1] / "error.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("num_clients=0",), "error: num_clients=0 must be >= 1"),
        (("num_clients=900",), "works here"),
        (("method=nothing",), "error: method=nothing is unknown; choose one of: "),
        (("privcy.k=3",), "did you mean 'privacy.k'?"),
        (("data=mnist", "data.path=nowhere"), "is not a folder"),
        (("partition.alpha=-1",), "error: partition.alpha=-1.0 must be a finite number > 0"),
        (("privacy.k=99",), "error: privacy.k=99 must be between 2 and"),
        (("out=/dev/null",), "is not writable"),
        (("--nodes", "2"), "error: --nodes 2: it must be >= 1 and goes with --engine flower"),
        (("--engine", "flower", "--nodes", "0"), "error: --nodes 0"),
        (("--engine", "flower", "num_clients=900"), "works here"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_one(fed_dpsd, arguments, expected):
    code, _, err = fed_dpsd("run", *arguments)
    assert code == 1
    assert expected in err
    assert "Traceback" not in err


def test_two_problems_are_two_lines(fed_dpsd):
    _, _, err = fed_dpsd("run", "num_clients=0", "privacy.k=1")
    assert err.count("error: ") == 2


def test_resuming_what_is_no_run_is_an_error(fed_dpsd, tmp_path):
    code, _, err = fed_dpsd("resume", str(tmp_path))
    assert code == 1
    assert "is not a run folder" in err


# --- privacy plan ---


def plan(fed_dpsd, *overrides):
    code, out, _ = fed_dpsd("privacy", "plan", "--json", *overrides)
    assert code == 0
    return json.loads(out[-1])


@pytest.mark.parametrize(
    ("sigma", "record", "client", "published"),
    [
        (100, 28.839, 11.651, 0.0456),
        (200, 11.651, 5.053, None),
        (500, 3.901, 1.783, None),
        (1000, 1.783, 0.830, None),
    ],
)
def test_plan_gives_the_golden_numbers_of_gradients(fed_dpsd, sigma, record, client, published):
    result = plan(
        fed_dpsd,
        *("privacy=gradient", f"privacy.noise_multiplier={sigma}"),
        *("rounds=200", "queries_per_round=256"),
    )
    assert result["queries_per_client"] == 51_200
    rows = {(r["unit"], r["relation"]): r["epsilon"] for r in result["privacy"]["proven"]}
    assert rows["record", "add_remove"] == pytest.approx(record, abs=0.01)
    assert rows["record", "replace_one"] == pytest.approx(record, abs=0.01)
    assert rows["client", "add_remove"] == pytest.approx(client, abs=0.01)
    assert rows["client", "replace_one"] == pytest.approx(record, abs=0.01)
    if published:
        assert result["privacy"]["epsilon_published"] == pytest.approx(published, abs=1e-4)


@pytest.mark.parametrize(
    ("epsilon_per_answer", "rounds", "batch", "expected"),
    [
        (10, 200, 256, 512_000),
        (1, 200, 256, 19_424.3),
        (0.1, 200, 256, 251.89),
        (0.01, 200, 256, 9.080),
        (1, 1, 100, 67.92),
        (1, 1, 1_000, 470.6),
        (0.1, 1, 200, 5.186),
        (0.1, 10, 256, 25.72),
    ],
)
def test_plan_gives_the_golden_numbers_of_labels(
    fed_dpsd, epsilon_per_answer, rounds, batch, expected
):
    result = plan(
        fed_dpsd,
        f"privacy.epsilon_per_answer={epsilon_per_answer}",
        *("privacy.k=3", f"rounds={rounds}", f"queries_per_round={batch}"),
    )
    assert result["privacy"]["epsilon_published"] == epsilon_per_answer
    for row in result["privacy"]["proven"]:
        assert row["epsilon"] == pytest.approx(expected, rel=1e-3)
        assert row["queries"] == rounds * batch
        assert "spent" not in row


def test_plan_for_people_prints_no_bare_epsilon(fed_dpsd):
    code, out, _ = fed_dpsd("privacy", "plan", "privacy=non_private")
    assert code == 0
    proven = [line for line in out if line.startswith("epsilon proven")]
    assert len(proven) == 6
    for line in proven:
        assert "trust nobody, delta 1e-05" in line
        assert "inf" in line
    assert "epsilon published (no guarantee): inf" in out
    assert "reason: answers leave the client without noise" in out


# --- data and doctor ---


def test_data_shows_every_client_and_class(fed_dpsd):
    code, out, err = fed_dpsd("data", "num_clients=3")
    assert code == 0
    assert "digits: 1,437 to train, 360 to test, 10 classes" in err
    rows = [line for line in out if line.startswith("│")]
    assert len(rows) == 3
    total = sum(int(row.split("│")[2].strip().replace(",", "")) for row in rows)
    assert total == 1_437


def test_doctor_finds_nothing_wrong_here_and_a_wrong_version(fed_dpsd, monkeypatch):
    code, out, _ = fed_dpsd("doctor")
    assert code == 0, out
    assert any("flwr" in line and "ok: " in line for line in out)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.9")
    code, out, _ = fed_dpsd("doctor")
    assert code == 1
    assert any("BAD: 0.9" in line and "pip install" in line for line in out)


def test_the_gpu_share_survives_rounding_to_32_bits(monkeypatch):
    import numpy as np

    monkeypatch.setattr(simulation.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(simulation.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(simulation.os, "cpu_count", lambda: 16)
    for nodes in range(1, 17):
        assert int(1 / float(np.float32(simulation.gpu_share(nodes)))) >= nodes
