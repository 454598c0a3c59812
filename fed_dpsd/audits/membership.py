"""Membership inference on the runs of a sweep, compared with what proofs allow.

A failed attack proves nothing. An attack that succeeds beyond a proof's cap refutes the proof.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.audits.claims import Say
from fed_dpsd.audits.one_run import (
    Guesses,
    approximate_dp,
    joint_claim,
    largest_refuted,
    refutes_any,
)
from fed_dpsd.audits.rates import (
    FAILURE,
    Claim,
    Members,
    Point,
    Scores,
    auc,
    lira,
    logits,
    point_at,
    tpr_cap,
)
from fed_dpsd.audits.shadows import Row, ShadowRun, Victim, facts, rows_of
from fed_dpsd.errors import UserError
from fed_dpsd.models import torch_threads
from fed_dpsd.models.inference import Images
from fed_dpsd.progress import track

WANTED = (0.01, 0.001)  # rates of false positives
TARGETS = 3  # one of this many runs is attacked; the others are its shadows
FEWEST = 6  # runs of a setting: at least two targets, and four shadows
ALARM = 0.01  # largest probability that guesses refute a valid proof, in each row
CURVE = np.geomspace(1e-4, 1, 200)  # false positive rates drawn in a figure


@dataclass(frozen=True)
class Outcome:
    """An attack on the target runs of a setting."""

    row: Row  # the setting
    victim: Victim  # the attacked model of each run
    attack: Literal["lira", "loss"]  # LiRA, or a threshold on the loss
    # (T, N) scores; the higher, the more a record of a target run looks like a member
    scores: Scores
    included: Members  # (T, N) mask of members
    shadows: int  # number of shadow runs
    claims: tuple[Claim, ...]  # the claims proven for the victim (see `ShadowRun.claims`)

    @functools.cached_property
    def points(self) -> tuple[Point, ...]:
        """Return the points at 1 % and 0.1 % false positives, over all target runs together."""
        return tuple(point_at(self.scores, self.included, wanted) for wanted in WANTED)

    @property
    def above_cap(self) -> bool:
        """Return whether a point's interval lies above its cap."""
        return any(each.exceeds(self.claims) for each in self.points)

    @functools.cached_property
    def refuted(self) -> bool:
        """Return whether Theorem 12 refutes the proof; a few confident guesses may suffice."""
        claim = joint_claim(self.claims)
        return bool(claim and self._fair and refutes_any(claim, self._guesses, ALARM))

    @property
    def contradicts(self) -> bool:
        """Return whether the attack finds more than the proof allows, by either test."""
        return self.above_cap or self.refuted

    @property
    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return false positive rates, true positive rates and the latter's caps, for a figure."""
        others = np.sort(self.scores[~self.included])[::-1]
        members = np.sort(self.scores[self.included])
        places = np.minimum((CURVE * len(others)).astype(int), len(others) - 1)
        rates = 1 - np.searchsorted(members, others[places], side="right") / len(members)
        return CURVE, rates, np.array([tpr_cap(rate, self.claims) for rate in CURVE])

    def to_row(self) -> dict[str, Any]:
        """Return the outcome as a row of the table."""
        each = [auc(*pair) for pair in zip(self.scores, self.included, strict=True)]
        row: dict[str, Any] = {
            "setting": self.row.name,
            "victim": self.victim,
            "attack": self.attack,
            "shadows": self.shadows,
            "targets": len(self.scores),
            "members": int(self.included.sum()),
            "non_members": int((~self.included).sum()),
            "auc": auc(self.scores, self.included),
            "auc_deviation": float(np.std(each, ddof=1)),
        }
        for wanted, found in zip(("1%", "0.1%"), self.points, strict=True):
            runs = zip(self.scores, self.included, strict=True)
            alone = [point_at(*run, found.wanted).tpr for run in runs]
            row |= {
                f"tpr@{wanted}": found.tpr,
                f"tpr@{wanted}_low": found.tpr_low,
                f"tpr@{wanted}_high": found.tpr_high,
                f"tpr@{wanted}_deviation": float(np.std(alone, ddof=1)),
                f"fpr@{wanted}_high": found.fpr_high,
                f"resolved@{wanted}": found.resolved,
                f"cap@{wanted}": tpr_cap(found.fpr_high, self.claims[:1]),
                f"profile_cap@{wanted}": tpr_cap(found.fpr_high, self.claims),
            }
        least = None
        if self._fair:  # Theorem 12, which allows the guesses of a run to depend on each other
            delta = self.row.runs[0].experiment.config.privacy.delta
            least = largest_refuted(
                lambda value: approximate_dp(value, delta), self._guesses, FAILURE
            )
        row |= {"epsilon_at_least": least, "above_cap": self.above_cap, "refuted": self.refuted}
        return row | facts(self.row, self.victim)

    @property
    def _fair(self) -> bool:
        """Return whether the coins are fair, as Theorem 12 requires."""
        return self.row.runs[0].coins.fraction == 0.5

    @property
    def _guesses(self) -> Guesses:
        return Guesses(self.included, self.scores)


