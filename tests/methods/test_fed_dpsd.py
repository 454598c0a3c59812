"""FedDPSD's own steps, and that it learns."""

import copy
from dataclasses import replace
from itertools import starmap

import numpy as np
import pytest
import torch

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.experiment import load_data
from fed_dpsd.losses import decoupled_kd_gradient
from fed_dpsd.methods.method import ReplayBuffer, tensors_of
from fed_dpsd.models.inference import predict
from fed_dpsd.protocol import Aggregate, Request
from fed_dpsd.streams import Streams
from tests.running import finish, rounds

NO_OTHERS = ("method.areas_fraction=0", "method.lines_fraction=0")


def test_gradient_labels_follow_eq_3(small):
    experiment = small("training=plain", "answers=gradient", "method.label_step=0.5")
    context = experiment.public
    predictions = np.full((1, 10), 0.1, np.float32)
    request = Request(1, np.zeros((1, 1, 8, 8), np.uint8), predictions)
    total = Aggregate(request, np.arange(10.0)[None], count=4)
    labels = experiment.method.noisy_labels(context, total)
    bound = experiment.answers.bound
    assert labels == pytest.approx(predictions - 0.5 * np.arange(10.0) / 4 / bound)


def test_response_labels_are_shares_of_the_votes(small):
    experiment = small()
    context = experiment.public
    votes = np.array([[3.0, 1.0, *[0] * 8]])
    request = Request(1, np.zeros((1, 1, 8, 8), np.uint8), np.zeros((1, 10), np.float32))
    labels = experiment.method.noisy_labels(context, Aggregate(request, votes, 4))
    assert labels[0, :2].tolist() == [0.75, 0.25]


def test_generator_training_lowers_its_loss_and_leaves_the_critic_alone(small):
    untrained, trained = (
        small("training=plain", "answers=probabilities", f"method.generator_steps={steps}")
        for steps in (0, 30)
    )
    context = trained.public
    discriminator = context.make_student(Streams(0).torch("discriminator"))
    before = {name: t.clone() for name, t in discriminator.state_dict().items()}
    losses = []
    for experiment in (untrained, trained):
        method = experiment.method
        images = method.generate(discriminator, context, 32, Streams(0).torch("generator"))
        assert 0 <= images.min() < images.max() <= 1
        losses.append(method.generator_loss(discriminator, images).item())
    assert losses[1] < losses[0] - 0.1
    after = discriminator.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.requires_grad for parameter in discriminator.parameters())


def test_a_kept_generator_is_trained_in_every_round_and_new_ones_are_not_kept(small, tmp_path):
    def generators(*overrides):
        folder = tmp_path / " ".join(overrides)
        states = [each.state.tensors for each in rounds(small(*overrides), folder)]
        own = ({k: v for k, v in s.items() if k.startswith("generator.")} for s in states)
        return [{name: tensor.tolist() for name, tensor in each.items()} for each in own]

    first, second, third = generators("method.generators=kept")
    assert first != second != third
    assert generators("method.generators=new") == [{}, {}, {}]
    assert generators("method.generators=kept", "method.noise_fraction=1", *NO_OTHERS) == [{}] * 3
    untrained = generators("method.generators=kept", "method.generator_steps=0")
    weights = [each["generator.project.weight"] for each in untrained]
    assert weights[0] == weights[1] == weights[2]  # the control


def test_a_rounds_images_are_mixed_as_configured_and_as_many_as_planned(small):
    names = ("noise_fraction", "areas_fraction", "lines_fraction")
    for queries, shares in (
        (64, (0.0, 0.0, 0.0)),
        (64, (0.25, 0.25, 0.5)),
        (2, (0.5, 0.5, 0.0)),
        (63, (0.34, 0.33, 0.33)),
        (65, (0.1, 0.2, 0.7)),
        (255, (0.34, 0.33, 0.33)),
    ):
        settings = [f"method.{name}={share}" for name, share in zip(names, shares, strict=True)]
        experiment = small(f"queries_per_round={queries}", *settings)
        method, context = experiment.method, experiment.public
        student = context.make_student(Streams(0).torch("student"))
        images, again, later = (method.draw(student, context, Streams(0), n) for n in (1, 1, 2))
        assert (images.shape, images.dtype) == ((queries, 1, 8, 8), np.uint8), shares
        assert queries * experiment.config.rounds == method.plan(context).queries
        assert (images == again).all()
        assert all((images[i] != later[i]).any() for i in range(queries)), shares
        if (count := int(queries * shares[0])) > 8:
            assert images[:count].std() == pytest.approx(255 / 12**0.5, rel=0.1)


def test_a_known_polarity_holds_from_the_first_image_on(small, tmp_path):
    """Images of both polarities, the control, are sent by default."""
    for polarity, dark in (("dark", {True}), ("light", {False}), ("both", {True, False})):
        settings = "training=plain", "rounds=1", f"method.polarity={polarity}"
        _, (only,) = finish(small(*settings), tmp_path / polarity)
        assert {bool(i.mean() < 127.5) for i in only.state.buffer[0].images} == dark, polarity


