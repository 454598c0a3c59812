"""A client's teachers: disjoint shards, architectures, files and the cache."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fed_dpsd.client import learning, teachers
from fed_dpsd.client.device import TeacherCache
from fed_dpsd.client.learning import ShiftedCopies, safe_batch, shifted
from fed_dpsd.client.teachers import Teachers, assign_shards, make_teacher
from fed_dpsd.data.intake import Records
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.models import initialise, precision, to_vector, write_weights
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.models.footprint import weight_bytes
from fed_dpsd.models.inference import IMAGES_AT_ONCE, Images, predict
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.noise import STREAM_BYTES, SecretStreams
from fed_dpsd.privacy.training import Plain
from fed_dpsd.progress import listening
from fed_dpsd.streams import Streams
from tests.client.conftest import SECRET
from tests.every import every
from tests.listeners import Hearing


def make(experiment, records, record_ids=None, client=0, secret=None):
    ids = np.arange(len(records)) if record_ids is None else record_ids
    return Teachers(experiment.config, experiment.training, client, records, ids, secret)


def same(one, other):
    weights = one.state_dict()
    return all(torch.equal(weights[name], t) for name, t in other.state_dict().items())


def test_public_features_are_kept_in_the_cache(small):
    """A teacher's and a student's; other classifiers, the control, have no folder."""
    experiment = small("model=pretrained")
    context = experiment.public
    expected = Path(experiment.config.cache) / "features"
    assert make_teacher(experiment.config, 0, 0).backbone.folder == expected
    assert context.make_student(Streams(0).torch("student")).backbone.folder == expected
    assert not hasattr(make_teacher(small().config, 0, 0).backbone, "folder")


def test_records_are_taken_one_by_one_where_places_in_a_batch_do_not_agree(monkeypatch):
    """Otherwise a record's features would depend on its neighbours in the batch."""
    build = functools.partial(CLASSIFIERS["scattering"], (1, 8, 8), 10, 4)
    teacher = initialise(build, Streams(0).torch("teacher"))
    images = np.zeros((3, 1, 8, 8), np.uint8)
    monkeypatch.setattr(learning, "_safe_batches", {})
    assert safe_batch(teacher, images) == IMAGES_AT_ONCE
    features = teacher.features

    def by_place(pixels):
        return features(pixels) + torch.arange(len(pixels))[:, None] * 2.0**-10

    monkeypatch.setattr(teacher, "features", by_place)
    assert safe_batch(teacher, images) == IMAGES_AT_ONCE  # it was found before
    monkeypatch.setattr(learning, "_safe_batches", {})
    assert safe_batch(teacher, images) == 1


def test_a_records_shard_depends_on_its_own_id_and_the_key_alone():
    ids = np.arange(5_000)
    shards = assign_shards(ids, 7, key=3)
    assert set(shards) == set(range(7))
    assert (assign_shards(ids[::3], 7, key=3) == shards[::3]).all()
    assert (assign_shards(ids, 7, key=4) != shards).mean() > 0.5
    counts = np.bincount(shards)
    assert abs(counts - 5_000 / 7).max() < 5 * (5_000 / 7) ** 0.5


def test_one_changed_record_changes_one_teacher(small, records):
    """The basis of the record-level guarantee; every other teacher has the same bits."""
    experiment = small("teachers_per_client=4")
    images = records.images.copy()
    images[17] = 255 - images[17]
    before = make(experiment, records).models
    after = make(experiment, Records(images, records.labels)).models
    changed = [not same(one, other) for one, other in zip(before, after, strict=True)]
    shard = assign_shards(np.array([17]), 4, experiment.config.teacher.seed)[0]
    assert changed == [i == shard for i in range(4)]


