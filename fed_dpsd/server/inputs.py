"""What a run read: digests of its data and files, kept with the run.

They show whether data has changed since a run, although its path is the same. In a
deployment, only the coordinator's test images have digests: no digest of records leaves a hospital.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from fed_dpsd.accounts.secret import ledger_folder
from fed_dpsd.config import is_function
from fed_dpsd.config.plugins import code_digest
from fed_dpsd.data.datasets import Loaded, digests_of
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment, load_data, test_split
from fed_dpsd.models.functions import network_digest
from fed_dpsd.models.public_networks import digest_of
from fed_dpsd.report.settings import DIGESTS
from fed_dpsd.storage import run_name

INPUTS = "inputs.json"
ELSEWHERE = "inputs"  # the file of a run folder that names its inputs next to the ledgers
OF_DATA = ("training ", "test ")  # how the names of a data set's parts begin

Inputs = Mapping[str, str]


def inputs_of(experiment: Experiment) -> dict[str, str]:
    """Return a digest of each input by its name; in a deployment, only of any test images.

    Raises:
        UserError: the data or a file cannot be read.
    """
    config = experiment.config
    if not config.federation.simulation:
        test = test_split(experiment)
        return {} if test is None else digests_of(test=Loaded(test, "", test.digests))
    found = dict(load_data(config.data, config.cache).digests)
    clients = range(config.num_clients)
    if path := config.teacher.path:
        files = dict.fromkeys(path.replace("{client}", str(client)) for client in clients)
        found["teacher.path"] = " ".join(digest_of("teacher.path", file) for file in files)
    found |= {f"plugins={package}": code_digest(package) for package in config.plugins}
    for name in filter(is_function, {*map(config.architecture, clients), config.model.student}):
        found[name] = network_digest(name, config.data.shape, config.data.num_classes)
    return found


def inputs_path(experiment: Experiment, folder: Path) -> Path:
    """Return the file with a run's inputs.

    In a simulation with secret noise, it is next to the ledgers, which are confidential: in the
    run folder, it could show whether a record was in the data. Runs of one name may share these
    ledgers, so RUN/inputs has the file's name.
    """
    if _in_run_folder(experiment):
        return folder / INPUTS
    return ledger_folder(experiment, folder) / os.fsdecode((folder / ELSEWHERE).read_bytes())


def new_inputs_name(experiment: Experiment, folder: Path) -> dict[Path, bytes]:
    """Return the file RUN/inputs of a new run; {} if its inputs are in the run folder."""
    if _in_run_folder(experiment):
        return {}
    name = f"{run_name(folder)}-{secrets.token_hex(4)}.{INPUTS}"
    return {folder / ELSEWHERE: os.fsencode(name)}


def _in_run_folder(experiment: Experiment) -> bool:
    return experiment.seeded or not experiment.config.federation.simulation


def recorded_inputs(experiment: Experiment, folder: Path) -> Inputs | None:
    """Return the inputs that a run has recorded; None if there is no readable file of them."""
    try:
        return dict(json.loads(inputs_path(experiment, folder).read_text()))
    except (OSError, ValueError):
        return None


def difference(recorded: Inputs | None, now: Inputs) -> str:
    """Return how the inputs of a run differ from those now, as a predicate; "" if they do not."""
    if recorded is None:
        return f"has no {INPUTS}, which says what it read"
    names = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
    return f"read other {', '.join(names)}" if names else ""


def require_same_inputs(experiment: Experiment, folder: Path) -> None:
    """Check that a run's inputs are still those that it has recorded.

    Raises:
        UserError: an input has changed or cannot be read; the message names it.
    """
    if found := difference(recorded_inputs(experiment, folder), inputs_of(experiment)):
        raise UserError(f"{folder}: this run {found}; restore what it had, or start a new run")


def digests_of_inputs(experiment: Experiment, folder: Path) -> dict[str, str]:
    """Return the columns of a table for a run's inputs: 16 hexadecimal digits or "" if unknown.

    They are a digest of the data set, and one of all other inputs.
    """
    inputs = recorded_inputs(experiment, folder) or {}
    columns = {}
    for column, of_data in zip(DIGESTS, (True, False), strict=True):
        own = {k: v for k, v in sorted(inputs.items()) if k.startswith(OF_DATA) == of_data}
        content = json.dumps(own).encode()
        columns[column] = hashlib.sha256(content).hexdigest()[:16] if own else ""
    return columns
