"""The public functions of `import fed_dpsd`, and the jobs that the command line runs."""

import base64
import contextlib
import dataclasses
import functools
import html
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.console import Console

from fed_dpsd.accounts.card import PlannedRun, planned_run
from fed_dpsd.accounts.words import PrivacyCard
from fed_dpsd.config.bind import read_run
from fed_dpsd.engines.clients import prepare_clients
from fed_dpsd.engines.flower.simulation import simulate
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.engines.placement import Placement
from fed_dpsd.engines.ready import check_run, check_simulated
from fed_dpsd.errors import ProtocolError, UserError, one_line
from fed_dpsd.experiment import Experiment, forget_data, one_run, unused_records
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.functions import MakeNetwork, add_functions
from fed_dpsd.progress import PlainConsole, reporting, show_progress
from fed_dpsd.server.completed import student_of
from fed_dpsd.server.export import Format, export
from fed_dpsd.server.federation import InUse
from fed_dpsd.server.run import Progress
from fed_dpsd.server.run import run as run_rounds
from fed_dpsd.server.run_folder import (
    new_run_folder,
    open_completed,
    open_run_folder,
    read_log,
    require_checkpoint,
)
from fed_dpsd.server.student import Student, open_student
from fed_dpsd.server.summary import read_summary, result_line, round_text, write_failure
from fed_dpsd.server.synthesis import Source, synthesize
from fed_dpsd.server.words import describe_start
from fed_dpsd.storage import shown_path, to_utf8, write_atomically
from fed_dpsd.sweep import sweep as sweeps
from fed_dpsd.sweep.reported import write_report

if TYPE_CHECKING:
    import pandas

