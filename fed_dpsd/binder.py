"""The binder from mappings to frozen dataclasses, which reports every problem at once."""

import dataclasses
import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fed_dpsd.errors import ConfigError

T = TypeVar("T")


class Binder:
    """A binder of mappings to frozen dataclasses that collects every problem on the way.

    Args:
        packages: packages of plug-ins, whose classes may be named too.
    """

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self.problems: list[str] = []
        self._packages = tuple(packages)

    def bind(self, cls: type[T], values: Mapping[str, Any], where: str = "") -> T | None:
        """Return an instance of dataclass `cls` from `values`, or None after recording problems.

        Keys must be `cls`'s fields, types must fit the annotations (an int is a float; nothing else
        is converted, and a Literal lists all values), and `cls` itself may raise ValueError for a
        value out of range.
        """
        before = len(self.problems)
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in sorted(set(values) - set(fields)):
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            self.problems.append(f"{where}{key}={values[key]!r} is not a key of {where[:-1]}{hint}")
        arguments = {}
        for name, field in fields.items():
            if name in values:
                arguments[name] = self._convert(values[name], hints[name], where + name)
            elif field.default is dataclasses.MISSING:
                self.problems.append(f"{where}{name} is missing")
        if len(self.problems) > before:
            return None
        try:
            return cls(**arguments)
        except ValueError as error:
            self.problems.append(f"{where}{error}")
            return None

    def _convert(self, value: Any, hint: Any, where: str) -> Any:
        """Return `value` as the type `hint`, or None after recording a problem."""
        if dataclasses.is_dataclass(hint):
            if isinstance(value, Mapping):
                return self.bind(typing.cast(type, hint), value, f"{where}.")
            self.problems.append(f"{where}={value!r} must be a group of keys")
            return None
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            if value is None and type(None) in arguments:
                return None
            if dataclasses.is_dataclass(value):  # an object that was bound before
                return value
            return self._convert(value, arguments[0], where)
        if origin is tuple and isinstance(value, list):
            return tuple(self._convert(item, arguments[0], where) for item in value)
        if hint is typing.Any:
            return value
        if origin is typing.Literal:
            if value not in arguments:
                *most, last = map(repr, arguments)
                listed = f"{', '.join(most)} or {last}" if most else last
                self.problems.append(f"{where}={value!r} must be {listed}")
            return value
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        expected = origin or hint
        if isinstance(value, expected) and (expected is bool or not isinstance(value, bool)):
            return value
        kinds = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
        kind = kinds.get(expected, "a group of keys" if expected is Mapping else "a list")
        self.problems.append(f"{where}={value!r} must be {kind}")
        return None

    def locate(self, package: str, path: Any, where: str) -> type | None:
        """Return the class PACKAGE.MODULE.CLASS, or None after recording a problem.

        Nothing outside our own `package` and the plug-ins' is imported, whatever a file or a
        message names.
        """
        known = (package, *self._packages)
        for each in known:
            pattern = rf"{re.escape(each)}\.([a-z_0-9]+)\.([A-Za-z0-9]+)"
            if isinstance(path, str) and (match := re.fullmatch(pattern, path)):
                module, name = match.groups()
                try:
                    cls = getattr(importlib.import_module(f"{each}.{module}"), name)
                except AttributeError:
                    continue
                except ImportError as error:
                    if error.name == f"{each}.{module}":
                        continue
                    self.problems.append(f"{where}={path} cannot be imported: {error}")
                    return None
                if dataclasses.is_dataclass(cls) and not inspect.isabstract(cls):
                    return typing.cast(type, cls)
        forms = " or ".join(f"{each}.MODULE.CLASS" for each in known)
        self.problems.append(f"{where}={path!r} is not a class {forms}")
        return None

    def finish(self) -> None:
        """Raise ConfigError with every recorded problem, if there is one."""
        if self.problems:
            raise ConfigError(self.problems)
