"""The loop around every method: evaluation, logs, checkpoints, resuming and the summary."""

import contextlib
import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fed_dpsd.accounts.card import plugins_note, requested_unit, seeded_note
from fed_dpsd.claims import smallest_claim
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import Diverged, one_line
from fed_dpsd.experiment import Experiment, contact_sheet, evaluated_on, test_split
from fed_dpsd.methods.class_counts import fetch_class_weights
from fed_dpsd.methods.method import PublicContext, Round, State, tensors_of
from fed_dpsd.models import digest_of, keep_freed_memory
from fed_dpsd.models.divergence import is_finite
from fed_dpsd.models.inference import Images
from fed_dpsd.models.precision import precision_of
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.protocol import Releases
from fed_dpsd.server import checkpoint
from fed_dpsd.server.charge_log import by_ranges
from fed_dpsd.server.diagnostics import diagnose
from fed_dpsd.server.federation import HostedFederation
from fed_dpsd.server.metrics import METRICS, agreement, calibration, confusion
from fed_dpsd.server.run_folder import (
    open_log,
    save_predictions,
    save_samples,
    save_test_images,
)
from fed_dpsd.server.summary import (
    ANSWERS,
    TRAVELLED,
    add_privacy,
    blank_summary,
    precision_of_teachers,
    record_round,
)
from fed_dpsd.server.trackers import Tracking
from fed_dpsd.storage import Unwritable, append_line, remove, write_json
from fed_dpsd.streams import Streams

Progress = Callable[[Mapping[str, Any]], None]


