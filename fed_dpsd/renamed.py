"""Configuration keys with other names in former versions, in run folders and in ledger digests.

Run folders of version 0.1 still open, and an upgraded client recognises the asks it has answered.
"""

from collections.abc import Mapping
from typing import Any

_METHODS, _PRIVACY = "fed_dpsd.methods.", "fed_dpsd.privacy."
_NEW_NAMES = {
    "commitment": "prediction_weight",
    "noise_share": "noise_fraction",
    "areas_share": "areas_fraction",
    "lines_share": "lines_fraction",
}
_FORMER_NAMES = {new: former for former, new in _NEW_NAMES.items()}
_POLARITIES = {False: "both", True: "answers"}  # of the former keys `turn` and `match_polarity`
_LATER = {
    "recombined_fraction": 0.0,
    "leaves_fraction": 0.0,
    "pooling": "mean",
    "distillation": "decoupled",
}  # keys of FedDPSD since 0.1; the last is one of the papers' loops too
_FORMER_POLARITIES = {new: former for former, new in _POLARITIES.items()}
# Until training and answers were two choices, `privacy` named one of these, and held its keys.
_CHOICES = {
    "label": "training=plain answers=label",
    "gradient": "training=plain answers=gradient",
    "votes": "training=plain answers=votes",
    "non_private": "training=plain answers=probabilities",
    "dp_teacher": "training=dp_sgd answers=probabilities",
}
_COMMON = {"delta", "epsilon_stated", "budget", "budget_relation", "target_epsilon"}
_TRAINING = "sample_rate", "steps", "max_grad_norm", "learning_rate", "copies", "noise_multiplier"
_ANSWERS = "epsilon_per_answer", "k", "threshold", "noise_at", "quorum", "noise_law", "bound"
_ANSWERS += "stability", "mask", "normalise", "noise_multiplier"
_MOVED = {
    "training": {**{key: key for key in _TRAINING}, "count_share": "count_fraction"},
    "answers": {key: key for key in _ANSWERS},
}
_PLAIN = {"_target_": f"{_PRIVACY}training.Plain"}
_PROBABILITIES = {"_target_": f"{_PRIVACY}mechanism.Probabilities"}


def upgraded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run folder's configuration with today's keys."""
    configuration = dict(raw)
    method = dict(configuration["method"])
    if "_class_" in method:
        method["_target_"] = f"{_METHODS}{method.pop('_class_')}"
        method = {_NEW_NAMES.get(key, key): value for key, value in method.items()}
    for former in ("turn", "match_polarity"):
        if former in method:
            method["polarity"] = _POLARITIES[method.pop(former)]
    if "images_per_generator" in method:  # FedDPSD and DPSD
        method = _LATER | method
    if "divisor" in method:  # a key of the papers' loops
        method.setdefault("distillation", _LATER["distillation"])
    for gone in ("literal", "as_printed"):  # one that is true stays, and is refused
        if method.get(gone) is False:
            del method[gone]
    configuration["method"] = method
    if "device" in configuration:  # the server's alone: clients were on the processor
        devices = {"client_device": "cpu", "server_device": configuration.pop("device")}
        configuration = devices | configuration
    if "answers" not in configuration:
        configuration |= _two_axes(configuration["privacy"])
    return configuration


def _two_axes(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """Split the one group of former versions into `privacy`, `training` and `answers`."""
    common = {key: value for key, value in privacy.items() if key in _COMMON}
    own = {key: value for key, value in privacy.items() if key not in _COMMON}
    if "_class_" in own:
        own["_target_"] = f"{_PRIVACY}{own.pop('_class_')}"
    if "count_share" in own:
        own["count_fraction"] = own.pop("count_share")
    name = own["_target_"].rpartition(".")[2]
    training, answers = _PLAIN, own
    if name == "DPSGD":
        own["_target_"] = f"{_PRIVACY}dp_sgd.DPSGD"
        training, answers = own, _PROBABILITIES
    elif name == "NonPrivate":
        answers = _PROBABILITIES
    return {"privacy": common, "training": dict(training), "answers": dict(answers)}


def former_privacy(override: str) -> str | None:
    """Return the error of an override of the former group `privacy`; None for any other."""
    key, _, value = override.partition("=")
    if key == "privacy":
        new = _CHOICES.get(value, "training=dp_sgd answers=label, for example")
        return (
            f"{override}: `privacy` is two choices now, how teachers are trained and how they "
            f"answer; write {new}"
        )
    group, _, name = key.partition(".")
    if group != "privacy":
        return None
    new = [f"{choice}.{keys[name]}" for choice, keys in _MOVED.items() if name in keys]
    return f"{override}: write {' or '.join(new)}" if new else None


def former_method(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's values under the keys of version 0.1, for digests in ledgers."""
    values = {_FORMER_NAMES.get(key, key): value for key, value in method.items()}
    for key, value in _LATER.items():
        if values.get(key) == value:
            del values[key]
    if "polarity" in values:
        polarity = values.pop("polarity")
        values["turn"] = _FORMER_POLARITIES.get(polarity, polarity)
    values["_class_"] = str(values.pop("_target_")).removeprefix(_METHODS)
    if values["_class_"] in ("fed_dpsd.FedDPSD", "dpsd.DPSD"):
        values["literal"] = False  # a key that they had
    return values
