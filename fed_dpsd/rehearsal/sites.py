"""The hospitals of a rehearsal, with their records and site files that allow the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fed_dpsd.data.intake import Records
from fed_dpsd.experiment import Experiment

# What every file allows, by key, in addition to the run's needs.
ALLOWED = {
    "methods": ("fed_dpsd",),
    "training": ("dp_sgd", "plain"),
    "answers": ("label", "gradient", "votes", "probabilities"),
    "models": ("scattering", "cnn", "cnn_bn", "mlp"),
}


def site_keys(experiment: Experiment) -> dict[str, Any]:
    """Return the keys of a site file, without its records, that allows a run and its plug-ins."""
    config = experiment.config
    needed = {
        "methods": [experiment.method_name],
        "training": [experiment.training.name],
        "answers": [experiment.answers.name],
        "models": map(config.architecture, range(config.num_clients)),
    }
    window = config.data.window
    facts: dict[str, Any] = {
        "name": "rehearsal",
        "num_clients": config.num_clients,
        "state": "state",
        "shape": list(config.data.shape),
        "fit": config.data.fit,
        "files": {"window": list(window) if isinstance(window, tuple) else window},
        "classes": list(config.data.class_names),
        "budget": 100.0,
        "delta": 1e-5,
        "queries": 10_000_000,
        "threads": 1,
        "trust": ["nobody", "threshold"],
        "keys": [],
        "colluding": 0,
        "limits": {},
        **{key: list(dict.fromkeys((*ALLOWED[key], *more))) for key, more in needed.items()},
    }
    if experiment.unit == "record":
        facts["units"] = ["record"]  # even if the data names patients
    if config.model.weights is not None:
        facts["weights"] = config.model.weights
    return facts | ({"plugins": list(config.plugins)} if config.plugins else {})


def write_site(
    path: Path, records: Records, names: Sequence[str], facts: Mapping[str, Any]
) -> None:
    """Write a hospital's records, with class names as labels, and its file next to them.

    Args:
        path: the file.
        records: its records.
        names: the names of the classes of `records`.
        facts: keys of the file; those in `files` are added to what is written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = records.images.shape[1] == 1
    images = records.images[:, 0] if grey else records.images.transpose(0, 2, 3, 1)
    arrays: dict[str, Any] = {"image": images, "label": np.array(names)[records.labels]}
    if records.patients is not None:
        arrays["patient"] = records.patients
    np.savez(path.parent / "records.npz", **arrays)
    files: dict[str, Any] = {
        "path": "records.npz",
        "image_column": "image",
        "label_column": "label",
        "patient_column": None if records.patients is None else "patient",
        "skip_unreadable": False,
    }
    files |= facts.get("files", {})
    path.write_text(yaml.safe_dump({**facts, "files": files}))
