"""The audit of a client: statistical attacks, and checks of its draws and charges.

Correct code is contradicted at most once in 1,000 audits. There are at most eight attacks on
private training and its answers, each with failure probability 1e-4; the three on clipping share
it, and the attack on answers at the run's settings has 1e-6. There are at most eight checks, each
with 1e-5 or less.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dp_accounting import NonPrivateDpEvent

from fed_dpsd.audits.attacks import answer_attacks, check_sampling, training_attacks
from fed_dpsd.audits.black_box import Audited
from fed_dpsd.audits.checks import Check, run_checks
from fed_dpsd.audits.claims import Attack, Say
from fed_dpsd.audits.draws import check_answers, check_steps
from fed_dpsd.audits.victims import Broken
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.models import torch_threads
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.training import TrainingMechanism


@dataclass(frozen=True)
class Conformance:
    """The result of a client's audit."""

    # bounds on the leak of releases, compared with proofs; the run's own settings come last
    attacks: tuple[Attack, ...]
    checks: tuple[Check, ...]  # properties of correct code
    broken: Broken | None  # how the attacked hospital's noise was weakened
    untested: str = ""  # the setting with noise that no attack knows; "" if there is none

    @property
    def contradicts(self) -> bool:
        """Return whether a proof or a property is contradicted."""
        found: tuple[Attack | Check, ...] = (*self.attacks, *self.checks)
        return any(each.contradicts for each in found)

    @property
    def refuted(self) -> bool:
        """Return whether all attacks and checks that test the noise succeed."""
        testing = [attack.contradicts for attack in self.attacks if attack.tests_code]
        testing += [check.contradicts for check in self.checks if check.tests_noise]
        return bool(testing) and all(testing)

    @property
    def as_expected(self) -> bool:
        """Return whether nothing is contradicted; for a broken hospital, whether its noise is."""
        return self.refuted if self.broken else not self.contradicts

    @property
    def failure_probability(self) -> float:
        """Bound the probability that correct code is contradicted, by the sum over all parts."""
        attacks = sum(attack.audit.failure_probability for attack in self.attacks)
        return attacks + sum(check.failure_probability for check in self.checks)


def audit_client(experiment: Experiment, broken: Broken | None, say: Say) -> Conformance:
    """Audit the code that hospitals run."""
    private, answered = audited_parts(experiment)
    attacks: list[Attack] = []

    def attacked() -> Iterator[Check]:
        """Collect attacks; yield the checks."""
        if private:
            yield from check_sampling(experiment, say)
            yield check_steps(experiment, say)
            attacks.extend(training_attacks(experiment, broken, say))
        if answered:
            yield from check_answers(experiment, broken, say)
            attacks.extend(answer_attacks(experiment, broken, say))

    with torch_threads(experiment.config.threads_client):
        checks = tuple(run_checks("the audited code runs", attacked))
    unknown = isinstance(experiment.training, TrainingMechanism) and not private
    untested = f"training={experiment.training.name}" if unknown else ""
    return Conformance(tuple(attacks), checks, broken, untested)


def audited_parts(experiment: Experiment) -> tuple[bool, bool]:
    """Return whether the training and the answers are audited."""
    private = isinstance(experiment.training, DPSGD)
    randomised = not isinstance(experiment.answers.event("record", "add_remove"), NonPrivateDpEvent)
    answered = any(stage.mechanism == experiment.answers for stage in experiment.plan.stages)
    if not (private or (randomised and answered)):
        unused = f"method {type(experiment.method).__name__} releases no answers"
        noisy = isinstance(experiment.training, TrainingMechanism)
        trained = (
            "no attack knows the training's noise" if noisy else "no epsilon of a record holds"
        )
        raise UserError(
            f"privacy audit: training={experiment.training.name} and "
            f"answers={experiment.answers.name} have nothing to audit: "
            f"{unused if randomised else 'nothing is proven of the answers'}, and {trained}; audit "
            "training=dp_sgd, or method=fed_dpsd with answers=gradient, votes, noisy_max or label"
        )
    if randomised and answered and not isinstance(experiment.answers, Audited):
        raise UserError(
            f"privacy audit: answers={experiment.answers.name} draws noise that no attack knows; "
            "define `additive` and `worst_case` in the mechanism, or audit "
            "answers=gradient, votes, noisy_max or label"
        )
    return private, randomised and answered
