"""How a data set is split among simulated clients: flwr-datasets' partitioners.

The only file that imports flwr_datasets, and only when it is needed (it takes seconds).
"""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.config import UserError, require, require_positive

if TYPE_CHECKING:
    import pyarrow
    from flwr_datasets.partitioner import Partitioner


class Partition(Protocol):
    """A rule that splits records among clients, by their labels and its own seed."""

    name: ClassVar[str]
    seed: int

    def partitioner(self, num_clients: int) -> "Partitioner":
        """The library's partitioner for `num_clients`."""


@dataclass(frozen=True)
class Dirichlet:
    """Each class is shared out by Dirichlet(alpha) proportions; small alpha is far from IID."""

    name: ClassVar[str] = "dirichlet"
    seed: int
    alpha: float
    self_balancing: bool
    min_partition_size: int

    def __post_init__(self) -> None:
        require(self, seed=0, min_partition_size=1)
        require_positive(self, "alpha")

    def partitioner(self, num_clients: int) -> "Partitioner":
        """flwr-datasets' DirichletPartitioner."""
        from flwr_datasets.partitioner import DirichletPartitioner

        return DirichletPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            alpha=self.alpha,
            min_partition_size=self.min_partition_size,
            self_balancing=self.self_balancing,
            seed=self.seed,
        )


@dataclass(frozen=True)
class IID:
    """Equal shares of a random order."""

    name: ClassVar[str] = "iid"
    seed: int

    def __post_init__(self) -> None:
        require(self, seed=0)

    def partitioner(self, num_clients: int) -> "Partitioner":
        """flwr-datasets' IidPartitioner (which does not shuffle: `split` does)."""
        from flwr_datasets.partitioner import IidPartitioner

        return IidPartitioner(num_partitions=num_clients)


@dataclass(frozen=True)
class ByClass:
    """Each client holds records of `classes_per_client` classes only."""

    name: ClassVar[str] = "class"
    seed: int
    classes_per_client: int

    def __post_init__(self) -> None:
        require(self, seed=0, classes_per_client=1)

    def partitioner(self, num_clients: int) -> "Partitioner":
        """flwr-datasets' PathologicalPartitioner."""
        from flwr_datasets.partitioner import PathologicalPartitioner

        return PathologicalPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            num_classes_per_partition=self.classes_per_client,
            class_assignment_mode="deterministic",
            seed=self.seed,
        )


PARTITIONS: dict[str, type] = {kind.name: kind for kind in (Dirichlet, IID, ByClass)}


def split(
    partition: Partition, labels: NDArray[np.int64], num_clients: int
) -> list[NDArray[np.int64]]:
    """Indices of each client's records: disjoint, none empty.

    Raises:
        UserError: the data does not allow so many clients; names the largest number that works.
    """
    shares = _try_split(partition, labels, num_clients)
    if shares is not None:
        return shares
    feasible, infeasible = 0, min(num_clients, len(labels) + 1)
    while infeasible - feasible > 1:
        middle = (feasible + infeasible) // 2
        works = _try_split(partition, labels, middle) is not None
        feasible, infeasible = (middle, infeasible) if works else (feasible, middle)
    remedy = f"num_clients={feasible} works here" if feasible else "no number of clients works"
    if isinstance(partition, Dirichlet):
        remedy += (
            ", a smaller partition.min_partition_size "
            f"(now {partition.min_partition_size}) or partition.self_balancing=true may allow more"
        )
    raise UserError(
        f"num_clients={num_clients}: partition={partition.name} cannot give every client enough "
        f"of the {len(labels)} records; {remedy}"
    )


def _try_split(
    partition: Partition, labels: NDArray[np.int64], num_clients: int
) -> list[NDArray[np.int64]] | None:
    """The clients' indices; None where the partitioner cannot, or leaves a client without any."""
    from datasets import Dataset

    order = np.random.Generator(np.random.PCG64([partition.seed, 1])).permutation(len(labels))
    partitioner = partition.partitioner(num_clients)
    partitioner.dataset = Dataset.from_dict({"label": labels[order], "index": order})
    try:
        with warnings.catch_warnings(action="ignore"):  # one warning for each attempt
            parts = [partitioner.load_partition(client) for client in range(num_clients)]
    except (ValueError, IndexError):
        return None
    shares = [np.sort(np.asarray(part["index"], np.int64)) for part in parts]
    if min(len(share) for share in shares) == 0:
        return None
    return shares


def read_hub(name: str, split_name: str) -> "pyarrow.Table":
    """A split of a Hugging Face data set, as an Arrow table with encoded images.

    Raises:
        UserError: there is no network, or no such data set.
    """
    from datasets import Image
    from flwr_datasets import FederatedDataset

    try:
        dataset = FederatedDataset(dataset=name, partitioners={}).load_split(split_name)
    except Exception as error:
        raise UserError(
            f"data.hub={name}: {type(error).__name__} while downloading it; without a network, "
            "set data.path to a folder with train.parquet and test.parquet"
        ) from error
    for column, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(column, Image(decode=False))
    return dataset.with_format("arrow")[:]
