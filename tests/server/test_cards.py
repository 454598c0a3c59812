"""Artefacts state their cost: the run's own numbers, and what they do not cover."""

import dataclasses
import json
import math
import shutil

import pytest
import yaml
from huggingface_hub import DatasetCard, ModelCard

from fed_dpsd.accounts.card import how_answered, how_trained
from fed_dpsd.accounts.words import MORE_NOTE, SEEDED_VERDICT, TEACHER_NOTE
from fed_dpsd.experiment import from_overrides
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.server import cards
from fed_dpsd.server.export import export
from fed_dpsd.server.run_folder import CompletedRun, open_completed
from fed_dpsd.server.student import open_student
from fed_dpsd.server.synthesis import synthesize
from tests.every import every
from tests.plugin import installed, write
from tests.proofs import by

VOTES = ("training=plain", "answers=votes", "answers.noise_multiplier=1000")
DP = ("training=dp_sgd", "training.steps=4")
PLAIN = ("training=plain", "answers=label", "answers.epsilon_per_answer=0.01")
WEAK = ("training=plain", "answers=label", "answers.epsilon_per_answer=10", "noise=secure")
CLEAR = ("training=plain", "answers=probabilities")
SUMS = ("method=dp_fedsgd", "answers=clipped_gradients", "model=scattering", "diagnostics=false")


def read(folder):
    card = json.loads((folder / "privacy_card.json").read_text())
    return card, (folder / "PRIVACY.md").read_text()


@pytest.mark.slow
@every("artefact", ["student", "images"])
@every("overrides", [DP, PLAIN, CLEAR])
def test_a_card_has_the_runs_own_numbers_each_with_its_meaning(
    finished, tmp_path, artefact, overrides
):
    folder, summary, _ = finished(*overrides)
    if artefact == "student":
        path = export(folder, tmp_path / "it", "safetensors").path
        assert open_student(path).card["privacy"] == summary["privacy"]
    else:
        path = synthesize(folder, 8, tmp_path / "it" / "train.parquet").path
    card, text = read(tmp_path / "it")
    assert card["privacy"] == summary["privacy"]
    assert path.name in card["files"]
    assert path.name in text
    for row in summary["privacy"]["proven"]:
        claim = Epsilon.from_json(row)
        (line,) = (
            line
            for line in text.splitlines()
            if line.startswith(f"| {claim.unit} | {claim.relation} |")
        )
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2:5] == [claim.number, f"{claim.delta:g}", claim.trust]
        nothing = f"{claim.unit}, {claim.relation}"
        assert math.isinf(claim.value) == any(nothing in line for line in card["not_covered"])
    before, published = text.split("## Published epsilon, which guarantees nothing")
    assert "epsilon published" not in before
    assert card["published"] in published.split("##")[0]
    for part in (
        card["post_processing"],
        *card["verdict"],
        *card["source"],
        *card["notes"],
    ):
        assert part in text
    assert card["versions"]["run"] == json.loads((folder / "versions.json").read_text())
    plain = any("trained without noise" in line for line in card["not_covered"])
    assert plain == (overrides != DP)
    assert "2 of 2 clients stated" in text
    assert "Not reviewed" not in text


@pytest.mark.slow
def test_what_carries_no_guarantee_begins_with_that(finished):
    """Its numbers, if any is finite, are those of secret noise."""
    secure = "; the numbers apply to the same run with noise=secure"
    for settings, more in ((DP, secure), (CLEAR, "")):
        card = cards.privacy_card_of(open_completed(finished(*settings)[0]))
        assert card["verdict"][0] == SEEDED_VERDICT + more
    card = cards.privacy_card_of(open_completed(finished(*DP, "noise=secure")[0]))
    assert not any(SEEDED_VERDICT in said for said in card["verdict"])


