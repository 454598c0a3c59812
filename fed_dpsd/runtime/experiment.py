"""From composed configuration to the objects of an experiment, with every problem in one error."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed_dpsd.config import Binder, Config, split_privacy, to_json
from fed_dpsd.data.partition import PARTITIONS, Partition
from fed_dpsd.methods.method import Method
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class Experiment:
    """A configuration, and the method, mechanism and partition that it names."""

    config: Config
    method: Method
    mechanism: Mechanism
    partition: Partition

    def to_json(self) -> str:
        """The configuration, for `from_json` on another machine."""
        return to_json(self.config)


def home() -> Path:
    """FED_DPSD_HOME, by default ~/.fed-dpsd: caches, and the runs of a bare `flwr run`."""
    return Path(os.environ.get("FED_DPSD_HOME") or Path.home() / ".fed-dpsd").absolute()


def set_up(raw: Mapping[str, Any], base: Path | None) -> Experiment:
    """Bind what Hydra composed.

    Args:
        raw: the composed configuration.
        base: folder that relative paths start from; None where the working directory is not the
            user's, and relative paths are errors.

    Raises:
        ConfigError: every problem found, one a line. No data has been read.
    """
    binder = Binder()
    privacy = dict(raw["privacy"])
    values = {**raw, "privacy": split_privacy(privacy)}
    config = binder.bind(Config, values)
    num_classes = raw["data"].get("num_classes") if isinstance(raw["data"], Mapping) else None

    method = _bind_class(binder, "fed_dpsd.methods", raw["method"], "method", {})
    mechanism = _bind_class(
        binder,
        "fed_dpsd.privacy",
        values["privacy"]["mechanism"],
        "privacy",
        {"num_classes": num_classes, "teachers": raw["teachers_per_client"]},
    )
    partition = _bind_partition(binder, raw["partition"])
    if config is not None:
        model = config.model
        named = {"model.teacher": [model.teacher], "model.student": [model.student]}
        named |= {"model.teachers": model.teachers, "teacher.arch": [config.teacher.arch or "cnn"]}
        for key, names in named.items():
            for name in set(names) - set(CLASSIFIERS):
                known = ", ".join(CLASSIFIERS)
                binder.problems.append(f"{key}={name!r} is unknown; choose one of: {known}")
        needed = method.num_clients if method else None
        if needed not in (None, config.num_clients):
            binder.problems.append(
                f"num_clients={config.num_clients}: method "
                f"{type(method).__name__} needs num_clients={needed}"
            )
        config = _resolve_paths(binder, config, base)
    binder.finish()
    assert config is not None
    return Experiment(config, method, mechanism, partition)


def from_json(text: str) -> Experiment:
    """The experiment that `Experiment.to_json` wrote."""
    return set_up(json.loads(text), None)


def _bind_class(
    binder: Binder, package: str, values: Mapping[str, Any], where: str, public: dict[str, Any]
) -> Any:
    """An instance of the class that `_class_` names, from its keys and public facts."""
    cls = binder.locate(package, values.get("_class_"), f"{where}._class_")
    if cls is None:
        return None
    names = {field.name for field in dataclasses.fields(cls)}
    arguments = {key: value for key, value in values.items() if key != "_class_"}
    arguments |= {key: value for key, value in public.items() if key in names}
    return binder.bind(cls, arguments, f"{where}.")


def _bind_partition(binder: Binder, values: Mapping[str, Any]) -> Any:
    name = values.get("name")
    if name not in PARTITIONS:
        binder.problems.append(f"partition.name={name!r} is not one of {', '.join(PARTITIONS)}")
        return None
    arguments = {key: value for key, value in values.items() if key != "name"}
    return binder.bind(PARTITIONS[name], arguments, "partition.")


def _resolve_paths(binder: Binder, config: Config, base: Path | None) -> Config:
    """Absolute paths, with their defaults; the data folder must be there."""

    def absolute(key: str, value: str) -> str:
        path = Path(value).expanduser()
        if not path.is_absolute() and base is None:
            binder.problems.append(
                f"{key}={value} must be an absolute path under `flwr run`, "
                "whose working directory is not yours"
            )
        return str(path if base is None else base / path)

    default_out = home() / "runs" if base is None else base / "runs"
    changes: dict[str, Any] = {
        "out": absolute("out", config.out) if config.out else str(default_out),
        "cache": absolute("cache", config.cache) if config.cache else str(home() / "cache"),
    }
    if config.run_folder:
        changes["run_folder"] = absolute("run_folder", config.run_folder)
    if config.data.path is not None:
        path = absolute("data.path", config.data.path)
        if not Path(path).is_dir():
            binder.problems.append(
                f"data.path={path} is not a folder; give one with train.parquet and test.parquet"
            )
        changes["data"] = dataclasses.replace(config.data, path=path)
    if config.teacher.path is not None:
        path = absolute("teacher.path", config.teacher.path)
        changes["teacher"] = dataclasses.replace(config.teacher, path=path)
    return dataclasses.replace(config, **changes)
