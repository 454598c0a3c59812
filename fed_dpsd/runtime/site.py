"""One client: its data, its teacher, its ledger, and the only door for anything private."""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from fed_dpsd import __version__
from fed_dpsd.config import Config, DataConfig
from fed_dpsd.data import datasets, partition
from fed_dpsd.data.datasets import Dataset, Split
from fed_dpsd.methods.method import predict, to_unit
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.privacy.accounting import epsilon
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal
from fed_dpsd.runtime.experiment import Experiment
from fed_dpsd.runtime.ledger import Entry, FileLedger, Ledger, spent
from fed_dpsd.streams import Streams


class Site:
    """One client's data, teacher and ledger.

    Args:
        config: the site's own configuration: budget, trust and limits are read from it, never from
            a message.
        mechanism: the mechanism this site answers with.
        client: the client's number.
        records: its private records.
        test: the public test split, for diagnostics in a simulation.
        ledger: its account.
    """

    def __init__(
        self,
        config: Config,
        mechanism: Mechanism,
        client: int,
        records: Split,
        test: Split,
        ledger: Ledger,
    ) -> None:
        self.config = config
        self.mechanism = mechanism
        self.client = client
        self.ledger = ledger
        self._records = records
        self._test = test

    @functools.cached_property
    def _teacher(self) -> nn.Module:
        return load_or_train(self.config, self.client, self._records)

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The teacher's (B, K) probabilities; private until released."""
        if images.shape[1:] != self.config.data.shape:
            raise ProtocolError(
                f"images have shape {list(images.shape[1:])}; "
                f"this client's teacher takes {list(self.config.data.shape)}"
            )
        return predict(self._teacher, images, torch.device("cpu")).astype(np.float64)

    def release(
        self, mechanism: Mechanism, sensitive_value: NDArray[Any], ask: Ask
    ) -> Answer | Refusal:
        """Release a private value: bound it, charge the ledger (fsync), then draw the noise.

        An ask that comes again returns the stored answer and charges nothing. Over budget nothing
        is drawn. The noise stream is keyed by the whole ask, so the same id with other content gets
        other noise and its own charge.
        """
        digest = ask.digest()
        stored = self.ledger.stored(digest)
        if stored is not None:
            return Answer(ask.query_id, stored)
        entry = Entry(
            digest, ask.query_id, len(ask.images), mechanism.event("record", "add_remove")
        )
        bounded = mechanism.encode(sensitive_value, ask.predictions)
        if all(charged.digest != digest for charged in self.ledger.entries()):
            if self._exceeds_budget(entry):
                return Refusal(ask.query_id, "the client's privacy budget is spent")
            self.ledger.charge(entry)
        values = bounded
        if mechanism.noise_at == "client":
            key = int(digest, 16)
            rng = Streams(self.config.seed).numpy("answer", self.client, key)
            values = mechanism.noise(bounded, ask.predictions, rng)
        self.ledger.store(digest, values)
        return Answer(ask.query_id, values)

    def _exceeds_budget(self, entry: Entry) -> bool:
        budget = self.config.privacy.budget
        if budget is None:
            return False
        event = ComposedDpEvent(
            [spent(self.ledger), SelfComposedDpEvent(entry.event, entry.queries)]
        )
        return epsilon(event, self.config.privacy.delta)[0] > budget

    def diagnose(self) -> NDArray[np.float32]:
        """The teacher's exact probabilities on the public test split; in a simulation only.

        Raises:
            ProtocolError: this site is not part of a simulation.
        """
        if not self.config.federation.simulation:
            raise ProtocolError("exact diagnostics are refused outside a simulation")
        return predict(self._teacher, self._test.images, torch.device("cpu"))


@functools.lru_cache(maxsize=2)
def load_data(config: DataConfig, cache: str) -> Dataset:
    """A data set, once a process."""
    return datasets.load(config, Path(cache))


@functools.lru_cache(maxsize=2)
def _shares(
    data: DataConfig, cache: str, rule: partition.Partition, num_clients: int
) -> list[NDArray[np.int64]]:
    return partition.split(rule, load_data(data, cache).train.labels, num_clients)


def shares(experiment: Experiment) -> list[NDArray[np.int64]]:
    """Every simulated client's indices into the training split, once a process."""
    config = experiment.config
    return _shares(config.data, config.cache, experiment.partition, config.num_clients)


def open_site(experiment: Experiment, client: int, run_folder: Path) -> Site:
    """A simulated client, with its ledger in the run folder."""
    config = experiment.config
    data = load_data(config.data, config.cache)
    return Site(
        config=config,
        mechanism=experiment.mechanism,
        client=client,
        records=data.train.take(shares(experiment)[client]),
        test=data.test,
        ledger=FileLedger(run_folder / "ledger", client),
    )


def load_or_train(config: Config, client: int, records: Split) -> nn.Module:
    """The client's teacher, from the cache or trained now.

    The cache key is a digest of the records, the architecture, the settings, the seed and the
    library versions; it stays at the client.
    """
    build = functools.partial(
        CLASSIFIERS[config.model.teacher],
        config.data.shape,
        config.data.num_classes,
        config.model.teacher_width,
    )
    settings = [config.model.teacher, config.model.teacher_width, config.data.num_classes]
    settings += [vars(config.teacher), client, config.threads_client]
    settings += [__version__, torch.__version__]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(f"{records.images.shape}".encode())
    digest.update(np.ascontiguousarray(records.images).tobytes())
    digest.update(records.labels.tobytes())
    path = Path(config.cache) / "teachers" / f"{digest.hexdigest()}.safetensors"
    streams = Streams(config.teacher.seed)
    teacher = initialise(build, streams.torch("teacher weights", client))
    if path.exists():
        try:
            teacher.load_state_dict(safetensors.torch.load_file(path))
            return teacher
        except (SafetensorError, RuntimeError):
            path.unlink()  # a damaged cache entry is trained again
    train(teacher, records, config, streams.torch("teacher batches", client))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    safetensors.torch.save_file(teacher.state_dict(), temporary)
    os.replace(temporary, path)
    return teacher


def train(teacher: nn.Module, records: Split, config: Config, rng: torch.Generator) -> None:
    """Train a teacher on one client's records with Adam; any number of records and classes works.

    Batches are cut from a fresh permutation each epoch; a client with fewer records than a batch
    takes them all in each step.
    """
    settings = config.teacher
    size = min(settings.batch_size, len(records))
    batches = len(records) // size
    steps = max(settings.epochs * batches, settings.min_steps)
    images = to_unit(records.images, torch.device("cpu"))
    labels = torch.from_numpy(records.labels)
    optimiser = torch.optim.Adam(teacher.parameters(), settings.learning_rate)
    teacher.train()
    for step in range(steps):
        if step % batches == 0:
            order = torch.randperm(len(records), generator=rng)
        chosen = order[step % batches * size :][:size]
        loss = nn.functional.cross_entropy(teacher(images[chosen]), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
