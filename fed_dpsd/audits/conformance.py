"""The audit of a client: statistical attacks, sampler tests and protocol tests.

Correct code is contradicted at most once in 1,000 audits. There are at most eight attacks on
private training and its answers, each with failure probability 1e-4; the three on clipping share
it, and the attack on answers at the run's settings has 1e-6. There are at most 19 counting checks,
each with 1e-5. Protocol tests contradict correct code only if 64 noisy rows are equal by chance
(below 1e-9).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dp_accounting import NonPrivateDpEvent

from fed_dpsd.accounts.card import plan_of
from fed_dpsd.audits.attacks import answer_attacks, check_sampling, training_attacks
from fed_dpsd.audits.black_box import Audited
from fed_dpsd.audits.checks import Check, Part, run_checks
from fed_dpsd.audits.claims import Attack, Say
from fed_dpsd.audits.protocol import protocol_tests
from fed_dpsd.audits.sampling import sampler_tests
from fed_dpsd.audits.victims import Broken
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.models import torch_threads
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.training import TrainingMechanism

TITLES: dict[Part, str] = {
    "attacks": "Statistical attacks",
    "sampler": "Sampler tests",
    "protocol": "Protocol tests",
}


@dataclass(frozen=True)
class Conformance:
    """The result of a client's audit."""

    # bounds on the leak of releases, compared with proofs; the run's own settings come last
    attacks: tuple[Attack, ...]
    checks: tuple[Check, ...]  # properties of correct code, for all parts
    broken: Broken | None  # how the attacked hospital's noise was weakened
    untested: str = ""  # the setting with noise that no attack knows; "" if there is none

    def contradicts(self, part: Part) -> bool:
        """Return whether anything in a part of the audit is contradicted."""
        attacked = part == "attacks" and any(attack.contradicts for attack in self.attacks)
        return attacked or any(check.contradicts for check in self.of(part))

    def of(self, part: Part) -> list[Check]:
        """Return the checks of a part."""
        return [check for check in self.checks if check.part == part]

    @property
    def refuted(self) -> bool:
        """Return whether all attacks that test the code succeed."""
        attacks = [attack.contradicts for attack in self.attacks if attack.tests_code]
        return bool(attacks) and all(attacks)

    @property
    def as_expected(self) -> bool:
        """Return whether nothing is contradicted; for a broken hospital, whether something is."""
        return self.refuted if self.broken else not any(map(self.contradicts, TITLES))

    @property
    def failure_probability(self) -> float:
        """Bound the probability that correct code is contradicted, by the sum over all parts."""
        attacks = sum(attack.audit.failure_probability for attack in self.attacks)
        return attacks + sum(check.failure_probability for check in self.checks)


def audit_client(experiment: Experiment, broken: Broken | None, say: Say) -> Conformance:
    """Audit the code that hospitals run.

    The protocol does not depend on noise, so it is not tested for a broken hospital.
    """
    private, answered = audited_parts(experiment)
    attacks: list[Attack] = []
    checks: list[Check] = []

    def attacked() -> Iterator[Check]:
        """Collect attacks; yield the checks among them."""
        if private:
            yield check_sampling(experiment, say)
            attacks.extend(training_attacks(experiment, broken, say))
        if answered:
            attacks.extend(answer_attacks(experiment, broken, say))

    with torch_threads(experiment.config.threads_client):
        checks += run_checks("attacks", "the attacked code runs", attacked)
        checks += run_checks(
            "sampler", "the tested code runs", lambda: sampler_tests(experiment, broken, say)
        )
        if not broken:
            checks += protocol_tests(experiment, say)
    unknown = isinstance(experiment.training, TrainingMechanism) and not private
    untested = f"training={experiment.training.name}" if unknown else ""
    return Conformance(tuple(attacks), tuple(checks), broken, untested)


def audited_parts(experiment: Experiment) -> tuple[bool, bool]:
    """Return whether the training and the answers are audited."""
    private = isinstance(experiment.training, DPSGD)
    randomised = not isinstance(experiment.answers.event("record", "add_remove"), NonPrivateDpEvent)
    answered = any(stage.mechanism == experiment.answers for stage in plan_of(experiment).stages)
    if not (private or (randomised and answered)):
        unused = f"method {type(experiment.method).__name__} releases no answers"
        noisy = isinstance(experiment.training, TrainingMechanism)
        trained = (
            "no attack knows the training's noise" if noisy else "no epsilon of a record holds"
        )
        raise UserError(
            f"privacy audit: training={experiment.training.name} and "
            f"answers={experiment.answers.name} have nothing to audit: "
            f"{unused if randomised else 'no noise is drawn in answers'}, and {trained}; audit "
            "training=dp_sgd, or method=fed_dpsd with answers=gradient, votes, noisy_max or label"
        )
    if randomised and answered and not isinstance(experiment.answers, Audited):
        raise UserError(
            f"privacy audit: answers={experiment.answers.name} draws noise that no attack knows; "
            "define `additive` and `worst_case` in the mechanism, or audit "
            "answers=gradient, votes, noisy_max or label"
        )
    return private, randomised and answered
