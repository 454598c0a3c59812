"""The paths given to `fed-dpsd report`: their tables, and the facts of a single run."""

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.card import how_answered, how_trained, ledger_epsilons
from fed_dpsd.accounts.database import ledgers_in, read_ledger
from fed_dpsd.accounts.words import PrivacyCard, is_meaningful, published_line, sentences
from fed_dpsd.claims import smallest_claim
from fed_dpsd.config import is_function, leaves
from fed_dpsd.config.plugins import files_of
from fed_dpsd.errors import UserError, printable
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.mechanism import Unit
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.report import REPORTED, require_path
from fed_dpsd.report.facts import Facts, Unfinished
from fed_dpsd.report.scores import Predictions
from fed_dpsd.report.settings import (
    Row,
    Setting,
    contents_notes,
    number_contents,
    read_settings,
)
from fed_dpsd.server import checkpoint
from fed_dpsd.server.attendance import (
    hospital_text,
    incomplete_attendance,
    members_of,
    requests_of,
)
from fed_dpsd.server.charge_log import clients_in
from fed_dpsd.server.federation import in_use
from fed_dpsd.server.inputs import digests_of_inputs
from fed_dpsd.server.run_folder import (
    TEST_IMAGES,
    open_run_folder,
    read_log,
    read_predictions,
)
from fed_dpsd.server.summary import (
    TRAVELLED,
    add_privacy,
    blank_summary,
    read_summary,
    record_round,
)
from fed_dpsd.storage import client_name, is_run_folder, shown_path, writing
from fed_dpsd.sweep.apart import distinguish_rows, key_texts, named_parts, try_open_experiment
from fed_dpsd.sweep.sweep import TABLE, Cell, Say, read_table, write_tables

MOST_NAMED = 3  # runs in an error
REHEARSED = "run"  # the run folder in a rehearsal's folder
OMITTED = ("out", "cache", "run_folder", "ledger", "tracker")
DEPLOYED = ("flwr", "run", "APP", "federation", "--stream", "--run-config")


def write_report(
    paths: Sequence[Path],
    out: Path | None = None,
    against: str | None = None,
    threshold: float | None = None,
    say: Say = lambda line: None,
    title: str = "",
) -> Iterator[Path]:
    """Write the tables, figures and page of absolute paths; yield each file, the page last."""
    from fed_dpsd.report import pages  # matplotlib takes a second to import

    if against == "":
        raise UserError("against is empty; give an entry of the tables, or leave it out")
    run = facts_of(paths, threshold, title)
    if run and run.unfinished:  # its numbers are not in a table yet
        say(f"not finished: {run.unfinished.status}")
        yield pages.write_unfinished(run, out or run_in(paths[0]))
        return
    tables, unfinished = tables_of(paths, out), unfinished_nearby(paths)
    for each in unfinished:
        say(f"{each.name} is not finished: {each.status}")
    settings, folder = settings_in(tables), out or tables[0].parent
    for note in contents_notes(settings):
        say(f"the same names, but other contents: {note}")
    yield from pages.write(settings, tables, folder, against, run, unfinished, title)


def settings_in(tables: Sequence[Path]) -> list[Setting]:
    """Read the settings in tables; runs with folders next to their table are distinguished."""

    def change(rows: list[Row], folders: Mapping[str, Path]) -> list[Row]:
        runs: dict[str, Experiment] = {}
        for row in rows:
            folder = folders[row["key"]]
            if folder.parent.name == folder.name:  # a run's own table is in its folder
                folder = folder.parent
            if run := try_open_experiment(folder):
                runs[row["key"]] = run
                known = digests_of_inputs(run, folder)
                row |= {column: digest for column, digest in known.items() if digest}
        return number_contents(distinguish_rows(rows, runs))

    return read_settings(tables, change)


