"""One client: its data, its teachers, its ledger, and the only door for anything private."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent
from numpy.typing import NDArray

from fed_dpsd.config import Config, DataConfig
from fed_dpsd.data import datasets, partition
from fed_dpsd.data.datasets import Dataset, Split
from fed_dpsd.privacy.accounting import epsilon
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal
from fed_dpsd.runtime.experiment import Experiment
from fed_dpsd.runtime.ledger import Entry, FileLedger, Ledger, spent
from fed_dpsd.runtime.teachers import Teachers
from fed_dpsd.streams import Streams


class Site:
    """One client's data, teachers and ledger.

    Args:
        config: the site's own configuration: budget, trust and limits are read from it, never from
            a message.
        mechanism: the mechanism this site answers with.
        client: the client's number.
        records: its private records.
        record_ids: (len(records),) each record's lasting id.
        test: the public test split, for diagnostics in a simulation.
        ledger: its account.
    """

    def __init__(
        self,
        config: Config,
        mechanism: Mechanism,
        client: int,
        records: Split,
        record_ids: NDArray[np.int64],
        test: Split,
        ledger: Ledger,
    ) -> None:
        self.config = config
        self.mechanism = mechanism
        self.client = client
        self.ledger = ledger
        self._teachers = Teachers(config, client, records, record_ids)
        self._test = test

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The teachers' (n, B, K) probabilities; private until released."""
        if images.shape[1:] != self.config.data.shape:
            raise ProtocolError(
                f"images have shape {list(images.shape[1:])}; "
                f"this client's teachers take {list(self.config.data.shape)}"
            )
        return self._teachers.sensitive_probabilities(images).astype(np.float64)

    def sensitive_weights(self) -> NDArray[np.float32]:
        """The teachers' parameters, (n, P, 1); private until released."""
        return self._teachers.sensitive_weights()

    def release(
        self, mechanism: Mechanism, sensitive_value: NDArray[Any], ask: Ask
    ) -> Answer | Refusal:
        """Release (n, B, K) private values: bound each, charge the ledger (fsync), draw the noise.

        An ask that comes again returns the stored answer and charges nothing. Over budget nothing
        is drawn. The noise stream is keyed by the whole ask, so the same id with other content gets
        other noise and its own charge.
        """
        digest = ask.digest()
        stored = self.ledger.stored(digest)
        if stored is not None:
            return Answer(ask.query_id, stored, self.config.teachers_per_client)
        queries = max(1, len(ask.images))  # weights are one answer
        entry = Entry(digest, ask.query_id, queries, mechanism.event("record", "add_remove"))
        bounded = np.stack([mechanism.encode(v, ask.predictions) for v in sensitive_value])
        if all(charged.digest != digest for charged in self.ledger.entries()):
            if self._exceeds_budget(entry):
                return Refusal(ask.query_id, "the client's privacy budget is spent")
            self.ledger.charge(entry)
        if mechanism.noise_at == "client":
            key = int(digest, 16)
            rng = Streams(self.config.seed).numpy("answer", self.client, key)
            values = mechanism.noise(bounded, ask.predictions, rng)
        else:
            values = bounded.sum(0)
        self.ledger.store(digest, values)
        return Answer(ask.query_id, values, self.config.teachers_per_client)

    def _exceeds_budget(self, entry: Entry) -> bool:
        budget = self.config.privacy.budget
        if budget is None:
            return False
        event = ComposedDpEvent(
            [spent(self.ledger), SelfComposedDpEvent(entry.event, entry.queries)]
        )
        return epsilon(event, self.config.privacy.delta)[0] > budget

    def diagnose(self) -> NDArray[np.float32]:
        """The teachers' exact (n, N, K) probabilities on the test split; in a simulation only.

        Raises:
            ProtocolError: this site is not part of a simulation.
        """
        if not self.config.federation.simulation:
            raise ProtocolError("exact diagnostics are refused outside a simulation")
        return self._teachers.sensitive_probabilities(self._test.images)


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
    record_ids = shares(experiment)[client]
    return Site(
        config=config,
        mechanism=experiment.mechanism,
        client=client,
        records=data.train.take(record_ids),
        record_ids=record_ids,
        test=data.test,
        ledger=FileLedger(run_folder / "ledger", client),
    )
