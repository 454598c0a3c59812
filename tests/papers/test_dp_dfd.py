"""DP-DFD: what its two discriminators see and prove, its responses, and its generator."""

import math

import pytest

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.client import site as sites
from fed_dpsd.errors import ProtocolError
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.protocol import Request, Response
from tests.ledgers import entries_of
from tests.running import finish, not_refused

TEACHER = ("method=dp_dfd", "training=plain", "method.pretraining_steps=4")
STUDENT = (*TEACHER, "method.discriminator=student")
WEIGHTS = Request.without_images("weights", (1, 8, 8), 10)


class Listening:
    """A federation that records requests."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    def total(self, request):
        self.asked.append(request.kind)
        return self.inner.total(request)

    def each(self, request):
        self.asked.append(request.kind)
        return self.inner.each(request)


def test_a_student_driven_generator_never_gets_the_teachers_weights(small, tmp_path):
    """Nor would the client send them. The control: with the teacher they are sent."""
    federation, _ = finish(small(*STUDENT), tmp_path / "student", Listening)
    assert federation.asked == ["answers"] * 3
    site = federation.inner._sites[0]
    with pytest.raises(ProtocolError, match="does not answer 'weights'"):
        sites.answer(small(*STUDENT).method, WEIGHTS, site)
    assert {entry.kind for entry in entries_of(site.ledger)} == {"answers"}

    federation, _ = finish(small(*TEACHER), tmp_path / "teacher", Listening)
    assert federation.asked == ["weights", *["answers"] * 3]
    assert isinstance(federation.inner.each(WEIGHTS)[0], Response)


def test_the_teacher_as_discriminator_proves_nothing_and_says_so(small):
    experiment = small(*TEACHER)
    card = privacy_card(experiment, experiment.plan)
    assert {row["epsilon"] for row in card["proven"]} == {"inf"}
    assert card["reason"] == "the teachers' own weights leave the clients"
    assert card["epsilon_published"] == 10.0


@pytest.mark.parametrize("epsilon_per_answer", [1.0, 0.1])
def test_with_a_student_each_response_is_charged_as_one_between_two_classes(
    small, epsilon_per_answer
):
    """However many classes are above the threshold; as many responses as there are images."""
    experiment = small(*STUDENT, f"answers.epsilon_per_answer={epsilon_per_answer}")
    row = privacy_card(experiment, experiment.plan)["proven"][1]
    between_two = TopKRandomizedResponse(10, epsilon_per_answer, k=2)
    expected = prove((Stage(between_two, 3, 64),), 1e-5, "record", "replace_one").value
    among_ten = TopKRandomizedResponse(10, epsilon_per_answer)
    assert (row["unit"], row["relation"]) == ("record", "replace_one")
    assert row["epsilon"] == pytest.approx(expected)
    assert row["epsilon"] < math.inf
    assert prove((Stage(among_ten, 3, 64),), 1e-5, "record", "replace_one").value < expected


def test_the_papers_threshold_is_the_default(small):
    experiment = small("method=dp_dfd")
    assert experiment.answers.threshold == 1 / (2 * experiment.answers.num_classes)


@pytest.mark.parametrize("settings", [TEACHER, STUDENT], ids=["teacher", "student"])
def test_what_the_generator_learns_from_the_teacher_counts_as_answers(small, tmp_path, settings):
    _, finished = finish(small(*settings, "method.generator_steps=2"), tmp_path)
    trained = [(4 + 2) * 64, 2 * 64, 2 * 64] if settings is TEACHER else [0, 0, 0]
    counted = [(each.forward_answers, each.backward_answers) for each in finished]
    assert counted == [(64 + more, more) for more in trained]


def test_bad_settings_are_named(small):
    table = (
        ("method.discriminator=both", "discriminator=both must be student or teacher"),
        (
            "method.pretraining_steps=0 method.generator_steps=0",
            "pretraining_steps=0 and generator_steps=0; set one of them >= 1",
        ),
        ("method.contrast=0", "contrast=0 must be > 0"),
        ("num_clients=2", "method=dp_dfd has one client; use num_clients=1"),
    )
    assert not not_refused(small, table, *TEACHER)
