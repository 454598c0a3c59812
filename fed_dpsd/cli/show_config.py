"""The whole configuration of a run as YAML, with the origin of each value as a comment."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

if TYPE_CHECKING:
    from fed_dpsd.experiment import Experiment

# Keys whose null is replaced by a value that suits the data.
UNIT = [f"{e}.{key}" for e in ("training", "answers") for key in ("unit", "records_per_patient")]

ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config",
        help="Print the whole configuration as YAML, with the origin of each value; nothing runs.",
    ),
]


def print_config(overrides: Sequence[str]) -> None:
    """Print the configuration that overrides describe; no data is read and no folder is made."""
    from fed_dpsd.api import experiment_of
    from fed_dpsd.config.plugins import find_plugins, search_plugins

    experiment = experiment_of(overrides)
    with search_plugins(find_plugins(experiment.config.plugins)):
        print(annotate_config(overrides, experiment))


def annotate_config(overrides: Sequence[str], experiment: "Experiment") -> str:
    """Return the configuration that overrides describe, one line per key.

    A comment gives each value's origin: typed, a file of conf/ and the choice that selected it, the
    key that the value was copied from, calibrated, or default.

    Args:
        overrides: the overrides as typed.
        experiment: the experiment that `set_up` returned for them.
    """
    from fed_dpsd.config import keys
    from fed_dpsd.experiment import calibrated_axis

    typed = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    chosen, groups = keys.resolve_choices(typed), keys.groups()
    known = {key.name: key for key in keys.all_keys(typed)}
    target, axis = experiment.config.privacy.target_epsilon, calibrated_axis(experiment)
    calibrated = f"{axis}.{getattr(experiment, axis).calibrated_by}"

    def origin_of_choice(group: str, choice: str) -> str:
        if group in typed:
            return "typed"
        for above in ("experiment", "method") if groups[group] != choice else ():
            named = {above: chosen[above]}
            if named[above] != "null" and keys.resolve_choices(named).get(group) == choice:
                return f"by {above}={named[above]}"
        return "default"

    def origin(name: str) -> str:
        if target is not None and name == calibrated:  # even if null is typed
            return f"calibrated to privacy.target_epsilon={target:g}"
        within = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if name in typed or any(part in typed and part not in groups for part in within):
            return "typed"
        if name in ("client_device", "server_device") and "device" in typed:
            return "typed, as device"
        key = known.get(name)
        if key and key.value == "null" and name == f"answers.{experiment.answers.calibrated_by}":
            return f"suits training={experiment.training.name}"
        if key and key.value == "null" and name in UNIT:
            return "suits the data"
        if key and key.value.startswith("${"):
            return f"as {key.value[2:-1]}"
        group, _, choice = key.file.partition("/") if key else ("", "", "")
        if not choice:
            return "default"
        if choice != chosen.get(group):
            return f"{group}/{choice}.yaml, on which {group}={chosen.get(group)} builds"
        return "default" if groups[group] == choice else f"{group}={choice}"

    lines = [
        f"# {group}={choice}: {origin_of_choice(group, choice)}"
        for group, choice in chosen.items()
        if choice != "null" and group in groups
    ]
    return "\n".join([*lines, *_lines(json.loads(experiment.to_json()), origin)])


def _lines(
    tree: Mapping[str, Any], origin: Callable[[str], str], prefix: str = ""
) -> Iterator[str]:
    """Yield the YAML lines of a mapping, with scalars and lists before sections."""
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
