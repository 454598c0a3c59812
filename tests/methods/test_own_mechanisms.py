"""Mechanisms of a plug-in, class and YAML alone: a method learns from their answers or refuses."""

import re

import pytest

from fed_dpsd.experiment import load_data
from fed_dpsd.models.inference import predict
from fed_dpsd.server.metrics import accuracy
from tests.plugin import PACKAGE, installed, write
from tests.running import finish, not_refused

pytestmark = pytest.mark.usefixtures("few_examples")
SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from dp_accounting import LaplaceDpEvent

from fed_dpsd.privacy.mechanism import ONE_TEACHER, Mechanism, Shards
from fed_dpsd.privacy.noise import LAPLACE_LOSS, noisy_sum
from fed_dpsd.privacy.votes import NoisyVotes


@dataclass(frozen=True)
class LaplaceGradients(Mechanism):
    """Gradients of L1 norm at most 0.01, with Laplace noise in units of this bound."""

    name: ClassVar[str] = "own"
    input: ClassVar[str] = "gradient"
    calibrated_by: ClassVar[str] = "noise_multiplier"
    noise_at: ClassVar[str] = "client"
    reason: ClassVar[None] = None
    num_classes: int
    noise_multiplier: float
    shards: Shards = ONE_TEACHER

    def constrain_sensitivity(self, sensitive_value, predictions):
        value = np.nan_to_num(np.asarray(sensitive_value, np.float64))
        return 0.01 * value / np.maximum(np.abs(value).sum(axis=1, keepdims=True), 1)

    def add_noise(self, value, predictions, rng):
        return noisy_sum(value, 0.01 * self.noise_multiplier, "laplace", rng)

    def admissible(self, values, predictions, teachers):
        return np.ones(len(values), bool)

    def event(self, unit, relation):
        shift = 2 * self.shards.changed(unit) / self.noise_multiplier
        return LaplaceDpEvent(1 / (shift + self.num_classes * LAPLACE_LOSS))


class NotDecoded(LaplaceGradients):
    """Its labels are the gradients."""

    def labels(self, total, count, predictions, step=1.0):
        return total / count


class Vanishing(LaplaceGradients):
    def constrain_sensitivity(self, sensitive_value, predictions):
        return np.zeros(np.shape(sensitive_value))


class Moved(NoisyVotes):
    """Each vote is for the next class, which only the mechanism knows."""

    name: ClassVar[str] = "own"

    def constrain_sensitivity(self, sensitive_value, predictions):
        return np.roll(super().constrain_sensitivity(sensitive_value, predictions), 1, axis=1)


class MovedBackInLabels(Moved):
    def labels(self, total, count, predictions, step=1.0):
        return np.roll(super().labels(total, count, predictions), -1, axis=1)


class MovedBackInTheLoss(Moved):
    def student_loss(self, predictions):
        loss = super().student_loss(predictions)
        return lambda logits, labels, chosen: loss(logits.roll(1, 1), labels, chosen)
'''


@pytest.fixture
def own(small, tmp_path):
    """Sets up an experiment with the mechanisms of SOURCE as further choices of `answers`."""
    folder = write(tmp_path / "installed")
    (folder / PACKAGE / "own.py").write_text(SOURCE)
    for name in re.findall(r"class (\w+)", SOURCE):
        text = f"_target_: {PACKAGE}.own.{name}\nnoise_multiplier: 1.0\n"
        (folder / PACKAGE / "conf" / "answers" / f"{name}.yaml").write_text(text)
    with installed(folder):
        yield lambda *overrides: small("plugins=fed_dpsd_example", "training=plain", *overrides)


def learnt(experiment, folder):
    """The last student's accuracy on the test split."""
    *_, last = finish(experiment, folder)[1]
    test = load_data(experiment.config.data, experiment.config.cache).test
    return accuracy(predict(last.student, test.images, experiment.public.device), test.labels)


LEARNING = ("model=patches", "rounds=2", "queries_per_round=512", "teacher.min_steps=200")
LEARNING += ("method.final_student_steps=200", "method.batch_size=128", "method.generator_steps=0")


@pytest.mark.parametrize(
    ("answers", "learns"),
    [
        ("LaplaceGradients", True),
        ("gradient", True),
        ("NotDecoded", False),
        ("MovedBackInLabels", True),
        ("MovedBackInTheLoss", True),
        ("Moved", False),
        ("laplace_probabilities", True),
    ],
)
@pytest.mark.slow
@pytest.mark.ci
def test_a_student_learns_from_a_mechanism_that_decodes_its_answers(own, tmp_path, answers, learns):
    """As from ours; if a mechanism decodes its answers wrongly, the student is near chance."""
    noise = "answers.noise_multiplier=0.2"
    found = learnt(own(f"answers={answers}", noise, *LEARNING), tmp_path / "run")
    assert found >= 0.6 if learns else found <= 0.2


def test_a_mechanism_that_a_method_cannot_decode_is_refused(own):
    table = [
        ("answers=Vanishing", "answers=own: the gradient of a sure teacher becomes 0 .*row_norm"),
        ("answers=LaplaceGradients method=dgd", "answers=own: method=dgd does not learn from grad"),
    ]
    assert not not_refused(own, table)
    own("answers=LaplaceGradients")  # the control


def test_the_papers_loop_warns_of_every_mechanism_of_gradients(own):
    """Whatever its keys are; the control takes probabilities."""
    for answers, warned in (("LaplaceGradients", True), ("Moved", False)):
        found = own("method=paper_fed_dpsd", f"answers={answers}").warnings
        assert any("learns nothing from gradients" in warning for warning in found) == warned