def test_a_run_of_no_commit_names_none(finished):
    folder, _, _ = finished(*DP)
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps({**versions, "commit": None}))
    text = cards.as_markdown(cards.privacy_card_of(open_completed(folder)))
    assert "commit" not in text
    assert "torch" in text


def test_every_number_of_the_verdict_says_whom_it_holds_against(finished):
    """A record's proof may come from the training, a client's from answers to a trusted server."""
    folder, _, _ = finished(*VOTES, "answers.noise_at=server", "noise=secure")
    lines = cards.privacy_card_of(open_completed(folder))["verdict"]
    numbers = [line for line in lines if "epsilon" in line]
    assert len(numbers) == 3
    assert all("any observer except the coordinator" in line for line in numbers)


def test_teachers_have_the_proof_of_their_training_alone(finished):
    """If the answers' noise proves less than the training, it covers no teacher and no score."""
    settings = *DP, "answers=gradient", "answers.noise_multiplier=1e4"
    folder, summary, _ = finished(*settings)
    card = cards.privacy_card_of(open_completed(folder))
    record = summary["privacy"]["proven"][0]
    proofs = [row["basis"] for row in (record, *record["beside"])]
    assert proofs == ["contraction", "answers", "training"]  # the smallest first
    (teachers,) = (line for line in card["not_covered"] if "teachers themselves" in line)
    other = dataclasses.replace(Epsilon.from_json(record), value=by(record, "training"))
    assert f"{other.number} (record, add_remove)" in teachers
    assert "replace_one" in teachers
    assert "delta 1e-05" in teachers


def test_a_card_has_no_path_of_the_machine(finished, tmp_path):
    export(finished(*DP)[0], tmp_path / "first", "safetensors")
    teacher = tmp_path / "first" / "student.safetensors"
    folder, _, _ = finished(*PLAIN, f"teacher.path={teacher}", "teacher.arch=cnn")
    card = cards.privacy_card_of(open_completed(folder))
    assert str(tmp_path) not in json.dumps(card)
    assert TEACHER_NOTE in card["notes"]


@every(
    ("overrides", "besides"),
    [
        (("training=dp_sgd",), "; besides, noisy class counts leave"),
        (("training=dp_sgd", "training.count_fraction=null"), ""),
        (("training=plain", "answers=probabilities"), "; besides, exact class counts leave"),
        (("method=dp_dfd",), "; besides, the teachers' own weights leave"),
        (
            ("method=dgd",),
            "; besides, the weights of a classifier trained on all records leave",
        ),
        (
            ("method=feddf", "training=plain"),
            "none: the teachers' own weights leave the clients",
        ),
    ],
)
def test_a_card_names_all_that_leaves(tmp_path, overrides, besides):
    experiment = from_overrides(overrides, tmp_path)
    said = how_answered(experiment)
    assert said.endswith(besides)
    assert besides or "besides" not in said


@every(
    ("method", "begins"),
    [("dp_fedavg", "DP-SGD: 3 training runs of "), ("fed_dpsd", "DP-SGD: 100 ")],
)
def test_a_card_counts_private_trainings(tmp_path, method, begins):
    experiment = from_overrides([f"method={method}", "training=dp_sgd", "rounds=3"], tmp_path)
    assert how_trained(experiment).startswith(begins)


def test_a_card_says_how_many_clients_a_round_asks(finished):
    folder, _, _ = finished(*VOTES, "num_clients=4", "clients_per_round=2", "noise=secure")
    asked = cards.privacy_card_of(open_completed(folder))["asked"]
    assert asked.startswith(
        "4 clients, 2 of them in each round, drawn by a public schedule, 1 round of "
    )


def test_a_card_says_that_more_was_charged_than_planned(finished):
    folder, summary, _ = finished(*DP)
    run = open_completed(folder)
    assert not any("More was charged" in line for line in cards.privacy_card_of(run)["source"])
    for row in summary["privacy"]["proven"]:
        row["notes"].append(MORE_NOTE)
    run = CompletedRun(run.folder, run.experiment, summary, run.state)
    card = cards.privacy_card_of(run)
    assert "More was charged than planned" in cards.as_markdown(card)


