"""The console script `fed-dpsd`: data on stdout, every word for people on stderr."""

import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fed_dpsd.cli import rehearse as cli_rehearse
from fed_dpsd.cli import site as cli_site
from fed_dpsd.cli import student as cli_student
from fed_dpsd.config import ConfigError, UserError, compose
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.protocol import ProtocolError
from fed_dpsd.report import pages
from fed_dpsd.runtime import audits, simulation
from fed_dpsd.runtime import card as cards
from fed_dpsd.runtime import doctor as health
from fed_dpsd.runtime import ledger as ledgers
from fed_dpsd.runtime import run as runs
from fed_dpsd.runtime import sweep as sweeps
from fed_dpsd.runtime.experiment import Experiment, set_up
from fed_dpsd.runtime.federation import LocalFederation
from fed_dpsd.runtime.site import load_data, shares

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
privacy_app = typer.Typer(no_args_is_help=True, help="What a run would cost, before it is spent.")
app.add_typer(privacy_app, name="privacy")
app.add_typer(cli_site.app, name="site")
app.command()(cli_student.export)
app.command()(cli_student.predict)
app.command()(cli_rehearse.rehearse)
console = Console(stderr=True, highlight=False)
UNEXPECTED = 3  # exit code of an audit that does not come out as it should
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Hydra overrides, such as rounds=10 data=mnist.")
]


class Engine(StrEnum):
    """Where the clients live."""

    local = "local"
    flower = "flower"


def main() -> None:
    """Run the command line; anything the user can mend is one line, and the exit code is 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a simulation is cleaned up
    try:
        app()
    except (UserError, ProtocolError) as error:
        problems = error.problems if isinstance(error, ConfigError) else (runs.one_line(error),)
        for problem in problems:
            console.print(f"error: {problem}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def run(
    overrides: Overrides = None,
    engine: Annotated[Engine, typer.Option(help="In this process, or a Flower simulation.")] = (
        Engine.local
    ),
    nodes: Annotated[
        int | None, typer.Option(help="Simulated nodes with --engine flower; default: one each.")
    ] = None,
) -> None:
    """Run one experiment. The last line of stdout is the run folder."""
    experiment = set_up(compose(overrides or []), Path.cwd())
    _check_simulated(experiment, "overrides=...")
    if nodes is not None and (engine is Engine.local or nodes < 1):
        raise UserError(f"--nodes {nodes}: it must be >= 1 and goes with --engine flower")
    if engine is Engine.local:
        folder = runs.new_run_folder(experiment)
        _finish(experiment, folder, lambda progress: _run_local(experiment, folder, progress))
        return
    shares(experiment)  # what the data does not allow is said before Flower starts
    folder = runs.name_run_folder(experiment)
    absolute = [
        *(overrides or []),
        *(f'{key}="{value}"' for key, value in _absolute_paths(experiment, folder).items()),
    ]
    clients = nodes or experiment.config.num_clients
    _finish(
        experiment,
        folder,
        lambda progress: simulation.simulate(experiment, absolute, folder, clients, progress),
    )


@app.command()
def resume(
    run_folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
) -> None:
    """Go on from a run's last checkpoint, in this process, whatever engine it started on."""
    folder = run_folder.absolute()
    experiment = runs.open_run_folder(folder)
    _check_simulated(experiment, f'resume="{folder}"')
    _finish(experiment, folder, lambda progress: _run_local(experiment, folder, progress))


