"""The loop around every method: evaluation, logs, checkpoints, resume and the summary, once."""

import datetime
import functools
import json
import os
import platform
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from fed_dpsd import __version__
from fed_dpsd.config import UserError
from fed_dpsd.methods.method import (
    Bank,
    Round,
    State,
    World,
    below,
    predict,
    to_unit,
)
from fed_dpsd.privacy.mechanism import Epsilon
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.runtime import checkpoint
from fed_dpsd.runtime.card import NOTHING_NOTE, plan_of, privacy_card
from fed_dpsd.runtime.checkpoint import write_atomically
from fed_dpsd.runtime.diagnostics import diagnose
from fed_dpsd.runtime.experiment import (
    Experiment,
    evaluated_on,
    read_yaml,
    set_up,
    test_split,
)
from fed_dpsd.runtime.federation import HostedFederation
from fed_dpsd.runtime.metrics import METRICS, confusion
from fed_dpsd.runtime.site import largest_share, ledger_of
from fed_dpsd.runtime.tally import Tally
from fed_dpsd.streams import Streams

MEANINGFUL_EPSILON = 10.0
HEADLINE = ("record", "replace_one")
ANSWERS = ("forward_answers", "backward_answers")  # of teachers: images times teachers
TRAVELLED = ("bytes_to_clients", "bytes_to_server")
_LIBRARIES = ("flwr", "ray", "torch", "torchvision", "numpy", "hydra-core", "dp-accounting")

Progress = Callable[[Mapping[str, Any]], None]


def name_run_folder(experiment: Experiment) -> Path:
    """Where a new run goes: `run_folder`, or a new name below `out`."""
    config = experiment.config
    if config.run_folder:
        return Path(config.run_folder)
    when = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    what = f"{_method_name(experiment)}-{config.data.name}-seed{config.seed}"
    return Path(config.out) / f"{when}-{what}-{secrets.token_hex(2)}"


def new_run_folder(experiment: Experiment) -> Path:
    """Create the run folder with its configuration; an existing one is never overwritten.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    folder = name_run_folder(experiment)
    try:
        folder.mkdir(parents=True)
        versions = {library: metadata.version(library) for library in _LIBRARIES}
        versions |= {"fed-dpsd": __version__, "python": platform.python_version()}
        versions |= {"commit": _commit(), "machine": _machine()}
        _write_json(folder / "versions.json", versions)
        # Last, for it is what makes the folder a run folder.
        write_atomically(
            folder / "config.yaml", yaml.safe_dump(json.loads(experiment.to_json())).encode()
        )
    except OSError as error:
        if folder.is_dir() and isinstance(error, FileExistsError):
            raise UserError(f"run_folder={folder} exists already; choose another") from None
        raise UserError(
            f"out={folder.parent} is not writable ({error.strerror}); choose another folder"
        ) from None
    return folder


@functools.cache  # of the code that was imported, whatever is committed while it runs
def _commit() -> str | None:
    """The commit of this package's checkout, "+dirty" where it was changed; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not just installed inside one
        return git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+dirty")
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine() -> str:
    """What the run's times depend on, without naming the host."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {gpu}"


def open_run_folder(folder: Path) -> Experiment:
    """The experiment of an existing run folder.

    Raises:
        UserError: it is no run folder, or its configuration cannot be read.
    """
    path = folder / "config.yaml"
    try:
        raw = read_yaml(path)
    except ValueError as error:
        raise UserError(f"{folder} is not a run folder: {path}: {error}") from None
    return set_up(raw, None, written=True)


def run(
    experiment: Experiment, federation: HostedFederation, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Run, or go on with, the experiment of `folder`, and return its summary.

    Args:
        experiment: what to run.
        federation: its clients.
        folder: the run folder; if it holds a checkpoint, the run goes on from there.
        progress: called with each line of rounds.jsonl as it is written.

    Raises:
        UserError: something the user can mend. summary.json then says "failed", as after any error,
            and everything that was on disk is still there.
    """
    started = time.perf_counter()
    torch.set_num_threads(experiment.config.threads_server)
    torch.set_flush_denormal(True)  # a student that large noise saturates is ten times slower else
    summary = _blank_summary(experiment, federation.engine)
    checkpoint.remove(folder / "summary.json")  # its card is that of an earlier part of the run
    try:
        _run(experiment, federation, folder, progress, summary)
        summary["status"] = "completed"
    except BaseException as error:
        summary["error"] = one_line(error)
        raise
    finally:
        summary["seconds"]["total"] = time.perf_counter() - started
        summary["queries"] |= {name: getattr(federation, name) for name in TRAVELLED}
        _add_privacy(summary, experiment, folder)
        _write_json(folder / "summary.json", summary)
    return summary