def test_recombined_images_are_made_from_the_buffer(small):
    """White images in the buffer make white ones, black images black ones: nothing else shows."""
    experiment = small("method.recombined_fraction=0.25", "queries_per_round=64")
    context = experiment.public
    student = context.make_student(Streams(0).torch("student"))
    counts = experiment.method.mixture(64)
    assert counts["recombined"] == 16
    assert sum(counts.values()) == 64
    before = 64 - 16 - counts["generated"]
    place = slice(before, before + 16)
    even = np.full((4, 10), 0.1, np.float32)
    drawn = {}
    for pixel in (0, 255):
        buffer = [ReplayBuffer(np.full((4, 1, 8, 8), pixel, np.uint8), even, even)]
        drawn[pixel] = experiment.method.draw(student, context, Streams(0), 2, buffer)
        assert (drawn[pixel][place] == pixel).all()
    same = (drawn[0] == drawn[255]).all((1, 2, 3))
    assert same.sum() == 48  # the other images do not depend on the buffer
    labels, predictions = np.eye(10, dtype=np.float32)[[0, *[1] * 63]], np.full((64, 10), 0.1)
    one_white = np.repeat(np.uint8([255, *[0] * 63]), 64).reshape(64, 1, 8, 8)
    buffer = [ReplayBuffer(one_white, predictions.astype(np.float32), labels)]
    drawn = experiment.method.draw(student, context, Streams(0), 2, buffer)
    assert drawn[place].mean() > 40  # by its label it is rare; by predictions it would be a 64th
    buffer = [ReplayBuffer(np.full((4, 1, 8, 8), p, np.uint8), even, even) for p in (255, 0)]
    drawn = experiment.method.draw(student, context, Streams(0), 3, buffer)
    assert drawn[place].any()  # although the last round's images are black
    first = experiment.method.draw(student, context, Streams(0), 1)  # nothing is answered yet
    assert len(first) == 64
    assert len({image.tobytes() for image in first[place]}) == 16


def test_the_polarity_follows_the_answers_of_all_rounds(small):
    """The first round's dark images have varied answers; the second round had no light images."""
    method = small("method.polarity=answers").method
    labels = np.eye(10, dtype=np.float32)
    images = np.repeat(np.uint8([0] * 4 + [255] * 4), 64).reshape(8, 1, 8, 8)
    first = ReplayBuffer(images, labels[[0] * 8], labels[[0, 1, 2, 3, 0, 0, 0, 0]])
    second = ReplayBuffer(images[:4], labels[[0] * 4], labels[[0] * 4])
    assert method.infer_polarity([first, second]) == "dark"
    assert method.infer_polarity([second]) == "both"  # the control


def test_the_predictions_that_are_sent_are_the_students_after_the_last_round(small, tmp_path):
    straight = rounds(small("answers=probabilities", "rounds=2"), tmp_path)
    student = copy.deepcopy(next(straight).student)
    sent = next(straight).state.buffer[1]
    assert np.array_equal(sent.predictions, predict(student, sent.images, torch.device("cpu")))


def test_a_student_learns_in_training_mode_and_predicts_in_evaluation_mode(small, tmp_path):
    """So its BatchNorm layers see each step's batch once, and nothing else."""
    settings = "answers=probabilities", "model.student=cnn_bn"
    first, second, _ = rounds(small(*settings, "rounds=3"), tmp_path / "three")
    (last,) = rounds(small(*settings, "rounds=1"), tmp_path / "one")
    for finished, steps in ((first, 5), (second, 10), (last, 10)):  # the last one's are others
        tensors = tensors_of("student", finished.state.tensors).items()
        counts = {int(own) for name, own in tensors if name.endswith("batches_tracked")}
        assert counts == {steps}


def test_gradients_are_requested_near_the_uniform_prediction(small):
    """There the answer points at the teacher's class; with our divisor at lambda 8 it does not."""
    images = np.zeros((1, 1, 8, 8), np.uint8)
    experiment = small("training=plain", "answers=gradient")
    context = experiment.public
    student = context.make_student(Streams(0).torch("student"))
    with torch.no_grad():
        student.classifier.bias[3] = 5
    asked = experiment.method.predictions(student, images, context)
    assert predict(student, images, context.device).max() > 0.9
    assert asked.argmax() == 3
    assert asked == pytest.approx(np.full((1, 10), 0.1), abs=0.01)
    teacher = np.full((1, 10), 1e-3)
    teacher[0, 7], teacher[0, 2] = 0.8, 0.192
    steps = {balance: -decoupled_kd_gradient(teacher, asked, balance) for balance in (0.0, 8.0)}
    assert steps[0.0].argmax() == 7
    assert steps[8.0].argmax() == 2


