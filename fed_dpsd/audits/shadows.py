"""Runs under attack: a sweep's run folders, with each run's models and coins.

An attacked run has `partition=coins`: a coin decided whether each record of the data set was used.
The attacker knows the coins of the shadow runs and guesses the coins of the other runs.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.card import plugins_note
from fed_dpsd.accounts.secret import noise_of
from fed_dpsd.accounts.words import PrivacyCard
from fed_dpsd.audits.rates import Claim
from fed_dpsd.client.teachers import Teachers, make_teacher
from fed_dpsd.data.datasets import Dataset
from fed_dpsd.data.partition import Coins
from fed_dpsd.engines.clients import with_patients
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment, load_data, partitions
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.epsilon import Epsilon, rounded_up
from fed_dpsd.report.settings import setting_names
from fed_dpsd.server.completed import student_of
from fed_dpsd.server.inputs import require_same_inputs
from fed_dpsd.server.run_folder import open_completed, open_run_folder
from fed_dpsd.server.summary import read_summary, scores_of
from fed_dpsd.storage import client_name, is_run_folder
from fed_dpsd.sweep.reported import settings_in, tables_of

Victim = Literal["student", "teachers", "untrained teachers"]

# A proof gives an epsilon for each delta: these deltas are tested in addition to the card's.
DELTAS = np.geomspace(1e-6, 0.5, 24)


@dataclass(frozen=True)
class ShadowRun:
    """A completed run of a sweep with coins."""

    folder: Path
    experiment: Experiment  # its experiment, with `partition=coins`

    @property
    def data(self) -> Dataset:
        """Return the data set: members and non-members."""
        return load_data(self.experiment.config.data, self.experiment.config.cache)

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        return read_summary(self.folder)

    @functools.cached_property
    def versions(self) -> dict[str, Any]:
        """The content of versions.json, such as the commit and the machine."""
        return dict(json.loads((self.folder / "versions.json").read_text()))

    @property
    def included(self) -> NDArray[np.bool_]:
        """Return the (N,) mask of the training records that a client held."""
        included = np.zeros(len(self.data.train), bool)
        included[np.concatenate(partitions(self.experiment))] = True
        return included

    @property
    def victims(self) -> tuple[Victim, ...]:
        """Return the kinds of trained models, without "student" if teachers are the result."""
        alone = self.experiment.plan.ends_with_teachers
        return ("teachers",) if alone else ("teachers", "student")

    @property
    def coins(self) -> Coins:
        """Return the partition."""
        partition = self.experiment.partition
        assert isinstance(partition, Coins)  # only such runs are attacked
        return partition

    @property
    def holders(self) -> list[NDArray[np.int64]]:
        """Return the indices of the records that each client would hold without the coins."""
        everything = dataclasses.replace(self.coins, fraction=1.0, coins=0)
        return partitions(dataclasses.replace(self.experiment, partition=everything))

    def student(self) -> Classifier:
        """Return the trained student."""
        return student_of(open_completed(self.folder)).model

    def teachers(self, client: int) -> Teachers:
        """Return a client's teachers: from the cache, or retrained to the same bits."""
        config = self.experiment.config
        indices = partitions(self.experiment)[client]
        records = with_patients(self.data.train.take(indices), config.data.records_per_patient)
        secret = noise_of(self.experiment, self.folder, client_name(client))
        return Teachers(config, self.experiment.training, client, records, records.ids, secret)

    def untrained(self, client: int) -> Classifier:
        """Return a client's first teacher before training, which has seen no record."""
        return make_teacher(self.experiment.config, client, 0)

    def proven(self, victim: Victim) -> Epsilon:
        """Return the proven epsilon of a victim, for a record that is added or removed.

        A student's epsilon is on the run's card. A teacher's epsilon is its training's, because the
        noise of answers does not cover the teacher itself.
        """
        if victim == "student":
            return PrivacyCard(self.summary["privacy"]).epsilon("record", "add_remove")
        return self._smallest_epsilon(self._stages(victim), self.experiment.config.privacy.delta)

    def claims(self, victim: Victim) -> list[Claim]:
        """Return pairs of epsilon and delta that are proven together; the first is `proven`.

        The others are the same proof at other deltas; together, they are stricter than each alone.
        """
        first, stages = self.proven(victim), self._stages(victim)
        claim = (first.value, self.experiment.config.privacy.delta)
        if math.isinf(first.value) or first.value > self._smallest_epsilon(stages, claim[1]).value:
            return [claim]  # nothing is proven, or more was charged than these stages
        return [claim, *((self._smallest_epsilon(stages, at).value, at) for at in DELTAS)]

    def _stages(self, victim: Victim) -> list[tuple[Stage, ...]]:
        """Return the stages of each proof that covers a victim."""
        if victim == "untrained teachers":
            return [()]
        plan = self.experiment.plan
        trained = [plan.budgeted] if plan.training_stages else []
        return [plan.stages, *trained] if victim == "student" else trained

    def _smallest_epsilon(self, proofs: Sequence[tuple[Stage, ...]], delta: float) -> Epsilon:
        """Return the smallest epsilon of several proofs; `inf` if there are none."""
        notes = plugins_note(self.experiment)
        found = [prove(stages, delta, "record", "add_remove", notes) for stages in proofs]
        nothing = Epsilon(math.inf, delta, "record", "add_remove", "nobody", "none", 0)
        return min([nothing, *found], key=lambda epsilon: epsilon.value)


