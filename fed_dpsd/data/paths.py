"""Paths in a configuration, made absolute and checked before anything is read."""

from pathlib import Path

from fed_dpsd.data.sources import LAYOUT, is_data_path
from fed_dpsd.errors import UserError
from fed_dpsd.storage import expanded


def absolute_path(key: str, value: str, base: Path | None, problems: list[str]) -> str:
    """Return an absolute path.

    Add a problem if its home folder is not known, or if it is relative and there is no `base`.
    """
    try:
        path = expanded(value)
    except UserError as error:
        problems.append(f"{key}={error}")
        return value
    if not path.is_absolute() and base is None:
        problems.append(
            f"{key}={value} must be an absolute path, since `flwr run` has another working "
            "directory"
        )
    return str(path if base is None else base / path)


def data_path(value: str, base: Path | None, problems: list[str]) -> str:
    """Return `data.path` as an absolute path; add a problem if it cannot hold a data set."""
    known = len(problems)
    path = absolute_path("data.path", value, base, problems)
    if len(problems) == known and not is_data_path(Path(path)):
        there = Path(path).exists()
        problem = "is neither a folder nor a table" if there else "does not exist"
        problems.append(f"data.path={path} {problem}; give {LAYOUT}")
    return path