def attack(path: Path, say: Say) -> Iterator[Outcome]:
    """Attack the students and teachers of a sweep's folder or table, after the negative control.

    Two thirds of a setting's runs are shadow runs, and the attacker knows their coins. The other
    runs are targets. Teachers are queried with the records that their client holds or would hold.
    Untrained teachers, which do not depend on coins, are the control.
    """
    rows = rows_of(path)
    for row in rows:
        _check_row(row, path)
    known: list[tuple[Scores, tuple[Claim, ...]]] = []
    for number, row in enumerate(rows):
        say(f"{row.name}: seeds {row.seeds}, the last {len(row.runs) // TARGETS} under attack")
        included = np.stack([run.included for run in row.runs])
        control: tuple[Victim, ...] = () if number else ("untrained teachers",)
        for victim in (*control, *row.runs[0].victims):
            say(f"{row.name}: {victim}")
            scores, claims = _scores(row, victim), tuple(row.least_proven(victim).claims(victim))
            # Equal models with a different claim are a separate case, such as missing noise.
            if any(claims == of and np.array_equal(scores, other) for other, of in known):
                say("  the same models as in an earlier row")
                continue
            known.append((scores, claims))
            yield from _guess(row, victim, scores, included, claims)


def _check_row(row: Row, path: Path) -> None:
    """Reject settings with shadow runs that reveal nothing about targets, or their members."""
    number = len(row.runs)
    if number < FEWEST:
        runs = "run" if number == 1 else "runs"
        raise UserError(
            f"{path}: {row.name} has {number} {runs}; sweep over at least {FEWEST} seeds"
        )
    if len({run.coins.coins for run in row.runs}) < number:
        raise UserError(
            f"{path}: {row.name} has runs with the same partition.coins, so its shadow runs reveal "
            "which records the targets used; leave out partition.coins, which then follows the seed"
        )
    if len({run.coins.seed for run in row.runs}) > 1:
        raise UserError(
            f"{path}: {row.name} has runs with several values of partition.seed, so "
            "partition.coins alone does not decide who holds a record; use one value"
        )


def _guess(
    row: Row, victim: Victim, scores: Scores, included: Members, claims: tuple[Claim, ...]
) -> Iterator[Outcome]:
    shadows = len(scores) - len(scores) // TARGETS
    likelihoods = lira(scores[:shadows], included[:shadows], scores[shadows:])
    # The sign is the guess, so losses are centred at the middle of the shadows' losses.
    thresholds = scores[shadows:] - np.median(scores[:shadows])
    yield Outcome(row, victim, "lira", likelihoods, included[shadows:], shadows, claims)
    yield Outcome(row, victim, "loss", thresholds, included[shadows:], 0, claims)


def _scores(row: Row, victim: Victim) -> Scores:
    """Return the (R, N) logits of a victim's models on all records, members or not."""
    records, holders = row.runs[0].data.train, row.runs[0].holders
    parts = [np.arange(len(records))] if victim == "student" else holders
    asked = [Images(records.images[part]) for part in parts]
    scores = np.empty((len(row.runs), len(records)))
    with torch_threads(1):
        for number, run in enumerate(track("runs", row.runs)):
            for client, (part, images) in enumerate(zip(parts, asked, strict=True)):
                answers = _answers(run, victim, client, images)
                scores[number, part] = logits(answers, records.labels[part])
    return scores


def _answers(run: ShadowRun, victim: Victim, client: int, images: Images) -> NDArray[np.floating]:
    if victim == "student":
        return images.predict(run.student())
    if victim == "untrained teachers":
        return images.predict(run.untrained(client))
    return np.asarray(np.nanmean(run.teachers(client).sensitive_probabilities(images), axis=0))
