"""Methods whose server holds the teachers: what is counted, averaged, inverted and charged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fed_dpsd.accounts.card import privacy_card, proven_epsilons
from fed_dpsd.client import site as sites
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ConfigError, ProtocolError, UserError
from fed_dpsd.experiment import load_data, set_up
from fed_dpsd.methods.fedavg import average, sizes_of
from fed_dpsd.methods.white_box import (
    BatchStatistics,
    Ensemble,
    ensemble_logits,
    fetch_teachers,
)
from fed_dpsd.models import load_vector, procedural, to_vector
from fed_dpsd.models.inference import predict, to_bytes
from fed_dpsd.privacy.accounting import Stage, best_bound, prove
from fed_dpsd.protocol import Replies, Request, Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.metrics import accuracy
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.server.summary import scores_of
from fed_dpsd.streams import Streams
from tests.conftest import composed
from tests.every import every
from tests.ledgers import entries_of
from tests.running import finish, rounds

CLEAR = ("training=plain", "answers=probabilities", "teacher.same_start=true")
PRIVATE = (
    "training=dp_sgd",
    "answers=probabilities",
    "training.steps=3",
    "teacher.same_start=true",
)
WITH_STATISTICS = ("model.teacher=cnn_bn", "model.student=cnn_bn")


def open_(experiment, folder):
    return LocalFederation(experiment, folder), experiment.public


def images(count=6, size=8):
    return torch.rand((count, 1, size, size), generator=torch.Generator().manual_seed(0))


def ensemble_of(experiment, folder):
    federation, context = open_(experiment, folder)
    teachers = fetch_teachers(federation, context)
    return Ensemble([teacher for own in teachers.values() for teacher in own]), federation, context


# --- the ensemble ---


def test_an_ensemble_counts_every_image_that_a_teacher_sees_and_every_gradient(small, tmp_path):
    ensemble, _, context = ensemble_of(small(*CLEAR, "method=ensemble"), tmp_path)
    batch = images().requires_grad_()
    ensemble(batch).sum().backward()
    assert (ensemble.forward_answers, ensemble.backward_answers) == (12, 12)
    ensemble(batch)  # no gradient is requested
    ensemble_logits(ensemble, np.zeros((5, 1, 8, 8), np.uint8), context.device)
    assert (ensemble.forward_answers, ensemble.backward_answers) == (34, 12)


def test_one_sure_teacher_rules_a_mean_of_logits_but_not_of_probabilities():
    logits = torch.tensor([[[0.0, 50.0]], [[3.0, 0.0]], [[3.0, 0.0]]])  # the first is wrong
    assert Ensemble([]).combine(logits).argmax() == 1
    together = Ensemble([], "probabilities").combine(logits)
    assert together.argmax() == 0
    assert torch.allclose(together.softmax(1), logits.softmax(2).mean(0))


@pytest.mark.parametrize("method", ["dense", "feddf", "fedadi", "feddafl", "co_boosting"])
def test_methods_distil_the_mean_that_is_chosen(small, tmp_path, method):
    few = ("method.generator_steps=1",) * (method in ("dense", "co_boosting"))
    few += {"fedadi": ("method.pixel_steps=1",), "feddafl": ("method.steps_per_round=1",)}.get(
        method, ()
    )
    losses = []
    for mean in ("logits", "probabilities"):
        settings = (*CLEAR, f"method={method}", f"method.ensemble={mean}", "rounds=1", *few)
        _, finished = finish(small(*settings), tmp_path / mean)
        losses.append(finished[-1].metrics["student_loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("settings", [(), ("teachers_per_client=3",), WITH_STATISTICS])
def test_the_servers_teachers_are_the_clients_own(small, tmp_path, settings):
    """With the statistics that BatchNorm keeps; every teacher of a client."""
    experiment = small(*CLEAR, "method=ensemble", *settings)
    federation, finished = finish(experiment, tmp_path)
    models = [model for site in federation._sites.values() for model in site._teachers.models]
    batch = images()
    own = torch.stack([model.eval()(batch) for model in models]).mean(0)
    assert torch.allclose(finished[0].student(batch), own, atol=1e-6)
    assert not torch.allclose(models[0](batch), own, atol=1e-2)


def test_weights_of_another_length_name_the_client(small, tmp_path):
    federation, _ = open_(small(*CLEAR, "method=ensemble"), tmp_path)
    _, other = open_(small(*CLEAR, "method=ensemble", "model.teacher=mlp"), tmp_path / "other")
    with pytest.raises(ProtocolError, match="client 0 sent .* weights instead of"):
        fetch_teachers(federation, other)


def test_central_is_the_one_clients_teacher(small, tmp_path):
    federation, (finished,) = finish(small(*CLEAR, "method=central", "num_clients=1"), tmp_path)
    (teacher,) = federation._sites[0]._teachers.models
    assert torch.equal(finished.student(images()), teacher(images()))


def test_direct_training_is_that_of_the_students_own_network(small, tmp_path):
    """Whatever the teachers' network; nothing is proven. The control: central training."""
    model = ("model=cnn", "model.student=lenet", "model.student_width=6")
    for method, own in (("direct", True), ("central", False)):
        config = set_up(composed(f"method={method}", *model), tmp_path).config
        student = (config.model.student, config.model.student_width)
        assert ((config.architecture(0), config.model.teacher_width) == student) == own
    experiment = set_up(composed("method=direct"), tmp_path)
    card = privacy_card(experiment, experiment.plan)
    assert {row["epsilon"] for row in card["proven"]} == {"inf"}
    assert card["reason"] == "the teachers' own weights leave the clients"


