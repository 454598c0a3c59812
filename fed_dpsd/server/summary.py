"""The content of summary.json: the facts of a run, its student's accuracy and its privacy cost."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.accounts.entry import entries_of_run
from fed_dpsd.accounts.secret import ledger_folder
from fed_dpsd.accounts.simulated import entries_in
from fed_dpsd.accounts.words import PrivacyCard, short, spent
from fed_dpsd.errors import UserError, one_line
from fed_dpsd.experiment import Experiment, data_counts, largest_partition, unused_records
from fed_dpsd.methods.method import PublicContext
from fed_dpsd.models.devices import named_device, torch_device
from fed_dpsd.models.precision import choose_precision, precision_of
from fed_dpsd.server.charge_log import ChargeLog
from fed_dpsd.server.metrics import METRICS
from fed_dpsd.storage import client_name, run_name, shown_path, write_json

OF_TEACHERS = ("ensemble", "weighted_ensemble", "clients", "vote")
ANSWERS = ("forward_answers", "backward_answers")  # answers of teachers: images times teachers
TRAVELLED = ("bytes_to_clients", "bytes_to_server")
MOST_NAMED = 5  # clients in a line on a round


def blank_summary(experiment: Experiment, engine: str) -> dict[str, Any]:
    """Return the content of summary.json with null for every unknown value."""
    config = experiment.config
    return {
        "status": "failed",
        "error": None,
        "method": experiment.method_name,
        "data": config.data.name,
        "num_clients": config.num_clients,
        "seed": config.seed,
        "engine": engine,
        "accuracy": {
            "student": None,
            "ensemble": None,
            "weighted_ensemble": None,
            "clients": None,
            "vote": None,
            "evaluated_on": None,
            "covered_by_epsilon": False,
        },
        "auroc": {"student": None, "ensemble": None, "weighted_ensemble": None, "clients": None},
        "confusion": None,
        "calibration": None,
        "queries": {"answered_per_client": 0, **dict.fromkeys((*ANSWERS, *TRAVELLED), 0)},
        "privacy": None,
        "diagnostics": {},
        "precision": {"asked": config.precision, "teachers": None, "student": None},
        "seconds": {"total": 0.0, "teachers": 0.0, "rounds": 0.0},
        "student_sha256": None,
    }


def read_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json of a run folder; empty if there is none yet."""
    path = folder / "summary.json"
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except ValueError:
        raise UserError(
            f"{path} is damaged; delete it, then run `fed-dpsd resume {shown_path(folder)}` to "
            "write it again"
        ) from None


def precision_of_teachers(experiment: Experiment, context: PublicContext) -> str | None:
    """Return the precision of the clients' teachers; None in a deployment, where sites choose it.

    If architectures differ in precision, both are named, as in "bfloat16 and float32".
    """
    config, names = experiment.config, set()
    if not config.federation.simulation:
        return None
    own_steps = experiment.training.reads == "features"
    asked = "float32" if own_steps else config.precision
    clients = {config.architecture(client): client for client in range(config.num_clients)}
    for client in clients.values():
        device, teacher = torch_device(named_device(config, client)), context.make_teacher(client)
        names.add(precision_of(choose_precision(teacher, asked, device)))
    return " and ".join(sorted(names))


def record_round(summary: dict[str, Any], line: Mapping[str, Any]) -> None:
    """Record the student's scores and the answers so far, from a line of rounds.jsonl."""
    for name in METRICS:
        summary[name]["student"] = line[f"student_{name}"]
    for name in ANSWERS:
        summary["queries"][name] = line[name]
    for name in ("confusion", "calibration"):
        summary[name] = line[f"student_{name}"]


def write_failure(experiment: Experiment, folder: Path, engine: str, error: BaseException) -> None:
    """Write the summary.json of a run that failed before or outside `run`."""
    summary = blank_summary(experiment, engine) | {"error": one_line(error)}
    add_privacy(summary, experiment, folder)
    write_json(folder / "summary.json", summary)


