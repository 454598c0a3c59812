"""Messages about a run: what it will do, its progress and the next steps."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.card import privacy_card, requested_unit
from fed_dpsd.accounts.words import NOTHING_NOTE, SEEDED_NOTE, PrivacyCard, short
from fed_dpsd.config.bind import read_run
from fed_dpsd.errors import counted, one_line
from fed_dpsd.experiment import Experiment, data_counts
from fed_dpsd.server import checkpoint
from fed_dpsd.server.summary import read_summary
from fed_dpsd.storage import is_run_folder, shown_path

NO_GUARANTEE = (
    "seeded noise: anyone who knows the seed, which is in the run folder, can remove it, so the "
    "folder's files carry no guarantee; noise=secure draws it from a secret outside the folder"
)


def describe_start(experiment: Experiment, folder: Path) -> Iterator[str]:
    """Yield what a run is about to do, line by line; the first line needs no computation."""
    config = experiment.config
    yield f"run folder: {folder}"
    architectures = sorted(set(map(config.architecture, range(config.num_clients))))
    teachers = config.teachers_per_client
    by = ", by patient" if requested_unit(experiment) == "patient" else ""
    images = experiment.answers.from_teachers
    queries = f" of {config.queries_per_round:,} queries" if images else ""
    yield (
        f"data {config.data.name} · method {experiment.method_name} · "
        f"{counted(config.num_clients, 'client')}, each with {counted(teachers, 'teacher')} "
        f"({', '.join(architectures)}; training {experiment.training.name}, "
        f"answers {experiment.answers.name}{by}) · "
        f"{counted(config.rounds, 'round')}{queries}"
    )
    if counts := data_counts(experiment):
        yield f"data: {'; '.join(counts)}"
    before = read_summary(folder)
    if before.get("error"):
        yield f"last error: {before['error']}"
    if number := checkpoint.latest(folder / "checkpoint"):
        yield f"resuming after round {number} of {config.rounds}"
    card = PrivacyCard(privacy_card(experiment, experiment.plan), "planned")
    yield f"privacy: {short(card)}"
    if config.tracker == "tensorboard":
        yield f"curves and images: tensorboard --logdir {shown_path(folder.parent)}"


def next_steps(folder: Path, summary: Mapping[str, Any], ledgers: Path) -> Iterator[str]:
    """Yield what a completed run's numbers do not cover, and the next commands."""
    place, proven = shown_path(folder), summary["privacy"]["proven"]
    if any(SEEDED_NOTE in row["notes"] and row["epsilon"] != "inf" for row in proven):
        yield NO_GUARANTEE
    # method=local has no student; method=ensemble's student is all teachers together
    if summary["student_sha256"] is not None and summary["method"] != "ensemble":
        yield f"export the student: fed-dpsd export {place}"
    yield f"report with tables and figures: fed-dpsd report {place}"
    if not all(NOTHING_NOTE in row["notes"] for row in proven):
        yield f"what each client has spent: fed-dpsd privacy ledger {shown_path(ledgers)}"


def how_to_continue(folder: Path, error: BaseException) -> str:
    """Describe how far an interrupted run got, and how to continue it."""
    if not is_run_folder(folder):
        return "the run had not started; start it again"
    number = checkpoint.latest(folder / "checkpoint")
    where = f"after round {number}" if number else "before the end of its first round"
    command = f"fed-dpsd resume {shown_path(folder)}"
    if isinstance(error, Exception):
        others = "others, or a changed plug-in," if read_run(folder).get("plugins") else "others"
        return (
            f"failed {where}; after fixing the cause: {command} (with the same settings; {others} "
            "need a new run)"
        )
    return f"{one_line(error)} {where}; to continue: {command}"