def test_one_record_less_changes_one_teacher_although_layers_draw(
    small, records, monkeypatch, tmp_path
):
    """Dropout draws from torch's own generator, which all shards share."""

    def build(shape, num_classes, width):
        layers = nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.Dropout()
        return Classifier(nn.Sequential(*layers), 8, num_classes)

    monkeypatch.setitem(CLASSIFIERS, "mlp", build)
    key, ids, trained = small().config.teacher.seed, np.arange(len(records)), []
    for kept in (ids, np.delete(ids, assign_shards(ids, 2, key).argmin())):
        torch.manual_seed(0)  # as in two processes, which share no cache either
        experiment = small(
            *("teachers_per_client=2", "model.teacher=mlp", "teacher.epochs=1"),
            *("teacher.batch_size=1024", f"cache={tmp_path / str(len(kept))}"),
        )
        trained.append(make(experiment, records.take(kept), kept).models)
    assert [same(one, other) for one, other in zip(*trained, strict=True)] == [False, True]


def test_an_empty_shard_still_answers(small, records):
    """One record, eight teachers: seven have no vote, and the answer's shape does not reveal it."""
    own = make(small("teachers_per_client=8"), records.take(np.arange(1)))
    sensitive = own.sensitive_probabilities(Images(records.images))
    empty = np.isnan(sensitive).all((1, 2))
    assert empty.tolist() == [teacher is None for teacher in own.models]
    assert empty.sum() == 7
    assert np.isfinite(sensitive[~empty]).all()
    for answers in ("label", "gradient", "probabilities"):
        mechanism = small(f"answers={answers}", "teachers_per_client=8").answers
        uniform = np.full(sensitive.shape[1:], 0.1, np.float32)
        encoded = mechanism.constrain_sensitivity(sensitive[empty][0], uniform)
        assert (encoded == encoded[0, 0]).all()
        assert encoded[0, 0] == pytest.approx(0 if answers == "gradient" else 0.1)


def test_every_client_may_have_another_architecture(small, tmp_path):
    experiment = small(
        "num_clients=5", "model.teachers=[cnn,mlp,lenet]", "training=plain", "answers=probabilities"
    )
    federation = LocalFederation(experiment, tmp_path)
    kinds = [type(s._teachers.models[0].backbone[-1]).__name__ for s in federation._sites.values()]
    sizes = [
        sum(p.numel() for p in site._teachers.models[0].parameters())
        for site in federation._sites.values()
    ]
    assert len(kinds) == 5
    assert sizes[0] == sizes[3] != sizes[1] == sizes[4] != sizes[2]


def test_a_teacher_from_a_file_answers_as_it_did_where_it_was_trained(small, records, tmp_path):
    trained = make_teacher(small("model.teacher=mlp").config, 0, 0)
    write_weights(trained, tmp_path / "client_1.safetensors")
    path = f"teacher.path={tmp_path}/client_{{client}}.safetensors".replace("{client}", "1")
    read = make(small(path, "teacher.arch=mlp"), records)
    expected = predict(trained, records.images, torch.device("cpu"))
    assert (read.sensitive_probabilities(Images(records.images))[0] == expected).all()


def test_a_file_of_another_architecture_is_refused_by_name(small, records, tmp_path):
    for name, wrong in (("cnn", "mlp"), ("lenet", "cnn"), ("scattering", "cnn")):
        teacher = make_teacher(small(f"model.teacher={wrong}").config, 0, 0)
        write_weights(teacher, tmp_path / "t.safetensors")
        experiment = small(f"teacher.path={tmp_path}/t.safetensors", f"teacher.arch={name}")
        with pytest.raises(UserError, match=f"t.safetensors does not fit teacher.arch={name}") as e:
            make(experiment, records)
        assert "\n" not in str(e.value)


def test_a_file_of_another_width_or_no_file_is_refused(small, records, tmp_path):
    teacher = make_teacher(small("model.teacher_width=5").config, 0, 0)
    write_weights(teacher, tmp_path / "t.safetensors")
    with pytest.raises(UserError, match=r"teacher_width=4.*shape \[5, 1, 3, 3\].*\[4, 1, 3, 3\]"):
        make(small(f"teacher.path={tmp_path}/t.safetensors", "teacher.arch=cnn"), records)
    (tmp_path / "t.safetensors").write_bytes(b"pickle?")
    with pytest.raises(UserError, match="is not a safetensors file"):
        make(small(f"teacher.path={tmp_path}/t.safetensors", "teacher.arch=cnn"), records)
    with pytest.raises(UserError, match="does not exist"):
        make(small(f"teacher.path={tmp_path}/none.safetensors", "teacher.arch=cnn"), records)