def test_what_a_plug_in_took_part_in_is_not_reviewed(finished, tmp_path):
    with installed(write(tmp_path / "installed")):
        folder, _, _ = finished("plugins=fed_dpsd_example", "answers=laplace_probabilities")
        export(folder, tmp_path / "model", "safetensors")
        synthesize(folder, 8, tmp_path / "images" / "train.parquet")
    for place in ("model", "images"):
        card, text = read(tmp_path / place)
        assert card["not_reviewed"] == ["fed_dpsd_example"]
        assert "**Not reviewed**: fed_dpsd_example took part" in text
        assert "not reviewed: fed_dpsd_example" in (tmp_path / place / "README.md").read_text()


def as_deployed(run):
    """A run as if its clients had been hospitals."""
    config = run.experiment.config
    federation = dataclasses.replace(config.federation, simulation=False)
    config = dataclasses.replace(config, federation=federation)
    experiment = dataclasses.replace(run.experiment, config=config)
    queries = {**run.summary["queries"], "answered_per_client": None}
    summary = {**run.summary, "queries": queries}
    return dataclasses.replace(run, experiment=experiment, summary=summary)


def test_a_deployments_card_names_statements_instead_of_ledgers(finished):
    card = cards.privacy_card_of(as_deployed(open_completed(finished(*DP)[0])))
    assert "the coordinator has only their statements" in " ".join(card["source"])
    assert "the hospitals' own ledgers record how many" in card["asked"]
    assert not any("accuracies of teachers" in line for line in card["not_covered"])


def test_a_card_says_what_its_scores_are_computed_from(finished):
    """The ensemble's score is exact: next to answers that prove a number, it is not on the card."""

    def said(run):
        return cards.privacy_card_of(run)["post_processing"]

    private, noisy = (open_completed(finished(*each)[0]) for each in (DP, PLAIN))
    assert cards.EXACT_SCORES in said(private)
    assert cards.EXACT_SCORES not in said(noisy)
    scores = {**private.summary["accuracy"], "ensemble": None}
    hospitals = as_deployed(private)
    hospitals.summary["accuracy"] = scores
    assert cards.STUDENTS_SCORES in said(hospitals)
    assert cards.EXACT_SCORES not in said(hospitals)
    for run in (private, noisy, hospitals):
        assert (cards.NO_EXACT_SCORES in said(run)) == (run is hospitals)


def test_a_card_of_secure_sums_names_each_observer_and_no_images(finished):
    quorum = "answers.noise_at=distributed", "answers.quorum={threshold: 3, colluding: 1}"
    run = open_completed(finished(*SUMS, "num_clients=3", *quorum)[0])
    card = cards.privacy_card_of(run)
    text = cards.as_markdown(card)
    for seen in run.summary["privacy"]["observers"]:
        assert f"against {seen['observer']}\n" in text
    assert "- the coordinator together with more than 1 client: the numbers with trust" in text
    assert "any observer" not in text
    assert "the teachers themselves" not in text  # there are none
    assert card["asked"].endswith("no answers to images")
    answers = open_completed(finished(*DP)[0])
    assert "of 64 images" in cards.privacy_card_of(answers)["asked"]  # the control


def test_a_deployments_card_names_absent_hospitals(finished, tmp_path):
    """A hospital that never connected released nothing, so the model is not made of its data."""
    run = as_deployed(open_completed(finished(*DP)[0]))
    assert "connected" not in cards.privacy_card_of(run)["asked"]  # the control
    run = dataclasses.replace(run, folder=shutil.copytree(run.folder, tmp_path / "run"))
    away = {"ask": "aa", "answered": [0], "refused": {"1": "away"}, "unconnected": [1]}
    (run.folder / "asks.jsonl").write_text(json.dumps(away) + "\n")
    card = cards.privacy_card_of(run)
    everyone = run.experiment.config.num_clients
    assert card["asked"].startswith(f"{everyone} hospitals (hospital 1 never connected), ")
    text = cards.model_card(run, "x.onnx", "0123456789", card)
    assert f"{everyone - 1} client" in " ".join(text.split())
    assert f"made of what {everyone} client" not in " ".join(text.split())


