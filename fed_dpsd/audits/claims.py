"""Attacks and the claims that they test, at settings where attack and claim are close."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fed_dpsd.audits.black_box import Audit, Proof, verdict
from fed_dpsd.config import Config
from fed_dpsd.experiment import CALIBRATED_BETWEEN
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.calibration import calibrate
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.mechanism import Charged, Relation
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse

Say = Callable[[str], None]

# Settings at which an attack comes close to the proof: a few very revealing answers.
CLOSE_EPSILON, CLOSE_DELTA = 2.1, 1e-3
ATTACK_FAILURE = 1e-4  # of each attack; conformance.py adds up all attacks and checks


@dataclass(frozen=True)
class Attack:
    """An audit and the numbers that it tests."""

    key: str  # its name in `--json`
    title: str  # the attacked part, in words
    mechanism: Charged  # the mechanism as claimed
    audit: Audit  # lower bounds on the leak
    proof: Proof  # upper bounds on the leak, valid if the claim is true
    # the paper's epsilon for the same number of answers; `inf` if none is tested
    published: float = math.inf
    tests_code: bool = True  # whether a broken implementation must be detected at these settings
    also: str = ""  # a sentence on what else the run releases; "" if nothing

    @property
    def contradicts(self) -> bool:
        """Return whether a proven number is refuted."""
        return bool(self.proof.contradicted(self.audit))

    def verdict(self) -> list[str]:
        """Describe in sentences what is refuted and what is not."""
        sentences = verdict(self.audit, self.proof, self.published, self._published_delta)
        if not self.tests_code and self.audit.lower_bound < self.proof.epsilon.value / 10:
            sentences.append("a bound near zero says little: this attack is weak at these settings")
        return sentences + [self.also] * bool(self.also)

    @property
    def _published_delta(self) -> float:
        """Return 0 for Theorem 2, which claims pure DP, and the proof's delta otherwise."""
        pure = isinstance(self.mechanism, TopKRandomizedResponse)
        return 0.0 if pure else self.proof.epsilon.delta

    def to_json(self) -> dict[str, Any]:
        """Return the object of `fed-dpsd privacy audit --json`."""
        proven = self.proof.epsilon.to_json()
        return self.audit.to_json() | {
            "title": self.title,
            "mechanism": str(self.mechanism),
            "epsilon_proven": proven["epsilon"],
            "mu_proven": self.proof.mu,
            "advantage_proven": self.proof.advantage,
            "proven": proven,
            "contradicts": self.contradicts,
            "epsilon_published": "inf" if math.isinf(self.published) else self.published,
            "published_refuted": self.audit.refutes(
                self.published, self._published_delta, self.proof.epsilon.queries
            ),
            "verdict": self.verdict(),
        }


def with_close_epsilon(mechanism: Any, spend: Callable[[Any], Epsilon]) -> Any:
    """Return the mechanism with the noise that spends CLOSE_EPSILON."""
    field = mechanism.calibrated_by

    def value_at(setting: float) -> float:
        return spend(dataclasses.replace(mechanism, **{field: setting})).value

    setting = calibrate(value_at, CLOSE_EPSILON, *CALIBRATED_BETWEEN[field])
    return dataclasses.replace(mechanism, **{field: setting})


def prove_epsilon(mechanism: Charged, queries: int, delta: float, relation: Relation) -> Epsilon:
    """Prove an epsilon for `queries` requests with one query each; a training run is one release.

    The epsilon is for a record, or for the unit of training.
    """
    if isinstance(mechanism, DPSGD):
        return prove([Stage(mechanism, 1, queries)], delta, mechanism.unit, relation)
    return prove([Stage(mechanism, queries, 1)], delta, "record", relation)


def audit_secrets(config: Config, purpose: str) -> Iterator[SecretStreams]:
    """Yield secrets derived from the run's seed, so that an audit can be repeated."""
    for number in itertools.count():
        name = f"audit of {purpose} {config.seed} {number}".encode()
        yield SecretStreams(hashlib.sha256(name).digest())
