"""The privacy card of an artefact: its run's requests, answers and proofs, for readers and scripts.

All numbers come from the run's summary.json; none are computed here. `as_markdown` writes
PRIVACY.md from the content of privacy_card.json alone, so the two cannot differ.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template

from fed_dpsd import __version__
from fed_dpsd.accounts.card import how_answered, how_trained
from fed_dpsd.accounts.words import (
    BY,
    MORE_NOTE,
    RUN_NOTE,
    SEEDED_NOTE,
    SEEDED_VERDICT,
    TUNING_NOTE,
    PrivacyCard,
    is_meaningful,
    published_line,
    sentences,
    too_many,
)
from fed_dpsd.errors import counted
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.epsilon import Epsilon, rounded_up
from fed_dpsd.server.attendance import absences, incomplete_attendance, requests_of
from fed_dpsd.server.charge_log import ChargeLog
from fed_dpsd.server.run_folder import CompletedRun
from fed_dpsd.server.summary import result_line
from fed_dpsd.storage import jinja_environment, to_json_bytes, to_utf8

POST_PROCESSING = (
    "This artefact is computed only from the clients' releases{} and from public information, such "
    "as settings and queries. Making or copying it, or computing anything from it, is "
    "post-processing and has no further privacy cost."
)
STUDENTS_SCORES = "The student's scores are computed from the student and the test images alone."
EXACT_SCORES = (
    "The ensemble's score is not: simulated clients computed it exactly from their teachers, and "
    "only the epsilons of their private training cover it."
)
NO_EXACT_SCORES = "No hospital sends a score of its teachers."
UNITS = {"record": "a record", "patient": "a patient", "client": "a whole client"}
NOTHING_PROVEN = "nothing is proven"
CHANGES = {"add_remove": "added or removed", "replace_one": "replaced"}
SIZES = {1e3: "n<1K", 1e4: "1K<n<10K", 1e5: "10K<n<100K", 1e6: "100K<n<1M", 1e7: "1M<n<10M"}
LARGEST = "10M<n<100M"


def privacy_card_of(run: CompletedRun) -> dict[str, Any]:
    """Return the content of privacy_card.json, for anything made from a run.

    `privacy` is copied from the run's summary; the other keys are texts and names. If the noise is
    seeded, the verdict starts with this fact, because readers quote the first line.
    """
    experiment, summary = run.experiment, run.summary
    card = PrivacyCard(summary["privacy"])
    notes = dict.fromkeys(note for epsilon in card.proven for note in epsilon.notes)
    versions, said = run.folder / "versions.json", sentences(card, experiment.seeded)
    return {
        "run": {
            **{key: summary[key] for key in ("method", "data", "num_clients", "seed", "engine")},
            "student_sha256": summary["student_sha256"],
            "result": result_line(experiment, summary),
        },
        "verdict": sorted(said, key=lambda text: not text.startswith(SEEDED_VERDICT)),
        "asked": _describe_requests(run),
        "answered": {"training": how_trained(experiment), "answers": how_answered(experiment)},
        "privacy": dict(summary["privacy"]),
        "published": published_line(card),
        "source": list(_source(run)),
        "not_covered": list(_not_covered(experiment, summary, card)),
        "notes": [note for note in notes if note not in (RUN_NOTE, TUNING_NOTE)],
        "not_reviewed": list(experiment.config.not_reviewed),
        "post_processing": " ".join(_computed_from(experiment, summary)),
        "versions": {
            "run": json.loads(versions.read_text()) if versions.exists() else None,
            "artefact": __version__,
        },
    }


def _computed_from(experiment: Experiment, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on what an artefact and the scores on its card are computed from."""
    noisy = experiment.answers.noise_at == "server"
    yield POST_PROCESSING.format(", with the coordinator's noise," if noisy else "")
    if summary["accuracy"]["student"] is not None:
        yield STUDENTS_SCORES
    if summary["accuracy"]["ensemble"] is not None:
        yield EXACT_SCORES
    if not experiment.config.federation.simulation:
        yield NO_EXACT_SCORES


def _describe_requests(run: CompletedRun) -> str:
    config, summary = run.experiment.config, run.summary
    simulated = config.federation.simulation
    clients = counted(config.num_clients, "client" if simulated else "hospital")
    if not simulated and (absent := absences(run.folder)):
        clients += f" ({', '.join(absent)})"
    answers = run.experiment.answers
    if summary["privacy"]["answers"] != answers.name or not answers.from_teachers:
        return f"{clients}; no answers to images"
    cohort = config.clients_per_round
    drawn = (
        "" if cohort is None else f", {cohort:,} of them in each round, drawn by a public schedule"
    )
    rounds = counted(config.rounds, "round")
    requests = f"{clients}{drawn}, {rounds} of {config.queries_per_round:,} images"
    if (most := summary["queries"]["answered_per_client"]) is None:
        return f"{requests}; only the hospitals' own ledgers record how many each answered"
    return f"{requests}; {most:,} answered by the client that answered most"


def _source(run: CompletedRun) -> Iterator[str]:
    config = run.experiment.config
    stated = len(ChargeLog(run.folder, {}).heard)
    yield (
        "Each proven epsilon covers the run's whole plan, even if only part of it was used, and "
        "all other charges."
    )
    yield f"{stated:,} of {config.num_clients:,} clients stated what the run cost them."
    if config.federation.simulation:
        yield (
            "`spent`, the largest cost of this run to any client, was read from the simulated "
            "clients' ledgers."
        )
    else:
        yield "Hospitals keep their ledgers, so the coordinator has only their statements."
    if any(MORE_NOTE in row["notes"] for row in run.summary["privacy"]["proven"]):
        yield "More was charged than planned; the numbers cover all charges."


