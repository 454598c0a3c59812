"""The whole configuration of a run, as YAML in which a comment on each value says who set it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from fed_dpsd.config import keys
from fed_dpsd.config.plugins import find, searching

if TYPE_CHECKING:
    from fed_dpsd.experiment import Experiment


ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config",
        help="Print the whole configuration as YAML, with the origin of each value; nothing runs.",
    ),
]


def print_config(overrides: Sequence[str]) -> None:
    """Print the configuration that overrides stand for; no data is read, no folder made.

    Raises:
        ConfigError: it has problems.
    """
    from fed_dpsd.api import composed

    experiment = composed(overrides)
    with searching(find(experiment.config.plugins)):
        print(annotated(overrides, experiment))


def annotated(overrides: Sequence[str], experiment: "Experiment") -> str:
    """Return the configuration that overrides stand for, a line for each key.

    A comment names the origin: typed, a file of conf/ with the choice that brought it, the key
    that it follows, calibrated, or default.

    Args:
        overrides: as they were typed.
        experiment: what `set_up` made of them.
    """
    settled = json.loads(experiment.to_json())
    typed = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    chosen, groups = keys.chosen(typed), keys.groups()
    known = {key.name: key for key in keys.all_keys(typed)}
    lines = [
        f"# {group}={choice}: {_origin_of_choice(group, choice, typed)}"
        for group, choice in chosen.items()
        if choice != "null" and group in groups
    ]
    target = experiment.config.privacy.target_epsilon

    def origin(name: str) -> str:
        within = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if name in typed or any(part in typed and part not in groups for part in within):
            return "typed"
        if name in ("client_device", "server_device") and "device" in typed:
            return "typed, as device"
        key = known.get(name)
        if target is not None and name == _calibrated(experiment):
            return f"calibrated to privacy.target_epsilon={target:g}"
        if key is None:
            return "default"
        if key.value.startswith("${"):
            return f"as {key.value[2:-1]}"
        group, _, choice = key.file.partition("/")
        if not choice:
            return "default"
        if key.file != f"{group}/{chosen.get(group)}":
            return f"{key.file}.yaml, on which {group}={chosen.get(group)} builds"
        return "default" if groups[group] == choice else f"{group}={choice}"

    lines += _lines(settled, origin)
    return "\n".join(lines)


def _lines(
    tree: Mapping[str, Any], origin: Callable[[str], str], prefix: str = ""
) -> Iterator[str]:
    """Yield YAML of a mapping, scalars and lists before sections."""
    margin = "  " * prefix.count(".")
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{margin}{key}:"
            yield from _lines(value, origin, f"{prefix}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=2**20)
            text = text.removesuffix("\n").removesuffix("\n...")
            comment = "" if key == "_target_" else f" # {origin(prefix + key)}"
            yield f"{margin}{key}: {text}{comment}"


def _origin_of_choice(group: str, choice: str, typed: Mapping[str, str]) -> str:
    """Say who chose a group's file."""
    if group in typed:
        return "typed"
    if keys.groups().get(group) == choice:
        return "default"
    for above in ("experiment", "method"):
        named = {above: keys.chosen(typed)[above]}
        if named[above] != "null" and keys.chosen(named).get(group) == choice:
            return f"by {above}={named[above]}"
    return "default"


def _calibrated(experiment: "Experiment") -> str:
    """Return the key whose value follows privacy.target_epsilon."""
    from fed_dpsd.experiment import calibrated_axis

    axis = calibrated_axis(experiment)
    return f"{axis}.{getattr(experiment, axis).calibrated_by}"
