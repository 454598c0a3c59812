"""A client's teachers, which are each trained on a shard of the client's records and cached.

A changed record affects one shard, so it changes one teacher. Shards share no random streams,
hold-outs or statistics. With a training mechanism, teachers see records only through this
mechanism; the site charges its cost.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from fed_dpsd import __version__
from fed_dpsd.client.device import device_of, teacher_cache
from fed_dpsd.client.learning import (
    CPU,
    Role,
    ShardLearner,
    Watch,
    added_loss,
    digest_of_shard,
    last_images,
    places_of_patients,
    read_shard,
    reporting_steps,
)
from fed_dpsd.client.shards import LARGEST, LEAST, SLOTS, Shard, slots_agree, train_together
from fed_dpsd.client.teacher_file import read_teacher
from fed_dpsd.config import Config, is_function
from fed_dpsd.config.plugins import code_digest
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.methods.method import TrainingLoss
from fed_dpsd.models import (
    initialise,
    layers_draw_from,
    load_vector,
    number_of_weights,
    precision,
    read_facts,
    read_file,
    to_vector,
    torch_threads,
    write_weights,
)
from fed_dpsd.models.classifiers import FIXED, OURS, Classifier, builder, features_version
from fed_dpsd.models.devices import gpu_model
from fed_dpsd.models.footprint import weight_bytes
from fed_dpsd.models.functions import network_digest
from fed_dpsd.models.inference import Images
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.noise import Noise, SecretStreams
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.training import Plain, Training, TrainingMechanism
from fed_dpsd.progress import track
from fed_dpsd.streams import Streams

INPUT = "input"  # in the metadata of a cached teacher: the digest of what it was trained on


def assign_shards(shard_ids: NDArray[np.int64], shards: int, key: int) -> NDArray[np.int64]:
    """Return each record's shard in 0..shards-1, a keyed hash of only its own or its patient's id.

    Adding, removing or changing a record therefore leaves every other record in its shard.
    """
    secret = key.to_bytes(16, "little")

    def shard(record: int) -> int:
        name = record.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(name, key=secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") % shards

    return np.array([shard(int(record)) for record in shard_ids], np.int64)


def _patients_of(records: Records) -> NDArray[np.int64]:
    if records.patients is None:
        raise UserError(
            "training.unit=patient: the records name no patients; give data.patient_column or "
            "data.records_per_patient=N in a simulation, files.patient_column in a hospital's "
            "site.yaml"
        )
    return records.patients


class Teachers:
    """The n = teachers_per_client teachers of a client, trained when `models` is first read.

    Args:
        config: the site's configuration.
        training: how these teachers are trained.
        client: the client's number.
        records: the client's private records.
        shard_ids: (len(records),) permanent id of each record or of its patient. Private training
            with patients as the unit uses `records.patients` instead.
        secret: source of a training mechanism's noise; None to use `teacher.seed`.
        role: as for `Watch`.

    Raises:
        UserError: teacher.path has no weights of this client's architecture, private training
            protects patients but the records name none, or the device does not exist.
    """

    def __init__(
        self,
        config: Config,
        training: Training,
        client: int,
        records: Records,
        shard_ids: NDArray[np.int64],
        secret: SecretStreams | None = None,
        role: Role = "teacher",
    ) -> None:
        self.watch = Watch(config, training, client, role)
        self._config = config
        self._client = client
        self._role = role
        self._secret = secret
        self._noise: Noise = secret or Streams(config.teacher.seed)
        self._training = training
        self._device = device_of(config, client)
        self._learns_on = self._device if training.reads == "images" else CPU
        self._models: list[Classifier | None] | None = None
        self._new: dict[int, Classifier] = {}  # trained before they were asked for
        self._inputs: dict[int, str] = {}
        self._from_file = None
        if config.teacher.path is not None:
            self._from_file = read_teacher(self._untrained(0), config, client)
        self._by_patient = training.unit == "patient"
        ids = _patients_of(records) if self._by_patient else shard_ids
        shards = assign_shards(ids, config.teachers_per_client, config.teacher.seed)
        self._shards = [
            records.take(np.flatnonzero(shards == shard))
            for shard in range(config.teachers_per_client)
        ]

    @functools.cached_property
    def _bfloat16(self) -> bool:
        """Return whether the teachers compute in bfloat16; never if training has its own steps."""
        if self._training.reads == "features":
            return False
        asked, device = self._config.precision, self._learns_on
        if not precision.uses_bfloat16(asked, device):
            return False
        teacher = make_teacher(self._config, self._client, 0)
        return precision.choose_precision(teacher, asked, device).in_bfloat16

    def _untrained(self, shard: int) -> Classifier:
        teacher = make_teacher(self._config, self._client, shard)
        teacher.in_bfloat16 = self._bfloat16
        return teacher

    def _for_sent_weights(self, shard: int) -> Classifier:
        """Return a network to load weights into.

        Plain training changes nothing else in one of ours, so all clients of a process share it.
        """
        name, *sizes = _architecture(self._config, self._client)
        if self._training != Plain() or name not in OURS.difference(FIXED):
            return self._untrained(shard)
        teacher = _shared(builder(name, self._config.model), *sizes)
        teacher.in_bfloat16 = self._bfloat16
        return teacher

    @functools.cached_property
    def settings(self) -> str:
        """Return every public setting that the teachers depend on, as JSON."""
        config, name = self._config, self._config.architecture(self._client)
        settings = [self._role, name, config.model.teacher_width]
        settings += [config.data.num_classes, vars(config.teacher), config.threads_client]
        # Ledgers know plain training as "None".
        settings += [str(None if self._training == Plain() else self._training), self._client]
        settings += [__version__, torch.__version__]
        # Different instruction sets round differently.
        settings += [torch.backends.cpu.get_cpu_capability()]
        settings += [config.teachers_per_client]
        settings += [self._secret.identity] if self._secret else []
        settings += [gpu_model(self._learns_on)] if self._learns_on != CPU else []
        settings += ["bfloat16"] if self._bfloat16 else []
        settings += ["together"] if self._together else []  # rounds differently
        settings += features_version(name, config.model)
        settings += [config.plugins] if config.plugins else []
        settings += self._code if self._secret else []  # seeded noise does not depend on code
        if is_function(name):
            settings += [network_digest(name, config.data.shape, config.data.num_classes)]
        return json.dumps(settings, sort_keys=True)

    @property
    def _code(self) -> list[str]:
        """Return digests of the code of plug-ins."""
        return list(map(code_digest, self._config.plugins))

    @functools.cached_property
    def keys(self) -> list[str]:
        """Return each teacher's name in the cache: a digest of its records and all settings."""
        keys = []
        for shard, records in enumerate(self._shards):
            digest = hashlib.sha256(f"{self.settings} {shard}".encode())
            self._digest_records(records, digest.update)
            keys.append(digest.hexdigest())
        return keys

    @functools.cached_property
    def digests(self) -> list[str]:
        """Return a digest of each teacher's training input. The digests stay at the client.

        Charges and secret noise depend on the digests. Private training is identified by its actual
        input, to the last bit, because processors and libraries may compute different features of
        the same records. A cached teacher was charged under the digest stored with its weights.
        """
        if not self._may_draw_noise:
            return self.keys
        return [self._recorded(shard) or self._input(shard) for shard in self._numbers]

    @functools.cached_property
    def input_digest(self) -> str:
        """Return a digest of the input that training would read now, regardless of the cache."""
        inputs = map(self._input, self._numbers) if self._may_draw_noise else self.keys
        return hashlib.sha256("".join(inputs).encode()).hexdigest()

    @functools.cached_property
    def records_digest(self) -> str:
        """Return a digest of the records alone, in their shards."""
        digest = hashlib.sha256()
        for records in self._shards:
            self._digest_records(records, digest.update)
        return digest.hexdigest()

    @property
    def identity(self) -> str:
        """Return a digest of all teachers; their training is charged under it."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    @property
    def answers_on(self) -> str:
        """Return the kind of GPU that the teachers answer on; "" for the CPU."""
        return gpu_model(self._device)

    @property
    def ready(self) -> bool:
        """Return whether `models` are in memory."""
        return self._models is not None

    @property
    def models(self) -> list[Classifier | None]:
        """Return the trained teachers, on the device where they answer; None for an empty shard.

        A training mechanism trains on an empty shard too; otherwise, the missing teacher would
        reveal that the shard is empty.
        """
        models = self._models
        if models is None and self._from_file:
            models = [self._from_file]
        elif models is None:
            each, clients = len(self._shards), self._config.num_clients  # clients train in turn
            shards = track("teachers", self._shards, self._client * each, clients * each)
            models = [
                self._load_or_train(shard) if len(records) or self._training.private else None
                for shard, records in enumerate(shards)
            ]
        size = sum(weight_bytes(teacher) for teacher in models if teacher)
        teacher_cache(self._device).use(self, size)
        self._models = [teacher and teacher.to(self._device) for teacher in models]
        return self._models

    def sensitive_unread(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the images of each shard's last batch, if training will read fixed features."""
        fixed = self._config.architecture(self._client) in FIXED
        if self.ready or self._from_file or not fixed:
            return
        for shard, records in enumerate(self._shards):
            if not self._cached(shard).exists():
                yield from last_images(records, self._training)

    def drop(self) -> None:
        """Remove the teachers from their device; `models` reads them from the cache again."""
        if self._from_file:
            self._from_file.to(CPU)
        self._models = None

    def sensitive_probabilities(self, images: Images) -> NDArray[np.float32]:
        """Return (n, N, K) probabilities; NaN where a teacher's shard is empty."""
        models = self.models
        known = {i: teacher for i, teacher in enumerate(models) if teacher}
        shape = (len(models), len(images), self._config.data.num_classes)
        sensitive = np.full(shape, np.nan, np.float32)
        if known:
            sensitive[list(known)] = images.predict_all(list(known.values()))
        return sensitive

    @property
    def class_counts(self) -> NDArray[np.float64]:
        """Return (n, 1, K) noisy class counts of the shards; every call returns the same counts."""
        training, num_classes = self._training, self._config.data.num_classes
        assert isinstance(training, TrainingMechanism)
        counts = []
        for shard, records in enumerate(self._shards):
            labels = records.labels
            if self._by_patient:
                labels = labels[places_of_patients(records, training)]
            hides = hashlib.sha256(self.digests[shard].encode() + labels.tobytes()).hexdigest()
            rng = self._noise.noise("class counts", self._client, shard, hides)
            counts.append(training.count(labels, num_classes, rng))
        return np.stack(counts)[:, None]

    def sensitive_weights(self) -> NDArray[np.float32]:
        """Return (1, n * P, 1) weights, one teacher after another (see `to_vector`).

        An empty shard has the weights of an untrained teacher.
        """
        vectors = [
            to_vector(teacher or self._untrained(shard))
            for shard, teacher in enumerate(self.models)
        ]
        return torch.cat(vectors).numpy()[None, :, None]

    def sensitive_sum(self, mechanism: RecordSums, at: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return a mechanism's exact sum over the records of the only shard, (1, P, 1).

        Raises:
            ProtocolError: `at` has the wrong length.
        """
        if len(at) != (expected := mechanism.size_of_request(self._linear.layer)):
            raise ProtocolError(f"this client was sent {len(at)} weights instead of {expected}")
        return mechanism.sensitive_sum(self._linear, at).numpy()[None, :, None]

    @functools.cached_property
    def _linear(self) -> lattice.LinearShard:
        """Return the classifier and the records of the only shard."""
        (records,) = self._shards
        layer, inputs, labels = read_shard(self._untrained(0), records, self._training)
        assert isinstance(layer, nn.Linear)
        return lattice.LinearShard(layer, inputs, labels)

    def sensitive_class_counts(self) -> NDArray[np.float64]:
        """Return (1, 1, K) exact class counts of all records."""
        labels = np.concatenate([records.labels for records in self._shards])
        counts = np.bincount(labels, minlength=self._config.data.num_classes)
        return counts.astype(np.float64)[None, None]

    @property
    def size(self) -> int:
        """Return the number of weights of a teacher."""
        name, *sizes = _architecture(self._config, self._client)
        return number_of_weights(_shared(builder(name, self._config.model), *sizes))

    def check_weights(self, weights: NDArray[np.float32]) -> None:
        """Reject weights from which training cannot start.

        Raises:
            ValueError: the weights belong to another architecture.
        """
        if len(weights) != self.size:
            raise ValueError(f"{len(weights)} weights instead of {self.size}")

    def sensitive_retrained(
        self,
        weights: NDArray[np.float32],
        number: int,
        digest: str,
        epochs: int,
        loss: TrainingLoss | None = None,
    ) -> NDArray[np.float32]:
        """Train each teacher on its shard, all from `weights`; return their (1, n * P, 1) weights.

        Args:
            weights: (P,) weights that each teacher starts from (see `to_vector` and
                `check_weights`).
            number: number of the round.
            digest: hexadecimal digest of the teachers, the whole request and the method's settings.
            epochs: passes over a shard; a training mechanism uses its own number of steps instead.
            loss: is added to the records' loss (see `added_loss`); None adds nothing.
        """
        settings = dataclasses.replace(self._config.teacher, epochs=epochs, min_steps=1)
        config = dataclasses.replace(self._config, teacher=settings)
        vectors = []
        for shard, records in enumerate(self._shards):
            teacher = self._for_sent_weights(shard)
            purpose = f"retraining {shard}"
            load_vector(teacher, torch.from_numpy(weights))
            if len(records) or self._training.private:
                with added_loss(teacher, loss):
                    self._train(teacher, shard, config, purpose, number, digest)
                self.watch.check(teacher, shard)
            vectors.append(to_vector(teacher))
            teacher.zero_grad()
        return torch.cat(vectors).numpy()[None, :, None]

    def _load_or_train(self, shard: int) -> Classifier:
        """Return a shard's teacher, on the CPU, read from the cache or newly trained."""
        config, path = self._config, self._cached(shard)
        if path.exists() and (known := self._load(shard, path)):
            return known
        if self._together:
            if shard not in self._new:
                self._train_together(shard)
            return self._new.pop(shard)
        digest = self.digests[shard]
        if self._may_draw_noise and self._input(shard) != digest:
            raise UserError(
                f"{path} is missing, and this machine would not train the teacher that was paid "
                "for; restart to train and charge a new one"
            )
        noisy = f"private training of a {self._role}"
        purpose = noisy if self._may_draw_noise else f"{self._role} batches"
        teacher = self._untrained(shard)
        self._train(teacher, shard, config, purpose, shard, digest)
        self.watch.check(teacher, shard)
        write_weights(teacher, path, {INPUT: digest} if self._may_draw_noise else None)
        return teacher.to(CPU)

    @functools.cached_property
    def _together(self) -> bool:
        """Return whether teachers are trained many at once; it depends on no record.

        A hospital's are not: its proof needs no check of kernels.
        """
        config = self._config
        if len(self._shards) < LEAST or config.architecture(self._client) not in FIXED:
            return False
        if not config.federation.simulation:
            return False
        if self._training != Plain() or self._learns_on != CPU or config.teacher.one_cycle:
            return False
        layer = self._untrained(0).classifier
        large = layer.in_features * config.teacher.batch_size > LARGEST
        with torch_threads(config.threads_client):
            return not large and slots_agree(layer, config.teacher)

    def _train_together(self, first: int) -> None:
        """Train a shard's teacher, and later shards' teachers that the cache lacks."""
        later = (
            shard
            for shard in self._numbers[first + 1 :]
            if len(self._shards[shard]) and not self._cached(shard).exists()
        )
        group = [first, *itertools.islice(later, SLOTS - 1)]
        teachers = [self._untrained(shard) for shard in group]
        learning = [self._linear_shard(*each) for each in zip(teachers, group, strict=True)]
        losses = train_together(learning, self._config.teacher)
        for shard, teacher, own in zip(group, teachers, losses, strict=True):
            self.watch.check_losses(own, shard)
            self.watch.check(teacher, shard)
            write_weights(teacher, self._cached(shard), None)
            self._new[shard] = teacher

    def _linear_shard(self, teacher: Classifier, shard: int) -> Shard:
        """Return what a teacher of fixed features learns from; `_train` draws the same batches."""
        layer, inputs, labels = read_shard(teacher, self._shards[shard], self._training)
        assert isinstance(layer, nn.Linear)
        seeds, purpose = Streams(self._config.teacher.seed), f"{self._role} batches"
        rng = seeds.torch(purpose, client=self._client, query_id=shard)
        return Shard(layer, inputs, labels, rng)

    def _load(self, shard: int, path: Path) -> Classifier | None:
        """Return a cached teacher; None if it is damaged or was trained on another input."""
        teacher = self._untrained(shard)
        try:
            weights, facts = read_file(path)  # another process may replace it at any time
            if self._may_draw_noise and facts.get(INPUT) != self.digests[shard]:
                return None
            teacher.load_state_dict(weights)
            with contextlib.suppress(OSError):  # another user's cache cannot be modified
                os.utime(path)  # marks the last use
            self.watch.check(teacher, shard)
            return teacher
        except (ValueError, RuntimeError):
            path.unlink(missing_ok=True)  # a damaged teacher is trained again
            return None

    @property
    def _numbers(self) -> range:
        return range(len(self._shards))

    @property
    def _may_draw_noise(self) -> bool:
        """Return whether the training may draw noise; a training that reads images draws none."""
        return self._training.reads != "images"

    def _cached(self, shard: int) -> Path:
        name = "-".join([self.keys[shard], *self._code])
        return Path(self._config.cache) / "teachers" / f"{name}.safetensors"

    def _recorded(self, shard: int) -> str:
        """Return the digest of the input that a cached teacher was trained on; "" if unknown."""
        path = self._cached(shard)
        try:
            return read_facts(path).get(INPUT, "") if path.exists() else ""
        except (OSError, SafetensorError):  # another process is deleting it, or it is damaged
            return ""

    def _train(
        self,
        teacher: Classifier,
        shard: int,
        config: Config,
        purpose: str,
        number: int,
        digest: str,
    ) -> None:
        """Train on one shard: `Training.teach` decides how a `ShardLearner` learns from it.

        `purpose` and `number` name the draws; `digest` identifies the input of noisy training.
        """
        records, device = self._shards[shard], self._learns_on
        # Batches depend on public numbers only, so they cannot reveal labels.
        seeds = Streams(config.teacher.seed)
        seeded = functools.partial(seeds.torch, client=self._client, query_id=number)
        batches = seeded if self._may_draw_noise else lambda _: seeded(purpose)
        learner = ShardLearner(teacher, records, config, batches, device)
        # A name is of noise or of other draws, never of both.
        own = purpose if self._may_draw_noise else f"noise, {purpose}"
        rng = self._noise.noise(own, self._client, number, hides=digest)
        layers = seeded(f"layers, {purpose}")
        with reporting_steps(self._training), layers_draw_from(layers, device):
            self._training.teach(learner, records.labels, rng)
        teacher.to(memory_format=torch.channels_last)  # training may have changed the layout
        if not self._may_draw_noise:
            self.watch.check_losses(learner.losses, shard)

    def _input(self, shard: int) -> str:
        """Return a digest of the input of a shard's training, computed once."""
        if shard not in self._inputs:
            teacher = self._untrained(shard)
            records, key = self._shards[shard], self.keys[shard]
            self._inputs[shard] = digest_of_shard(key, teacher, records, self._training)
        return self._inputs[shard]

    def _digest_records(self, records: Records, update: Callable[[Any], None]) -> None:
        """Add a shard's images and labels to a digest, and its patients if teachers use them."""
        update(f"{records.images.shape}".encode())
        update(np.ascontiguousarray(records.images).data)
        update(records.labels.tobytes())
        if self._by_patient:
            assert records.patients is not None
            update(records.patients.tobytes())


def _architecture(config: Config, client: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return the architecture of a client's teachers: name, shape, classes and width."""
    sizes = config.data.shape, config.data.num_classes, config.model.teacher_width
    return config.architecture(client), *sizes


@functools.lru_cache(maxsize=16)
def _shared(build: Callable[..., Classifier], *sizes: Any) -> Classifier:
    return initialise(lambda: build(*sizes), torch.Generator())


def make_teacher(config: Config, client: int, shard: int) -> Classifier:
    """Return an untrained teacher of the client's architecture."""
    name, *sizes = _architecture(config, client)
    same = config.teacher.same_start
    drawn_for = (0, 0) if same else (client, shard)
    start: tuple[Any, ...] = (builder(name, config.model), *sizes, config.teacher.seed, *drawn_for)
    copied = same and name in OURS.difference(FIXED)  # as thousands of clients start
    teacher = copy.deepcopy(_first(*start)) if copied else _drawn(*start)
    return teacher.keep_features(Path(config.cache))


def _drawn(build: Callable[..., Classifier], *start: Any) -> Classifier:
    """Build a teacher and draw its weights, given its sizes, the seed and whom they are for."""
    *sizes, seed, client, shard = start
    rng = Streams(seed).torch("teacher weights", client, shard)
    return initialise(lambda: build(*sizes), rng)


_first = functools.lru_cache(maxsize=1)(_drawn)
