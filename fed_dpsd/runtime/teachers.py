"""A client's teachers: each trained on a shard of its own of the client's records, and cached.

One changed record touches one shard, so it changes one teacher: nothing here is shared between
shards, neither random streams nor hold-outs nor statistics.
"""

import functools
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd import __version__
from fed_dpsd.config import Config, UserError
from fed_dpsd.data.datasets import Split
from fed_dpsd.methods.method import predict, to_unit
from fed_dpsd.models import initialise, misfit, read_weights, write_weights
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier
from fed_dpsd.streams import Streams


def assign_shards(record_ids: NDArray[np.int64], shards: int, key: int) -> NDArray[np.int64]:
    """Each record's shard, in 0..shards-1: a keyed hash of its own id and of nothing else.

    So adding, removing or changing a record leaves every other record where it was.
    """
    secret = key.to_bytes(16, "little")

    def shard(record: int) -> int:
        digest = hashlib.blake2b(record.to_bytes(8, "little"), key=secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") % shards

    return np.array([shard(int(record)) for record in record_ids], np.int64)


class Teachers:
    """A client's n = teachers_per_client teachers.

    Args:
        config: the site's configuration.
        client: the client's number.
        records: its private records.
        record_ids: (len(records),) each record's lasting id; it decides the record's shard.

    Raises:
        UserError: teacher.path does not hold weights of this client's architecture.
    """

    def __init__(
        self, config: Config, client: int, records: Split, record_ids: NDArray[np.int64]
    ) -> None:
        self._config = config
        self._client = client
        self._records = records
        self._record_ids = record_ids
        self._read = config.teacher.path and read_teacher(config, client)

    @functools.cached_property
    def models(self) -> list[Classifier | None]:
        """The trained teachers; None for an empty shard."""
        config = self._config
        if self._read:
            return [self._read]
        shards = assign_shards(self._record_ids, config.teachers_per_client, config.teacher.seed)
        parts = [np.flatnonzero(shards == shard) for shard in range(config.teachers_per_client)]
        return [
            load_or_train(config, self._client, shard, self._records.take(part))
            if len(part)
            else None
            for shard, part in enumerate(parts)
        ]

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(n, B, K) probabilities; NaN where a teacher's shard is empty, so it has no opinion."""
        shape = (len(self.models), len(images), self._config.data.num_classes)
        sensitive = np.full(shape, np.nan, np.float32)
        for row, teacher in zip(sensitive, self.models, strict=True):
            if teacher is not None:
                row[:] = predict(teacher, images, torch.device("cpu"))
        return sensitive

    def sensitive_weights(self) -> NDArray[np.float32]:
        """(n, P, 1) parameters, in the architecture's order; untrained ones for an empty shard."""
        vectors = []
        for shard, teacher in enumerate(self.models):
            model = teacher or make_teacher(self._config, self._client, shard)
            vectors.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        return torch.stack(vectors).numpy()[:, :, None]


def make_teacher(config: Config, client: int, shard: int) -> Classifier:
    """An untrained teacher of the client's architecture."""
    build = functools.partial(
        CLASSIFIERS[config.architecture(client)],
        config.data.shape,
        config.data.num_classes,
        config.model.teacher_width,
    )
    rng = Streams(config.teacher.seed).torch("teacher weights", client, shard)
    return initialise(build, rng)


def read_teacher(config: Config, client: int) -> Classifier:
    """The teacher in teacher.path, where {client} stands for the client's number.

    Raises:
        UserError: the file is missing, is no safetensors file, or holds another architecture.
    """
    teacher = make_teacher(config, client, 0)
    path = str(config.teacher.path).replace("{client}", str(client))
    try:
        weights = read_weights(Path(path))
        problem = misfit(teacher, weights)
    except ValueError as error:
        raise UserError(f"teacher.path={error}") from None
    if problem:
        raise UserError(
            f"teacher.path={path} does not fit teacher.arch={config.architecture(client)} "
            f"(model.teacher_width={config.model.teacher_width}, data {config.data.name}): "
            f"{problem}; give the architecture and width that it was trained with"
        )
    teacher.load_state_dict(weights)
    return teacher


def load_or_train(config: Config, client: int, shard: int, records: Split) -> Classifier:
    """A shard's teacher, from the cache or trained now.

    The cache key is a digest of the records, the architecture, the settings, the seed and the
    library versions; it stays at the client.
    """
    settings = [config.architecture(client), config.model.teacher_width, config.data.num_classes]
    settings += [vars(config.teacher), client, shard, config.threads_client]
    settings += [__version__, torch.__version__]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(f"{records.images.shape}".encode())
    digest.update(np.ascontiguousarray(records.images).tobytes())
    digest.update(records.labels.tobytes())
    path = Path(config.cache) / "teachers" / f"{digest.hexdigest()}.safetensors"
    teacher = make_teacher(config, client, shard)
    if path.exists():
        try:
            teacher.load_state_dict(read_weights(path))
            return teacher
        except (ValueError, RuntimeError):
            path.unlink()  # a damaged cache entry is trained again
    rng = Streams(config.teacher.seed).torch("teacher batches", client, shard)
    train(teacher, records, config, rng)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_weights(teacher, temporary)
    os.replace(temporary, path)
    return teacher


def train(teacher: nn.Module, records: Split, config: Config, rng: torch.Generator) -> None:
    """Train a teacher on one shard's records with Adam; any number of records and classes works.

    Batches are cut from a fresh permutation each epoch; a shard with fewer records than a batch
    takes them all in each step.
    """
    settings = config.teacher
    size = min(settings.batch_size, len(records))
    batches = len(records) // size
    steps = max(settings.epochs * batches, settings.min_steps)
    images = to_unit(records.images, torch.device("cpu"))
    labels = torch.from_numpy(records.labels)
    optimiser = torch.optim.Adam(teacher.parameters(), settings.learning_rate, foreach=True)
    teacher.train()
    for step in range(steps):
        if step % batches == 0:
            order = torch.randperm(len(records), generator=rng)
        chosen = order[step % batches * size :][:size]
        loss = nn.functional.cross_entropy(teacher(images[chosen]), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
