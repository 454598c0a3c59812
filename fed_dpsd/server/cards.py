"""The privacy card of an artefact: what its run asked, answered and proved, for people and scripts.

Every number is the run's own, from summary.json; none is computed here. `as_markdown` writes
PRIVACY.md from the content of privacy_card.json alone, so the two cannot differ.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fed_dpsd import __version__
from fed_dpsd.accounts.card import BY, MORE_NOTE, RUN_NOTE, TUNING_NOTE, PrivacyCard
from fed_dpsd.accounts.verdict import (
    SEEDED_VERDICT,
    how_answered,
    how_trained,
    published_line,
    verdict,
)
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.server.charge_log import ChargeLog
from fed_dpsd.server.completed import CompletedRun
from fed_dpsd.server.summary import result_line
from fed_dpsd.storage import encoded, json_of

POST_PROCESSING = (
    "This artefact is computed from what the clients released and from what is public (settings, "
    "questions, test images), and from nothing else. Making it, copying it, and everything "
    "computed from it costs no more privacy: post-processing."
)
UNITS = {"record": "a record", "patient": "a patient", "client": "a whole client"}
NOTHING_PROVEN = "nothing is proven"
CHANGES = {"add_remove": "added or removed", "replace_one": "replaced"}


def privacy_card_of(run: CompletedRun) -> dict[str, Any]:
    """Return the content of privacy_card.json, for anything that is made of a run.

    `privacy` is that of the run's summary, unchanged. The other keys are words and names: the
    `verdict` in sentences, what was `asked` and `answered`, the `source` of the numbers, what is
    `not_covered` by them, further `notes` on them, plug-ins that are `not_reviewed`, and
    `versions`. Where noise is seeded, the verdict begins with that: people quote first lines.
    """
    experiment, summary = run.experiment, run.summary
    card = PrivacyCard(summary["privacy"])
    notes = dict.fromkeys(note for epsilon in card.proven for note in epsilon.notes)
    versions = run.folder / "versions.json"
    return {
        "run": {
            **{key: summary[key] for key in ("method", "data", "num_clients", "seed", "engine")},
            "student_sha256": summary["student_sha256"],
            "result": result_line(experiment, summary),
        },
        "verdict": sorted(verdict(experiment, card), key=lambda said: said != SEEDED_VERDICT),
        "asked": _asked(run),
        "answered": {
            "training": how_trained(experiment),
            "answers": how_answered(experiment),
        },
        "privacy": dict(summary["privacy"]),
        "published": published_line(card),
        "source": list(_source(run)),
        "not_covered": list(_not_covered(experiment, summary, card)),
        "notes": [note for note in notes if note not in (RUN_NOTE, TUNING_NOTE)],
        "not_reviewed": list(experiment.config.plugins),
        "post_processing": POST_PROCESSING,
        "versions": {
            "run": json.loads(versions.read_text()) if versions.exists() else None,
            "artefact": __version__,
        },
    }


def _asked(run: CompletedRun) -> str:
    """Say what the server asked, and how much of it was answered."""
    config, summary = run.experiment.config, run.summary
    clients = f"{config.num_clients:,} client{'s' * (config.num_clients != 1)}"
    if summary["privacy"]["answers"] != run.experiment.answers.name:
        return f"{clients}; no answers to images"
    cohort = config.clients_per_round
    drawn = "" if cohort is None else f", {cohort:,} of them in each round by a public schedule"
    rounds = f"{config.rounds:,} round{'s' * (config.rounds != 1)}"
    asked = f"{clients}{drawn}, {rounds} of {config.queries_per_round:,} images"
    if (most := summary["queries"]["answered_per_client"]) is None:
        return f"{asked}; how many each answered is in the hospitals' own ledgers"
    return f"{asked}; {most:,} answered by the client that answered most"


def _source(run: CompletedRun) -> Iterator[str]:
    """Yield where the numbers come from: the plan, and what clients' ledgers or statements say."""
    config = run.experiment.config
    stated = len(ChargeLog(run.folder, {}).heard)
    yield (
        "Each proven epsilon covers the run's whole plan, even if only a part of it was used, and "
        "all that was charged besides."
    )
    yield f"{stated:,} of {config.num_clients:,} clients stated what the run cost them."
    if config.federation.simulation:
        yield (
            "The simulated clients' ledgers were read: `spent` is the most that this run cost one "
            "of them."
        )
    else:
        yield "Hospitals keep their ledgers, so the coordinator has their statements alone."
    if any(MORE_NOTE in row["notes"] for row in run.summary["privacy"]["proven"]):
        yield "More was charged than planned; the numbers are of what was charged."