def _run(
    experiment: Experiment,
    federation: HostedFederation,
    folder: Path,
    progress: Progress,
    summary: dict[str, Any],
) -> None:
    config = experiment.config
    resume = checkpoint.load(folder / "checkpoint")
    log, lines = _open_log(folder / "rounds.jsonl", resume.round if resume else 0)
    test = test_split(experiment)
    summary["accuracy"]["evaluated_on"] = evaluated_on(experiment, test)
    world = World.of(config, experiment.mechanism, test)

    before = time.perf_counter()
    if config.federation.simulation and test is not None:
        for metric, scores in diagnose(experiment, federation, world, test.labels).items():
            summary[metric] |= scores
    summary["seconds"]["teachers"] = time.perf_counter() - before

    before = time.perf_counter()
    line: dict[str, Any] = {}
    if resume is not None:
        line = lines[-1]
        _record_round(summary, resume, line)
        before -= line["seconds"]
        federation.counted = resume.round
    for name in TRAVELLED:  # what diagnostics sent is none of it
        setattr(federation, name, line.get(name, 0))
    rounds = experiment.method.server(federation, world, Streams(config.seed), resume)
    for finished in rounds:
        if finished.state.bank:
            _save_samples(folder, finished.state.bank[-1], finished.state.round)
        line = _round_line(finished, world, time.perf_counter() - before, line)
        line |= {name: getattr(federation, name) for name in TRAVELLED}
        with log.open("a") as file:  # before the checkpoint, which is what makes the line count
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        checkpoint.save(folder / "checkpoint", finished.state)
        federation.prune(finished.state.round)
        progress(line)
        _record_round(summary, finished.state, line)
    summary["seconds"]["rounds"] = time.perf_counter() - before


def _student_scores(student: nn.Module, world: World) -> dict[str, Any]:
    """The student's scores and confusion on the test split; None without one."""
    metrics = METRICS | {"confusion": confusion}
    if world.test is None:
        return {f"student_{name}": None for name in metrics}
    predictions = predict(student, world.test.images, world.device)
    labels = world.test.labels
    return {f"student_{name}": metric(predictions, labels) for name, metric in metrics.items()}


def _record_round(summary: dict[str, Any], state: State, line: Mapping[str, Any]) -> None:
    """The latest round, so that a run that fails later still says how far it came."""
    for name in METRICS:
        summary[name]["student"] = line[f"student_{name}"]
    for name in ANSWERS:
        summary["queries"][name] = line[name]
    summary["confusion"] = line.get("student_confusion")  # logs of earlier versions have none
    summary["student_sha256"] = checkpoint.digest_of(below("student", state.tensors))


def _round_line(
    finished: Round, world: World, seconds: float, last: Mapping[str, Any]
) -> dict[str, Any]:
    """A line of rounds.jsonl; teachers' answers are counted over this round and all before it."""
    return {
        "round": finished.state.round,
        "rounds": world.rounds,
        **_student_scores(finished.student, world),
        **finished.metrics,
        "answered_queries": sum(len(part.labels) for part in finished.state.bank),
        **{name: last.get(name, 0) + getattr(finished, name) for name in ANSWERS},
        "refused": finished.refused,
        "seconds": round(seconds, 3),
    }


def round_text(line: Mapping[str, Any]) -> str:
    """One line of rounds.jsonl for people."""
    student = line["student_accuracy"]
    score = "unknown" if student is None else f"{100 * student:.1f} %"
    refused = f" · {len(line['refused'])} clients refused" if line["refused"] else ""
    return (
        f"round {line['round']}/{line['rounds']} · student {score} · "
        f"{line['answered_queries']:,} queries · {line['seconds']:.1f} s{refused}"
    )


def _open_log(path: Path, rounds: int) -> tuple[Path, list[dict[str, Any]]]:
    """Keep the first `rounds` lines of a log that may have run ahead of its checkpoint.

    Raises:
        UserError: the log is damaged: it holds less than its checkpoint.
    """
    text = path.read_text().splitlines()[:rounds] if path.exists() else []
    try:
        lines = [json.loads(line) for line in text]
    except ValueError:
        lines = []
    if len(lines) < rounds:
        raise UserError(
            f"{path} does not hold the {rounds} rounds of its checkpoint; delete the folder "
            f"{path.with_name('checkpoint')} to start the run again (its ledger stays)"
        )
    write_atomically(path, "".join(line + "\n" for line in text).encode())
    return path, lines