def _not_covered(
    experiment: Experiment, summary: Mapping[str, Any], card: PrivacyCard
) -> Iterator[str]:
    for claim in card.proven:
        if math.isinf(claim.value):
            unit, change = UNITS[claim.unit], CHANGES[claim.relation]
            yield f"{unit} that is {change}: {NOTHING_PROVEN} ({claim.unit}, {claim.relation})"
    if coalition := too_many(card.content):
        yield f"{coalition}: the numbers with trust threshold do not hold against them"
    if experiment.answers.from_teachers and not card.covers_nothing:
        yield from _not_covered_of_teachers(experiment, card)
    if summary["accuracy"]["student"] is not None:
        yield "the test images, treated as public: accuracies are computed from them without noise"
    yield "other runs on the same records: the clients' ledgers add them up"
    yield "the choice of settings from the results of several runs (tuning)"


def _not_covered_of_teachers(experiment: Experiment, card: PrivacyCard) -> Iterator[str]:
    """Yield what training proves against anyone who has a teacher, unless the card covers it."""
    if experiment.training.name == "plain":
        yield (
            "the teachers themselves: they are trained without noise, so anyone who has one may "
            "learn its records"
        )
        return
    rows = [row for row in card.content["proven"] if row["unit"] == "record"]
    if all(row["basis"] == "training" or row["epsilon"] == "inf" for row in rows):
        return
    trained = [
        row | other
        for row in rows
        for other in (row, *row["beside"])
        if other["basis"] == "training"
    ]
    if len(trained) < len(rows) or any(row["epsilon"] == "inf" for row in trained):
        yield (
            "the teachers themselves: their training proves nothing for a record, so anyone who "
            "has one may learn its records"
        )
        return
    numbers = " and ".join(
        f"{rounded_up(float(row['epsilon']))} (record, {row['relation']})" for row in trained
    )
    yield (
        f"the teachers themselves: against anyone who has one, their training alone proves "
        f"{numbers}, trust {trained[0]['trust']}, delta {trained[0]['delta']:g}"
    )


def cards_in(folder: Path, card: Mapping[str, Any]) -> dict[Path, bytes]:
    """Return the content of privacy_card.json and PRIVACY.md in a folder, by path."""
    return {
        folder / "privacy_card.json": to_json_bytes(card),
        folder / "PRIVACY.md": to_utf8(as_markdown(card)),
    }


def as_markdown(card: Mapping[str, Any]) -> str:
    """Return PRIVACY.md, made from the content of privacy_card.json."""
    privacy = card["privacy"]
    label = [privacy["label"]] if privacy["label"] else []
    known = {name: version for name, version in (card["versions"]["run"] or {}).items() if version}
    return _template("PRIVACY.md.j2").render(
        card=card,
        rows=[_cells(row) for row in (*privacy["proven"], *label)],
        libraries=[f"{name} {version}" for name, version in known.items()],
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    claim = Epsilon.from_json(row)
    planned, spent = (
        rounded_up(float(row[key])) if key in row else "" for key in ("planned", "spent")
    )
    return (
        *(claim.unit, claim.relation, claim.number, f"{claim.delta:g}", claim.trust),
        *(BY[row.get("basis", "training")], planned, spent, claim.accountant),
    )


# --- cards for the Hugging Face hub ---


def model_card(
    run: CompletedRun, file: str, classes: Sequence[str], card: Mapping[str, Any]
) -> str:
    """Return the README.md of an exported student."""
    config, summary = run.experiment.config, run.summary
    missed = {} if config.federation.simulation else incomplete_attendance(requests_of(run.folder))
    return _hub_card(
        "model.md.j2",
        *(run, file, card),
        hub=config.data.hub if config.data.path is None else None,
        scores={"accuracy": summary["accuracy"]["student"], "AUROC": summary["auroc"]["student"]},
        classes=classes,
        sizes=config.data.shape,
        clients=config.num_clients - sum(not known.answered for known in missed.values()),
    )


def dataset_card(
    run: CompletedRun, file: str, number: int, origin: str, labelled: bool, card: Mapping[str, Any]
) -> str:
    """Return the README.md of a set of synthetic images."""
    size = next((size for most, size in SIZES.items() if number < most), LARGEST)
    facts = {"number": number, "size": size, "origin": origin, "labelled": labelled}
    return _hub_card("dataset.md.j2", run, file, card, **facts)


@functools.cache
def _template(name: str) -> Template:
    return jinja_environment(__file__).get_template(name)


def _hub_card(
    template: str, run: CompletedRun, file: str, card: Mapping[str, Any], **values: Any
) -> str:
    facts = {"summary": run.summary, "file": file, "card": card, "tags": _tags(run.summary)}
    return _template(template).render(facts, nothing_proven=NOTHING_PROVEN, **values)


def _tags(summary: Mapping[str, Any]) -> list[str]:
    """Return the tags, including differential-privacy if records have a guarantee."""
    card = PrivacyCard(summary["privacy"])
    claim = card.epsilon("record", "add_remove")
    guaranteed = is_meaningful(claim) and SEEDED_NOTE not in claim.notes and not card.review
    tags = ["fed-dpsd", "image-classification", "federated-learning", "knowledge-distillation"]
    return [*tags, "differential-privacy"] if guaranteed else tags
