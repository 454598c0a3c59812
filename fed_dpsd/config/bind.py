"""Binding of mappings to frozen dataclasses with pydantic."""

import copy
import dataclasses
import difflib
import functools
import importlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

from fed_dpsd.config.schema import STRICT
from fed_dpsd.errors import ConfigError, UserError, format_value

T = TypeVar("T")
_INVALID = object()  # a section whose own problems are recorded
_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "mapping_type": "a group of keys",
    "dict_type": "a group of keys",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "less_than": "< {lt:g}",
    "less_than_equal": "<= {le:,}",
    "multiple_of": "a multiple of {multiple_of}",
}


class Binder:
    """A binder of mappings to frozen dataclasses that collects problems.

    Call `finish`, which raises them, before using an instance.

    Args:
        sources: for a key, the key that its value is copied from; problems name that key.

    Attributes:
        packages: packages of plug-ins, whose classes may also be named.
    """

    def __init__(self, sources: Mapping[str, str] | None = None) -> None:
        self.problems: list[str] = []
        self._sources = sources or {}
        self.packages: tuple[str, ...] = ()

    def bind(self, cls: type[T], values: Mapping[str, Any], where: str = "") -> T | None:
        """Return an instance of dataclass `cls`, or None after recording problems.

        Keys must be fields of `cls`, and types must match the annotations: an int is accepted as a
        float and a list as a tuple; nothing else is converted. `cls` may raise ValueError for a
        value out of range, with a message that names the field.
        """
        hints = typing.get_type_hints(cls)
        given = {
            str(key): self._ready(hints.get(str(key)), value, f"{where}{key}")
            for key, value in values.items()
        }
        try:
            checked = _pydantic_class(typing.cast(type, cls))(**given)
            if type(checked) is cls:
                return checked
            fields = dataclasses.fields(cls)  # type: ignore[arg-type]
            return cls(**{field.name: getattr(checked, field.name) for field in fields})
        except ValidationError as error:
            found = error.errors(include_url=False)
        except ValueError as error:  # of a plain dataclass's __post_init__
            self.problems.append(f"{where}{error}")
            return None
        # A key that is only misspelt is not reported as missing too.
        missing = [str(each["loc"][0]) for each in found if each["type"] == "missing"]
        if len(missing) == 1 and any(_closest_field(each, missing) for each in found):
            found = [each for each in found if each["type"] != "missing"]
        first = {each["loc"][:1]: each for each in reversed(found)}  # one problem for each key
        self.problems += [
            _problem(each, where, hints, missing)
            for each in reversed(first.values())
            if each["input"] is not _INVALID
        ]
        return None

    def _ready(self, hint: Any, value: Any, path: str) -> Any:
        """Convert a section to its dataclass, and a list to a tuple, as the type hint requires."""
        for kind in _kinds(hint):
            if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
                bound = self.bind(typing.cast(type, kind), value, f"{path}.")
                return _INVALID if bound is None else bound
            if typing.get_origin(kind) is tuple and isinstance(value, list):
                return tuple(tuple(each) if isinstance(each, list) else each for each in value)
        return value

    def locate(self, package: str, path: Any, where: str) -> type | None:
        """Return the class PACKAGE.MODULE.CLASS, or None after recording a problem.

        Only `package`, fed_dpsd.papers and named plug-ins are ever imported, regardless of what a
        file or a message names.
        """
        known = (package, "fed_dpsd.papers", *self.packages)
        forms = " or ".join(f"{each}.MODULE.CLASS" for each in known)
        problem = f"{where}={format_value(path)} is not an allowed class; give {forms}"
        for each in known:
            match = re.fullmatch(rf"{re.escape(each)}\.([a-z_0-9]+)\.([A-Za-z0-9]+)", str(path))
            if not match:
                continue
            module = f"{each}.{match[1]}"
            try:
                cls = getattr(importlib.import_module(module), match[2], None)
            except Exception as error:  # a plug-in's module may raise any
                if not (isinstance(error, ImportError) and error.name == module):
                    problem = f"{where}={path} cannot be imported: {error}"
                continue
            if dataclasses.is_dataclass(cls):
                return typing.cast(type, cls)
        self.problems.append(problem)
        return None

    def finish(self) -> None:
        """Raise ConfigError if there are problems; duplicates are removed."""
        if self.problems:
            raise ConfigError(list(dict.fromkeys(map(self._as_typed, self.problems))))

    def _as_typed(self, problem: str) -> str:
        """Return a problem with the name of the key that the value was copied from."""
        key = problem.partition("=")[0]
        return problem.replace(f"{key}=", f"{self._sources.get(key, key)}=")