@pytest.mark.slow
def test_noise_at_the_server_is_added_once_whatever_the_number_of_clients(small, tmp_path):
    """The answers are exact; the sum's noise has one client's scale, not sqrt(m) of it."""
    experiment = small(
        *(
            "training=plain",
            "answers=gradient",
            "answers.noise_at=server",
            "answers.noise_multiplier=1000",
        ),
        *("num_clients=8", "queries_per_round=512", "rounds=1"),
    )
    federation = LocalFederation(experiment, tmp_path)
    seen = {}
    original = federation.total

    def total(request):
        seen["total"] = original(request)
        return seen["total"]

    federation.total = total
    context = experiment.public
    list(experiment.method.server(federation, context, Streams(0), None))
    scale = seen["total"].sum.std() / experiment.answers.bound
    assert scale == pytest.approx(1000, rel=0.05)  # 5,120 draws: 5 standard errors
    assert scale < 1000 * 8**0.5 * 0.95


@pytest.mark.slow
def test_the_student_learns_from_answers_alone(small, tmp_path):
    experiment = small(
        *(
            "training=plain",
            "answers=probabilities",
            "rounds=2",
            "queries_per_round=256",
            "method.student_steps=60",
            "method.final_student_steps=150",
        ),
        *("method.batch_size=128", "teacher.min_steps=150", "model.teacher_width=8"),
        *("model.student_width=8", "model.generator_width=8"),
    )
    federation = LocalFederation(experiment, tmp_path)
    test = load_data(experiment.config.data, experiment.config.cache).test
    context = experiment.public
    *_, last = experiment.method.server(federation, context, Streams(0), None)
    accuracy = (predict(last.student, test.images, context.device).argmax(1) == test.labels).mean()
    assert accuracy > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 200])
def test_the_last_student_is_kept_if_it_agrees_better_with_the_answers(
    small, tmp_path, caplog, steps
):
    """After one step it does not, so the student before it stays; also in a resumed run."""
    settings = "answers=probabilities", "teacher.min_steps=100", "method.student_steps=50"
    settings += ("method.class_counts=false",)
    experiment = small(*settings, f"method.final_student_steps={steps}")
    _, (*_, before, last) = finish(experiment, tmp_path / "straight")
    students = (tensors_of("student", each.state.tensors) for each in (last, before))
    same = all(starmap(torch.equal, zip(*(own.values() for own in students), strict=True)))
    assert last.metrics["last_student_kept"] == (steps > 1) != same
    assert (f"final_student_steps={steps}: the last student agrees less" in caplog.text) == same
    state = replace(before.state, buffer=before.state.buffer[:-1])  # a run appends to its list
    (resumed,) = rounds(experiment, tmp_path / "resumed", state)
    assert all(resumed.state.tensors[name].equal(own) for name, own in last.state.tensors.items())
    assert "last_student_kept" not in before.metrics


def test_a_last_student_with_fewer_steps_than_the_student_before_it_is_warned_about(small):
    for overrides, warned in (
        ("method.student_steps=25 method.final_student_steps=49", True),
        ("method.student_steps=25 method.final_student_steps=50", False),
        ("method.student_steps=25 method.final_student_steps=1 rounds=1", False),
    ):
        found = "".join(small("answers=label", *overrides.split()).warnings)
        assert ("final_student_steps=49: the last student" in found) == warned, overrides
        assert ("use method.final_student_steps=200" in found) == warned


def test_the_temperature_and_moved_images_change_what_the_student_learns(small):
    """Control: the same settings twice give the same student."""
    students = []
    for settings in ((), (), ("method.temperature=4",), ("method.shift=1",), ("method.flip=true",)):
        experiment = small("answers=probabilities", *settings)
        context = experiment.public
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (64, 1, 8, 8)).astype(np.uint8)
        labels = rng.dirichlet(np.ones(10), 64).astype(np.float32)
        student = context.make_student(Streams(0).torch("student"))
        samples = [ReplayBuffer(images, labels, labels)]
        experiment.method.train_student(student, samples, context, Streams(0), 1, last=False)
        students.append(torch.cat([p.detach().ravel() for p in student.parameters()]))
    assert torch.equal(students[0], students[1])
    assert not any(torch.equal(students[0], other) for other in students[2:])


@pytest.mark.slow(seconds=8)
def test_least_squares_reproduces_the_pooled_odds_of_linear_teachers(small, tmp_path):
    """Steps of the cross-entropy on the same answers stay further away."""
    distances = {}
    for fit in ("least_squares", "steps"):
        experiment = small(
            *("training=plain", "answers=probabilities", "method.pooling=odds", "model=patches"),
            *("teacher.epochs=2", "rounds=2", "queries_per_round=512", f"method.final_fit={fit}"),
        )
        last = finish(experiment, tmp_path / fit)[1][-1]
        answered = ReplayBuffer.joined(last.state.buffer)
        found = predict(last.student, answered.images, torch.device("cpu"))
        distances[fit] = np.abs(found - answered.labels).mean()
    assert distances["least_squares"] < 0.005 < distances["steps"]