def test_teachers_are_cached_by_everything_they_depend_on(small, records, monkeypatch):
    trained = []
    original = Plain.teach
    monkeypatch.setattr(Plain, "teach", lambda *a: trained.append(a) or original(*a))
    experiment = small("seed=11")
    first = make(experiment, records).sensitive_probabilities(Images(records.images))
    again = make(experiment, records).sensitive_probabilities(Images(records.images))
    assert (first == again).all()
    assert len(trained) == 1
    fewer = records.take(np.arange(1, 60))
    relabelled = replace(records, labels=np.roll(records.labels, 1))
    repainted = replace(records, images=255 - records.images)
    for other, client, data in (
        (small("seed=12"), 0, records),
        (small("seed=11", "teacher.learning_rate=0.1"), 0, records),
        (small("seed=11", "model.teacher_width=5"), 0, records),
        (experiment, 1, records),
        (experiment, 0, fewer),
        (experiment, 0, relabelled),
        (experiment, 0, repainted),
    ):
        assert make(other, data, client=client).models
    assert len(trained) == 8
    secret = SecretStreams(bytes(32))
    own = Teachers(experiment.config, experiment.training, 0, records, np.arange(60), secret)
    assert own.keys != make(experiment, records).keys


def test_a_private_training_draws_other_noise_for_other_records(small, records):
    """Otherwise the difference of two teachers would reveal a record that one noise hides."""
    private = (
        "training=dp_sgd",
        "answers=probabilities",
        "training.steps=1",
        "training.noise_multiplier=1000.0",
    )
    weights = [
        next(make(small(*private), data).models[0].parameters()).detach().ravel()
        for data in (records, records.take(np.arange(59)))
    ]
    start = next(make_teacher(small().config, 0, 0).parameters()).detach().ravel()
    noise = [(weight - start).numpy() for weight in weights]
    assert np.abs(np.corrcoef(*noise)[0, 1]) < 0.7  # 36 weights: 0.7 is above 4 deviations
    assert np.abs(noise).max() > 1e-3  # one step of Adam


def test_each_retraining_of_each_teacher_has_noise_of_its_own(small, records):
    """Without records, a step is noise alone. 650 weights: 0.2 is above 5 deviations."""
    settings = "training=dp_sgd", "training.steps=1", "teachers_per_client=2", "model=scattering"
    own = make(small(*settings), records.take(np.arange(0)))
    start = np.zeros(own.size, np.float32)
    first, again, another = (
        own.sensitive_retrained(start, number, "ab", 1)[0, :, 0] for number in (2, 2, 3)
    )
    assert np.array_equal(first, again)
    for one, other in ((first, another), np.split(first, 2)):
        assert np.abs(np.corrcoef(one, other)[0, 1]) < 0.2


@every("network", ["cnn", "cnn_bn", "resnet9"])
def test_clients_that_share_a_network_learn_from_sent_weights_as_alone(small, records, network):
    """Weights and statistics are loaded, and nothing of another client is left."""
    experiment = small(f"model.teacher={network}", "teachers_per_client=2", "num_clients=2")
    sent = to_vector(make_teacher(experiment.config, 1, 0)).numpy()
    trained = []
    for alone in (True, False):
        for client in (0, 1):
            own = make(experiment, records.take(np.arange(client, len(records), 2)), client=client)
            if alone:
                own._for_sent_weights = own._untrained
            trained.append(own.sensitive_retrained(sent, 1, "0" * 64, epochs=1))
    for first, second in zip(trained[:2], trained[2:], strict=True):
        assert np.array_equal(first, second)
    assert not np.array_equal(*trained[:2])


def test_a_teacher_that_changes_leaves_the_same_start_of_others(small):
    config = small("teacher.same_start=true", "model.teacher=cnn_bn").config
    one, two = make_teacher(config, 0, 0), make_teacher(config, 1, 0)
    assert same(one, two)
    with torch.no_grad():
        next(one.parameters()).zero_()
    assert same(two, make_teacher(config, 2, 1))
    assert not same(one, two)


