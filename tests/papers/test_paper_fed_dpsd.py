"""The papers' loops as printed: an iteration by hand, every reading, one lasting generator."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

from fed_dpsd.losses import decoupled_kd_gradient, in_logits, kd_gradients
from fed_dpsd.models.inference import predict, to_bytes
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.protocol import Aggregate, Request
from fed_dpsd.streams import Streams
from tests.conftest import composed

ONCE = ("method.student_steps=1", "method.generator_steps=1")
FED = ("method=paper_fed_dpsd", "training=plain", "answers=gradient", "model=cnn", *ONCE)
PLAIN = ("method.student_optimiser=sgd", "method.generator_optimiser=sgd")
ONE = ("method=paper_dpsd", *FED[1:], "num_clients=1")


class Answering:
    """A federation whose clients' sum is a fixed function of the request."""

    def __init__(self, count):
        self.count, self.requests = count, []

    def total(self, request):
        self.requests.append(request)
        rng = np.random.default_rng(request.query_id)
        return Aggregate(request, rng.normal(size=request.predictions.shape), self.count, {})


def after(experiment, rounds):
    """The requests and states of a run over so many rounds."""
    federation, context = Answering(2), experiment.public
    states = [r.state for r in experiment.method.server(federation, context, Streams(0), None)]
    return federation.requests, states[:rounds]


def test_one_iteration_by_hand(small):
    """Alg. 2, lines 3 to 18, with plain gradient steps."""
    experiment = small(*FED, *PLAIN, "rounds=1", "queries_per_round=8")
    method, context = experiment.method, experiment.public
    student, generator, _ = method.start(context, Streams(0))
    draw = Streams(0).torch("latents", query_id=1)
    latents = torch.randn((8, method.latent_size), generator=draw)
    twin, twins_generator = copy.deepcopy(student), copy.deepcopy(generator)
    (request,), (state,) = after(experiment, 1)

    twins_generator.train()
    images = twins_generator(latents)
    assert (request.images == to_bytes(images)).all()
    assert (request.predictions == predict(twin, request.images, context.device)).all()
    gradient = np.random.default_rng(1).normal(size=(8, 10)) / 2
    labels = torch.from_numpy((request.predictions - 0.1 * gradient).astype(np.float32))
    assert torch.equal(torch.from_numpy(state.buffer[0].labels), labels)

    twin.train()
    asked = torch.from_numpy(request.images).float() / 255
    loss = -(labels * twin(asked).log_softmax(1)).sum()
    for parameter, slope in zip(
        twin.parameters(), torch.autograd.grad(loss, list(twin.parameters())), strict=True
    ):
        parameter.data -= 0.1 * slope
    again = twins_generator(latents)
    features = twin.features(again)
    logits = twin.classifier(features)
    p = logits.softmax(1)
    loss = (
        -(labels * p.log()).sum()
        - p.max(1).values.log().sum()
        + (p * p.log()).sum()
        + features.norm(dim=1).sum()
    )
    slopes = torch.autograd.grad(loss, list(twins_generator.parameters()))
    for parameter, slope in zip(twins_generator.parameters(), slopes, strict=True):
        parameter.data -= 0.01 * slope
    for name, module in (("student", twin), ("generator", twins_generator)):
        for key, tensor in module.state_dict().items():
            found = state.tensors[f"{name}.{key}"]
            torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-4)


def test_one_generator_lives_for_the_whole_run(small):
    """It moves in each round, and so do Algorithm 1's inputs; Algorithm 2 draws new ones."""
    kept, drawn = "method.latents=kept", "method.latents=drawn"
    for overrides, learnt in (
        (FED, False),
        (ONE, True),
        ((*FED, kept), True),
        ((*ONE, drawn), False),
    ):
        requests, states = after(small(*overrides, "rounds=3", "queries_per_round=8"), 3)
        drawn = [state.tensors["latents"] for state in states]
        assert not torch.equal(drawn[0], drawn[1])
        near = functional.mse_loss(drawn[0], drawn[1]) < 0.01
        assert near == learnt
        weights = [state.tensors["generator.project.weight"] for state in states]
        assert not torch.equal(weights[0], weights[1])
        assert (weights[0] - weights[1]).abs().max() < 0.1
        assert len({request.images.tobytes() for request in requests}) == 3


def test_readings_of_the_label(small):
    predictions = np.full((4, 10), 0.1, np.float32)
    request = Request(1, np.zeros((4, 1, 8, 8), np.uint8), predictions)
    total = Aggregate(request, np.random.default_rng(0).normal(size=(4, 10)), 2)
    mean = total.sum / 2
    for reading, expected in {
        "label=step mean_over=clients": predictions - 0.1 * mean,
        "label=step mean_over=batch": predictions - 0.1 * mean.mean(0),
        "label=gradient mean_over=clients": mean,
        "label=gradient mean_over=batch": np.tile(mean.mean(0), (4, 1)),
    }.items():
        experiment = small(*FED, *(f"method.{key}" for key in reading.split()))
        labels = experiment.method.noisy_labels(experiment.public, total)
        assert labels == pytest.approx(expected), reading


