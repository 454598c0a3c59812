"""Simulated clients; their records are partitions of a public data set."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.database import ledgers_in
from fed_dpsd.accounts.ledger import FileLedger, Ledger
from fed_dpsd.accounts.secret import noise_of, own_ledger_folder, simulated_key
from fed_dpsd.accounts.simulated import FILE, SimulatedLedgers
from fed_dpsd.client.secure_sum import SecureSums
from fed_dpsd.client.site import Site
from fed_dpsd.client.teacher_file import read_teacher
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.config import DataConfig
from fed_dpsd.data.intake import Records
from fed_dpsd.data.partition import made_up_patients
from fed_dpsd.engines.placement import Placement, place_on_this_machine
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment, load_data, partition_digest, partitions
from fed_dpsd.models.inference import Images
from fed_dpsd.privacy.mechanism import quorum_of
from fed_dpsd.privacy.secure_sum import Party, public_key
from fed_dpsd.storage import CLIENT, client_name, run_name


def prepare_clients(experiment: Experiment, nodes: int) -> Placement:
    """Check the ledgers and teachers' files of simulated clients, and place the clients on devices.

    Raises:
        UserError: a device does not exist or is too small, a ledger cannot be used or belongs to
            other records, or a teacher cannot be read. Nothing was charged.
    """
    placement, config = place_on_this_machine(experiment, nodes), experiment.config
    if config.ledger:
        folder = Path(config.ledger)
        if (folder / FILE).exists():
            raise UserError(
                f"ledger={config.ledger} holds the ledgers of one run; choose another folder"
            )
        for name in ledgers_in(folder):  # of all clients, even if this run has fewer
            number = name.removeprefix(CLIENT)
            if number.isdecimal():
                with shared_ledger(experiment, int(number)).transaction():
                    pass  # reads the ledger, and repairs it if a write was cut short
    if config.teacher.path is not None:
        files = config.num_clients if "{client}" in config.teacher.path else 1
        for client in range(files):
            read_teacher(make_teacher(config, client, 0), config, client)
    return placement


def shared_ledger(experiment: Experiment, client: int) -> FileLedger:
    """Return a simulated client's ledger in the folder `ledger`, which runs share.

    The data set is the client's partition, so a different partition is a different data set.
    """
    name = data_set_name(experiment, f"client {client}")
    return FileLedger(Path(experiment.config.ledger), client, name)


def data_set_name(experiment: Experiment, part: str) -> str:
    """Return the name by which a ledger knows the records of a client, or of all clients.

    It depends on all training records, since one more would deal all of them differently.
    """
    config = experiment.config
    rule = f"{experiment.partition}" + (" of patients" if config.data.patient_column else "")
    name = f"{config.data.name} (records {partition_digest(experiment)})"
    return f"{name}, {part} of {config.num_clients} by {rule}"


def with_patients(records: Records, size: int | None) -> Records:
    """Return a client's records with simulated patients of `size` records each; None adds none."""
    if size is None:
        return records
    return replace(records, patients=made_up_patients(records.labels, size))


class Clients(Mapping[int, Site]):
    """A run's simulated clients by number, each opened when this process first needs it."""

    def __init__(self, experiment: Experiment, run_folder: Path) -> None:
        self._experiment, self._run_folder = experiment, run_folder
        self._sites: dict[int, Site] = {}
        self._ledgers = None
        if not experiment.config.ledger:
            folder, data = own_ledger_folder(run_folder), data_set_name(experiment, "all clients")
            if ledgers_in(folder):
                raise UserError(
                    f"{folder} holds ledgers of another version of FedDPSD; resume the run with "
                    "the version in its versions.json"
                )
            self._ledgers = SimulatedLedgers(folder, data, secret=not experiment.seeded)

    def __getitem__(self, client: int) -> Site:
        if client not in self._sites:
            self._sites[client] = self._open(client)
        return self._sites[client]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._experiment.config.num_clients

    def charging(self) -> AbstractContextManager[None]:
        """Make the charges of a block durable at its end; replies may leave only after it.

        Raises:
            LedgerError: the run's ledgers cannot be read or written.
        """
        return self._ledgers.request() if self._ledgers else nullcontext()

    def _open(self, client: int) -> Site:
        """Return a client's site, whose `Teachers` get the client's part of the records."""
        experiment, run_folder = self._experiment, self._run_folder
        config, indices = experiment.config, partitions(experiment)[client]
        data = load_data(config.data, config.cache)
        records = with_patients(data.train.take(indices), config.data.records_per_patient)
        secret = noise_of(experiment, run_folder, client_name(client))
        own = self._ledgers
        ledger: Ledger = own[client] if own else shared_ledger(experiment, client)
        party, run = simulated_party(experiment, client, run_folder), run_name(run_folder)
        return Site(
            config=config,
            training=experiment.training,
            answers=experiment.answers,
            client=client,
            records=records,
            shard_ids=records.ids,
            test=_test_images(config.data, config.cache, data.digests["test images"]),
            account=Account(
                *(ledger, config.privacy, experiment.plan, run),
                plugins=bool(config.not_reviewed),
            ),
            secret=secret,
            secure_sums=SecureSums(party, experiment.answers, ledger, run) if party else None,
        )


@functools.lru_cache(maxsize=2)
def _test_images(config: DataConfig, cache: str, _digest: str) -> Images:
    """Return the test images, which all clients of a process share, including their features."""
    return Images(load_data(config, cache).test.images)


def simulated_party(experiment: Experiment, client: int, run_folder: Path) -> Party | None:
    """Return a simulated client's part in secure sums; None without secure sums."""
    quorum = quorum_of(experiment.answers)
    if quorum is None:
        return None
    keys = {
        number: simulated_key(experiment, run_folder, client_name(number))
        for number in range(experiment.config.num_clients)
    }
    public = {number: public_key(key) for number, key in keys.items()}
    return Party(client, keys[client], public, quorum.threshold)