def _save_samples(folder: Path, bank: Bank, number: int) -> None:
    """A PNG grid of the round's first 64 synthetic images."""
    from torchvision.utils import save_image  # seconds to import, and only a server's run needs it

    (folder / "samples").mkdir(exist_ok=True)
    images = to_unit(bank.images[:64], torch.device("cpu"))
    save_image(images, folder / "samples" / f"round_{number:05d}.png", nrow=8)


# --- summary ---


def _blank_summary(experiment: Experiment, engine: str) -> dict[str, Any]:
    """summary.json with everything unknown null."""
    config = experiment.config
    return {
        "status": "failed",
        "error": None,
        "method": _method_name(experiment),
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
            "answered_vote": None,
            "evaluated_on": None,
            "covered_by_epsilon": isinstance(experiment.mechanism, TrainingMechanism),
        },
        "auroc": {"student": None, "ensemble": None, "weighted_ensemble": None, "clients": None},
        "confusion": None,
        "queries": {
            "answered_per_client": 0,
            **dict.fromkeys((*ANSWERS, *TRAVELLED), 0),
        },
        "privacy": None,
        "seconds": {"total": 0.0, "teachers": 0.0, "rounds": 0.0},
        "student_sha256": None,
    }


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of a run folder; empty where there is none yet."""
    path = folder / "summary.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_failure(experiment: Experiment, folder: Path, engine: str, error: BaseException) -> None:
    """summary.json of a run that failed before, or outside, `run`."""
    summary = _blank_summary(experiment, engine) | {"error": one_line(error)}
    _add_privacy(summary, experiment, folder)
    _write_json(folder / "summary.json", summary)


def one_line(error: BaseException) -> str:
    """An error as one line: a user's error as it is, any other with its type."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _add_privacy(summary: dict[str, Any], experiment: Experiment, folder: Path) -> None:
    """Fill in what the run cost: the plan, what clients said, and what simulated ledgers hold.

    Hospitals' ledgers stay with them.
    """
    ledgers = []
    config = experiment.config
    plan = plan_of(experiment)
    try:
        for client in range(config.num_clients if config.federation.simulation else 0):
            ledger = ledger_of(experiment, client, folder)
            with ledger.transaction():
                entries = ledger.entries()
            if config.ledger:  # of all runs
                entries = [entry for entry in entries if entry.run == folder.name]
            ledgers.append(entries)
        tally = Tally(folder, plan.releases)
        charged, notes = tally.charged, tally.notes()
    except UserError as error:  # then nobody knows
        charged, notes = Counter({str(error): 1}), (str(error),)
    answered = [sum(entry.queries for entry in entries) for entries in ledgers]
    summary["queries"]["answered_per_client"] = max(answered, default=None)
    records = largest_share(experiment)
    summary["privacy"] = privacy_card(experiment, plan, ledgers, charged, notes, records)


def result_line(experiment: Experiment, summary: Mapping[str, Any]) -> str:
    """The result in one line: accuracies, the published epsilon and the proven one.

    Two classes are seldom balanced, so their accuracies stand beside the AUROC.
    """
    two_classes = experiment.config.data.num_classes == 2
    parts = []
    for role in ("student", "ensemble"):
        fraction, area = summary["accuracy"][role], summary["auroc"][role]
        part = f"{role} unknown" if fraction is None else f"{role} {100 * fraction:.1f} %"
        parts.append(part + (f" (AUROC {area:.3f})" if two_classes and area is not None else ""))
    card = summary["privacy"]
    published = card["epsilon_published"]
    published = published if isinstance(published, str) else f"{published:.3g}"
    if all(NOTHING_NOTE in row["notes"] for row in card["proven"]):
        return " · ".join([*parts, NOTHING_NOTE])
    parts.append(f"published {published} ({card['mechanism']})")
    (row,) = (r for r in card["proven"] if (r["unit"], r["relation"]) == HEADLINE)
    claim = Epsilon.from_json(row)
    weak = claim.value > MEANINGFUL_EPSILON
    parts.append(f"proven {claim}" + (": no meaningful protection" if weak else ""))
    return " · ".join(parts)


def _method_name(experiment: Experiment) -> str:
    return type(experiment.method).__module__.rsplit(".", 1)[-1]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