def test_the_coordinates_of_gradients_change_what_is_released_but_not_its_guarantee(small):
    """The mechanism bounds the norm of whatever it is given."""
    predictions = np.random.default_rng(0).dirichlet(np.ones(10), 3).astype(np.float32)
    summed = ("method=dpdfd", "training=plain", "answers=gradient_sum", *ONE[3:])
    for base, most in ((FED, 1), (ONE, 1), (summed, 3)):  # a sum has three gradients
        known = small(*base)
        other = small(*base, "method.gradients_of=logits")
        first, second = (answered(each, predictions)[0] for each in (known, other))
        assert second == pytest.approx(in_logits(first, predictions))
        assert abs(second.sum(2)).max() < 1e-9 < abs(first.sum(2)).min()
        for unit, relation in UNITS_AND_RELATIONS:
            assert known.answers.event(unit, relation) == other.answers.event(unit, relation)
        for own in second:
            bounded = other.answers.constrain_sensitivity(own, predictions)
            assert np.linalg.norm(bounded, axis=1).max() <= most * other.answers.bound


def test_readings_of_eq_8(small):
    keys = ("mean", "samples"), ("minus", "plus"), ("plus", "minus")
    for entropy, activation, sign in itertools.product(*keys):
        readings = f"method.entropy={entropy}", f"method.activation={activation}"
        weights = 2.0, 3.0, 5.0
        names = "one_hot_weight", "entropy_weight", "activation_weight"
        weighted = (f"method.{name}={weight}" for name, weight in zip(names, weights, strict=True))
        experiment = small(*FED, *readings, f"method.student_loss_sign={sign}", *weighted)
        student, generator, latents = experiment.method.start(experiment.public, Streams(0))
        images, labels = generator(latents), torch.full((len(latents), 10), 0.1)
        loss = experiment.method.generator_loss(student, images, labels).item()
        features = student.features(images)
        p = student.classifier(features).softmax(1).double()
        balance = len(p) * (p.mean(0) * p.mean(0).log()).sum()
        if entropy == "samples":
            balance = sum((row * row.log()).sum() for row in p)
        norms = sum(row.square().sum().sqrt() for row in features)
        student_loss = -(labels * p.log()).sum()
        naive = student_loss if sign == "plus" else -student_loss
        naive += 2 * -p.max(1).values.log().sum() + 3 * balance
        naive += 5 * (norms if activation == "plus" else -norms)
        assert loss == pytest.approx(naive.item(), rel=1e-4), (entropy, activation, sign)


def test_the_defaults_are_the_print():
    """Each is the reading that the file calls printed."""
    for method, expected in (
        ("paper_fed_dpsd", ("drawn", "clients")),
        ("paper_dpsd", ("kept", "batch")),
    ):
        defaults = composed(f"method={method}")["method"]
        assert (defaults["latents"], defaults["mean_over"]) == expected
        words = (
            "student_optimiser",
            "generator_optimiser",
            "divisor",
            "gradients_of",
            "label",
            "entropy",
            "student_loss_sign",
            "activation",
        )
        printed = ["adam", "adam", "own", "probabilities", "step", "samples", "plus", "plus"]
        assert [defaults[word] for word in words] == printed
        assert (defaults["student_steps"], defaults["generator_steps"]) == (1, 1)
        assert not defaults["student_learning_rate_falls"]
        assert not defaults["bank"]


class Teachers:
    """A site whose two teachers are sure of class 7 and, second, of class 2."""

    def __init__(self, answers):
        self.answers, self.released = answers, None
        self.probabilities = np.full((2, 3, 10), 1e-3)
        self.probabilities[:, :, 7], self.probabilities[:, :, 2] = 0.8, 0.192

    def pay_for_training(self):
        pass

    def sensitive_probabilities(self, images):
        return self.probabilities

    def release(self, mechanism, sensitive, request):
        self.released = sensitive


def answered(experiment, predictions):
    """The values that a client's two teachers release."""
    site = Teachers(experiment.answers)
    experiment.method.client(Request(1, np.zeros((3, 1, 8, 8), np.uint8), predictions), site)
    return site.released, site.probabilities


def test_a_client_answers_with_the_gradient_of_its_keys(small):
    """Other values of either key give other gradients, so that neither is ignored."""
    predictions = np.random.default_rng(0).dirichlet(np.ones(10), 3).astype(np.float32)
    for keys in ((8.0, "own"), (8.0, "target"), (2.0, "own")):
        balance, divisor = keys
        experiment = small(*FED, f"method.balance={balance}", f"method.divisor={divisor}")
        for own, teacher in zip(*answered(experiment, predictions), strict=True):
            assert own == pytest.approx(decoupled_kd_gradient(teacher, predictions, *keys)), keys
            for others in ((3.0, divisor), (balance, {"own": "target", "target": "own"}[divisor])):
                assert own != pytest.approx(decoupled_kd_gradient(teacher, predictions, *others))