@every("training", ["plain", "dp_sgd"])
def test_teachers_and_their_steps_are_reported_over_all_clients(small, training):
    steps = {"plain": ("teacher.min_steps=3",), "dp_sgd": ("training.steps=3",)}[training]
    experiment = small(f"training={training}", *steps, "teachers_per_client=2", "model=scattering")
    federation, hearing = (
        LocalFederation(experiment, Path(experiment.config.out)),
        Hearing(),
    )
    with listening(hearing):
        list(federation.diagnose())
    heard = [part for part in hearing.heard if part[0] != "images"]
    expected = []
    for teacher in (1, 2, 3, 4):
        expected += [("steps of a teacher", step, 3) for step in (1, 2, 3)]
        expected.append(("teachers", teacher, 4))
    assert heard == expected
    before = list(hearing.heard)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()  # of nobody's training
    assert hearing.heard == before


def test_copies_are_the_image_moved_by_a_pixel_and_itself():
    image = np.arange(12, dtype=np.uint8).reshape(1, 1, 3, 4)
    copies = shifted(image, 9)
    assert copies.shape == (1, 9, 1, 3, 4)
    assert (copies[:, 0] == image).all()
    assert len({copy.tobytes() for copy in copies[0]}) == 9
    assert (copies[0, 1, 0] == image[0, 0, [1, 2, 2]]).all()  # what comes in is what was there
    assert (copies[0, 4, 0] == image[0, 0][:, [0, 0, 1, 2]]).all()


def test_copies_are_made_when_they_are_read():
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)
    every, lazy = shifted(images, 4).reshape(20, 3, 8, 8), ShiftedCopies(images, 4)
    assert (len(lazy), lazy.shape) == (20, every.shape)
    for chosen in (slice(3, 14), slice(None), slice(0, 0), np.array([19, 2, 2, 7])):
        assert (lazy[chosen] == every[chosen]).all()


def test_class_counts_are_each_shards_own_and_the_same_at_every_call(small, records):
    """The sum of the shards is what leaves; one record changes the counts of its shard alone."""
    experiment = small(
        *(
            "training=dp_sgd",
            "answers=probabilities",
            "training.steps=1",
            "training.count_fraction=200.0",
        ),
        "teachers_per_client=3",
    )
    known = make(experiment, records, secret=SECRET)
    first = known.class_counts
    assert first.shape == (3, 1, 10)
    assert (known.class_counts == first).all()
    assert (make(experiment, records, secret=SECRET).class_counts == first).all()
    exact = np.stack([np.bincount(s.labels, minlength=10) for s in known._shards])[:, None]
    assert np.abs(first - exact).max() < 6  # 30 draws: 6e-8
    assert not np.isclose(first, exact, atol=1e-4).any()  # 30 draws: 2e-3, by the fixed seed
    images = records.images.copy()
    images[17] = 255 - images[17]  # its label stays
    changed = Records(images, records.labels)
    after = make(experiment, changed, secret=SECRET).class_counts
    shard = assign_shards(np.array([17]), 3, experiment.config.teacher.seed)[0]
    assert [bool((a != b).any()) for a, b in zip(first, after, strict=True)] == [
        i == shard for i in range(3)
    ]
    assert (first[shard] != after[shard]).all()
    other = make(experiment, records, client=1, secret=SECRET).class_counts - exact
    assert not np.isclose(first - exact, other, atol=1e-4).any()
    seeded = make(experiment, records).class_counts
    assert (make(experiment, changed).class_counts == seeded).all()  # it has the same labels
    noise = np.concatenate(
        [seeded - exact, make(experiment, records, client=1).class_counts - exact]
    )
    assert len(np.unique(noise.round(6))) == noise.size


def test_exact_class_counts_are_those_of_all_shards(small, records):
    counts = make(small("teachers_per_client=3"), records).sensitive_class_counts()
    assert counts.tolist() == [[np.bincount(records.labels, minlength=10).tolist()]]


