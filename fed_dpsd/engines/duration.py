"""About how long a run takes on this machine, told before it begins, without a measurement.

The best that can be known comes from earlier runs with the same settings, as their folders say.
Otherwise there are the seconds of the default run, for those that differ from it in their number
of rounds, queries and clients alone.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed_dpsd.config.bind import read_yaml
from fed_dpsd.config.keys import leaves
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.fed_dpsd import FedDPSD

# Settings on which no second depends, or by which the seconds are scaled.
UNTIMED = {
    *("seed", "teacher.seed", "partition.seed", "rounds", "noise", "tracker"),
    *("out", "cache", "run_folder", "ledger", "training.noise_multiplier"),
    *("answers.noise_multiplier", "answers.epsilon_per_answer"),
}
ROUND_OF_NODES = 2.25  # mean wait for the slowest of three nodes: docs/results/time.md
LOOKED_AT = 20  # run folders, the newest first
SPREAD = 1.25  # between runs with the same settings
# Seconds of the default run and of its like on an idle core: processor seconds of `fed-dpsd run`,
# 2 cores of an AMD EPYC. On a busy machine it takes several times as long.
START, CLIENT, QUERY, STEP, IDLE_TO_BUSY = 6.0, 0.5, 0.0015, 0.0006, 4.0


@dataclass(frozen=True)
class Duration:
    """The seconds that a run is expected to take.

    Args:
        least: seconds, > 0.
        most: seconds, at least as many.
        source: where they come from, in words.
    """

    least: float
    most: float
    source: str

    def __str__(self) -> str:
        """Return the text that a plan prints."""
        least, most = rounded(self.least), rounded(self.most)
        span = most if least == most else f"{least} to {most}"
        return f"about {span} on this machine ({os.cpu_count()} cores), {self.source}"


def expected(experiment: Experiment) -> Duration | None:
    """Return how long a simulation will take in this process; None where nothing is known.

    No data is read.
    """
    if not experiment.config.federation.simulation:
        return None
    return _of_earlier_runs(experiment) or _like_default(experiment)


def words(experiment: Experiment, duration: Duration | None) -> str:
    """Return what a plan says about the time of a run, given what `expected` has returned."""
    config = experiment.config
    if duration is not None:
        return str(duration)
    if not config.federation.simulation:
        return (
            f"not known: it depends on the hospitals' machines, and {config.rounds:,} rounds take "
            f"{rounded(ROUND_OF_NODES * config.rounds)} at least, for nodes ask for work every 3 s"
        )
    first = "one with rounds=2" if config.rounds > 2 else "one"
    return (
        f"not known here: no run with these settings is in {config.out}; after {first}, this plan "
        "knows"
    )


def rounded(seconds: float) -> str:
    """Return seconds as people say them: 40 s, 3 minutes, 5 hours."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{round(seconds / size)} {unit}"
    return f"{max(5, 5 * math.ceil(seconds / 5))} s"


# --- earlier runs ---


def _of_earlier_runs(experiment: Experiment) -> Duration | None:
    seconds = list(_seconds_of_runs(experiment))
    if not seconds:
        return None
    runs = "an earlier run" if len(seconds) == 1 else f"{len(seconds)} earlier runs"
    where = f"by {runs} with these settings in {experiment.config.out}"
    return Duration(min(seconds) / SPREAD, max(seconds) * SPREAD, where)


def _seconds_of_runs(experiment: Experiment) -> Iterator[float]:
    """Yield the seconds of each earlier run with the same settings, scaled to as many rounds."""
    config = experiment.config
    facts = {"method": experiment.method_name, "data": config.data.name}
    facts |= {"num_clients": config.num_clients, "status": "completed", "engine": "local"}
    wanted = timed(json.loads(experiment.to_json()))
    folders = Path(config.out).glob(f"*-{facts['method']}-{facts['data']}-seed*")
    newest = sorted(folders, key=lambda folder: folder.name, reverse=True)
    for folder in itertools.islice(newest, LOOKED_AT):
        try:
            summary = json.loads((folder / "summary.json").read_text())
            if any(summary.get(key) != value for key, value in facts.items()):
                continue
            if timed(earlier := read_yaml(folder / "config.yaml")) != wanted:
                continue
            lines = (folder / "rounds.jsonl").read_text().splitlines()
            rounds = [json.loads(line)["round_seconds"] for line in lines]
            before = summary["seconds"]["teachers"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is under way or damaged
        if earlier["rounds"] == config.rounds:
            yield START + before + sum(rounds)
        elif len(rounds) > 1:
            *first, last = rounds  # the last one trains the student for longer
            yield START + before + last + (config.rounds - 1) * sum(first) / len(first)


def timed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration that its seconds depend on, by their keys."""
    return {
        key: value
        for key, value in leaves(settings)
        if key not in UNTIMED and not key.startswith("privacy.")
    }


# --- the default run ---


def _like_default(experiment: Experiment) -> Duration | None:
    """Return the seconds of a run that differs from the default one in its numbers alone."""
    config, method = experiment.config, experiment.method
    architectures = {config.model.student, *map(config.architecture, range(config.num_clients))}
    alike = isinstance(method, FedDPSD) and architectures == {"scattering"}
    if not alike or config.data.name != "digits":
        return None
    steps = method.final_student_steps + (config.rounds - 1) * method.student_steps
    teachers = config.num_clients * config.teachers_per_client
    queries = config.rounds * config.queries_per_round
    seconds = START + CLIENT * teachers + QUERY * queries + STEP * steps
    source = f"from the default run's seconds: no run with these settings is in {config.out}"
    return Duration(seconds, IDLE_TO_BUSY * seconds, source)