@dataclass(frozen=True)
class Row:
    """Runs under attack that differ only in the seed."""

    name: str  # the setting's name in its sweep
    runs: Sequence[ShadowRun]  # its runs, by seed

    def least_proven(self, victim: Victim) -> ShadowRun:
        """Return the run with the weakest proof, for example a run charged more than planned."""
        return max(self.runs, key=lambda run: run.proven(victim).value)

    @property
    def seeds(self) -> str:
        """Return the seeds as a range, or list them all if some in between are missing."""
        seeds = [run.experiment.config.seed for run in self.runs]
        whole = seeds == list(range(seeds[0], seeds[-1] + 1))
        return f"{seeds[0]}-{seeds[-1]}" if whole else ", ".join(map(str, seeds))

    def all_of(self, key: str) -> str:
        """Return the distinct values of a key of versions.json; "" if no run has it."""
        values = [run.versions.get(key) for run in self.runs]
        return ", ".join(dict.fromkeys(value for value in values if value))

    def accuracy(self, victim: Victim) -> tuple[float, float]:
        """Return the mean and sample standard deviation of the test accuracy; NaN if unknown."""
        scores = [scores_of(run.summary, "accuracy") for run in self.runs]
        if victim == "student":
            known = [score["student"] for score in scores]
        elif victim == "teachers":
            known = [float(np.mean(score["clients"])) for score in scores]
        else:
            return math.nan, math.nan
        return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else math.nan


def facts(row: Row, victim: Victim) -> dict[str, Any]:
    """Return a table's facts: the claims on a setting's victim, and where it was measured."""
    first, proven = row.runs[0], row.least_proven(victim).proven(victim)
    published = first.summary["privacy"]["epsilon_published"] if victim == "student" else "inf"
    accuracy, deviation = row.accuracy(victim)
    return {
        "accuracy": accuracy,
        "accuracy_deviation": deviation,
        "seeds": row.seeds,
        "epsilon_proven": rounded_up(proven.value, 5),
        "unit": proven.unit,
        "relation": proven.relation,
        "delta": proven.delta,
        "trust": proven.trust,
        **({"review": proven.review} if proven.review else {}),
        "epsilon_published": published,
        "commit": row.all_of("commit"),
        "machine": row.all_of("machine"),
    }


def rows_of(path: Path) -> list[Row]:
    """Return the settings in a sweep's folder, or in a table next to its run folders."""
    (table,) = tables_of([path])
    settings = settings_in([table])
    alone = is_run_folder(table.parent)  # a run's own table is in its folder
    rows = []
    for name, setting in zip(setting_names(settings), settings, strict=True):
        runs = sorted(setting.runs, key=lambda run: int(run["seed"]))
        folders = [table.parent / ("" if alone else run["key"]) for run in runs]
        rows.append(Row(name, list(map(_open_shadow_run, folders))))
    return rows


def _open_shadow_run(folder: Path) -> ShadowRun:
    if not is_run_folder(folder):
        raise UserError(
            f"the run folder {folder} does not exist; an attack needs a sweep's run folders "
            "next to its table, so give the folder that the sweep wrote to"
        )
    experiment = open_run_folder(folder)
    partition, size = experiment.partition, experiment.config.data.records_per_patient
    if not isinstance(partition, Coins) or partition.fraction == 1:
        coins = isinstance(partition, Coins)
        typed = "partition.fraction=1" if coins else f"partition={partition.name}"
        raise UserError(
            f"{folder}: {typed} leaves no record out, so there are no non-members to compare "
            "with; sweep with partition=coins and a partition.fraction below 1"
        )
    if size is not None:
        raise UserError(
            f"{folder}: data.records_per_patient={size} makes up patients from existing records, "
            "so leaving out a record moves others; use null, or a data set with known patients"
        )
    require_same_inputs(experiment, folder)
    return ShadowRun(folder, experiment)
