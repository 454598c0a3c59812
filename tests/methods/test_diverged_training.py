"""Every training of a method's server: one that diverges names network, step and key.

The control of all is tests/methods/test_method_contract.py: with ordinary rates they finish.
"""

import math
import re

import pytest

from fed_dpsd.errors import Diverged
from fed_dpsd.methods.fedadi import FedADI
from fed_dpsd.methods.white_box import Distilling
from tests.conftest import quick_for
from tests.methods.test_method_contract import NEEDS
from tests.running import rounds

STUDENT, GENERATOR = "method.student_learning_rate", "method.generator_learning_rate"
CLEAR = "training=plain", "answers=probabilities"
LABELS = "training=plain", "answers=label"
ONCE = "method.student_steps=1"
TRAININGS = [
    ("fed_dpsd", LABELS, "student", STUDENT),
    ("fed_dpsd", LABELS, "generator", GENERATOR),
    ("dpsd", LABELS, "student", STUDENT),
    ("dpsd", (*CLEAR, "method.discriminator=teacher"), "generator", GENERATOR),
    ("paper_fed_dpsd", (*LABELS, ONCE), "generator", STUDENT),  # which learns from the student
    ("paper_dpsd", (*LABELS, ONCE), "generator", STUDENT),
    ("dpdfd", ("training=plain", "answers=gradient_sum", ONCE), "generator", STUDENT),
    ("dp_dfd", LABELS, "student", STUDENT),
    ("dp_dfd", LABELS, "generator", GENERATOR),
    ("dgd", (*LABELS, "method.vae_steps=0"), "student", "method.learning_rate"),
    ("dgd", LABELS, "autoencoder", "method.learning_rate"),
    ("dgd", LABELS, "generator", GENERATOR),
    ("feddf", CLEAR, "student", STUDENT),
    ("fedadi", CLEAR, "student", STUDENT),
    ("dense", CLEAR, "student", STUDENT),
    ("dense", CLEAR, "generator", GENERATOR),
    ("co_boosting", CLEAR, "student", STUDENT),
    ("co_boosting", CLEAR, "generator", GENERATOR),
    ("feddafl", CLEAR, "student", STUDENT),
    ("feddafl", CLEAR, "generator", GENERATOR),
]


def named(small, method, *overrides):
    named = f"method={method}"
    return small(named, *quick_for([named]), *NEEDS.get(method, ()), *overrides)


@pytest.mark.slow
def test_a_training_that_diverges_names_network_step_and_key(small, tmp_path):
    wrong = {}
    for number, (method, answers, network, key) in enumerate(TRAININGS):
        text = f"training diverged: the loss of the {network} is .* after step "
        text += rf".*lower {key} \(now 1e\+30\)"
        found = error_of(small, tmp_path / str(number), method, *answers, f"{key}=1e30")
        if not re.match(text, found):
            wrong[method, network, key] = found
    assert not wrong


def error_of(small, folder, method, *settings):
    """The error of a diverging run; "" if there is none."""
    try:
        list(rounds(named(small, method, *settings), folder))
    except Diverged as error:
        return str(error)
    return ""


def test_images_of_a_generator_that_its_last_step_broke_are_not_sent(small, tmp_path):
    """No later loss says so, and a client would be charged for them."""
    no_areas = "method.generator_steps=1", "method.areas_fraction=0"
    wrong = {}
    for method, settings in {
        "fed_dpsd": no_areas,
        "paper_fed_dpsd": ("method.generator_steps=1",),
        "dp_dfd": ("method.pretraining_steps=1",),
        "dgd": (*no_areas, "method.lines_fraction=0"),
    }.items():
        key = f"{GENERATOR}=1e30"
        found = error_of(small, tmp_path / method, method, *LABELS, *settings, key)
        text = r"images.* are NaN or infinite; lower (its|method\.generator_learning_rate \(now 1e)"
        if not re.search(text, found):
            wrong[method] = found
    assert not wrong


def test_images_that_are_trained_themselves_are_checked_too(small, tmp_path, monkeypatch):
    """Pixels stay in [0, 1] at any rate, so the loss is planted here; the control is without."""
    experiment = named(small, "fedadi", *CLEAR)
    assert list(rounds(experiment, tmp_path / "control"))
    loss = FedADI.loss
    monkeypatch.setattr(FedADI, "loss", lambda self, *given: loss(self, *given) * math.nan)
    with pytest.raises(Diverged, match=r"of the images is NaN after step 0; lower method\.pixel"):
        list(rounds(experiment, tmp_path / "planted"))


def test_a_loss_that_is_infinite_in_a_later_round_is_found(small, tmp_path, monkeypatch):
    """The first round is normal; the infinite loss is planted in the third and last one."""
    distil, calls = Distilling.distil, []

    def later(self, student, *given):
        calls.append(student)
        if len(calls) == 3:
            for parameter in student.parameters():
                parameter.data.mul_(1e38)
        return distil(self, student, *given)

    monkeypatch.setattr(Distilling, "distil", later)
    server = rounds(named(small, "feddf", *CLEAR), tmp_path)
    assert [next(server).state.round, next(server).state.round] == [1, 2]
    with pytest.raises(Diverged, match="the loss of the student is NaN after step 0"):
        next(server)
    assert len(calls) == 3
