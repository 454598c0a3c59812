"""The command that repeats a run, derived from its configuration."""

import functools
import json
import os
import shlex
from typing import Any

from fed_dpsd.config.compose import read
from fed_dpsd.config.keys import choices, leaves
from fed_dpsd.errors import shown
from fed_dpsd.experiment import Experiment, calibrated_axis, from_overrides

PLACES = ("out", "cache", "run_folder", "ledger", "tracker", "data.classes")
FEDERATIONS = ("deployment", "simulation")
DEPLOYED = ("flwr", "run", "APP", "federation", "--stream", "--run-config")


def command_of(experiment: Experiment) -> str:
    """Return the command that runs an experiment, with FOLDER or FILE in place of its paths.

    It is `fed-dpsd run` or, for a deployment, `flwr run` with APP for the app's folder. It names
    the choices of conf/ that are not defaults, and the keys that differ from these choices. Return
    "" if no such command gives the same settings.
    """
    values = json.loads(experiment.to_json())
    typed = _choices(experiment, values)
    if any(
        name not in choices(group) for group, _, name in (each.partition("=") for each in typed)
    ):
        return ""
    if experiment.config.plugins:
        typed.append(f"plugins={shown(list(experiment.config.plugins))}")
    composition = read(typed)
    if composition.problems:
        return ""
    unset = leaves(json.loads(from_overrides([], None).to_json()))  # also keys that no file sets
    known, own = dict(unset) | dict(leaves(composition.values)), dict(leaves(values))
    calibrated = _calibrated(experiment)
    for key, value in own.items():
        source = composition.sources.get(key)
        same = own[source] == value if source in own else known.get(key) == value
        if same or key in PLACES or key == calibrated:
            continue
        group, _, _ = key.rpartition(".")
        if key not in known and group in known:  # a group of keys that is null in the file
            key, value = group, functools.reduce(dict.__getitem__, group.split("."), values)
        if key not in known or key.endswith("_target_"):
            return ""
        typed.append(f"{key}={_typed(value)}")
    typed = list(dict.fromkeys(typed))
    if experiment.config.federation.simulation:
        return shlex.join(["fed-dpsd", "run", *typed])
    overrides = " ".join(word.replace('"', "'") for word in typed)
    return shlex.join([*DEPLOYED, f'overrides="{overrides}"'])


def _choices(experiment: Experiment, values: dict[str, Any]) -> list[str]:
    method = f"method={experiment.method_name}"
    typed = (
        [method] if read([]).values["method"]["_target_"] != values["method"]["_target_"] else []
    )
    default = read(typed).values
    for group, name, mark in (
        ("federation", FEDERATIONS[experiment.config.federation.simulation], "simulation"),
        ("data", experiment.config.data.name, "name"),
        ("partition", values["partition"].get("name"), "name"),
        ("training", experiment.training.name, "_target_"),
        ("answers", experiment.answers.name, "_target_"),
    ):
        if default[group].get(mark) != values[group].get(mark):
            typed.append(f"{group}={name}")
    return typed


def _calibrated(experiment: Experiment) -> str:
    """Return the key that privacy.target_epsilon calibrates; "" if there is none."""
    if experiment.config.privacy.target_epsilon is None:
        return ""
    axis = calibrated_axis(experiment)
    return f"{axis}.{getattr(experiment, axis).calibrated_by}"


def _typed(value: Any) -> str:
    """Return a value as a user types it, with a placeholder for a path on this machine."""
    if isinstance(value, str) and os.sep in value:
        return "FILE" if os.path.splitext(value)[1] else "FOLDER"
    return shown(value)
