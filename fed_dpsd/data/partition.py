"""Partitions of a data set among simulated clients; flwr-datasets deals records by labels.

No other file imports flwr_datasets, because importing it takes seconds. So downloads from the
Hugging Face hub are here too (`read_hub`).
"""

import hashlib
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT, Config, DataConfig, Positive
from fed_dpsd.config.plugins import code_digest
from fed_dpsd.errors import UserError
from fed_dpsd.storage import to_npz, write_atomically

if TYPE_CHECKING:
    import pyarrow
    from flwr_datasets.partitioner import Partitioner

CONNECT_SECONDS = 5.0


class Partition(Protocol):
    """A rule that splits records among clients, by their labels and a seed.

    If patients are known, it splits patients instead, each labelled with their most frequent class,
    and keeps a patient's records together.

    Attributes:
        leaves_out_by: what determines the records that even a single client does not get: their
            labels, or their places in the data; "" if a single client gets all records.
    """

    name: ClassVar[str]
    leaves_out_by: ClassVar[Literal["", "labels", "places"]] = ""
    seed: int
    __hash__: Callable[[], int]

    def deal(self, labels: NDArray[np.int64], num_clients: int) -> list[NDArray[np.int64]]:
        """Return the indices of each client's records, given (N,) labels in a random order.

        Raises:
            ValueError: the rule cannot give so many clients enough records.
        """

    def check(self, config: Config) -> list[str]:
        """Return the problems with the rule in an experiment, each with key, value and remedy."""
        return []

    def unused_reason(self, classes: int, num_clients: int) -> str:
        """Return why some records have no client, given the numbers of classes and clients."""
        return ""


@dataclass(frozen=True, config=STRICT)
class Dirichlet(Partition):
    """A split of each class in Dirichlet(alpha) proportions; a small alpha is far from IID."""

    name: ClassVar[str] = "dirichlet"
    seed: NonNegativeInt
    alpha: Positive
    self_balancing: bool
    min_partition_size: PositiveInt

    def deal(self, labels: NDArray[np.int64], num_clients: int) -> list[NDArray[np.int64]]:
        """Return the indices of each client's records, by DirichletPartitioner of flwr-datasets."""
        from flwr_datasets.partitioner import DirichletPartitioner

        partitioner = DirichletPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            alpha=self.alpha,
            min_partition_size=self.min_partition_size,
            self_balancing=self.self_balancing,
            seed=self.seed,
        )
        return _load_partitions(partitioner, labels, num_clients)


@dataclass(frozen=True, config=STRICT)
class IID(Partition):
    """A split of randomly ordered records into equal parts."""

    name: ClassVar[str] = "iid"
    seed: NonNegativeInt

    def deal(self, labels: NDArray[np.int64], num_clients: int) -> list[NDArray[np.int64]]:
        """Return the indices of each client's records, as IidPartitioner of flwr-datasets does."""
        return np.array_split(np.arange(len(labels)), num_clients)


@dataclass(frozen=True, config=STRICT)
class ByClass(Partition):
    """A split that gives each client records of only `classes_per_client` classes."""

    name: ClassVar[str] = "class"
    seed: NonNegativeInt
    classes_per_client: PositiveInt

    def check(self, config: Config) -> list[str]:
        """Reject more classes per client than the data has."""
        classes = config.data.num_classes
        if self.classes_per_client <= classes:
            return []
        return [
            f"partition.classes_per_client={self.classes_per_client} is more than the "
            f"{classes} classes of data={config.data.name}; use {classes} or fewer"
        ]

    def unused_reason(self, classes: int, num_clients: int) -> str:
        """Return why some records have no client; client j has the classes starting at number j."""
        each = self.classes_per_client
        left = classes - (num_clients + each - 1)
        return (
            f"because {left} of {classes} classes have no client with "
            f"partition.classes_per_client={each} and num_clients={num_clients}; raise the first "
            f"to {each + left}, or the second to {num_clients + left}"
        )

    def deal(self, labels: NDArray[np.int64], num_clients: int) -> list[NDArray[np.int64]]:
        """Return each client's indices, by PathologicalPartitioner of flwr-datasets."""
        from flwr_datasets.partitioner import PathologicalPartitioner

        partitioner = PathologicalPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            num_classes_per_partition=self.classes_per_client,
            class_assignment_mode="deterministic",
            seed=self.seed,
        )
        return _load_partitions(partitioner, labels, num_clients)


@dataclass(frozen=True, config=STRICT)
class Coins(IID):
    """IID partition; each record is kept with probability `fraction`.

    A record's client does not depend on the coins, so splits that differ in one coin differ in one
    record. Attacks guess the coins.
    """

    name: ClassVar[str] = "coins"
    leaves_out_by: ClassVar[Literal["places"]] = "places"
    coins: NonNegativeInt
    fraction: Annotated[float, Field(gt=0, le=1)]

    def unused_reason(self, classes: int, num_clients: int) -> str:
        """Return why some records have no client."""
        return f"left out by their coins (partition.fraction={self.fraction:g})"

    def kept(self, number: int) -> NDArray[np.bool_]:
        """Return a (number,) mask of the kept records."""
        rng = np.random.Generator(np.random.PCG64([self.coins, 2]))
        return rng.random(number) < self.fraction