SCATTERING = ("model=scattering", "model.teacher_width=4")


@every("training", ["plain", "dp_sgd"])
def test_teachers_with_fixed_features_answer_together_as_each_alone(small, records, training):
    steps = ("training.steps=2",) if training == "dp_sgd" else ()
    experiment = small(f"training={training}", *steps, *SCATTERING, "teachers_per_client=3")
    known = make(experiment, records)
    together = known.sensitive_probabilities(Images(records.images))
    for teacher, answers in zip(known.models, together, strict=True):
        alone = predict(teacher, records.images, torch.device("cpu"))
        assert answers == pytest.approx(alone, abs=1e-6)
    assert np.abs(together[0] - together[1]).max() > 1e-2


def test_a_damaged_cache_entry_is_trained_again(small, records, tmp_path):
    experiment = small(f"cache={tmp_path}/cache")
    first = make(experiment, records).sensitive_probabilities(Images(records.images))
    (path,) = (tmp_path / "cache" / "teachers").iterdir()
    path.write_bytes(b"damaged")
    again = make(experiment, records).sensitive_probabilities(Images(records.images))
    assert (first == again).all()
    assert path.stat().st_size > 100


class Recording:
    """Noise from a secret; it records what was drawn."""

    def __init__(self):
        self.given = []

    def noise(self, *names, hides):
        self.given.append(((*names, hides), SECRET.noise(*names, hides)))
        return self.given[-1][1]

    @property
    def drawn(self):
        return [names for names, rng in self.given if rng._left < STREAM_BYTES]


def test_a_training_with_steps_of_its_own_draws_other_noise_for_other_records(small, records):
    """Like private training; plain training draws none."""
    custom = small("training=output_gradient", "training.steps=2")
    changed = Records(255 - records.images, records.labels)
    seen = []
    for experiment, each in ((custom, records), (custom, changed), (small(), records)):
        teachers_ = make(experiment, each)
        teachers_._noise = Recording()
        assert teachers_.models[0] is not None
        seen.append(teachers_._noise.drawn)
    (one,), (other,), plain = seen
    assert one[:3] == other[:3] == ("private training of a teacher", 0, 0)
    assert one[3] != other[3]
    assert plain == []


# --- devices ---


@pytest.fixture
def elsewhere(monkeypatch):
    """A GPU that this machine need not have: the meta device, from which zeros come back."""
    monkeypatch.setattr(teachers, "device_of", lambda *_: torch.device("meta"))
    monkeypatch.setattr(teachers, "gpu_model", lambda d: "" if d.type == "cpu" else "a GPU")
    monkeypatch.setattr(teachers, "teacher_cache", lambda device: TeacherCache(10**9))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape))


def test_a_teachers_name_depends_on_its_training_and_its_features(small, records, monkeypatch):
    ons = "weight_decay=0.1", "one_cycle=true", "shift=1", "flip=true", "seed=5"
    names = {make(small(f"teacher.{on}"), records).keys[0] for on in (*ons, "path=null")}
    assert len(names) == len(ons) + 1
    for model in ("scattering", "patches"):
        before = make(small(f"model={model}"), records).keys
        monkeypatch.setattr(FixedFeatures, "version", lambda: "other code")
        assert make(small(f"model={model}"), records).keys != before
        monkeypatch.undo()