def add_privacy(summary: dict[str, Any], experiment: Experiment, folder: Path) -> None:
    """Add the run's cost, from the plan, the clients' statements and simulated ledgers."""
    ledgers = []
    config, plan = experiment.config, experiment.plan
    try:
        simulated = config.federation.simulation
        found = entries_in(ledger_folder(experiment, folder)) if simulated else {}
        accounts = {path.stem: entries for path, entries in found.items()}
        for client in range(config.num_clients if simulated else 0):
            entries = accounts.get(client_name(client), ())
            if config.ledger:  # a shared ledger holds the charges of all runs
                entries = entries_of_run(entries, run_name(folder))
            ledgers.append(entries)
        charge_log = ChargeLog(folder, plan.releases)
        charged, notes = charge_log.charged, charge_log.notes()
        # With thousands of clients, most statements are equal.
        stated = (
            {frozenset(each.items()): each for each in charge_log.heard.values()} if ledgers else {}
        )
    except UserError as error:  # the cost is unknown, so the card must claim no finite epsilon
        charged, notes, stated = Counter({str(error): 1}), (str(error),), {}
    answered = [sum(entry.queries for entry in entries) for entries in ledgers]
    summary["queries"]["answered_per_client"] = max(answered, default=None)
    card = summary["privacy"] = privacy_card(
        experiment, plan, ledgers, charged, notes, [*stated.values()]
    )
    largest = largest_partition(experiment)
    summary["diagnostics"] |= {
        "records_of_largest_client": largest,
        "data": data_counts(experiment),
        "unused": unused_records(experiment) if largest else "",
    }
    # Teachers' scores are computed from the teachers, so they are only as private as training.
    finite = [row for row in card["proven"] if row["epsilon"] != "inf"]
    by_training = all(row["basis"] == "training" for row in finite)
    summary["accuracy"]["covered_by_epsilon"] = bool(finite) and by_training
    if not by_training:
        _move_uncovered_scores(summary)


def _move_uncovered_scores(summary: dict[str, Any]) -> None:
    """Move teachers' scores, which no epsilon covers, to `diagnostics`, which is never exported."""
    for metric in METRICS:
        scores = summary[metric]
        for role in OF_TEACHERS:
            if scores.get(role) is not None:
                summary["diagnostics"].setdefault(metric, {})[role] = scores[role]
                scores[role] = None


def scores_of(summary: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return all scores of a run by role; only its owner may see the ones without an epsilon."""
    apart = summary.get("diagnostics", {}).get(metric, {})
    return {role: apart.get(role, score) for role, score in summary[metric].items()}


def result_line(experiment: Experiment, summary: Mapping[str, Any]) -> str:
    """Return the result in one line: accuracies, the published epsilon and the proven one.

    The ensemble's accuracy is included if the proven epsilon covers it. Two classes are seldom
    balanced, so their accuracies are shown with the AUROC.
    """
    two_classes = experiment.config.data.num_classes == 2
    parts = []
    for role in ("student", "ensemble"):
        fraction, area = summary["accuracy"][role], summary["auroc"][role]
        if role == "ensemble" and fraction is None:
            continue
        part = f"{role} unknown" if fraction is None else f"{role} {100 * fraction:.1f} %"
        parts.append(part + (f" (AUROC {area:.3f})" if two_classes and area is not None else ""))
    return " · ".join([*parts, short(PrivacyCard(summary["privacy"]))])


def round_text(line: Mapping[str, Any], who: str = "client") -> str:
    """Return a line of rounds.jsonl as readable text; queries and seconds are for the round."""
    refused = f" · {_missing_clients(line, who)}" if line["refused"] else ""
    accuracy, agreed = line["student_accuracy"], line.get("agreement")
    student = "not scored" if accuracy is None else f"{100 * accuracy:.1f} %"
    agreement = "" if agreed is None else f"agreement {100 * agreed:.1f} % · "
    cost = f"{spent(line['spent'])} · " if "spent" in line else ""
    queries = f"{line['round_queries']:,} queries · " if line["round_queries"] else ""
    return (
        f"round {line['round']}/{line['rounds']} · student {student} · {agreement}{cost}"
        f"{queries}{line['round_seconds']:.1f} s{refused}"
    )


def _missing_clients(line: Mapping[str, Any], who: str) -> str:
    """Describe the clients that gave no answer in a round because they refused or were absent."""
    clients = sorted(map(int, line["refused"]))
    if len(clients) > MOST_NAMED:
        return f"without {len(clients):,} {who}s"
    return f"without {who}{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"
