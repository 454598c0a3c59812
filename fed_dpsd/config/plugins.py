"""Plug-ins: importable packages with their own methods, mechanisms, data sets or networks.

A package is searched for files and imported only if a configuration names it.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from fed_dpsd.context import setting
from fed_dpsd.errors import ConfigError
from fed_dpsd.storage import conf_folder

_searched: ContextVar[tuple[Path, ...]] = ContextVar("folders of plug-ins", default=())
_own: ContextVar[tuple[Path, ...]] = ContextVar("folders of a user's experiments", default=())


def require_importable(packages: Sequence[str]) -> None:
    """Check that packages can be found, without importing any.

    Raises:
        ConfigError: some cannot be found, or are FedDPSD; the message names each of them.
    """
    ours = __name__.partition(".")[0]  # a message could name any of its classes
    problems = [f"plugins={ours}: FedDPSD is no plug-in; leave it out"] if ours in packages else []
    problems += [
        f"plugins={package}: there is no such package here; pip install it, or give the name that "
        "`import` takes"
        for package in packages
        if not _places(package)
    ]
    if problems:
        raise ConfigError(problems)


def load(package: str) -> ModuleType:
    """Import a plug-in.

    Raises:
        ConfigError: it cannot be imported; the message gives the reason.
    """
    require_importable([package])
    try:
        return importlib.import_module(package)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"plugins={package} cannot be imported: {reason}"]) from error


def _places(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; [] if there is none."""
    if not re.fullmatch(r"[A-Za-z]\w*", package):  # a.b would import a
        return []
    if (spec := importlib.util.find_spec(package)) is None:
        return []
    places = spec.submodule_search_locations or filter(None, [spec.origin])
    paths = (Path(place).absolute() for place in places)
    return [path for path in paths if path.exists()]


@functools.cache  # a process keeps the code that it imported
def code_digest(package: str) -> str:
    """Return 16 hexadecimal digits that depend on a plug-in's code, as first asked for."""
    digest = hashlib.sha256()
    for place in _places(package):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(place)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def split_plugins(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into the names of plug-ins and the remaining overrides.

    >>> split_plugins(["rounds=2", "plugins=[retina,lungs]"])
    (['retina', 'lungs'], ['rounds=2'])
    """
    settings = [override.partition("=") for override in overrides]
    texts = [value.strip("[] ").split(",") for key, _, value in settings if key == "plugins"]
    names = [name for text in (texts or [[]])[-1] if (name := text.strip(" '\""))]
    return names, [each for each in overrides if each.partition("=")[0] != "plugins"]


@contextlib.contextmanager
def search_plugins(packages: Sequence[str]) -> Iterator[None]:
    """Inside the block, also find the conf/ files of plug-ins, which are laid out like ours.

    Raises:
        ConfigError: there is no such package, or its file has the same name as a file of FedDPSD or
            of another plug-in, so that a choice would be ambiguous.
    """
    require_importable(packages)
    folders, problems = [conf_folder()], []
    for package in packages:
        confs = (place / "conf" for place in _places(package))
        if (conf := next(filter(Path.is_dir, confs), None)) is None:
            continue
        files = [path.relative_to(conf) for path in sorted(conf.glob("*/*.yaml"))]
        problems += [
            f"plugins={package}: its conf/{file} has the same name as another file; rename it"
            for file in files
            if any((folder / file).exists() for folder in folders)
        ]
        folders.append(conf)
    if problems:
        raise ConfigError(problems)
    with setting(_searched, tuple(folders[1:])):
        yield


@contextlib.contextmanager
def with_experiment(text: str, name: str) -> Iterator[None]:
    """Inside the block, make `text` the file of an experiment with this name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment" / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text)
        with setting(_own, (Path(folder),)):
            yield


def conf_folders() -> tuple[Path, ...]:
    """Return our folder of YAML files, the user's, and the folders of the searched plug-ins."""
    return conf_folder(), *_own.get(), *_searched.get()


def groups() -> list[str]:
    """Return the groups of conf/."""
    return sorted(folder.name for folder in conf_folder().iterdir() if folder.is_dir())


def files_of(group: str) -> dict[str, Path]:
    """Return the files of a group of conf/ by name, in order, including plug-ins' files."""
    paths = (path for folder in conf_folders() for path in (folder / group).glob("*.yaml"))
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}
