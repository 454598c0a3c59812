"""Reads the dependencies from requirements*.txt, and adds deploy/ to wheels, where there are any.

The Flower bundle carries this file but no .txt, so Flower finds no dependency there and installs
nothing at run time: the app runs in the environment it was started from.
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class RequirementsHook(MetadataHookInterface):
    """Fills `dependencies`, and an extra for each requirements-EXTRA.txt."""

    def update(self, metadata: dict) -> None:
        """Add what the requirements files list to the project's metadata."""
        root = Path(self.root)
        metadata["dependencies"] = _read(root / "requirements.txt")
        metadata["optional-dependencies"] = {
            path.stem.removeprefix("requirements-"): _read(path)
            for path in root.glob("requirements-*.txt")
        }


class DeployHook(BuildHookInterface):
    """Puts deploy/ beside the app: bundles may not carry such files, and hospitals need them."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Include the folder where it is."""
        folder = Path(self.root) / "deploy"
        if folder.is_dir():
            build_data["force_include"][str(folder)] = "fed_dpsd/_app/deploy"


def _read(path: Path) -> list[str]:
    """What a requirements file lists; nothing where it is missing."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