def bind_dataclass(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return an instance of dataclass `cls` (see `Binder.bind`).

    Raises:
        ConfigError: the values have problems, one per line.
    """
    binder = Binder()
    instance = binder.bind(cls, values, where)
    binder.finish()
    assert instance is not None
    return instance


@functools.cache
def _pydantic_class(cls: type) -> Callable[..., Any]:
    """Return a strict pydantic dataclass with the fields of the plain dataclass `cls`."""
    if is_pydantic_dataclass(cls):
        return cls
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(f.name, hints[f.name], copy.copy(f)) for f in dataclasses.fields(cls)]
    return dataclass(dataclasses.make_dataclass(cls.__name__, fields, kw_only=True), config=STRICT)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a single type."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def _closest_field(error: Any, fields: Iterable[str]) -> list[str]:
    """Return the field closest to an unknown key; [] if none is close, or the key is known."""
    if error.get("type") != "unexpected_keyword_argument":
        return []
    return difflib.get_close_matches(str(error["loc"][0]), [*fields], n=1)


def _problem(error: Any, where: str, hints: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Return pydantic's error as a sentence that names the key, its value and the remedy."""
    kind, context = error["type"], error.get("ctx", {})
    if not error["loc"]:  # of the whole section's __post_init__
        return f"{where}{context['error']}"
    name = str(error["loc"][0])
    typed = f"{where}{name}={format_value(error['input'])}"
    if kind == "missing":
        return f"{where}{name} is missing"
    if kind == "unexpected_keyword_argument":
        near = _closest_field(error, missing) or _closest_field(error, hints)
        group = f" of {where[:-1]}" if where else ""
        return f"{typed} is not a key{group}{f'; did you mean {near[0]}?' if near else ''}"
    if kind == "value_error":
        return f"{typed} {context['error']}"
    if kind == "literal_error":
        return f"{typed} must be {context['expected']}".replace("'", "")
    if kind == "dataclass_exact_type":
        section = next(each for each in _kinds(hints[name]) if dataclasses.is_dataclass(each))
        keys = ", ".join(f"{where}{name}.{field.name}" for field in dataclasses.fields(section))
        return f"{typed}: {where}{name} is a group of keys: {keys}"
    if kind in _BOUNDS:
        return f"{typed} must be {_BOUNDS[kind].format(**context)}"
    if kind not in _KINDS:
        return f"{typed}: {error['msg']}"
    remedy = _as_yaml(kind, error["input"]) if where.startswith("site.") else ""
    if isinstance(value := error["input"], list) and value and not where.startswith("site."):
        values = ",".join(map(format_value, value))
        remedy = f"; for several runs: fed-dpsd sweep {where}{name}={values}"
    return f"{typed} must be {_KINDS[kind]}{remedy}"


def _as_yaml(kind: str, value: object) -> str:
    """Return the remedy for what YAML 1.1 reads as another type: 5e-6 is text, no is false."""
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; quote it"
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        mantissa, _, exponent = value.lower().partition("e")
        number = f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent):+d}"
        written = f"{float(value):.0f}" if kind.startswith("int") else number
        return f"; YAML reads {value} as text, so write {written}"
    return ""


class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that rejects duplicate keys; otherwise the last would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, unless a key occurs twice."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            line = node.start_mark.line + 1
            raise ValueError(f"{twice} is given twice, in the keys from line {line} on; keep one")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run folder's configuration without checking its values.

    Raises:
        UserError: `folder` is not a run folder, or its configuration cannot be read.
    """
    path = folder / "config.yaml"
    try:
        if not path.exists():
            raise ValueError("it has no config.yaml" if folder.exists() else "it does not exist")
        return read_yaml(path)
    except ValueError as error:
        raise UserError(
            f"{folder} is not a run folder ({error}); give the path that `run` printed last"
        ) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file.

    Raises:
        ValueError: the file cannot be read, contains no mapping, or has a key twice.
    """
    try:
        raw = yaml.load(path.read_bytes(), UniqueKeys)
    except OSError as error:
        raise ValueError(error.strerror) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"it is not valid YAML{at}") from None
    if not isinstance(raw, dict):
        raise ValueError("it is empty" if raw is None else "it has no KEY: VALUE lines")
    return raw