def _not_covered(
    experiment: Experiment, summary: Mapping[str, Any], card: PrivacyCard
) -> Iterator[str]:
    """Yield what the proven numbers leave out."""
    for claim in card.proven:
        if math.isinf(claim.value):
            unit, change = UNITS[claim.unit], CHANGES[claim.relation]
            yield f"{unit} that is {change}: {NOTHING_PROVEN} ({claim.unit}, {claim.relation})"
    if not card.covers_nothing:
        yield from _of_teachers(experiment, card)
    if summary["accuracy"]["student"] is not None:
        yield "the test images, taken as public: accuracies are computed from them without noise"
    yield "other runs on the same records: the clients' ledgers add them up"
    yield "the choice of settings by the results of several runs (tuning)"


def _of_teachers(experiment: Experiment, card: PrivacyCard) -> Iterator[str]:
    """Yield what is left of the proof for those who hold a teacher: that of its training alone."""
    if experiment.training.name == "plain":
        yield (
            "the teachers themselves: they are trained without noise, so whoever holds one may "
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
            "the teachers themselves: their training proves nothing of a record, so whoever holds "
            "one may learn it"
        )
        return
    numbers = " and ".join(
        f"{Epsilon.from_json(row).number(5)} (record, {row['relation']})" for row in trained
    )
    yield (
        f"the teachers themselves: against whoever holds one, their training alone proves "
        f"{numbers}, trust {trained[0]['trust']}, delta {trained[0]['delta']:g}"
    )


def cards_in(folder: Path, card: Mapping[str, Any]) -> dict[Path, bytes]:
    """Return the content of privacy_card.json and PRIVACY.md in a folder."""
    return {
        folder / "privacy_card.json": json_of(card),
        folder / "PRIVACY.md": encoded(as_markdown(card)),
    }


def as_markdown(card: Mapping[str, Any]) -> str:
    """Return PRIVACY.md, from the content of privacy_card.json."""
    return "\n".join(_lines(card)) + "\n"


def _lines(card: Mapping[str, Any]) -> Iterator[str]:
    run, privacy, versions = card["run"], card["privacy"], card["versions"]
    yield "# Privacy card\n"
    if card.get("artefact"):
        yield f"Of {card['artefact']}, made of a run of method {run['method']} on {run['data']}.\n"
    if card["not_reviewed"]:
        plugins = " and ".join(card["not_reviewed"])
        yield (
            f"**Not reviewed**: {plugins} took part, and nothing is proven of what plug-ins do.\n"
        )
    yield from _bullets(card["verdict"])
    yield f"{card['post_processing']}\n"
    yield "## Asked and answered\n"
    answered = card["answered"]
    yield from _bullets(
        (
            f"asked: {card['asked']}",
            f"training of the teachers: {answered['training']}",
            f"answers: {answered['answers']}",
        )
    )
    yield "## Proven\n"
    yield "| unit | relation | epsilon proven | delta | trust | by | planned | spent | accountant |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in privacy["proven"]:
        yield _row(row)
    if privacy["label"]:
        yield _row(privacy["label"])
    yield ""
    if privacy["reason"]:
        yield f"Where nothing finite is proven: {privacy['reason']}.\n"
    yield from _bullets(card["source"])
    yield "## Published, which guarantees nothing\n"
    yield f"{card['published']}.\n"
    yield "## Not covered\n"
    yield from _bullets(card["not_covered"])
    if card["notes"]:
        yield "Notes on the proven numbers:\n"
        yield from _bullets(card["notes"])
    yield "## Versions\n"
    known = {name: version for name, version in (versions["run"] or {}).items() if version}
    libraries = [f"{name} {version}" for name, version in known.items()]
    yield from _bullets(
        (f"the run: {', '.join(libraries) or 'not known'}", f"this card: {versions['artefact']}")
    )


def _row(row: Mapping[str, Any]) -> str:
    """Return a row of the table of proven epsilons."""
    claim = Epsilon.from_json(row)
    cells = (
        *(claim.unit, claim.relation, claim.number(5), f"{claim.delta:g}", claim.trust),
        *(BY.get(row.get("basis", "training")), _number(row, "planned"), _number(row, "spent")),
        claim.accountant,
    )
    return f"| {' | '.join(cells)} |"


def _number(row: Mapping[str, Any], key: str) -> str:
    """Return another number of a row of summary.json as it is printed; "" where it has none."""
    return Epsilon.from_json({**row, "epsilon": row[key]}).number(5) if key in row else ""


def _bullets(lines: Any) -> Iterator[str]:
    yield from (f"- {line}" for line in lines)
    yield ""