def tables_of(paths: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Return the tables of paths; tables of runs are written first."""
    written: dict[Path, list[Cell]] = {}
    tables = []
    for path in map(run_in, paths):
        require_path(path)
        table = path
        if is_run_folder(path):
            table = (out or path) / TABLE
            written.setdefault(table, []).append(_cell(path))
        elif path.is_dir():
            table = path / TABLE
            if not table.is_file():
                raise UserError(f"{path} contains neither a table nor a run; give {REPORTED}")
        tables.append(table)
    values = _values_of([cell for cells in written.values() for cell in cells])
    for table, cells in written.items():
        with writing(table):
            table.parent.mkdir(parents=True, exist_ok=True)
        if out is None:  # the table of the run itself, whose folder may have been renamed
            _delete(table)
        elif others := read_table(table)[1].keys() - {cell.key for cell in cells}:
            raise UserError(
                f"{table} is a table of other runs ({', '.join(sorted(others)[:MOST_NAMED])}); "
                "choose another --out, or delete this folder"
            )
        write_tables(table, [dataclasses.replace(c, overrides=values[c.folder]) for c in cells])
    return list(dict.fromkeys(tables))


def _delete(table: Path) -> None:
    """Delete the table of a run, and the table of its rounds."""
    for suffix in ("", "_rounds"):
        table.with_stem(f"{table.stem}{suffix}").unlink(missing_ok=True)


def run_in(path: Path) -> Path:
    """Return the run folder in a rehearsal's folder, or any other path unchanged."""
    inside = path / REHEARSED
    return inside if is_run_folder(inside) and not is_run_folder(path) else path


def _values_of(cells: Sequence[Cell]) -> dict[Path, Row]:
    """Return the typed keys of each run with its values, which may be typed as 1e-5 or 0.00001."""
    known = key_texts([cell.experiment for cell in cells])
    return {
        cell.folder: {key: own.get(key, text) for key, text in cell.overrides.items()}
        for cell, own in zip(cells, known, strict=True)
    }


def _cell(folder: Path) -> Cell:
    experiment = open_run_folder(folder)
    if unfinished := unfinished_in(folder, experiment):
        raise UserError(
            f"{folder}: the run has not completed: {unfinished.status} For its own page: "
            f"fed-dpsd report {shown_path(folder)}"
        )
    config = dataclasses.replace(experiment.config, run_folder=str(folder))
    experiment = dataclasses.replace(experiment, config=config)
    return Cell(folder.name, folder.name, "", experiment.typed, experiment)


# --- a run that has not completed ---


def unfinished_in(folder: Path, experiment: Experiment) -> Unfinished | None:
    """Return the progress of an unfinished run; None if it has completed."""
    if (summary := read_summary(folder)).get("status") == "completed":
        return None
    under_way, name = in_use(folder), shlex.quote(folder.name)
    command = f"fed-dpsd {'report' if under_way else 'resume'} {name}"
    if not (under_way or experiment.config.federation.simulation):
        resume = f'resume="{folder.name}"'
        command = f"flwr run APP federation --stream --run-config {shlex.quote(resume)}"
    return Unfinished(
        name=folder.name,
        done=checkpoint.latest(folder / "checkpoint") or 0,  # the log may be ahead of it
        rounds=experiment.config.rounds,
        error=summary.get("error") or "",
        under_way=under_way,
        command=command,
    )


def unfinished_nearby(paths: Sequence[Path]) -> list[Unfinished]:
    """Return the runs in sweeps' folders that have started but not completed."""
    sweeps = (path for path in paths if not is_run_folder(path))
    begun = (
        folder
        for path in sweeps
        for folder in sorted(path.glob("*/"))
        if is_run_folder(folder) and read_summary(folder).get("status") != "completed"
    )
    return [run for folder in begun if (run := unfinished_in(folder, open_run_folder(folder)))]


def _summary_so_far(
    folder: Path, experiment: Experiment, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return an unfinished run's summary after its last round, with its charges so far."""
    summary = blank_summary(experiment, "") | read_summary(folder)
    for line in lines[-1:]:
        record_round(summary, line)
        summary["queries"] |= {name: line.get(name, 0) for name in TRAVELLED}
        summary["seconds"]["rounds"] = line["seconds"]
    add_privacy(summary, experiment, folder)
    return summary


# --- the facts of one run ---


def facts_of(
    paths: Sequence[Path], threshold: float | None = None, title: str = ""
) -> Facts | None:
    """Return the facts of a single run; None for any other `paths`."""
    if threshold is not None and not 0 < threshold < 1:
        raise UserError(f"--threshold={threshold:g} must be above 0 and below 1")
    if len(paths) != 1 or not is_run_folder(folder := run_in(paths[0])):
        if threshold is not None:
            raise UserError(f"--threshold={threshold:g} needs the folder of a single run")
        return None
    experiment, rounds = open_run_folder(folder), read_log(folder)
    unfinished = unfinished_in(folder, experiment)
    if unfinished:
        rounds = rounds[: unfinished.done]
        summary = _summary_so_far(folder, experiment, rounds)
    else:
        summary = read_summary(folder)
    plan, card = experiment.plan, PrivacyCard(summary["privacy"])
    delta, charges = experiment.config.privacy.delta, _json(folder / "charges.json")
    versions = _json(folder / "versions.json")
    kept = read_predictions(folder, rounds[-1]["round"] if rounds else 0)
    predictions = Predictions(**kept) if kept else None
    if threshold is not None and (predictions is None or predictions.probabilities.shape[1] != 2):
        raise UserError(
            f"--threshold={threshold:g}: {folder.name} has no test predictions of two classes; "
            "leave out this option"
        )
    members = members_of(folder)
    stated = {int(n): known["charged"] for n, known in charges.get("clients", {}).items()}
    return Facts(
        name=folder.name,
        summary=summary,
        rounds=rounds,
        versions=versions,
        settings=_settings(experiment),
        classes=tuple(map(printable, experiment.config.data.class_names)),
        simulated=experiment.config.federation.simulation,
        meaningful=is_meaningful(card.epsilon(card.unit, "add_remove")),
        verdict=tuple(sentences(card, experiment.seeded)),
        trained=how_trained(experiment),
        answered=how_answered(experiment),
        published=published_line(card),
        command=command_of(experiment),
        spent=[_spent(plan, line.get("charged", {}), delta, card.unit) for line in rounds],
        costs={n: _epsilon(plan, releases, delta, card.unit) for n, releases in stated.items()},
        samples=_samples(folder),
        test_images={int(path.stem): path for path in (folder / TEST_IMAGES).glob("*.png")},
        hospitals=[hospital_text(members, n) for n in range(experiment.config.num_clients)],
        requests=(requests := requests_of(folder)),
        absent={client: str(missed) for client, missed in incomplete_attendance(requests).items()},
        charges=charges,
        ledgers=_ledgers(experiment, folder, paths[0]),
        unfinished=unfinished,
        rehearsed=bool(versions.get("rehearsal")),
        predictions=predictions,
        threshold=threshold,
        own_title=title,
    )


def _spent(
    plan: Plan, charged: Mapping[str, Mapping[str, int]], delta: float, unit: Unit
) -> dict[int, float]:
    """Return clients' epsilons (add_remove) for a unit, from charges by ranges of clients."""
    return {
        client: value
        for ranges, releases in charged.items()
        for value in (_epsilon(plan, releases, delta, unit),)
        for client in clients_in(ranges)
    }


def _epsilon(plan: Plan, releases: Mapping[str, int], delta: float, unit: Unit) -> float:
    return smallest_claim(plan, releases, delta, unit, "add_remove").value


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that took part: hospitals have their own records and secret noise."""
    values = named_parts(experiment) | {
        key: value
        for key, value in leaves(json.loads(experiment.to_json()))
        if not key.endswith("_target_") and not (isinstance(value, str) and os.sep in value)
    }
    if experiment.config.federation.simulation:
        return values
    own = {key: value for key, value in values.items() if not key.startswith("partition")}
    return own | {"noise": "secure"}


def _samples(folder: Path) -> dict[int, Path]:
    paths = (folder / "samples").glob("round_*.png")
    return {int(path.stem.removeprefix("round_")): path for path in paths}


def _ledgers(experiment: Experiment, folder: Path, place: Path) -> dict[int, str]:
    """Describe each client's ledger that may hold charges of other runs.

    These are the ledgers in the folder `ledger`, or a rehearsal's hospitals'.
    """
    config = experiment.config
    clients = range(config.num_clients)
    if config.federation.simulation:
        shared = ledgers_in(Path(config.ledger)) if config.ledger else {}
        known = {n: shared[name] for n in clients if (name := client_name(n)) in shared}
    else:
        hospitals = clients if place != folder else ()
        folders = {n: place / f"hospital{n}" / "state" / "ledger" for n in hospitals}
        known = {n: path for n in folders for path in ledgers_in(folders[n]).values()}
    described = {}
    for number, path in known.items():
        entries = read_ledger(path)
        (proof, *_) = ledger_epsilons(
            entries, config.privacy.delta, "record", "add_remove"
        ).values()
        described[number] = f"{len(entries):,} charges: epsilon {proof.number}"
    return described


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except ValueError:
        raise UserError(f"{path} is damaged; restore it from a backup") from None


def command_of(experiment: Experiment) -> str:
    """Return the command with a run's overrides, as typed.

    It is `fed-dpsd run` or, for a deployment, `flwr run` with APP for the app's folder. FOLDER and
    FILE stand for paths, and the keys in OMITTED, which name places of output, are left out. Return
    "" if the overrides are unknown, or if they name a user's file of grids or a Python function.
    """
    typed = experiment.typed
    of_user = typed.get("experiment", "null") not in ("null", *files_of("experiment"))
    of_python = any(is_function(text.strip("'")) for text in typed.values())
    if experiment.overrides is None or of_user or of_python:
        return ""
    words = [
        f"{key}={('FILE' if Path(text).suffix else 'FOLDER') if os.sep in text else text}"
        for key, text in typed.items()
        if key not in OMITTED
    ]
    if experiment.config.federation.simulation:
        return shlex.join(["fed-dpsd", "run", *words])
    overrides = " ".join(words).replace('"', "'")
    return shlex.join([*DEPLOYED, f'overrides="{overrides}"'])
