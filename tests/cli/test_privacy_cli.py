"""`fed-dpsd privacy`: planned costs, actual costs and the results of audits."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from fed_dpsd.accounts.words import NO_SECRET_NOTE
from fed_dpsd.config.compose import compose
from fed_dpsd.experiment import set_up
from fed_dpsd.privacy.epsilon import rounded_up
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.progress import listening
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL
from tests.listeners import Hearing
from tests.privacy import planted

# --- privacy plan ---


def plan(fed_dpsd, *overrides):
    code, out, _ = fed_dpsd("privacy", "plan", "--json", *overrides)
    assert code == 0
    return json.loads(out[-1])


def test_plan_gives_the_golden_numbers_of_gradients(fed_dpsd):
    result = plan(
        fed_dpsd,
        *("training=plain", "answers=gradient", "answers.noise_multiplier=100"),
        *("rounds=200", "queries_per_round=256"),
    )
    assert result["queries_per_client"] == 51_200
    rows = {(r["unit"], r["relation"]): r["epsilon"] for r in result["privacy"]["proven"]}
    for unit, relation, expected in (
        *(("record", "add_remove", 28.839), ("record", "replace_one", 28.839)),
        *(("client", "add_remove", 11.651), ("client", "replace_one", 28.839)),
    ):
        assert rows[unit, relation] == pytest.approx(expected, abs=0.01)
    assert result["privacy"]["epsilon_published"] == pytest.approx(0.0456, abs=1e-4)


def test_plan_gives_the_golden_numbers_of_labels(fed_dpsd):
    result = plan(
        fed_dpsd,
        *("training=plain", "answers=label", "answers.epsilon_per_answer=0.1", "answers.k=3"),
        *("rounds=10", "queries_per_round=256"),
    )
    assert result["privacy"]["epsilon_published"] == 0.1
    for row in result["privacy"]["proven"]:
        assert row["epsilon"] == pytest.approx(25.72, rel=1e-3)
        assert row["queries"] == 2_560
        assert "spent" not in row


def test_plan_for_people_prints_no_bare_epsilon(fed_dpsd):
    code, out, _ = fed_dpsd("privacy", "plan", "training=plain", "answers=probabilities")
    assert code == 0
    proven = [line for line in out if line.startswith("epsilon planned")]
    assert len(proven) == 6
    for line in proven:
        assert "trust nobody, delta 1e-05" in line
        assert "inf" in line
    assert any(line.startswith("nothing published: ") for line in out)
    (reason,) = [line for line in out if line.startswith("reason: ")]
    assert "probabilities leave the clients without noise" in reason
    assert "exact class counts leave the clients" in reason
    need, sent = out[-2:]
    assert re.match(r"estimated need, besides the records: memory about [\d.]+ MB for the ", need)
    assert sent.startswith("estimated traffic: about ")


def test_a_plan_that_does_not_fit_is_printed_and_refused(fed_dpsd, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=600_000_000))
    for form in ((), ("--json",)):
        code, out, err = fed_dpsd("privacy", "plan", "training=plain", *form)
        assert code == 1
        assert out
        assert "this machine has 600.0 MB; use " in err


@pytest.mark.slow(seconds=7)
def test_plan_calibrates_to_a_target_and_says_so(fed_dpsd, subtests):
    """The training where it is private, and the answers otherwise."""
    for training, answers, field in [
        ("plain", "gradient", "answers.noise_multiplier"),
        ("plain", "votes", "answers.noise_multiplier"),
        ("plain", "label", "answers.epsilon_per_answer"),
        ("dp_sgd", "probabilities", "training.noise_multiplier"),
        ("dp_sgd", "label", "training.noise_multiplier"),
    ]:
        with subtests.test(training=training, answers=answers, field=field):
            overrides = (f"training={training}", f"answers={answers}")
            overrides += ("privacy.target_epsilon=1.5", "rounds=4")
            row = plan(fed_dpsd, *overrides)["privacy"]["proven"][0]
            assert (row["unit"], row["relation"]) == ("record", "add_remove")
            assert row["basis"] == field.partition(".")[0]
            assert 0.98 * 1.5 <= row["epsilon"] <= 1.5
            _, out, _ = fed_dpsd("privacy", "plan", *overrides)
            asked = "calibrated to privacy.target_epsilon=1.5 (record, add_remove): "
            assert any(line.startswith(f"{asked}{field}=") for line in out)


# --- privacy ledger and audit ---


@pytest.mark.slow
def test_ledger_prints_what_each_client_has_spent_and_by_whom_it_is_paid(fed_dpsd):
    private = ("training=dp_sgd", "training.steps=5", "model=scattering", "model.student_width=4")
    _, (folder,), _ = fed_dpsd("run", *SMALL, *private)
    code, out, _ = fed_dpsd("privacy", "ledger", folder)
    assert code == 0
    summary = json.loads((Path(folder) / "summary.json").read_text())
    for number in (0, 1):
        (row,) = [line.split() for line in out if line.startswith(f"client_00{number}")]
        assert row[2] == "192"
        for spent, proven in zip(row[3:5], summary["privacy"]["proven"], strict=False):
            assert spent == rounded_up(proven["spent"])
        assert row[5:] == ["nobody"]
    assert "replace_one" in "".join(out[:2])
    assert "delta 1e-05, rounded up; over the ledger's life, settings chosen in advance" in out[-2]
    assert out[-1].startswith("The training of the teachers covers")
    assert len(out) == 6
    assert max(map(len, out[:4])) <= 80
    _, (folder,), _ = fed_dpsd("run", *SMALL, "training=plain", "answers=gradient")
    _, out, _ = fed_dpsd("privacy", "ledger", folder)
    assert "covers their answers" not in "".join(out)  # answers of plain teachers are charged
    assert "client," in "".join(out[:2]).replace(" ", "")  # whose epsilon is finite here


def test_a_ledger_of_seeded_noise_says_so(fed_dpsd, run_of):
    """Like its run's card: a reader of the ledger alone must not take it for a proof."""
    for noise in ("seeded", "secure"):
        folder = run_of("rounds=1", *["noise=secure"] * (noise == "secure"))
        _, out, _ = fed_dpsd("privacy", "ledger", folder)
        _, (content,), _ = fed_dpsd("privacy", "ledger", folder, "--json")
        for text in ("".join(out), content):
            assert (NO_SECRET_NOTE in text) == (noise == "seeded")