Engine = Literal["local", "flower"]


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder.

    Args:
        folder: the run folder: configuration, log, checkpoints, samples, summary.
    """

    folder: Path

    def __post_init__(self) -> None:
        _path("folder", self.folder)
        object.__setattr__(self, "folder", Path(self.folder))  # a string is accepted too

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: accuracies in [0, 1], queries, seconds, privacy.

        Raises:
            UserError: the folder is not a run folder, or has no summary yet.
        """
        if not (summary := read_summary(self.folder)):
            raise self._unfinished("no summary.json")
        return summary

    def _unfinished(self, lacking: str) -> UserError:
        read_run(self.folder)  # raises its own error if this is not a run folder
        return UserError(
            f"{self.folder} has {lacking}; `fed-dpsd resume {shown_path(self.folder)}` continues "
            "the run"
        )

    @functools.cached_property
    def student(self) -> Student[Classifier]:
        """The trained student.

        Raises:
            UserError: the run is not completed, or its method has no student of its own.
        """
        return student_of(open_completed(self.folder))

    @property
    def privacy(self) -> PrivacyCard:
        """The published epsilon and every proven one, each with its meaning.

        Raises:
            UserError: the run has no results yet.
        """
        if not (card := self.summary["privacy"]):
            raise self._unfinished("no results")
        return PrivacyCard(card)

    def export(self, folder: Path | str, form: Format = "safetensors") -> Path:
        """Write the student and its privacy card; return the path of the student's file.

        Raises:
            UserError: the form is unknown, the run has no student to export, or the file exists
                or cannot be written.
        """
        if form not in get_args(Format):
            raise UserError(f"form={form!r} must be {' or '.join(get_args(Format))}")
        return export(self.folder, _path("folder", folder), form).path

    def synthesize(
        self,
        number: int,
        path: Path | str,
        labels: bool = False,
        source: Source | None = None,
        seed: int = 0,
    ) -> Path:
        """Write synthetic images as parquet, with their privacy card; return the file's path.

        Args:
            number: how many images to draw, >= 1.
            path: the file to write, FILE.parquet, in a separate folder.
            labels: whether to add the student's labels, in the columns `label` and `probabilities`.
            source: "generator" for the run's generator (the default, if there is one) or "queries"
                for images like the ones that the run sent to its clients.
            seed: the same seed gives the same file.

        Raises:
            UserError: the run is not completed or has no such images, or a file exists or cannot be
                written.
        """
        return synthesize(self.folder, number, _path("path", path), labels, source, seed).path

    def history(self) -> "pandas.DataFrame":
        """Return the numbers of rounds.jsonl as a pandas DataFrame, indexed by round.

        >>> import fed_dpsd
        >>> run = fed_dpsd.run("rounds=2", "queries_per_round=64", progress=False)
        >>> run.history()["answered_queries"].to_dict()
        {1: 64, 2: 128}

        Raises:
            UserError: there is no finished round.
        """
        import pandas  # takes a second to import

        if not (rows := read_log(self.folder)):
            if read_summary(self.folder).get("status") == "completed":
                raise UserError(f"{self.folder}: method={self.summary['method']} has no rounds")
            raise self._unfinished("no finished rounds")
        nested = {
            name for row in rows for name, value in row.items() if isinstance(value, list | dict)
        }
        lines = [{name: row[name] for name in row if name not in nested} for row in rows]
        return pandas.DataFrame(lines).set_index("round").drop(columns="rounds")

    def __str__(self) -> str:
        """Return the result in one line, or why there is none."""
        try:
            if not read_summary(self.folder).get("privacy"):
                return f"{self.folder}: no results"
            return result_line(open_run_folder(self.folder), self.summary)
        except UserError as error:
            return str(error)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the result, the proven epsilons and the last synthetic images, for a notebook."""
        shown = f"<p><b>{html.escape(str(self))}</b></p>"
        try:
            card = str(self.privacy)
        except UserError:
            return shown
        for picture in sorted(self.folder.glob("samples/*.png"))[-1:]:
            data = base64.b64encode(picture.read_bytes()).decode()
            shown += (
                '<p>Synthetic images that clients answered last:</p><img alt="synthetic images" '
                f'style="width:20em;image-rendering:pixelated" src="data:image/png;base64,{data}">'
            )
        shown += f"<details><summary>Privacy</summary><pre>{html.escape(card)}</pre>"
        return f"{shown}</details><p>{html.escape(str(self.folder))}</p>"


@dataclass(frozen=True)
class Sweep:
    """The finished runs of a grid.

    Args:
        table: the CSV file of the results, one row for each run; other grids may share it.
        runs: the runs, in the order of the grid.
    """

    table: Path
    runs: tuple[Run, ...]

    def results(self) -> "pandas.DataFrame":
        """Return the rows of these runs in the table as a pandas DataFrame."""
        import pandas

        table = pandas.read_csv(self.table)
        own = [run.folder.name for run in self.runs]
        return table[table["key"].isin(own)].reset_index(drop=True)

    def __repr__(self) -> str:
        """Return the number of runs and the path of the table."""
        return f"Sweep({len(self.runs)} runs, {self.table})"


@dataclass(frozen=True)
class Job:
    """A run that is ready to start or to continue.

    Args:
        experiment: the run's experiment.
        folder: the run folder.
        work: runs the experiment with a progress callback; its result is not used.
        completed: whether the run is already completed.
        warnings: sentences to show before a new run.
    """

    experiment: Experiment
    folder: Path
    work: Callable[[Progress], Any]
    completed: bool = False
    warnings: Sequence[str] = ()

    def run(self, progress: Progress) -> Run:
        """Run the job; an unexpected error leaves its traceback in error.log of the run folder.

        Raises:
            UserError: the run failed; the message names the remedy or the traceback.
        """
        if self.completed:
            return Run(self.folder)
        try:
            self.work(progress)
        except (UserError, ProtocolError):
            raise
        except Exception as error:
            note = one_line(error)
            with contextlib.suppress(UserError):  # the original error matters more
                write_atomically(self.folder / "error.log", to_utf8(traceback.format_exc()))
                note += f" (traceback: {self.folder}/error.log)"
            raise UserError(note) from error
        return Run(self.folder)


def run(
    *overrides: str,
    teacher: MakeNetwork | None = None,
    student: MakeNetwork | None = None,
    engine: Engine = "local",
    nodes: int | None = None,
    progress: bool | Progress = True,
) -> Run:
    """Run one experiment, as `fed-dpsd run OVERRIDE...` does.

    >>> import fed_dpsd, numpy as np
    >>> run = fed_dpsd.run("rounds=1", "queries_per_round=64", "training.steps=20", progress=False)
    >>> images = np.zeros((2, *run.student.network.shape), np.uint8)
    >>> run.summary["status"], run.student.predict(images).shape
    ('completed', (2, 10))

    Args:
        overrides: Hydra overrides of conf/, such as "rounds=10" and "data=mnist"; relative paths
            start from the working directory.
        teacher: a function or class that makes the network of every client's teachers, in place of
            `model.teacher`. It takes no arguments, or the image shape (C, S, S) and the number of
            classes. The network takes float images (B, C, S, S) in [-1, 1], and returns the logits
            of its last `torch.nn.Linear`. All its weights are drawn from the seed.
        student: as `teacher`, for the student. Only engine="local" takes functions.
        engine: "local", in this process, or "flower", in a separate Flower simulation.
        nodes: simulated Flower nodes, >= 1; by default one for each client.
        progress: whether to show progress, as a bar on a terminal and as lines elsewhere; or a
            function to call with each line of rounds.jsonl.

    Raises:
        UserError: an override is wrong or the run failed; the message names the remedy. The run's
            files are kept for `resume`.
    """
    named = add_functions({"teacher": teacher, "student": student})
    if named and engine != "local":
        raise UserError(
            f"{' and '.join(named)} given as a function needs engine=local; for engine={engine} "
            "write a plug-in (docs/extending.md)"
        )
    overrides += tuple(f"model.{role}='{name}'" for role, name in named.items())
    overrides += ("model.teachers=[]",) if "teacher" in named else ()
    return _run_job(new_job(overrides, engine, nodes), progress)


def resume(
    folder: Run | Path | str,
    teacher: MakeNetwork | None = None,
    student: MakeNetwork | None = None,
    progress: bool | Progress = True,
) -> Run:
    """Continue a run from its last checkpoint, in this process, with bit-identical results.

    >>> import fed_dpsd
    >>> run = fed_dpsd.run("rounds=1", "queries_per_round=64", "training.steps=20", progress=False)
    >>> again = fed_dpsd.resume(run.folder, progress=False)
    >>> again.summary["student_sha256"] == run.summary["student_sha256"]
    True

    Args:
        folder: a run or its folder, from any engine.
        teacher: the function that `run` was given, if any.
        student: the function that `run` was given, if any.
        progress: as for `run`.

    Raises:
        UserError: `folder` is not a run folder, its clients are hospitals, its data has changed, a
            function or the checkpoint of a completed run is missing, or the run failed.
    """
    if isinstance(teacher, str):
        raise UserError(
            f"{teacher}: resume takes no settings; for a longer run, start a new one with "
            "fed_dpsd.run"
        )
    add_functions({"teacher": teacher, "student": student})
    return _run_job(resumed_job(_path_of(folder)), progress)


def sweep(*overrides: str, out: Path | str = "runs/sweep", progress: bool = True) -> Sweep:
    """Run a grid of experiments, as `fed-dpsd sweep OVERRIDE...` does; repeat it to resume.

    Args:
        overrides: as for `run`, with values separated by commas, such as "seed=0,1".
        out: folder for the runs' folders and the table results.csv.
        progress: whether to show progress.

    Raises:
        UserError: an override is wrong, or a run failed; the message names each run that failed.
    """
    folder = _path("out", out)
    console = PlainConsole(stderr=True, quiet=not progress)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    table = folder / sweeps.TABLE
    _check_strings(overrides, "sweep")
    cells = sweeps.plan(list(overrides), folder, Path.cwd(), say)
    if failed := run_cells(cells, table, console, say):
        raise UserError("; ".join(f"failed: {cell}: {error}" for cell, error in failed.items()))
    return Sweep(table, tuple(Run(cell.folder) for cell in cells))


def run_cells(
    cells: Sequence[sweeps.Cell], table: Path, console: Console, say: sweeps.Say
) -> dict[str, str]:
    """Check all cells of a sweep and show their warnings, run them, and write their table.

    Returns:
        The error of each cell that failed.
    """

    def work(experiment: Experiment, folder: Path) -> None:
        run_and_show(local_job(experiment, folder), console)

    with show_progress(console):
        checked = sweeps.check(cells, _checked)
        for line in dict.fromkeys(line for _, warnings in checked for line in warnings):
            say(f"warning: {line}")
        return sweeps.run(cells, work, table, say)


def report(
    *runs: Run | Sweep | Path | str, out: Path | str | None = None, against: str | None = None
) -> Path:
    """Write a report, as `fed-dpsd report` does; return the path of its HTML page.

    Args:
        runs: runs, sweeps, or paths of run folders, of sweeps' folders and of their tables.
        out: folder to write to; by default the folder of the first table.
        against: entry to compare the others with, at equal seeds and varied keys.

    Raises:
        UserError: there is nothing to report.
    """
    if not runs:
        raise UserError("report() needs a run, a sweep or a path, as in fed_dpsd.report(run)")
    places = [_path_of(each).absolute() for each in runs]
    place = None if out is None else _path("out", out)
    return [*write_report(places, place, against)][-1]


def _path(name: str, value: Path | str) -> Path:
    """Return an argument as an absolute path; "" would silently be the working directory."""
    if not str(value):
        raise UserError(f'{name}="" is empty; give a path')
    return Path(value).absolute()


def _path_of(each: Run | Sweep | Path | str) -> Path:
    if isinstance(each, Run):
        return each.folder
    return each.table if isinstance(each, Sweep) else _path("path", each)


def load_student(path: Path | str, student: MakeNetwork | None = None) -> Student[Any]:
    """Read a student that `fed-dpsd export` wrote, as safetensors or ONNX.

    Args:
        path: the file.
        student: the function that `run` was given for the student, if any.

    Raises:
        UserError: the file is not an exported student, is damaged, or needs a missing ONNX package.
    """
    add_functions({"student": student})
    return open_student(_path_of(path))  # rejects a `Run` with the command that exports it


def plan(*overrides: str) -> PlannedRun:
    """Return the cost of a run to a client, as `fed-dpsd privacy plan` does; nothing is spent.

    Args:
        overrides: Hydra overrides, as for `run`.

    Raises:
        UserError: an override is wrong.
    """
    planned = planned_run(experiment_of(overrides))
    return dataclasses.replace(planned, sends_once=_sends_once(planned, overrides))


def _sends_once(planned: PlannedRun, overrides: Sequence[str]) -> str | None:
    """Return the method that sends weights of the same teachers once, if it costs no more."""
    name = planned.experiment.method.sends_once
    if name is None or math.isinf(planned.smallest_budget):
        return None
    own = ("method", "rounds", "queries_per_round")
    others = [each for each in overrides if each.partition("=")[0].partition(".")[0] not in own]
    try:
        other = planned_run(experiment_of([*others, f"method={name}"]))
    except UserError:  # such as teachers of several architectures
        return None
    return name if other.smallest_budget <= planned.smallest_budget else None


def new_job(overrides: tuple[str, ...], engine: Engine = "local", nodes: int | None = None) -> Job:
    """Prepare a run: check its configuration, then read its data, then make its folder."""
    forget_data()
    experiment = experiment_of(overrides)
    if engine not in get_args(Engine):
        raise UserError(f"engine={engine} must be {' or '.join(get_args(Engine))}")
    if nodes is not None and engine == "local":
        raise UserError(f"nodes={nodes} needs engine=flower; the local engine has no nodes")
    if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
        raise UserError(f"nodes={nodes!r} must be an integer >= 1")
    clients = nodes or experiment.config.num_clients
    placement, warnings = _checked(experiment, overrides, 1 if engine == "local" else clients)
    # Not in `_checked`: a sweep with partition=coins would repeat this warning for every run.
    warnings += filter(None, [unused_records(experiment)])
    folder = new_run_folder(experiment)
    if engine == "local":
        return dataclasses.replace(local_job(experiment, folder), warnings=warnings)
    return Job(
        experiment,
        folder,
        lambda progress: simulate(experiment, folder, clients, placement, progress),
        warnings=warnings,
    )


def _checked(
    experiment: Experiment, overrides: Sequence[str], nodes: int = 1
) -> tuple[Placement, list[str]]:
    """Check a run whose clients are simulated here; return its placement and warnings."""
    check_simulated(experiment, f'overrides="{" ".join(overrides)}"')
    return check_run(experiment, lambda: prepare_clients(experiment, nodes))


def resumed_job(folder: Path) -> Job:
    """Prepare the run of a folder to continue in this process."""
    forget_data()
    folder = folder.absolute()
    experiment = open_run_folder(folder)
    job = local_job(experiment, folder)
    if (summary := read_summary(folder)).get("status") == "completed":
        require_checkpoint(folder, summary)
        return dataclasses.replace(job, completed=True)
    check_simulated(experiment, f'resume="{folder}"')
    check_run(experiment, lambda: prepare_clients(experiment, 1), resumed=folder)
    return job


def local_job(experiment: Experiment, folder: Path) -> Job:
    """Prepare a run with all its clients in this process."""

    def work(progress: Progress) -> Mapping[str, Any]:
        try:
            federation = LocalFederation(experiment, folder)
        except InUse:
            raise
        except (UserError, KeyboardInterrupt, SystemExit) as error:
            write_failure(experiment, folder, LocalFederation.engine, error)
            raise
        return run_rounds(experiment, federation, folder, progress)

    return Job(experiment, folder, work)


@contextlib.contextmanager
def show_rounds(experiment: Experiment, console: Console) -> Iterator[Progress]:
    """Show finished rounds, and the work within a round: bars on a terminal, lines elsewhere."""
    with show_progress(console), reporting("rounds", experiment.config.rounds) as rounds:

        def show(line: Mapping[str, Any]) -> None:
            rounds.advance(line["round"] - rounds.done, round_text(line))

        yield show


def experiment_of(overrides: Sequence[str]) -> Experiment:
    """Return the experiment of overrides that describe a single run.

    Relative paths start from the working directory.
    """
    _check_strings(overrides, "run")
    return one_run(overrides, Path.cwd())


def _check_strings(overrides: Sequence[str], function: str) -> None:
    if not all(isinstance(override, str) for override in overrides):
        raise UserError(
            f"overrides={overrides!r}: give each override as a string, as in "
            f'fed_dpsd.{function}("rounds=2", "seed=1")'
        )


def run_and_show(job: Job, console: Console) -> Run:
    """Run a job under a progress display, and print its result on `console`."""
    with show_rounds(job.experiment, console) as progress:
        finished = job.run(progress)
    console.print(str(finished), soft_wrap=True)
    return finished


def announce(job: Job, console: Console) -> None:
    """Print what a job is about to do: the run folder at once, then the rest."""
    for line in describe_start(job.experiment, job.folder):
        console.print(line, soft_wrap=True)


def _run_job(job: Job, progress: bool | Progress) -> Run:
    if callable(progress):
        return job.run(progress)
    if not progress or job.completed:
        return job.run(lambda line: None)
    console = PlainConsole(stderr=True)
    announce(job, console)
    for line in job.warnings:
        console.print(f"warning: {line}", soft_wrap=True)
    return run_and_show(job, console)
