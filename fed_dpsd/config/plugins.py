"""Plug-ins: installed packages with their own methods, mechanisms, data sets or networks.

A distribution declares its package as an entry point of the group `fed_dpsd.plugins`. A package is
imported and searched for files only if a configuration names it.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fed_dpsd.errors import ConfigError
from fed_dpsd.storage import conf_folder

GROUP = "fed_dpsd.plugins"
_searched: ContextVar[tuple[Path, ...]] = ContextVar("folders of plug-ins", default=())
_own: ContextVar[tuple[Path, ...]] = ContextVar("folders of a user's experiments", default=())


@dataclass(frozen=True)
class Plugin:
    """An installed plug-in.

    Args:
        name: the name that its distribution declares.
        version: the version of the distribution.
        package: the package that may provide classes, in addition to our own package.
    """

    name: str
    version: str
    package: str

    def __str__(self) -> str:
        """Return NAME==VERSION, which a run records."""
        return f"{self.name}=={self.version}"

    @property
    def conf(self) -> Path | None:
        """Return the plug-in's folder of YAML files, laid out like ours; None if there is none.

        This does not import the package.
        """
        folders = [place / "conf" for place in _places(self.package)]
        return next(filter(Path.is_dir, folders), None)

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that depend on the package's code, as first asked for."""
        return _code_digest(self.package)

    def load(self) -> ModuleType:
        """Import the plug-in's package.

        Raises:
            ConfigError: the package cannot be imported; the message gives the reason.
        """
        try:
            return importlib.import_module(self.package)
        except Exception as error:
            reason = " ".join(str(error).split())
            problem = f"plugins={self.name}: {self.package} cannot be imported: {reason}"
            raise ConfigError([problem]) from error


def _places(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    places = spec.submodule_search_locations or filter(None, [spec.origin])
    return [Path(place).absolute() for place in places]


@functools.cache  # a process keeps the code that it imported
def _code_digest(package: str) -> str:
    digest = hashlib.sha256()
    for place in _places(package):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(place)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def installed_plugins() -> dict[str, Plugin]:
    """Return all installed plug-ins by name, in order, without importing any."""
    found = {
        point.name: Plugin(point.name, point.dist.version if point.dist else "0", point.value)
        for point in metadata.entry_points(group=GROUP)
    }
    return dict(sorted(found.items()))


def find_plugins(names: Sequence[str]) -> tuple[Plugin, ...]:
    """Return the installed plug-ins with the given names, each NAME or NAME==VERSION.

    Raises:
        ConfigError: some are not installed or have another version; the message names each of them.
    """
    if not names:
        return ()
    known, plugins, problems = installed_plugins(), [], []
    for text in names:
        name, _, version = text.partition("==")
        plugin = known.get(name)
        if plugin is None:
            problems.append(
                f"plugins={name} is not installed; pip install the package that declares it as an "
                f"entry point of {GROUP} (installed: {', '.join(known) or 'none'})"
            )
        elif version not in ("", plugin.version):
            problems.append(
                f"plugins={name}: version {plugin.version} is installed, but {version} is "
                f"required; pip install version {version}, or give {name} without a version"
            )
        else:
            plugins.append(plugin)
    if problems:
        raise ConfigError(problems)
    return tuple(plugins)


def split_plugins(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into the names of plug-ins and the remaining overrides.

    >>> split_plugins(["rounds=2", "plugins=[retina,lungs==1.0]"])
    (['retina', 'lungs==1.0'], ['rounds=2'])
    """
    settings = [override.partition("=") for override in overrides]
    texts = [value.strip("[] ").split(",") for key, _, value in settings if key == "plugins"]
    names = [name for text in (texts or [[]])[-1] if (name := text.strip(" '\""))]
    return names, [each for each in overrides if each.partition("=")[0] != "plugins"]


@contextlib.contextmanager
def search_plugins(plugins: Sequence[Plugin]) -> Iterator[None]:
    """Inside the block, also find the conf/ files of plug-ins.

    Raises:
        ConfigError: a plug-in's file has the same name as a file of FedDPSD or of another plug-in,
            so that a choice would be ambiguous.
    """
    folders, problems = [conf_folder()], []
    for plugin in plugins:
        if (conf := plugin.conf) is None:
            continue
        files = [path.relative_to(conf) for path in sorted(conf.glob("*/*.yaml"))]
        problems += [
            f"plugins={plugin.name}: its conf/{file} has the same name as another file; rename it"
            for file in files
            if any((folder / file).exists() for folder in folders)
        ]
        folders.append(conf)
    if problems:
        raise ConfigError(problems)
    token = _searched.set(tuple(folders[1:]))
    try:
        yield
    finally:
        _searched.reset(token)


@contextlib.contextmanager
def with_experiment(text: str, name: str) -> Iterator[None]:
    """Inside the block, make `text` the file of an experiment with this name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment" / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text)
        token = _own.set((Path(folder),))
        try:
            yield
        finally:
            _own.reset(token)


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