def test_a_gpu_is_part_of_the_digest_of_teachers_that_learn_on_it(small, records, monkeypatch):
    """Private ones do not; another kind of GPU rounds in another way."""
    private = ("training=dp_sgd", "answers=probabilities")
    for training, same in (((), False), (private, True)):
        digests = {make(small(*training), records).identity}
        for name in ("one kind", "another"):
            with monkeypatch.context() as patch:
                patch.setattr(teachers, "device_of", lambda *_: torch.device("meta"))
                patch.setattr(teachers, "gpu_model", lambda d, n=name: n * (d.type != "cpu"))
                known = make(small(*training), records)
                assert known.answers_on == name
                digests.add(known.identity)
        assert len(digests) == (1 if same else 3)


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        (("training=plain",), True),
        (("training=plain", "model=scattering"), False),
        (("training=dp_sgd", "training.steps=2", "model=scattering"), False),
        (("training=dp_sgd", "training.steps=2"), False),
    ],
)
def test_plain_networks_alone_compute_in_bfloat16(small, records, monkeypatch, settings, used):
    """Only then is it part of the digest, so that a teacher of another precision is not read."""
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)
    seen, autocast = [], torch.autocast

    def spy(*arguments):
        seen.append(arguments)
        return autocast(*arguments)

    monkeypatch.setattr(torch, "autocast", spy)
    keys = {}
    for asked in ("float32", "auto", "bfloat16"):
        own = make(small(*settings, f"precision={asked}"), records)
        own.sensitive_probabilities(Images(records.images))
        own.sensitive_retrained(own.sensitive_weights()[0, :, 0], 2, "ab", 1)
        keys[asked] = own.keys
        assert bool(seen) == (used and asked == "bfloat16")
        assert set(seen) <= {("cpu", torch.bfloat16)}
    assert keys["auto"] == keys["float32"]  # on a CPU
    assert (keys["bfloat16"] != keys["float32"]) == used


@pytest.mark.usefixtures("elsewhere")
def test_plain_teachers_learn_where_they_answer(small, records, monkeypatch):
    learnt = []
    monkeypatch.setattr(Plain, "teach", lambda *a: learnt.append(a[1]._device.type))
    assert next(make(small("seed=21"), records).models[0].parameters()).device.type == "meta"
    assert learnt == ["meta"]


@pytest.mark.usefixtures("elsewhere")
def test_private_teachers_learn_on_the_processor_and_answer_elsewhere(small, records, monkeypatch):
    learnt = []
    original = DPSGD.train
    monkeypatch.setattr(DPSGD, "train", lambda *a: learnt.append(a[2]) or original(*a))
    private = ("training=dp_sgd", "answers=probabilities", "training.steps=1", "seed=22")
    for model in ("cnn", "scattering"):
        known = make(small(*private, f"model={model}"), records)
        assert known.sensitive_probabilities(Images(records.images)).shape == (1, 60, 10)
        assert learnt.pop().device.type == "cpu"
        assert {p.device.type for p in known.models[0].parameters()} == {"meta"}
        size = sum(p.numel() for p in known.models[0].parameters())
        assert known.sensitive_weights().shape == (1, size, 1)
    assert not learnt


def test_a_dropped_teacher_comes_back_from_the_cache(small, records, monkeypatch):
    trained = []
    original = Plain.teach
    monkeypatch.setattr(Plain, "teach", lambda *a: trained.append(a) or original(*a))
    known = make(small("seed=23"), records)
    first = known.sensitive_probabilities(Images(records.images))
    assert known.ready
    known.drop()
    assert not known.ready
    assert (known.sensitive_probabilities(Images(records.images)) == first).all()
    assert len(trained) == 1


def test_a_dropped_teacher_comes_back_from_its_file(small, records, tmp_path):
    path = tmp_path / "t.safetensors"
    write_weights(make_teacher(small("model.teacher=mlp").config, 0, 0), path)
    known = make(small(f"teacher.path={path}", "teacher.arch=mlp"), records)
    first = known.sensitive_probabilities(Images(records.images))
    path.unlink()
    known.drop()
    assert (known.sensitive_probabilities(Images(records.images)) == first).all()


def test_any_number_of_clients_stays_below_the_limit_of_a_device(small, records, monkeypatch):
    experiment = small("seed=24", "num_clients=30", "teacher.min_steps=1")
    size = weight_bytes(make_teacher(experiment.config, 0, 0))
    held = TeacherCache(4 * size + 1)
    monkeypatch.setattr(teachers, "teacher_cache", lambda device: held)
    clients = [make(experiment, records, client=number) for number in range(30)]
    answers = [each.sensitive_probabilities(Images(records.images)) for each in clients]
    assert [each.ready for each in clients] == [False] * 26 + [True] * 4
    for each, before in zip(clients, answers, strict=True):
        assert (each.sensitive_probabilities(Images(records.images)) == before).all()
