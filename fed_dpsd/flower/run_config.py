"""The configuration of `flwr run --run-config`: flat keys, and a string of overrides for the rest.

Flower admits the keys that pyproject.toml declares, and checks no types. There "" means that a key
is not given, so every default lives in conf/.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fed_dpsd.errors import ConfigError
from fed_dpsd.overrides import compose, split_overrides

_KINDS = {int: "an integer", float: "a number"}


@dataclass(frozen=True)
class FlatKey:
    """A key of Flower's run configuration.

    Args:
        override: the key of conf/ that it sets.
        kind: the type of its values.
    """

    override: str
    kind: type = str

    def admits(self, value: Any) -> bool:
        """Return whether a value is of this type; an integer is a number."""
        accepted = (int, float) if self.kind is float else self.kind
        return isinstance(value, accepted) and not isinstance(value, bool)


FLAT_KEYS = {
    **{key: FlatKey(key, int) for key in ("num_clients", "seed", "rounds", "queries_per_round")},
    "teachers_per_client": FlatKey("teachers_per_client", int),
    **{key: FlatKey(key) for key in ("method", "data", "training", "answers", "model")},
    **{key: FlatKey(key) for key in ("partition", "federation", "experiment", "device")},
    "plugins": FlatKey("plugins"),
    "data_path": FlatKey("data.path"),
    "alpha": FlatKey("partition.alpha", float),
    "target_epsilon": FlatKey("privacy.target_epsilon", float),
    "delta": FlatKey("privacy.delta", float),
    "budget": FlatKey("privacy.budget", float),
    **{key: FlatKey(key) for key in ("out", "cache", "ledger")},
}


def given(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are given, `overrides` and `resume` among them."""
    return {key: value for key, value in run_config.items() if value != ""}


def from_run_config(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Compose the configuration that a Flower run asks for.

    Raises:
        ConfigError: a key is unknown, is given twice or has a wrong type, or an override is wrong.
    """
    flat = given(run_config)
    text = flat.pop("overrides", "")
    if not isinstance(text, str):
        raise ConfigError([f'overrides={_typed(text)} must be a string: overrides="rounds=10"'])
    overrides = split_overrides(text)
    if problems := _problems(flat, overrides):
        raise ConfigError(problems)
    return compose(
        [*overrides, *(f"{FLAT_KEYS[key].override}={_quoted(v)}" for key, v in flat.items())]
    )


def _problems(flat: Mapping[str, Any], overrides: list[str]) -> list[str]:
    named = {override.partition("=")[0].lstrip("+~") for override in overrides}
    problems = []
    for key, value in flat.items():
        if key not in FLAT_KEYS:
            known = (*FLAT_KEYS, "overrides", "resume")
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            problems.append(f"{key}={_typed(value)} is no key of a run configuration; {hint}")
            continue
        known_as, kind = FLAT_KEYS[key].override, FLAT_KEYS[key].kind
        if known_as in named:
            within = "" if known_as == key else f" as {known_as}"
            problems.append(
                f"{key} is given twice, flat and{within} in overrides; keep one of them"
            )
        if not FLAT_KEYS[key].admits(value):
            wanted = _KINDS.get(kind, f'a string, in quotes: {key}="{_typed(value)}"')
            problems.append(f"{key}={_typed(value)} must be {wanted}")
    return problems


def _typed(value: Any) -> str:
    """Return a value as it is typed in a run configuration."""
    return json.dumps(value, ensure_ascii=False)


def _quoted(value: Any) -> str:
    """Return a value as Hydra reads it: text in quotes, so that nothing in it has a meaning."""
    if not isinstance(value, str):
        return str(value)
    # Only before a quote is a backslash more than itself.
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + m[2].replace("'", r"\'"), value)
    return f"'{escaped}'"
