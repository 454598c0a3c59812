"""The configuration of `flwr run --run-config`: flat keys, and a string with the other overrides.

Flower accepts only the keys declared in pyproject.toml and does not check their types. The value ""
means that a key is not given, so all defaults are in conf/.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from fed_dpsd.config.compose import split_overrides
from fed_dpsd.config.errors import QUOTES, quoted
from fed_dpsd.errors import ConfigError, format_value
from fed_dpsd.experiment import Experiment, one_run

# The keys set by flat keys with shorter names.
SHORT = {
    "data_path": "data.path",
    "alpha": "partition.alpha",
    **{key: f"privacy.{key}" for key in ("target_epsilon", "delta", "budget")},
}
# Text that Hydra reads literally: all other text goes in quotes.
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)\Z)[a-z_/][\w./-]*", re.ASCII | re.IGNORECASE)


def given_keys(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys, including `overrides` and `resume`."""
    return {key: value for key, value in run_config.items() if value != ""}


def from_run_config(run_config: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a Flower run's configuration.

    Raises:
        ConfigError: a key is given twice, the keys or values have problems, or they describe a grid
            of several runs. No data was read.
    """
    overrides, problems = _overrides(run_config)
    try:
        experiment = one_run(overrides, None)
    except ConfigError as error:
        problems += map(_for_run_config, error.problems)
    if problems:
        raise ConfigError(problems)
    return experiment


def _overrides(run_config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the overrides in a run's configuration, and a problem for each key given twice."""
    flat = given_keys(run_config)
    overrides = split_overrides(format_value(flat.pop("overrides", "")))
    named = {override.lstrip("+~").partition("=")[0] for override in overrides}
    problems = []
    for key, value in flat.items():
        name = SHORT.get(key, key)
        overrides.append(f"{name}={_quoted(value)}")
        if name in named:
            within = "" if name == key else f" as {name}"
            problems.append(
                f"{key} is given twice, flat and{within} in overrides; keep one of them"
            )
    return overrides, problems


def with_typed_keys(text: str, run_config: Mapping[str, Any]) -> str:
    """Return the lines of a text, with long names replaced by the flat keys as typed."""
    for key in SHORT.keys() & given_keys(run_config).keys():
        text = re.sub(rf"^{re.escape(SHORT[key])}(?![\w.])", key, text, flags=re.MULTILINE)
    return text


def _quoted(value: Any) -> str:
    """Return a value in Hydra's syntax, so that no text is interpreted."""
    if not isinstance(value, str):
        return format_value(value)
    if _PLAIN.fullmatch(value):
        return value
    return quoted(value)


def _for_run_config(problem: str) -> str:
    """Return a problem with its remedy in the syntax of --run-config."""
    said, marked, word = problem.partition(QUOTES)
    if not marked or "'" in (setting := " ".join(shlex.split(word))):  # Flower has no escapes
        return problem
    config = shlex.quote(f"overrides='{setting}'")
    return f"{said}{marked}--run-config {config}"
