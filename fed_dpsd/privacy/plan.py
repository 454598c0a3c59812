"""Plans of a run's charges, computed from public information in advance."""

from collections import Counter
from dataclasses import dataclass

from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import ExactCounts, KeptTeachers
from fed_dpsd.privacy.training import ClassCounts, Training, TrainingMechanism


@dataclass(frozen=True)
class Plan:
    """The charges that one client should expect, computed from public information."""

    training: Training  # how the teachers are trained
    stages: tuple[Stage, ...]  # the releases, in order: class counts, weights, answers
    trainings: int = 1  # number of training runs, >= 1

    @property
    def training_stages(self) -> tuple[Stage, ...]:
        """Return the stage of private training; empty if `training` is `Plain`."""
        if not isinstance(self.training, TrainingMechanism):
            return ()
        return (Stage(self.training, self.trainings, 0),)

    @property
    def charged(self) -> tuple[Stage, ...]:
        """Return all stages that a ledger records."""
        return (*self.stages, *self.training_stages)

    @property
    def budgeted(self) -> tuple[Stage, ...]:
        """Return the stages that a budget counts.

        Private training covers everything that passes through its teachers, as post-processing.
        """
        if not self.training_stages:
            return self.stages
        others = (s for s in self.stages if not s.mechanism.from_teachers)
        return (*self.training_stages, *others)

    @property
    def ends_with_teachers(self) -> bool:
        """Return whether the teachers themselves are the result and stay at their clients."""
        return any(isinstance(stage.mechanism, KeptTeachers) for stage in self.stages)

    @property
    def releases_class_counts(self) -> bool:
        """Return whether class counts are released."""
        return any(isinstance(s.mechanism, ClassCounts | ExactCounts) for s in self.stages)

    @property
    def queries(self) -> int:
        """Return N, the number of queries in all stages."""
        return sum(stage.requests * stage.queries for stage in self.stages)

    @property
    def releases(self) -> Counter[str]:
        """Return the number of releases that a client is charged for, by name."""
        totals = Counter[str]()
        for stage in self.charged:
            totals[stage.mechanism.name] += stage.mechanism.releases(stage.requests, stage.queries)
        return totals