@dataclass(frozen=True, config=STRICT)
class Counts(Partition):
    """A split that gives each client `counts` records of each class, drawn at random."""

    name: ClassVar[str] = "counts"
    leaves_out_by: ClassVar[Literal["labels"]] = "labels"
    seed: NonNegativeInt
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for own in self.counts:
            if min(own, default=0) < 0 or not sum(own):
                raise ValueError(f"counts has {list(own)}; give numbers >= 0, and one above 0")

    def check(self, config: Config) -> list[str]:
        """Reject counts that are not one list for each client, with a number for each class."""
        clients, classes = config.num_clients, config.data.num_classes
        if len(self.counts) == clients and {*map(len, self.counts)} == {classes}:
            return []
        return [
            f"partition.counts={list(map(list, self.counts))} must have num_clients={clients} "
            f"lists, each with a number of records for each of the {classes} classes of "
            f"data={config.data.name}"
        ]

    def unused_reason(self, classes: int, num_clients: int) -> str:
        """Return why some records have no client."""
        return "left out by partition.counts"

    def deal(self, labels: NDArray[np.int64], num_clients: int) -> list[NDArray[np.int64]]:
        """Return the indices of each client's records, dealing each class client by client.

        DistributionPartitioner of flwr-datasets needs a multiple of the number of classes as the
        number of clients.
        """
        ends = np.cumsum(self.counts, axis=0)
        parts = []
        for client, (own, end) in enumerate(zip(self.counts, ends, strict=True)):
            chosen = list[NDArray[np.int64]]()
            for label, (number, until) in enumerate(zip(own, end, strict=True)):
                held = np.flatnonzero(labels == label)
                if until > len(held):
                    raise UserError(
                        f"partition.counts: clients 0 to {client} get {until:,} of the "
                        f"{len(held):,} records or patients of class {label}; lower them"
                    )
                chosen.append(held[until - number : until])
            parts.append(np.concatenate(chosen))
        return parts