def test_a_client_answers_with_the_gradient_of_classic_distillation_if_asked(small):
    predictions = np.random.default_rng(0).dirichlet(np.ones(10), 3).astype(np.float32)
    for method in ("method=fed_dpsd", "method=paper_fed_dpsd"):
        for distillation, classic in (("classic", True), ("decoupled", False)):
            experiment = small(method, *FED[1:4], f"method.distillation={distillation}")
            released, probabilities = answered(experiment, predictions)
            expected = pytest.approx(kd_gradients(probabilities, predictions))
            assert (released == expected) == classic, (method, distillation)


def test_a_bad_reading_is_one_clear_error(small):
    with pytest.raises(Exception, match="method.generator_optimiser=rmsprop must be adam or sgd"):
        small(*FED, "method.generator_optimiser=rmsprop")


def test_the_untrained_generator_has_the_levels_of_its_keys(small):
    """With another draw of the levels, learning would depend on luck."""
    for contrast, brightness in ((2.0, 1.0), (5.0, -3.0)):
        levels = f"method.contrast={contrast}", f"method.brightness={brightness}"
        experiment = small(*FED, *levels)
        _, generator, latents = experiment.method.start(experiment.public, Streams(0))
        before = torch.logit(generator(latents).double(), eps=1e-12)
        assert before.mean().item() == pytest.approx(brightness, abs=0.05)
        assert before.std().item() == pytest.approx(contrast, rel=0.05)


def test_a_rate_that_falls_moves_the_student_less(small):
    """Both runs take the same first step; the last of two is half as long."""

    def steps(falls):
        experiment = small(
            *FED, *PLAIN, "rounds=2",
            "queries_per_round=8", f"method.student_learning_rate_falls={falls}",
        )  # fmt: skip
        start, _, _ = experiment.method.start(experiment.public, Streams(0))
        _, states = after(experiment, 2)
        weights = [start.classifier.bias, *(s.tensors["student.classifier.bias"] for s in states)]
        return [later - sooner for sooner, later in itertools.pairwise(weights)]

    (first, last), (same, half) = steps("false"), steps("true")
    assert torch.equal(first, same)
    torch.testing.assert_close(half, last / 2, rtol=1e-4, atol=1e-6)


def test_without_a_rate_the_generator_stays_as_it_was_drawn(small):
    """Its normalisation counts batches; its images, which the clients see, depend on none of it."""
    for rate, stays in (("0", True), ("0.01", False)):
        _, states = after(small(*FED, f"method.generator_learning_rate={rate}", "rounds=3"), 3)
        weights = [state.tensors["generator.project.weight"] for state in states]
        assert torch.equal(weights[0], weights[2]) == stays


def test_an_epoch_takes_so_many_steps_of_each_network(small):
    """With plain gradient steps, on the last images, and against the labels of the last images."""
    epoch = "method.student_steps=3", "method.generator_steps=2", "rounds=1"
    experiment = small(*FED, *PLAIN, *epoch, "queries_per_round=8")
    method, context = experiment.method, experiment.public
    student, generator, _ = method.start(context, Streams(0))
    draw = Streams(0).torch("latents", query_id=1)
    latents = torch.randn((8, method.latent_size), generator=draw)
    _, (state,) = after(experiment, 1)
    images = torch.from_numpy(state.buffer[0].images).float() / 255
    labels = torch.from_numpy(state.buffer[0].labels)
    generator.train()(latents)  # the images that were sent; it normalises by moving averages
    for _ in range(3):
        step(student.train(), method.student_loss(student(images), labels), 0.1)
    for _ in range(2):
        step(generator, method.generator_loss(student, generator(latents), labels), 0.01)
    for name, module in (("student", student), ("generator", generator)):
        for key, tensor in module.state_dict().items():
            found = state.tensors[f"{name}.{key}"]
            torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-4)


def step(module, loss, rate):
    parameters = list(module.parameters())
    for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.data -= rate * slope


@pytest.mark.parametrize("bank", [True, False])
def test_only_with_a_bank_does_a_student_learn_from_earlier_images(small, bank):
    experiment = small(*FED, "rounds=3", f"method.bank={str(bank).lower()}")
    method, context = experiment.method, experiment.public
    _, (*_, state) = after(experiment, 3)
    for number, part in enumerate(state.buffer):
        part.labels[:] = number  # so that a label names its round
    seen = []
    twin = copy.copy(method)
    object.__setattr__(twin, "student_steps", 5)
    object.__setattr__(twin, "student_loss", lambda logits, labels: seen.append(labels[:, 0]))
    student, _, _ = method.start(context, Streams(0))
    list(twin.student_losses(student, state.buffer, context, Streams(0)))
    assert len(seen) == 5
    assert len(seen[0]) == len(state.buffer[-1].labels)
    assert set(torch.cat(seen).tolist()) == ({0.0, 1.0, 2.0} if bank else {2.0})
    assert len({tuple(labels.tolist()) for labels in seen}) == (5 if bank else 1)
