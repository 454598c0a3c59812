"""The binder from mappings to frozen dataclasses, which reports every problem at once."""

import dataclasses
import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fed_dpsd.errors import ConfigError, shown

T = TypeVar("T")


class Binder:
    """A binder of mappings to frozen dataclasses that collects every problem on the way.

    Where `defaults` are known, a default stands in for a value that has a problem, so that one
    problem hides no other. Whoever binds must call `finish` before an instance is used.

    Args:
        defaults: values without problems of what will be bound, by the paths of their keys; called
            when the first problem is found.
        sources: the key that another key takes its value from; problems name the former.

    Attributes:
        packages: packages of plug-ins, whose classes may be named too.
    """

    def __init__(
        self,
        defaults: Callable[[], Mapping[str, Any]] | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.problems: list[str] = []
        self._defaults, self._sources = defaults, sources or {}
        self.packages: tuple[str, ...] = ()
        self._wrong: set[str] = set()  # paths whose values have a problem

    def bind(self, cls: type[T], values: Mapping[str, Any], where: str = "") -> T | None:
        """Return an instance of dataclass `cls` from `values`, or None after recording problems.

        Keys must be `cls`'s fields, types must fit the annotations (an int is a float; nothing else
        is converted, and a Literal lists all values), and `cls` itself may raise ValueError for a
        value out of range, in a sentence that names the field.
        """
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in sorted(set(values) - set(fields)):
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            group = f" of {where[:-1]}" if where else ""
            self._record(
                where + key, f"{where}{key}={shown(values[key])} is not a key{group}{hint}"
            )
        arguments = {}
        for name, field in fields.items():
            if name in values:
                arguments[name] = self._convert(values[name], hints[name], where + name)
            elif field.default is field.default_factory is dataclasses.MISSING:
                self._record(where + name, f"{where}{name} is missing")
        replaced = {name for name in fields if where + name in self._wrong}
        if not all(self._stand_in(name, arguments, hints, where) for name in replaced):
            return None
        while True:
            try:
                return cls(**arguments)
            except ValueError as error:
                text = str(error)
            if not _named(text, replaced):
                self.problems.append(f"{where}{text}")
            for name in _named(text, set(fields) - replaced):
                before = arguments.get(name)
                if self._stand_in(name, arguments, hints, where) and arguments[name] != before:
                    self._wrong.add(where + name)
                    replaced.add(name)
                    break
            else:
                return None

    def concerns(self, problem: str) -> bool:
        """Return whether a sentence names a value that has been replaced by its default."""
        return any(re.search(rf"(?<![\w.]){re.escape(path)}\b", problem) for path in self._wrong)

    def _record(self, path: str, problem: str) -> None:
        self._wrong.add(path)
        self.problems.append(problem)

    def _stand_in(
        self, name: str, arguments: dict[str, Any], hints: Mapping[str, Any], where: str
    ) -> bool:
        """Put a field's default into `arguments`; return whether there is one."""
        node: Any = self._defaults() if self._defaults else {}
        for part in f"{where}{name}".split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        alone = Binder()
        arguments[name] = alone._convert(node, hints[name], name)
        return not alone.problems

    def _convert(self, value: Any, hint: Any, where: str) -> Any:
        """Return `value` as the type `hint`, or None after recording a problem."""
        if dataclasses.is_dataclass(hint):
            if isinstance(value, Mapping):
                bound = self.bind(typing.cast(type, hint), value, f"{where}.")
                if bound is None:
                    self._wrong.add(where)
                return bound
            keys = ", ".join(f"{where}.{field.name}" for field in dataclasses.fields(hint))
            self._record(where, f"{where}={shown(value)}: {where} stands for several keys: {keys}")
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
                *most, last = map(shown, arguments)
                listed = f"{', '.join(most)} or {last}" if most else last
                self._record(where, f"{where}={shown(value)} must be {listed}")
            return value
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        expected = origin or hint
        if isinstance(value, expected) and (expected is bool or not isinstance(value, bool)):
            return value
        kinds = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
        kind = kinds.get(expected, "a group of keys" if expected is Mapping else "a list")
        self._record(where, f"{where}={shown(value)} must be {kind}")
        return None

    def locate(self, package: str, path: Any, where: str) -> type | None:
        """Return the class PACKAGE.MODULE.CLASS, or None after recording a problem.

        Nothing outside our own `package` and the plug-ins' is imported, whatever a file or a
        message names.
        """
        known = (package, "fed_dpsd.papers", *self.packages)
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
                    self._record(where, f"{where}={path} cannot be imported: {error}")
                    return None
                if dataclasses.is_dataclass(cls) and not inspect.isabstract(cls):
                    return typing.cast(type, cls)
        forms = " or ".join(f"{each}.MODULE.CLASS" for each in known)
        self._record(where, f"{where}={shown(path)} is not a class {forms}")
        return None

    def finish(self) -> None:
        """Raise ConfigError with every recorded problem once, if there is one."""
        if self.problems:
            raise ConfigError(list(dict.fromkeys(map(self._as_typed, self.problems))))

    def _as_typed(self, problem: str) -> str:
        """Return a problem with the key that its value came from in the place of its own."""
        key, equals, rest = problem.partition("=")
        return f"{self._sources.get(key, key)}{equals}{rest}"


def _named(text: str, names: Collection[str]) -> list[str]:
    """Return the fields that a sentence names, in its order."""
    words = dict.fromkeys(re.findall(r"(?<![\w.])\w+(?=[=.:])", text))
    return [word for word in words if word in names]