def test_ledgers_that_are_elsewhere_are_named(fed_dpsd, tmp_path):
    code, (folder,), err = fed_dpsd("run", *SMALL, "rounds=1", f"ledger={tmp_path}/life")
    assert code == 0
    assert err.splitlines()[-1].endswith("fed-dpsd privacy ledger life")
    code, _, err = fed_dpsd("privacy", "ledger", folder)
    assert code == 1
    assert f"this run's charges are in ledger={tmp_path}/life" in err
    deployed = set_up(compose(["federation=deployment", f"out={tmp_path}/runs"]), tmp_path)
    code, _, err = fed_dpsd("privacy", "ledger", str(new_run_folder(deployed)))
    assert code == 1
    assert "hospitals, which keep their ledgers" in err


def test_a_run_whose_ledger_was_deleted_is_not_taken_for_one_without_charges(fed_dpsd, run_of):
    folder = Path(run_of("rounds=1"))
    shutil.rmtree(folder / "ledger")
    for form in ((), ("--json",)):
        code, out, err = fed_dpsd("privacy", "ledger", str(folder), *form)
        assert (code, out) == (1, [])
        assert err.startswith(f"error: {folder}/ledger is missing, but charges.json records")
        assert "restore the folder from a backup" in err
    (folder / "charges.json").unlink()  # as in a run in which nothing was charged
    assert fed_dpsd("privacy", "ledger", str(folder))[:2] == (
        0,
        [f"nothing was charged in this run: {folder}"],
    )


