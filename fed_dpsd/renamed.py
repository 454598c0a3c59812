"""Configuration keys with other names in version 0.1, in run folders and in ledger digests.

Run folders of version 0.1 still open, and an upgraded client recognises the asks it has answered.
"""

from collections.abc import Mapping
from typing import Any

_PACKAGES = {"method": "fed_dpsd.methods.", "privacy": "fed_dpsd.privacy."}
_NEW_NAMES = {
    "turn": "match_polarity",
    "commitment": "prediction_weight",
    "literal": "as_printed",
    "noise_share": "noise_fraction",
    "areas_share": "areas_fraction",
    "lines_share": "lines_fraction",
}
_FORMER_NAMES = {new: former for former, new in _NEW_NAMES.items()}


def upgraded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run folder's configuration with today's keys."""
    configuration = dict(raw)
    for group, package in _PACKAGES.items():
        values = dict(configuration[group])
        if "_class_" in values:
            values["_target_"] = f"{package}{values.pop('_class_')}"
            values = {_NEW_NAMES.get(key, key): value for key, value in values.items()}
        configuration[group] = values
    return configuration


def former_method(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's values under the keys of version 0.1, for digests in ledgers."""
    values = {_FORMER_NAMES.get(key, key): value for key, value in method.items()}
    values["_class_"] = str(values.pop("_target_")).removeprefix(_PACKAGES["method"])
    return values