def test_locals_private_training_is_charged_and_nothing_else(small):
    experiment = small("method=local", *PRIVATE)
    folder = new_run_folder(experiment)
    federation = LocalFederation(experiment, folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    rows = summary["privacy"]["proven"]
    assert all(row["epsilon"] == row["spent"] for row in rows)
    # The teachers are the result, so the training is what is claimed; no class is counted.
    event = experiment.training.event("record", "add_remove")
    assert rows[0]["epsilon"] == pytest.approx(best_bound(event, 1e-5).epsilon)
    assert {row["basis"] for row in rows[:2]} == {"training"}
    assert all(row["epsilon"] == "inf" for row in rows[2:])
    for site in federation._sites.values():
        assert [entry.kind for entry in entries_of(site.ledger)] == ["training", "teachers"]


def test_local_sends_nothing_and_spends_nothing(small):
    experiment = small("method=local", "training=plain", "answers=label")
    folder = new_run_folder(experiment)
    federation = LocalFederation(experiment, folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    assert summary["status"] == "completed"
    assert summary["accuracy"]["student"] is None
    assert len(scores_of(summary, "accuracy")["clients"]) == 2
    assert summary["accuracy"]["clients"] is None  # nothing was released, so nothing covers them
    assert all(row["epsilon"] == row["spent"] == 0 for row in summary["privacy"]["proven"])
    assert not any(entries_of(site.ledger) for site in federation._sites.values())


@pytest.mark.parametrize(("method", "counts"), [("ensemble", False), ("dp_fedavg", True)])
def test_teachers_are_weighed_by_counts_only_where_the_student_reads_them(small, method, counts):
    experiment = small(*PRIVATE, f"method={method}", "rounds=1")
    folder = new_run_folder(experiment)
    federation = LocalFederation(experiment, folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    assert summary["status"] == "completed"
    assert (summary["accuracy"]["weighted_ensemble"] is not None) == counts
    kinds = [entry.kind for entry in entries_of(federation._sites[0].ledger)]
    assert kinds.count("counts") == counts


# --- averages ---


def test_an_average_is_flowers_own(monkeypatch):
    """The same replies, to `flwr.serverapp.strategy.FedAvg` and to ours."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    rng = np.random.default_rng(0)
    for shares in ([1.0, 1.0, 1.0], [5.0, 0.0, 120.0]):
        vectors = [rng.normal(size=50).astype(np.float32) for _ in shares]
        replies = []
        for number, (vector, share) in enumerate(zip(vectors, shares, strict=True)):
            metrics = MetricRecord({"num-examples": share})
            content = RecordDict({"arrays": ArrayRecord([vector]), "metrics": metrics})
            message = Message(RecordDict(), dst_node_id=number + 1, message_type="train")
            replies.append(Message(content, reply_to=message))
        flower, _ = FedAvg(weighted_by_key="num-examples").aggregate_train(1, replies)
        (theirs,) = flower.to_numpy_ndarrays()
        ours = average([torch.from_numpy(vector) for vector in vectors], shares)
        assert ours.numpy() == pytest.approx(theirs, abs=1e-6)
        assert np.abs(ours.numpy() - np.mean(vectors, 0)).max() > 0.1 or shares == [1.0] * 3


def test_one_round_averages_the_teachers_by_their_records(small, tmp_path):
    federation, (finished,) = finish(small(*CLEAR, "method=fedavg", "rounds=1"), tmp_path)
    sites = federation._sites.values()
    sizes = [site.sensitive_class_counts().sum() for site in sites]
    vectors = [to_vector(site._teachers.models[0]) for site in sites]
    assert sizes[0] != sizes[1]
    student = to_vector(finished.student)
    assert torch.equal(student, average(vectors, sizes))
    assert not torch.allclose(student, average(vectors, [1, 1]), atol=1e-6)
    # Without weights, and where private clients state no counts, all count alike.
    for settings in (
        (*CLEAR, "method=fedavg", "method.weights=equal"),
        (*PRIVATE, "method=dp_fedavg", "training.count_fraction=null"),
    ):
        federation, (alike,) = finish(small(*settings, "rounds=1"), tmp_path / settings[0])
        vectors = [to_vector(site._teachers.models[0]) for site in federation._sites.values()]
        assert torch.equal(to_vector(alike.student), average(vectors, [1, 1]))


def test_a_clients_teachers_share_its_records():
    """A client with more teachers counts no more; one without counts has a record to share."""
    answers = {
        client: Response(0, np.zeros((6, 1)), teachers) for client, teachers in enumerate((1, 2, 3))
    }
    replies = Replies(Request.without_images("weights", (1, 8, 8), 10), answers)
    counts = {0: np.array([5, 4]), 1: np.array([0, 9])}
    assert sizes_of(replies, counts) == [9, 4.5, 4.5, *[pytest.approx(1 / 3)] * 3]


def test_a_class_has_the_rows_of_the_clients_that_know_it(small, tmp_path):
    """All other weights count by records. The control: some rows differ from such an average."""
    experiment = small(*CLEAR, "method=weights_once", "rounds=1", "partition.alpha=0.1")
    federation, (finished,) = finish(experiment, tmp_path)
    sites = list(federation._sites.values())
    counts = np.concatenate([site.sensitive_class_counts()[0] for site in sites])
    teachers = [site._teachers.models[0] for site in sites]
    whole = experiment.public.make_teacher(0)
    load_vector(whole, average([to_vector(each) for each in teachers], counts.sum(1)))
    for name, value in finished.student.state_dict().items():
        if not name.startswith("classifier"):
            assert torch.equal(value, whole.state_dict()[name])
    shares = torch.from_numpy(counts / counts.sum(0))
    for name in ("weight", "bias"):
        own = torch.stack([getattr(each.classifier, name).detach().double() for each in teachers])
        expected = torch.einsum("ck,ck...->k...", shares, own).numpy()
        found = getattr(finished.student.classifier, name).detach().numpy()
        assert found == pytest.approx(expected, abs=1e-6)
        assert found != pytest.approx(getattr(whole.classifier, name).detach().numpy(), abs=1e-3)


def test_private_weights_once_cost_as_much_as_answers_of_the_same_teachers(small):
    """Including class counts. The control: without counts, the cost is lower."""
    once, fed = (
        small(*PRIVATE, *settings)
        for settings in (("method=weights_once", "rounds=1"), ("method=fed_dpsd",))
    )
    costs = [
        proven_epsilons(each, each.plan, "record", "add_remove")["training"].value
        for each in (once, fed, small(*PRIVATE, "training.count_fraction=null"))
    ]
    assert costs[0] == costs[1] > costs[2]
    assert once.plan.queries == 1


def test_later_rounds_train_from_the_average(small, tmp_path):
    """Better than one round from a common start; training from elsewhere would not reach it."""
    experiment = small(*CLEAR, "method=fedavg", "teacher.min_steps=100", "rounds=4")
    test = load_data(experiment.config.data, experiment.config.cache).test
    first, *_, last = (
        accuracy(predict(each.student, test.images, experiment.public.device), test.labels)
        for each in rounds(experiment, tmp_path)
    )
    assert last > first + 0.05


@pytest.mark.parametrize(
    "settings", [(*CLEAR[:1], "method=fedavg"), (*PRIVATE[:2], "method=dp_fedavg")]
)
def test_weights_that_no_average_has_a_meaning_for_are_an_error(small, settings):
    """Before any training: several architectures, or starts of their own."""
    with pytest.raises(ConfigError) as error:
        small(*settings, "model.teachers=[cnn,mlp]", "teacher.same_start=false")
    several, apart = error.value.problems
    assert "use model.teachers=[]" in several
    assert "use teacher.same_start=true" in apart
    small(*settings, "model.teachers=[]", "teacher.same_start=true")
    small(*settings, "model.teacher=scattering", "teacher.same_start=false")  # one linear layer


@every("start", ["false", "true"])
def test_weights_are_those_of_the_teachers_that_answer(small, tmp_path, start):
    """Two methods then compare what leaves, not two trainings."""
    both = []
    for method in ("fed_dpsd", "weights_once"):
        settings = "model=scattering", "training=dp_sgd", f"teacher.same_start={start}", "rounds=1"
        federation = LocalFederation(small(f"method={method}", *settings), tmp_path / method)
        both.append(federation._sites[1]._teachers.models[0])
    assert torch.equal(*map(to_vector, both))


def test_vectors_of_several_lengths_cannot_be_averaged():
    with pytest.raises(ProtocolError, match="needs one architecture; use model.teachers="):
        average([torch.zeros(3), torch.zeros(4)], [1.0, 1.0])


def test_over_budget_clients_train_no_further_and_the_run_keeps_what_it_has(small, tmp_path):
    experiment = small(*PRIVATE, "method=dp_fedavg", "rounds=3")
    one = prove([Stage(experiment.training, 1, 0)], 1e-5, "record", "add_remove").value
    experiment = small(*PRIVATE, "method=dp_fedavg", "rounds=3", f"privacy.budget={1.02 * one!r}")
    _, finished = finish(experiment, tmp_path)
    assert [each.state.round for each in finished] == [1, 1]
    assert finished[-1].refused == {c: "the client's privacy budget is spent" for c in (0, 1)}
    first, last = (to_vector(each.student) for each in finished)
    assert torch.equal(first, last)


# --- images from the teachers ---


def test_batch_statistics_match_the_teachers():
    class Teacher(nn.Module):
        def __init__(self, mean, variance):
            super().__init__()
            self.layer = nn.BatchNorm2d(1)
            self.layer.running_mean.fill_(mean)
            self.layer.running_var.fill_(variance)
            self.classifier = nn.Flatten()

        def features(self, batch):
            return self.layer(batch)

    batch = images(50).requires_grad_()
    mean, variance = batch.mean().item(), batch.var(correction=0).item()
    ensemble = Ensemble([Teacher(mean, variance), Teacher(mean + 0.3, variance + 0.4)]).eval()
    statistics = BatchStatistics(ensemble)
    ensemble(batch)
    assert statistics.loss().item() == pytest.approx(0.3 + 0.4, rel=1e-4)
    statistics.close()
    ensemble(batch)
    assert statistics.loss().item() == 0


def test_hooks_do_not_pile_up_over_rounds(small, tmp_path):
    experiment = small(*CLEAR, *WITH_STATISTICS, "method=dense", "method.generator_steps=1")
    ensemble, _, context = ensemble_of(experiment, tmp_path)
    student = context.make_student(Streams(0).torch("student"))
    for number in (1, 2):
        experiment.method.synthesise(ensemble, student, context, Streams(0), number)
    assert not any(layer._forward_hooks for layer in ensemble.modules())


def test_dense_disagrees_where_the_classes_differ_alone(small, tmp_path):
    """Equal classes: the third term is absent, however far apart the probabilities are."""
    weights = ("method.one_hot_weight=0.0", "method.batch_norm_weight=0.0")
    method = small(*CLEAR, "method=dense", *weights).method
    assert dense_loss(method, torch.tensor([[1.0, 0.0], [9.0, 0.0]])) == 0
    assert dense_loss(method, torch.tensor([[0.0, 1.0], [9.0, 0.0]])) < 0


def test_dense_weighs_the_mean_of_its_teachers_statistics(small):
    weights = ("method.one_hot_weight=0.0", "method.batch_norm_weight=2.0")
    method = small(*CLEAR, "method=dense", *weights).method
    same = torch.tensor([[4.0, 0.0], [4.0, 0.0]])
    assert dense_loss(method, same, teachers=5, distance=10.0) == pytest.approx(2 * 10 / 5)


def dense_loss(method, given, teachers=1, distance=0.0):
    class Fixed:
        def __init__(self):
            self.teachers = [None] * teachers

        def __call__(self, batch):
            return torch.tensor([[4.0, 0.0], [4.0, 0.0]])

        def loss(self):
            return torch.tensor(distance)

    classes = torch.zeros(2, dtype=torch.long)
    return method.loss(Fixed(), lambda batch: given, images(2), classes, Fixed()).item()


def test_generators_of_hard_samples_start_grey_in_every_round(small, tmp_path):
    """Like their sources', they have no brightness drawn at random."""
    experiment = small(*CLEAR, *WITH_STATISTICS, "method=dense", "method.generator_steps=1")
    ensemble, _, context = ensemble_of(experiment, tmp_path)
    student = context.make_student(Streams(0).torch("student"))
    for number in range(1, 6):
        batch = experiment.method.synthesise(ensemble, student, context, Streams(0), number)
        assert 90 < batch.mean() < 165


def test_the_batch_with_the_smallest_loss_is_kept(small):
    """Not the last one: the generator's loss does not only fall."""
    experiment = small(*CLEAR, "method=dense", "method.generator_steps=4")
    context, rng, seen = experiment.public, torch.Generator().manual_seed(0), []
    student = context.make_student(Streams(0).torch("student"))

    def loss_of(batch):
        seen.append(to_bytes(batch))
        return batch.mean() + (0, -9, 9, 0)[len(seen) - 1]

    best = experiment.method.best_batch(student, context, rng, loss_of)
    assert [np.array_equal(best, each) for each in seen] == [False, True, False, False]


def test_a_student_is_fitted_to_the_ensemble_and_not_the_other_way_round(small):
    """The loss is T^2 KL(ensemble || student), which weighs a class by the ensemble's belief."""
    experiment = small(*CLEAR, "method=feddf", "method.temperature=2")
    student = experiment.public.make_student(Streams(0).torch("student"))
    seen, answers = images(8), 9 * torch.eye(10)[:8]
    with torch.no_grad():
        believed, logs = (answers / 2).softmax(1), (student(seen) / 2).log_softmax(1)
    expected = 4 * (believed * (believed.log() - logs)).sum(1).mean().item()
    assert experiment.method.distil(student, [(seen, answers)]) == pytest.approx(expected)


def test_feddf_starts_at_the_average_where_it_can(small, tmp_path):
    widths = ("model.teacher_width=4", "model.student_width=4")
    for settings, same in ((widths, True), (("model.student=mlp",), False)):
        experiment = small(*CLEAR, "method=feddf", *settings)
        ensemble, _, context = ensemble_of(experiment, tmp_path / str(same))
        start = experiment.method.initial_student(ensemble, context, Streams(0))
        mean = average([to_vector(teacher) for teacher in ensemble.teachers], [1, 1])
        assert (len(to_vector(start)) == len(mean)) == same
        assert not same or torch.equal(to_vector(start), mean)


@pytest.mark.parametrize(
    ("spoil", "returned"),
    [
        (lambda images: images[1:], r"uint8 of shape \(63, 1, 8, 8\)"),
        (lambda images: images / 2, r"float64 of shape \(64, 1, 8, 8\)"),
    ],
)
def test_images_that_a_plugin_synthesises_are_bytes_of_the_runs_shape(
    small, tmp_path, monkeypatch, spoil, returned
):
    experiment = small(*CLEAR, "method=feddf", "queries_per_round=64")
    method, own = experiment.method, type(experiment.method).synthesise
    monkeypatch.setattr(type(method), "synthesise", lambda *a: spoil(own(*a)))
    problem = rf"FedDF.synthesise: images are {returned}; return uint8 of shape \(64, 1, 8, 8\)"
    with pytest.raises(UserError, match=problem):
        next(method.server(*open_(experiment, tmp_path), Streams(0), None))


def test_feddf_draws_each_kind_by_its_fraction_and_lines_otherwise(small, tmp_path):
    fractions = {"noise": 0.25, "areas": 0.0, "leaves": 0.5, "objects": 0.125}
    typed = [f"method.{kind}_fraction={part}" for kind, part in fractions.items()]
    experiment = small(*CLEAR, "method=feddf", "queries_per_round=16", *typed)
    ensemble, _, context = ensemble_of(experiment, tmp_path)
    student = context.make_student(torch.Generator())
    images = experiment.method.synthesise(ensemble, student, context, Streams(0), 1)
    counts = {"noise": 4, "leaves": 8, "objects": 2, "lines": 2}
    expected = procedural.draw(counts, context.image_shape, Streams(0), 1)
    assert (images == np.concatenate(expected)).all()
    with pytest.raises(ConfigError, match=r"objects_fraction=0\.6 must be >= 0 with a sum of at"):
        small(*CLEAR, "method=feddf", "method.leaves_fraction=0.5", "method.objects_fraction=0.6")
    parts = {"noise": 0.2, "areas": 0.4, "leaves": 0.3, "objects": 0.1}  # a sum above 1 in floats
    small(*CLEAR, "method=feddf", *(f"method.{kind}_fraction={parts[kind]}" for kind in parts))


@pytest.mark.parametrize("again", [False, True])
def test_denses_student_sees_moved_images_only_if_they_are_answered_again(small, tmp_path, again):
    moved = (f"method.answer_again={str(again).lower()}", "method.flip=true", "method.shift=2")
    quick = ("method.generator_steps=1", "method.student_epochs=3", "queries_per_round=4")
    experiment = small(*CLEAR, "method=dense", *moved, *quick, "rounds=2")
    ensemble, _, context = ensemble_of(experiment, tmp_path)
    learned = []
    method = replace(experiment.method)
    object.__setattr__(method, "distil", lambda _, samples: learned.extend(samples) or 0.0)
    federation = open_(experiment, tmp_path / "server")[0]
    done = [*method.server(federation, context, Streams(0), None)]
    for images, answers in learned:
        assert torch.allclose(answers, ensemble(images), atol=1e-5)
    buffer = {image.tobytes() for part in done[-1].state.buffer for image in part.images}
    seen = [to_bytes(image).tobytes() for images, _ in learned for image in images]
    assert all(image in buffer for image in seen) != again
    # 2 teachers answer 4 images in a generator's step and, if stored, once more; otherwise in each
    # of 3 epochs on 4, then 8 images.
    assert [each.forward_answers for each in done] == ([32, 56] if again else [16, 16])
    federation = open_(experiment, tmp_path / "resumed")[0]
    state = replace(done[0].state, buffer=done[0].state.buffer[:1])
    (_,) = method.server(federation, context, Streams(0), state)
    for before, after in zip(learned[3:6], learned[6:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


# --- what a client does not do ---


@every(("method", "trains"), [("weights_once", False), ("dp_fedavg", True)])
def test_weights_once_rejects_requests_to_train_before_anything_is_charged(
    small, tmp_path, method, trains
):
    federation, context = open_(small(*PRIVATE, f"method={method}", "rounds=1"), tmp_path)
    start = to_vector(context.make_teacher(0)).numpy()
    request = replace(context.request("train", 1, start), acknowledged={"dp_sgd": 1, "weights": 1})
    if trains:  # the control
        assert federation.each(request).answers
    else:
        with pytest.raises(ProtocolError, match="WeightsOnce does not answer 'train'"):
            federation.each(request)
    assert any(entries_of(site.ledger) for site in federation._sites.values()) == trains


@pytest.mark.parametrize("method", ["local", "dense", "fed_dpsd"])
def test_counts_without_noise_are_released_only_if_planned(small, tmp_path, method):
    off = ("method.class_counts=false",) if method == "fed_dpsd" else ()
    experiment = small(*CLEAR, f"method={method}", *off)
    federation, context = open_(experiment, tmp_path)
    assert not experiment.plan.releases_class_counts
    counts = Request.without_images("counts", context.image_shape, context.num_classes)
    for refused in federation.each(counts).values():
        assert refused.reason.endswith("cost the client 1 releases of class_counts")
    granted = replace(counts, acknowledged={"class_counts": 1})
    for site in federation._sites.values():
        with pytest.raises(ProtocolError, match="answer"):
            sites.answer(experiment.method, granted, site)
    assert not any(entries_of(site.ledger) for site in federation._sites.values())


def test_weights_that_no_training_can_start_from_are_not_charged(small, tmp_path):
    federation, context = open_(small(*PRIVATE, "method=dp_fedavg"), tmp_path)
    weights = np.zeros(7, np.float32)
    request = Request.without_images("train", context.image_shape, context.num_classes, 2, weights)
    with pytest.raises(ProtocolError, match="sent 7 weights instead of"):
        federation.each(request)
    assert not any(entries_of(site.ledger) for site in federation._sites.values())


def test_all_teachers_of_one_start_start_alike(small):
    config = small(*CLEAR, "method=ensemble", "teachers_per_client=2").config
    starts = [to_vector(make_teacher(config, *which)) for which in ((0, 0), (0, 1), (1, 1))]
    assert all(torch.equal(starts[0], start) for start in starts)
    config = small("training=plain", "answers=probabilities", "teachers_per_client=2").config
    starts = [to_vector(make_teacher(config, *which)) for which in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(start[:5].tolist()) for start in starts}) == 3