def test_ledger_prints_every_charge_where_asked(fed_dpsd):
    _, (folder,), _ = fed_dpsd("run", *SMALL, "training=plain", "answers=gradient")
    code, out, _ = fed_dpsd("privacy", "ledger", folder, "--charges")
    assert code == 0
    assert sum(" answers to request " in line for line in out) == 2 * 3
    assert sum(line.startswith("spent: ") for line in out) == 2 * 6
    for line in out:
        if "so far" in line or line.startswith("spent: "):
            assert "trust nobody, delta 1e-05, gdp_exact)" in line
    so_far = [float(line.partition("so far ")[2].split()[0]) for line in out if "so far " in line]
    for own in (so_far[:3], so_far[3:]):  # a line counts the charges up to its own
        assert own[0] < own[1] < own[2]
    spent = [line.split()[1] for line in out if line.startswith("spent: ")]
    assert so_far[2] == so_far[5] == float(spent[0])
    code, out, _ = fed_dpsd("privacy", "ledger", f"{folder}/ledger/simulated.sqlite", "--json")
    _, account = json.loads(out[0]).values()
    assert [entry["query_id"] for entry in account["entries"]] == [1, 2, 3]
    summary = json.loads((Path(folder) / "summary.json").read_text())
    for spent, row in zip(account["spent"], summary["privacy"]["proven"], strict=True):
        assert spent["epsilon"] == row["spent"] == row["epsilon"]
        assert (spent["unit"], spent["relation"]) == (row["unit"], row["relation"])