def load_or_split(
    partition: Partition,
    labels: NDArray[np.int64],
    num_clients: int,
    cache: Path,
    patients: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Return the result of `split`, cached if the same records were split the same way before.

    Changed code of a plug-in's partition splits again.
    """
    rule = f"{partition} {num_clients} flwr-datasets {version('flwr-datasets')}"
    cls = type(partition)
    package = cls.__module__.partition(".")[0]
    if package != __name__.partition(".")[0]:
        rule += f" {cls.__module__}.{cls.__qualname__} {code_digest(package)}"
    records = labels.tobytes() + (b"" if patients is None else b"patients" + patients.tobytes())
    key = hashlib.sha256(rule.encode() + records).hexdigest()[:24]
    path = cache / "partitions" / f"{key}.npz"
    if not path.is_file():
        parts = split(partition, labels, num_clients, patients)
        sizes = np.array([len(part) for part in parts])
        write_atomically(path, to_npz({"indices": np.concatenate(parts), "sizes": sizes}))
    with np.load(path) as arrays:
        return np.split(arrays["indices"], np.cumsum(arrays["sizes"])[:-1])


def split(
    partition: Partition,
    labels: NDArray[np.int64],
    num_clients: int,
    patients: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Return the indices of each client's records, which are disjoint and not empty.

    A single client gets all records, regardless of their labels and number, unless the rule leaves
    some out.

    Args:
        partition: the rule.
        labels: (N,) the records' labels.
        num_clients: the number of clients.
        patients: (N,) the records' patients; all records of a patient go to one client. Only the
            patients' most frequent classes matter, not the order of records.

    Raises:
        UserError: the data does not allow so many clients; the message names a number that works.
    """
    if num_clients == 1 and partition.leaves_out_by != "labels":
        return [np.flatnonzero(_kept(partition, len(labels)))]
    dealt, place = _units_to_deal(labels, patients)
    parts = _try_split(partition, dealt, place, num_clients)
    if parts is not None:
        return parts
    least = partition.min_partition_size if isinstance(partition, Dirichlet) else 1
    feasible, infeasible = 0, min(num_clients, len(dealt) // least + 1)
    while infeasible - feasible > 1:
        middle = (feasible + infeasible) // 2
        works = _try_split(partition, dealt, place, middle) is not None
        feasible, infeasible = (middle, infeasible) if works else (feasible, middle)
    remedy = f"num_clients={feasible} works here" if feasible else "no number of clients works"
    if isinstance(partition, Dirichlet):
        size = partition.min_partition_size
        others = [f"a smaller partition.min_partition_size (now {size})"] * (size > 1)
        others += ["partition.self_balancing=true"] * (not partition.self_balancing)
        remedy += f"; {' or '.join([*others, 'partition=iid'])} may allow more"
    raise UserError(
        f"num_clients={num_clients}: partition={partition.name} cannot give every client enough "
        f"of the {len(dealt)} {'records' if patients is None else 'patients'}; {remedy}"
    )


def unused_records(
    partition: Partition,
    labels: NDArray[np.int64],
    parts: Sequence[NDArray[np.int64]],
    patients: NDArray[np.int64] | None = None,
) -> str:
    """Report how many records `split` assigned to no client, and why; "" if none.

    The numbers are exact: only the owner of the records may see them.
    """
    held, total = sum(map(len, parts)), len(labels)
    if held == total:
        return ""
    why = partition.unused_reason(len(np.unique(_units_to_deal(labels, patients)[0])), len(parts))
    return (
        f"partition: {held:,} of {total:,} training records have a client; {total - held:,} have "
        f"none, {why}"
    )


def made_up_patients(labels: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return a simulated patient for each record: `size` consecutive records of a class share one.

    The last patient of a class may have fewer records.
    """
    patients = np.empty_like(labels)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        patients[own] = (label << 32) + np.arange(len(own)) // size
    return patients


def _units_to_deal(
    labels: NDArray[np.int64], patients: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the labels of records, or of patients by id, and each record's index among these.

    A patient's label is the most frequent label of their records, or the smallest in a tie.
    """
    if patients is None:
        return labels, np.arange(len(labels))
    known, place = np.unique(patients, return_inverse=True)
    classes = labels.max(initial=0) + 1
    counts = np.bincount(place * classes + labels, minlength=len(known) * classes)
    return counts.reshape(-1, classes).argmax(1), place


def _try_split(
    partition: Partition, dealt: NDArray[np.int64], place: NDArray[np.int64], num_clients: int
) -> list[NDArray[np.int64]] | None:
    """Return the clients' indices; None if the partitioner fails or a client gets no records."""
    order = np.random.Generator(np.random.PCG64([partition.seed, 1])).permutation(len(dealt))
    try:
        own = partition.deal(dealt[order], num_clients)
    except (ValueError, IndexError):
        return None
    client_of = np.full(len(dealt), num_clients)  # num_clients stands for none
    for client, indices in enumerate(own):
        client_of[order[indices]] = client
    holder = np.where(_kept(partition, len(place)), client_of[place], num_clients)
    ends = np.cumsum(np.bincount(holder, minlength=num_clients))
    parts = np.split(np.argsort(holder, kind="stable"), ends[:num_clients])[:-1]
    return None if min(map(len, parts)) == 0 else parts


def _load_partitions(
    partitioner: "Partitioner", labels: NDArray[np.int64], num_clients: int
) -> list[NDArray[np.int64]]:
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
    with warnings.catch_warnings(action="ignore"):  # one warning for each attempt
        subsets = [partitioner.load_partition(client) for client in range(num_clients)]
    return [np.asarray(subset.with_format("numpy")[:]["index"], np.int64) for subset in subsets]


def _kept(partition: Partition, number: int) -> NDArray[np.bool_]:
    """Return a (number,) mask of the records that coins do not leave out."""
    return partition.kept(number) if isinstance(partition, Coins) else np.ones(number, bool)


# --- the hub ---


def read_hub(config: DataConfig, split_name: str) -> "pyarrow.Table":
    """Download a split of a Hugging Face data set as an Arrow table with encoded images.

    `config.hub` is OWNER/NAME or OWNER/NAME/SUBSET. Without a network, an earlier download is used.

    Raises:
        UserError: there is no network or the data set does not exist.
    """
    import datasets
    import huggingface_hub
    from flwr_datasets import FederatedDataset

    # Without a network, the libraries would retry for half a minute.
    online = _is_online()
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = not online
    datasets.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    parts = str(config.hub).split("/")
    source, subset = "/".join(parts[:2]), "/".join(parts[2:]) or None
    try:
        federated = FederatedDataset(dataset=source, subset=subset, partitioners={})
        dataset = federated.load_split(split_name)
    except Exception as error:
        problem = f"split {split_name} of {config.hub} cannot be downloaded from {_hub()}"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            problem = f"there is no {config.hub} at {_hub()}, or it is not public"
        raise UserError(
            f"data={config.name}: {problem}; "
            f"{'' if online else 'connect this machine to the network, or '}set data.path to "
            "a folder with train.parquet and test.parquet"
        ) from error
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
    return dataset.with_format("arrow")[:]


def _hub() -> str:
    """Return the host name of the hub."""
    return urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname or "huggingface.co"


def _is_online() -> bool:
    """Return whether the hub, or a proxy that may reach it, is available."""
    if getproxies().get("https"):
        return True
    try:
        socket.create_connection((_hub(), 443), timeout=CONNECT_SECONDS).close()
        return True
    except OSError:
        return False