def run(
    experiment: Experiment, federation: HostedFederation, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Run, or resume, the experiment of `folder`; return its summary.

    Raises:
        UserError: an error that the user can fix. After any error, the status in summary.json is
            "failed", and everything on disk is kept.
    """
    started = time.perf_counter()
    keep_freed_memory()
    torch.set_num_threads(experiment.config.threads_server)
    torch.set_flush_denormal(True)  # denormals make a saturated student ten times slower
    summary = blank_summary(experiment, federation.engine)
    remove(folder / "summary.json")  # the charges of this process will make its card outdated
    tracking = Tracking(experiment, folder)

    def report(line: Mapping[str, Any]) -> None:
        tracking.log(line)
        progress(line)

    try:
        tracking.open()
        _run(experiment, federation, folder, report, summary)
        summary["status"] = "completed"
    except BaseException as error:
        summary["error"] = one_line(error)
        raise
    finally:
        summary["seconds"]["total"] = time.perf_counter() - started
        summary["queries"] |= {name: getattr(federation, name) for name in TRAVELLED}
        add_privacy(summary, experiment, folder)
        # The error that ended the run matters more than an unwritable summary.
        with contextlib.suppress(*[Unwritable] * (summary["error"] is not None)):
            write_json(folder / "summary.json", summary)
        tracking.close(summary)
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
    log, lines = open_log(folder / "rounds.jsonl", resume.round if resume else 0)
    test = test_split(experiment)
    summary["accuracy"]["evaluated_on"] = evaluated_on(experiment, test)
    save_test_images(folder, contact_sheet(experiment, test))
    context = dataclasses.replace(experiment.public, test=test)

    summary["precision"]["teachers"] = precision_of_teachers(experiment, context)
    before = time.perf_counter()
    if config.diagnostics and config.federation.simulation and test is not None:
        counted = experiment.plan.releases_class_counts
        weights = fetch_class_weights(federation, context) if counted else {}
        for metric, scores in diagnose(experiment, federation, weights, test.labels).items():
            summary[metric] |= scores
    summary["seconds"]["teachers"] = time.perf_counter() - before

    before = time.perf_counter()
    images = None if test is None else Images(test.images)
    score = functools.partial(_student_scores, folder, test, images)
    line: dict[str, Any] = {}
    plan = experiment.plan
    if resume is not None:
        _check_state(resume)
        line = lines[-1]
        _record_round(summary, resume, line)
        before -= line["seconds"]
        federation.last_counted = resume.round
    for name in TRAVELLED:  # excludes the bytes of diagnostics
        setattr(federation, name, line.get(name, 0))
    finished: Round | None = None
    for finished in experiment.method.server(federation, context, Streams(config.seed), resume):
        number = finished.state.round
        _check_state(finished.state)
        if not is_finite(finished.student, context.image_shape):
            keys = config.method.keys() & {"student_learning_rate", "learning_rate"}
            rates = {f"method.{key}": float(config.method[key]) for key in keys}
            raise Diverged(f"the student predicts NaN or infinity after round {number}", rates)
        if finished.state.buffer:
            save_samples(folder, finished.state.buffer[-1], number)
        scored = number % config.evaluate_every == 0 or number == config.rounds
        own = score(finished.student if scored else None, number)
        line = _round_line(finished, context, time.perf_counter() - before, line, own)
        line |= {name: getattr(federation, name) for name in TRAVELLED}
        line |= _costs(plan, federation.charges, experiment)
        append_line(log, json.dumps(line))  # before the checkpoint, which makes the line valid
        checkpoint.save(folder / "checkpoint", finished.state)
        federation.prune(number)
        progress(line)
        summary["precision"]["student"] = precision_of(finished.student)
        _record_round(summary, finished.state, line)
    if finished is not None and line["student_accuracy"] is None:  # the run ended early
        last = score(finished.student, finished.state.round)
        _record_round(summary, finished.state, line | last)
    summary["seconds"]["rounds"] = time.perf_counter() - before


def _check_state(state: State) -> None:
    for name, tensor in state.tensors.items():
        if not tensor.isfinite().all():
            raise Diverged(f"{name} holds NaN or infinity after round {state.round}", {})


def _costs(plan: Plan, charges: Mapping[int, Releases], experiment: Experiment) -> dict[str, Any]:
    """Return the run's cost to its clients so far, and the largest epsilon of any client.

    `charged` has the releases by mechanism, for ranges of clients with equal charges. `spent` is an
    epsilon (add_remove) of the requested unit with its meaning, and with notes if noise is seeded
    or plug-ins took part.
    """
    delta = experiment.config.privacy.delta
    notes = (*seeded_note(experiment), *plugins_note(experiment))
    most = functools.reduce(Counter.__or__, map(Counter, charges.values()), Counter[str]())
    unit = requested_unit(experiment)
    spent = smallest_claim(plan, most, delta, unit, "add_remove").to_json()
    meaning = ("unit", "relation", "trust", "delta", "epsilon")
    row = {key: spent[key] for key in meaning} | ({"notes": list(notes)} if notes else {})
    return {"charged": by_ranges(charges), "spent": row}


def _student_scores(
    folder: Path,
    test: Records | None,
    images: Images | None,
    student: nn.Module | None,
    number: int,
) -> dict[str, Any]:
    """Store the student's predictions and return its scores; None without student or test split."""
    metrics = METRICS | {"confusion": confusion, "calibration": calibration}
    if test is None or images is None or student is None:
        return {f"student_{name}": None for name in metrics}
    predictions = images.predict(student)
    save_predictions(folder, predictions, test, number)
    return {f"student_{name}": metric(predictions, test.labels) for name, metric in metrics.items()}


def _record_round(summary: dict[str, Any], state: State, line: Mapping[str, Any]) -> None:
    """Record the latest round, so that the summary of a failed run shows its progress."""
    record_round(summary, line)
    summary["student_sha256"] = digest_of(tensors_of("student", state.tensors))


def _round_line(
    finished: Round,
    context: PublicContext,
    seconds: float,
    last: Mapping[str, Any],
    scores: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a line of rounds.jsonl.

    `round_queries` and `round_seconds` are for this round alone. Other counts and `seconds` are
    totals over all rounds so far.
    """
    buffer = finished.state.buffer
    queries = sum(len(part.labels) for part in buffer)
    return {
        "round": finished.state.round,
        "rounds": context.rounds,
        **scores,
        # how often the student agreed with the last answers before learning from them
        "agreement": agreement(buffer[-1].predictions, buffer[-1].labels) if buffer else None,
        **finished.metrics,
        "round_queries": queries - last.get("answered_queries", 0),
        "round_seconds": round(seconds - last.get("seconds", 0.0), 3),
        "answered_queries": queries,
        **{name: last.get(name, 0) + getattr(finished, name) for name in ANSWERS},
        "refused": finished.refused,
        "seconds": round(seconds, 3),
    }
