"""The expected duration of a run on this machine, found without reading data.

Earlier runs with the same settings give the best estimate. Otherwise, the default run's seconds are
scaled if the run differs from it only in rounds, queries and clients.
"""

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

# Settings that do not change a run's duration, or that only scale it.
UNTIMED = {
    *("seed", "teacher.seed", "partition.seed", "rounds", "noise", "tracker"),
    *("out", "cache", "run_folder", "ledger", "training.noise_multiplier"),
    *("answers.noise_multiplier", "answers.epsilon_per_answer"),
}
ROUND_OF_NODES = 2.25  # mean wait for the slowest of three nodes: results/time.md
MOST_FOLDERS = 20  # run folders to read, the newest first
SPREAD = 1.25  # between runs with the same settings
# Seconds of the default run on an idle core (2 cores of an AMD EPYC); a busy one takes longer.
START, CLIENT, QUERY, STEP, IDLE_TO_BUSY = 6.0, 0.5, 0.0015, 0.0006, 4.0


@dataclass(frozen=True)
class Duration:
    """The expected seconds of a run.

    Args:
        least: seconds, > 0.
        most: seconds, >= `least`.
        source: what the estimate is based on.
    """

    least: float
    most: float
    source: str

    def __str__(self) -> str:
        """Return the text that a plan prints."""
        span = " to ".join(dict.fromkeys(map(format_seconds, (self.least, self.most))))
        return f"about {span} on this machine ({os.cpu_count()} cores), {self.source}"


def expected_duration(experiment: Experiment) -> Duration | None:
    """Return the expected duration of a simulation in this process; None if unknown."""
    config = experiment.config
    if not config.federation.simulation:
        return None
    if seconds := list(_seconds_of_runs(experiment)):
        runs = "an earlier run" if len(seconds) == 1 else f"{len(seconds)} earlier runs"
        source = f"by {runs} with these settings in {config.out}"
        return Duration(min(seconds) / SPREAD, max(seconds) * SPREAD, source)
    method = experiment.method
    architectures = {config.model.student, *map(config.architecture, range(config.num_clients))}
    alike = isinstance(method, FedDPSD) and architectures == {"scattering"}
    if not alike or config.data.name != "digits":
        return None
    steps = method.final_student_steps + (config.rounds - 1) * method.student_steps
    teachers = config.num_clients * config.teachers_per_client
    queries = config.rounds * config.queries_per_round
    idle = START + CLIENT * teachers + QUERY * queries + STEP * steps
    source = f"from the default run's seconds: no run with these settings is in {config.out}"
    return Duration(idle, IDLE_TO_BUSY * idle, source)


def duration_text(experiment: Experiment, duration: Duration | None) -> str:
    """Return a plan's text about a run's duration, given the result of `expected_duration`."""
    config = experiment.config
    if duration is not None:
        return str(duration)
    if not config.federation.simulation:
        return (
            f"not known: it depends on the hospitals' machines, and {config.rounds:,} rounds take "
            f"at least {format_seconds(ROUND_OF_NODES * config.rounds)}, since nodes ask for work "
            "every 3 s"
        )
    first = "one with rounds=2" if config.rounds > 2 else "one"
    return (
        f"not known: no run with these settings is in {config.out}; after {first}, this plan "
        "shows it"
    )


def format_seconds(seconds: float) -> str:
    """Return seconds in a suitable unit: 40 s, 3 minutes, 5 hours."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{round(seconds / size)} {unit}"
    return f"{max(5, 5 * math.ceil(seconds / 5))} s"


def _seconds_of_runs(experiment: Experiment) -> Iterator[float]:
    """Yield the seconds of each earlier run with the same settings, scaled to the rounds."""
    config = experiment.config
    facts = {"method": experiment.method_name, "data": config.data.name}
    facts |= {"num_clients": config.num_clients, "status": "completed", "engine": "local"}
    wanted = timed_settings(json.loads(experiment.to_json()))
    folders = Path(config.out).glob(f"*-{facts['method']}-{facts['data']}-seed*")
    for folder in sorted(folders, key=lambda folder: folder.name, reverse=True)[:MOST_FOLDERS]:
        try:
            summary = json.loads((folder / "summary.json").read_text())
            earlier = read_yaml(folder / "config.yaml")
            if not facts.items() <= summary.items() or timed_settings(earlier) != wanted:
                continue
            lines = (folder / "rounds.jsonl").read_text().splitlines()
            *first, last = (json.loads(line)["round_seconds"] for line in lines)
            before = START + summary["seconds"]["teachers"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is running or damaged
        if earlier["rounds"] == config.rounds:
            yield before + sum(first) + last
        elif first:  # the last round trains the student for longer
            yield before + last + (config.rounds - 1) * sum(first) / len(first)


def timed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect a run's duration, by key."""
    return {
        key: value
        for key, value in leaves(settings)
        if key not in UNTIMED and not key.startswith("privacy.")
    }