@pytest.mark.slow
def test_a_ledger_for_life_adds_runs_up_and_ends_them(fed_dpsd, tmp_path):
    """Three runs of 192 queries under a cap that pays for about two and a half."""
    life = ("training=plain", "answers=gradient", f"ledger={tmp_path}/life", "partition.seed=0")
    budget = plan(
        fed_dpsd, "training=plain", "answers=gradient", "rounds=5", "queries_per_round=96"
    )
    cap = budget["privacy"]["proven"][0]["epsilon"]
    rounds = []
    for seed in (1, 2, 3):
        code, (folder,), _ = fed_dpsd(
            "run", *SMALL, *life, f"seed={seed}", f"privacy.budget={cap:.6f}"
        )
        lines = [json.loads(x) for x in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
        rounds.append((code, len([line for line in lines if not line["refused"]])))
    assert rounds == [(0, 3), (0, 3), (0, 1)]
    code, _, err = fed_dpsd("run", *SMALL, *life, "seed=4", f"privacy.budget={cap:.6f}")
    assert code == 1
    assert "no client answers" in err
    assert "budget is spent" in err


@pytest.mark.slow(seconds=15)
def test_audit_says_in_words_what_is_refuted(fed_dpsd, few_draws, monkeypatch):
    """A small run; the paper's own setting is in audits/test_black_box.py."""
    small = (
        "rounds=2",
        "queries_per_round=64",
        "training=plain",
        "answers=gradient",
        "answers.noise_multiplier=5.0",
    )
    with monkeypatch.context() as patch:  # fewer runs for the words, all of them for the numbers
        patch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", 2_000)
        code, out, _ = fed_dpsd("privacy", "audit", *small)
    assert code == 0
    text = "\n".join(out)
    assert text.count("consistent with the proven epsilon") == 2
    assert "refuted: the published epsilon" in text
    assert "not shown: that a particular trained teacher leaks this much" in text
    _, out, _ = fed_dpsd("privacy", "audit", "--json", *small)
    found = json.loads(out[0])
    assert found["published_refuted"] is True
    assert found["epsilon_published"] < found["lower_bound"] < found["epsilon_proven"]
    assert (found["queries"], found["runs"], found["failure_probability"]) == (128, 300, 1e-6)
    check = found["check"]
    assert 0.65 * 2.1 < check["lower_bound"] <= check["epsilon_proven"] <= 2.1


@pytest.mark.parametrize(
    ("broken", "runs"), [pytest.param("half", 100_000, marks=pytest.mark.slow), ("none", 2_000)]
)
def test_a_broken_hospital_is_refuted_and_a_blind_audit_says_so(
    fed_dpsd, few_draws, broken, runs, monkeypatch
):
    """Misses half of the noise in 100,000 runs, and is blind in ten, with probability 1e-6."""
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", runs)
    small = (
        "rounds=1",
        "queries_per_round=64",
        "training=plain",
        "answers=label",
        "--broken",
        broken,
    )
    code, out, _ = fed_dpsd("privacy", "audit", "--json", *small)
    found = json.loads(out[0])
    assert code == 0
    assert (found["broken"], found["as_expected"]) == (broken, True)
    assert found["check"]["contradicts"]
    assert found["check"]["lower_bound"] > found["check"]["epsilon_proven"]
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", 10)
    code, out, _ = fed_dpsd("privacy", "audit", *small)
    assert code == 3
    assert "NOT refuted: the audit is blind" in out[-1]


@pytest.mark.slow(seconds=15)
def test_an_audit_of_sums_says_that_it_sends_one_image(fed_dpsd, few_draws, monkeypatch):
    """A run's own requests have many images and cost more than the audit's epsilon."""
    monkeypatch.setattr("fed_dpsd.audits.attacks.ALONE_RUNS", 200)
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLAIM_RUNS", 20)
    settings = ("method=dpdfd", "rounds=4", "training=plain", "answers=gradient_sum")
    code, out, _ = fed_dpsd("privacy", "audit", "--json", *settings)
    assert code == 0
    claim = json.loads(out[0])
    _, out, _ = fed_dpsd("privacy", "plan", "--json", *settings)
    planned = json.loads(out[0])["privacy"]["proven"][1]
    assert claim["title"].endswith("requests of one image, which cost less than the run's requests")
    assert claim["epsilon_proven"] < planned["epsilon"] / 100


@pytest.mark.slow
def test_a_contradicted_proof_has_an_exit_code_of_its_own(fed_dpsd, few_draws, monkeypatch):
    def truthful(self, value, predictions, rng):
        return np.eye(self.num_classes)[value.argmax(-1)].sum(0).astype(np.uint8)

    monkeypatch.setattr(TopKRandomizedResponse, "add_noise", truthful)
    code, out, _ = fed_dpsd("privacy", "audit", "training=plain", "answers=label")
    assert code == 3
    assert any("contradicts the proven epsilon 2.1 (record" in line for line in out)


@pytest.mark.parametrize(
    ("fault", "settings", "words"),
    [
        (
            planted.noise_of_a_query_used_again,
            ("training=plain", "answers=gradient"),
            "answers: no draw is used twice: contradicted: draws 30 to 32 are those from 0 on",
        ),
        (
            planted.noise_of_a_step_used_again(3),
            ("training=dp_sgd", "answers=probabilities", "model=scattering"),
            "training: no draw is used twice: contradicted: draws 1,566 to 1,568 are those from 0",
        ),
        (
            planted.requests_are_counted_instead_of_queries,
            ("training=plain", "answers=gradient"),
            "sent twice, costs 256 answers: contradicted: it is charged as 1",
        ),
    ],
)
def test_an_audit_finds_draws_that_are_used_twice_and_releases_that_are_not_charged(
    fed_dpsd, few_draws, monkeypatch, fault, settings, words
):
    """The controls: these settings without a fault are in tests/audits/test_conformance.py."""
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", 200)
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLAIM_RUNS", 2)
    monkeypatch.setattr("fed_dpsd.audits.conformance.training_attacks", lambda *_: ())
    fault(monkeypatch)
    code, out, _ = fed_dpsd("privacy", "audit", "rounds=1", "num_clients=2", *settings)
    assert code == 3
    assert any(words in line for line in out)


@pytest.mark.slow(seconds=100)
def test_a_training_is_audited_by_canaries(fed_dpsd, few_draws, monkeypatch):
    """A correct training contradicts a proof with probability at most 0.001."""
    monkeypatch.setattr("fed_dpsd.audits.attacks.RUNS", (100, 100))
    clipped = {"weights": 100, "bias": 400, "network": 50}
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLIPPED_RUNS", clipped)
    monkeypatch.setattr("fed_dpsd.audits.attacks.ANSWER_RUNS", (250, 250))
    monkeypatch.setattr("fed_dpsd.audits.attacks.OWN_RUNS", (2, 2))
    settings = (
        "training=dp_sgd",
        "answers=probabilities",
        "training.noise_multiplier=1",
        "training.steps=20",
    )
    hearing = Hearing()
    with listening(hearing):
        code, out, _ = fed_dpsd("privacy", "audit", "--json", *settings)
    assert code == 0
    steps = [part for part in hearing.heard if part[0] == "training steps"]
    # Each training but the last of a kind, which has no listener.
    assert len(steps) == sum(each - 1 for each in (100, 200, 500, 150, 40 + 250, 40 + 2))
    assert steps[-1][2] - steps[-1][1] == 20
    assert {name for name, _, _ in hearing.heard} <= {"training steps", "images"}
    claim = json.loads(out[0])
    own, whole = (
        json.loads(fed_dpsd("privacy", "plan", "--json", *settings, *more)[1][0])
        for more in (["training.count_fraction=null"], [])
    )
    planned = own["privacy"]["proven"][0]["epsilon"]  # of what passes through teachers
    assert claim["epsilon_proven"] == pytest.approx(planned)
    assert planned < whole["privacy"]["proven"][0]["epsilon"]
    for name in ("check", "counts"):
        found = claim[name]
        assert (found["method"], found["relation"]) == ("canaries", "add_remove")
        assert 0 < found["mu_lower_bound"] < found["mu_proven"]
        assert found["lower_bound"] < found["epsilon_proven"]
        assert found["failure_probability"] == 1e-4
        assert found["canaries"] >= 40
    for found in (claim["check"], claim["answers"]):
        assert 0 < found["advantage_lower_bound"] < found["advantage_proven"]
    assert (claim["queries"], claim["canaries"]) == (8, 8)
    assert claim["lower_bound"] < claim["epsilon_proven"]
    for part in ("weights", "bias", "network"):
        assert not claim[f"clipping_{part}"]["contradicts"]
    assert not any(check["contradicts"] for check in claim["checks"])
    assert len(claim["checks"]) == 3
    monkeypatch.setattr("fed_dpsd.audits.attacks.RUNS", (60, 60))
    monkeypatch.setattr("fed_dpsd.audits.attacks.ANSWER_RUNS", (60, 60))
    code, out, _ = fed_dpsd("privacy", "audit", *settings, "--broken", "none")
    assert code == 0
    assert out[-1] == "a hospital with next to no noise: refuted, as expected"


def test_audit_of_what_adds_no_noise_says_why(fed_dpsd):
    code, _, err = fed_dpsd("privacy", "audit", "training=plain", "answers=probabilities")
    assert code == 1
    assert (
        "training=plain and answers=probabilities have nothing to audit: nothing is proven" in err
    )


def test_audit_of_answers_that_never_leave_says_so(fed_dpsd):
    for overrides in (["method=direct"], ["method=central", "training=lp_2st"]):
        code, out, err = fed_dpsd("privacy", "audit", *overrides, "answers=label")
        assert (code, out) == (1, [])
        assert "releases no answers, and no epsilon of a record holds" in err


@pytest.mark.slow  # an audit
def test_audit_of_a_run_that_releases_more_says_what_its_card_says(
    fed_dpsd, few_draws, monkeypatch
):
    """The control: with no steps of a generator nothing else leaves, and the sentence is gone."""
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", 200)
    dgd = ("method=dgd", "queries_per_round=8", "teachers_per_client=4")
    _, out, _ = fed_dpsd("privacy", "audit", "--json", *dgd)
    assert json.loads(out[0])["queries"] == 8  # the baseline is no query
    code, out, _ = fed_dpsd("privacy", "audit", *dgd)
    assert code == 0
    text = "the run also releases baseline, and its card states inf (record, replace_one"
    assert any(text in line for line in out)
    _, out, _ = fed_dpsd("privacy", "audit", *dgd, "method.generator_steps=0")
    assert not any("the run also releases" in line for line in out)