@app.command()
def sweep(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Parent of the run folders.")] = Path("runs/sweep"),
    table: Annotated[
        Path | None, typer.Option("--csv", help="The table. Default: results.csv in --out.")
    ] = None,
) -> None:
    """Run a grid, such as seed=0,1,2 privacy=label,votes. Again: go on where it stopped.

    The last line of stdout is the table's path.
    """
    folder = out.absolute()
    path = (table or folder / "results.csv").absolute()
    cells = sweeps.plan(overrides or [], folder, Path.cwd(), _say)
    failed = sweeps.run(cells, _run_cell, path, _say)
    print(path, flush=True)
    for cell, error in failed.items():
        console.print(f"failed: {cell}: {error}", style="red", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _run_cell(experiment: Experiment, folder: Path) -> None:
    _check_simulated(experiment, "overrides=...")
    _show(experiment, folder, lambda progress: _run_local(experiment, folder, progress))


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


@app.command()
def report(
    tables: Annotated[list[Path], typer.Argument(help="Tables of sweeps.", metavar="CSV...")],
    out: Annotated[
        Path | None, typer.Option(help="Where to. Default: beside the first table.")
    ] = None,
) -> None:
    """Write tables of means over seeds, figures, and a page of both; print the path of each.

    Figures: accuracy against the proven epsilon, teacher answers, seconds and alpha; confusion.
    """
    for path in pages.write(tables, (out or tables[0].parent).absolute()):
        print(path)


def _check_simulated(experiment: Experiment, run_config: str) -> None:
    """Refuse what hospitals are to answer: clients of this process would answer in their place."""
    if not experiment.config.federation.simulation:
        raise UserError(
            "the clients of this run are hospitals (federation=deployment), whom only Flower "
            f"reaches: flwr run PATH FEDERATION --run-config '{run_config}'"
        )


def _run_local(experiment: Experiment, folder: Path, progress: runs.Progress) -> dict[str, Any]:
    try:
        federation = LocalFederation(experiment, folder)
    except UserError as error:
        runs.write_failure(experiment, folder, LocalFederation.engine, error)
        raise
    return runs.run(experiment, federation, folder, progress)


def _finish(
    experiment: Experiment, folder: Path, work: Callable[[runs.Progress], dict[str, Any]]
) -> None:
    """Do the work, and always print the run folder."""
    try:
        _show(experiment, folder, work)
    finally:
        if folder.exists():
            print(folder, flush=True)


def _show(
    experiment: Experiment, folder: Path, work: Callable[[runs.Progress], dict[str, Any]]
) -> None:
    """Do the work under a progress display, and say the result."""
    try:
        with _progress(experiment) as progress:
            summary = work(progress)
        console.print(runs.result_line(experiment, summary), soft_wrap=True)
    except (UserError, ProtocolError):
        raise
    except Exception as error:
        (folder / "error.log").write_text(traceback.format_exc())
        raise UserError(f"{runs.one_line(error)} (traceback: {folder}/error.log)") from error


def _absolute_paths(experiment: Experiment, folder: Path) -> dict[str, str]:
    """Overrides that make the simulation write and read where this command would."""
    config = experiment.config
    paths = {"run_folder": str(folder), "cache": config.cache, "out": config.out}
    given = {"ledger": config.ledger, "data.path": config.data.path}
    given["teacher.path"] = config.teacher.path
    return paths | {key: path for key, path in given.items() if path}


@contextlib.contextmanager
def _progress(experiment: Experiment) -> Iterator[runs.Progress]:
    """A bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield lambda line: console.print(runs.round_text(line), soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training the teachers", total=experiment.config.rounds)

        def show(line: Mapping[str, Any]) -> None:
            bar.update(task, completed=line["round"], description=runs.round_text(line))

        yield show


@app.command()
def data(overrides: Overrides = None) -> None:
    """Show split sizes, class counts per simulated client, and a picture of the partition."""
    experiment = set_up(compose(overrides or []), Path.cwd())
    config = experiment.config
    loaded = load_data(config.data, config.cache)
    console.print(
        f"{config.data.name}: {len(loaded.train):,} to train, {len(loaded.test):,} to test, "
        f"{config.data.num_classes} classes, shape {list(config.data.shape)}; "
        f"partition {experiment.partition.name}, {config.num_clients} clients"
    )
    table = Table("client", "records", box=None, padding=(0, 1, 0, 0))
    for number in range(config.data.num_classes):
        table.add_column(str(number), justify="right")
    for client, part in enumerate(shares(experiment)):
        counts = np.bincount(loaded.train.labels[part], minlength=config.data.num_classes)
        table.add_row(str(client), f"{len(part):,}", *(_cell(n, counts) for n in counts))
    Console(highlight=False).print(table)


def _cell(count: int, counts: np.ndarray) -> str:
    """A class count, the darker the larger its part of the client's records."""
    shade = " ░▒▓█"[min(4, int(np.ceil(4 * count / max(1, counts.max()))))]
    return f"{shade}{count}"


@app.command()
def doctor() -> None:
    """Say what is wrong with this machine for a run, and how to mend it."""
    table = Table("check", "state", "remedy")
    checks = health.examine()
    for check in checks:
        table.add_row(check.name, ("ok: " if check.good else "BAD: ") + check.state, check.remedy)
    Console(highlight=False).print(table)
    if not all(check.good for check in checks):
        raise typer.Exit(1)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@privacy_app.command()
def plan(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print noise, number of queries, the published epsilon and every proven one."""
    experiment = set_up(compose(overrides or []), Path.cwd())
    planned = cards.plan_of(experiment)
    card = cards.privacy_card(experiment, planned)
    if as_json:
        print(json.dumps({"queries_per_client": planned.queries, "privacy": card}))
        return
    out = Console(highlight=False)
    out.print(f"{experiment.mechanism}", markup=False, soft_wrap=True)
    settings, field = experiment.config.privacy, experiment.mechanism.calibrated_by
    if settings.target_epsilon is not None:
        value = getattr(experiment.mechanism, str(field))
        target = f"privacy.target_epsilon={settings.target_epsilon:g} (record, add_remove)"
        out.print(f"calibrated to {target}: privacy.{field}={value:.6g}", soft_wrap=True)
    out.print(f"queries per client: {planned.queries:,}")
    if not planned.stages:
        out.print(f"{cards.NOTHING_NOTE}: there is nothing to prove")
        return
    stated = card["epsilon_stated"]
    out.print(f"epsilon stated by the paper: {'none' if stated is None else stated}")
    out.print(f"epsilon published (no guarantee): {card['epsilon_published']}")
    for unit, relation in UNITS_AND_RELATIONS:
        epsilon = cards.proven(experiment, planned, unit, relation)
        out.print(f"epsilon planned: {epsilon}", soft_wrap=True)
    notes = dict.fromkeys(note for row in card["proven"] for note in row["notes"])
    out.print(f"notes: {', '.join(notes)}", soft_wrap=True)
    if card["reason"]:
        out.print(f"reason: {card['reason']}", soft_wrap=True)


class Broken(StrEnum):
    """What an attacked hospital does instead of what it claims."""

    half = "half"
    none = "none"


@privacy_app.command()
def audit(
    overrides: Overrides = None,
    broken: Annotated[
        Broken | None,
        typer.Option(help="Attack a hospital with half of the noise it claims, or next to none."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack what hospitals run, and say what of its epsilons is refuted and what is not.

    At settings where an attack comes close to the proof, which tests the implementation; and at the
    run's settings. Exit code 3: a proof is contradicted. With --broken it has to be: then the exit
    code is 0, and 3 if an attack on the implementation misses it.
    """
    experiment = set_up(compose(overrides or []), Path.cwd())
    attacks = list(audits.attacks(experiment, broken.value if broken else None, _say))
    *code, claim = attacks
    refuted = all(attack.contradicts for attack in attacks if attack.tests_code)
    expected = refuted if broken else not any(attack.contradicts for attack in attacks)
    if as_json:
        names = ("check", "counts", "answers") if len(code) > 2 else ("check", "answers")
        named = dict(zip(names, (attack.to_json() for attack in code), strict=False))
        more = {"broken": broken and broken.value, "as_expected": expected}
        print(json.dumps(claim.to_json() | named | more))
    else:
        out = Console(highlight=False)
        for attack in attacks:
            out.print(f"{attack.title}: {attack.mechanism}", markup=False, soft_wrap=True)
            for sentence in attack.verdict():
                out.print(f"  {sentence}", markup=False, soft_wrap=True)
        if broken:
            noise = "half of the noise" if broken is Broken.half else "next to no noise"
            said = "refuted, as it has to be" if refuted else "NOT refuted: the audit is blind"
            out.print(f"a hospital with {noise}: {said}", soft_wrap=True)
    if not expected:
        raise typer.Exit(UNEXPECTED)


@privacy_app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="A ledger file, a folder of them, or a run folder.")],
    delta: Annotated[float, typer.Option(help="Failure probability of the epsilons.")] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Print what clients have spent, charge by charge. Nothing is written."""
    accounts = {file: ledgers.read(file) for file in cards.ledger_files(path)}
    totals = {
        file: [cards.account(entries, delta, *pair) for pair in UNITS_AND_RELATIONS]
        for file, entries in accounts.items()
    }
    if as_json:
        listed = {
            str(file): {
                "entries": [json.loads(entry.to_json()) for entry in entries],
                "spent": [epsilon.to_json() for epsilon in totals[file]],
            }
            for file, entries in accounts.items()
        }
        print(json.dumps(listed))
        return
    out = Console(highlight=False)
    for file, entries in accounts.items():
        out.print(str(file), markup=False, soft_wrap=True)
        for number, entry in enumerate(entries, start=1):
            ask = "" if entry.kind == "training" else f" to ask {entry.query_id}"
            so_far = cards.account(entries[:number], delta, "record", "add_remove")
            out.print(
                f"{entry.at} {entry.run or 'unnamed run'}: {entry.kind}{ask}, "
                f"{entry.queries:,} queries, {entry.digest[:12]}: so far {so_far}",
                markup=False,
                soft_wrap=True,
            )
        for epsilon in totals[file]:
            out.print(f"spent: {epsilon}; {', '.join(epsilon.notes)}", soft_wrap=True)
