"""Reads the dependencies from requirements*.txt when the package is installed.

The Flower bundle carries this file but no .txt, so Flower finds no dependency there and installs
nothing at run time: the app runs in the environment it was started from.
"""

from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RequirementsHook(MetadataHookInterface):
    """Fills `dependencies` and the `test` extra; a missing file yields none."""

    def update(self, metadata: dict) -> None:
        """Add what the requirements files list to the project's metadata."""
        metadata["dependencies"] = self._read("requirements.txt")
        test = self._read("requirements-test.txt")
        metadata["optional-dependencies"] = {"test": test} if test else {}

    def _read(self, name: str) -> list[str]:
        path = Path(self.root) / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