# --- cards of the hub, whose own validation needs the network: its data classes read them back ---


def test_a_model_card_is_what_the_hub_reads(finished, tmp_path):
    folder, summary, _ = finished(*DP)
    export(folder, tmp_path / "model", "safetensors")
    content = (tmp_path / "model" / "README.md").read_text()
    card = ModelCard(content)
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores["accuracy"] == summary["accuracy"]["student"]
    assert scores["roc_auc"] == summary["auroc"]["student"]
    result = card.data.eval_results[0]
    assert (result.task_type, result.dataset_name) == ("image-classification", "digits")
    assert card.data.model_name == "fed_dpsd-digits"
    assert card.data.pipeline_tag == "image-classification"
    block = content.split("---")[1]
    assert yaml.safe_load(card.data.to_yaml()) == yaml.safe_load(block)
    said = read(tmp_path / "model")[0]
    assert all(line in content for line in said["verdict"] + said["notes"])
    assert "predict student.safetensors" in content
    assert "\n- the choice of settings from the results of several runs (tuning)\n" in content


def test_data_of_ones_own_is_not_named_as_the_hubs(finished):
    run = open_completed(finished(*DP)[0])
    data = dataclasses.replace(run.experiment.config.data, hub="owner/set", path="/mine")
    config = dataclasses.replace(run.experiment.config, data=data)
    own = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, config=config))
    content = cards.model_card(own, "x.onnx", "0123456789", cards.privacy_card_of(run))
    assert "owner/set" not in content


def test_a_student_that_was_not_scored_has_no_result(finished):
    run = open_completed(finished(*CLEAR)[0])
    nothing = {key: {**run.summary[key], "student": None} for key in ("accuracy", "auroc")}
    unscored = dataclasses.replace(run, summary={**run.summary, **nothing})
    card = ModelCard(cards.model_card(unscored, "x.onnx", "01", cards.privacy_card_of(run)))
    assert card.data.eval_results is None
    assert "The student was not scored." in card.text
    assert "Accuracies were" not in card.text
    assert not any("test images" in line for line in cards.privacy_card_of(unscored)["not_covered"])


@every(
    ("overrides", "guaranteed"),
    [
        (CLEAR, False),
        (DP, False),
        ((*DP, "noise=secure"), True),
        (WEAK, False),
    ],
)
def test_differential_privacy_is_a_tag_only_where_a_record_has_a_guarantee(
    finished, overrides, guaranteed
):
    run = open_completed(finished(*overrides)[0])
    data = ModelCard(cards.model_card(run, "x.onnx", "01", cards.privacy_card_of(run))).data
    assert ("differential-privacy" in data.tags) == guaranteed


@every(("number", "size"), [(999, "n<1K"), (1_000, "1K<n<10K"), (60_000, "10K<n<100K")])
def test_a_dataset_card_is_what_the_hub_reads(finished, number, size):
    run = open_completed(finished(*DP)[0])
    content = cards.dataset_card(
        *(
            run,
            "train.parquet",
            number,
            "They were drawn.",
            True,
            cards.privacy_card_of(run),
        )
    )
    card = DatasetCard(content)
    assert card.data.size_categories == [size]
    assert card.data.task_categories == ["image-classification"]
    assert card.data.configs[0]["data_files"] == [{"split": "train", "path": "train.parquet"}]
    assert yaml.safe_load(card.data.to_yaml()) == yaml.safe_load(content.split("---")[1])
