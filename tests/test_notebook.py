"""docs/tutorial.ipynb: it runs, its privacy statements match its outputs, and it is small.

`python -m tests.test_notebook` rewrites its outputs.
"""

import json
import os
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
SAME = "the same anywhere"  # the tag of cells whose output does not depend on the machine


def executed(folder):
    """The notebook after a run in its own folder; an error in a cell is raised."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=resources, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def text(cell):
    """What a cell has printed or returned."""
    found = [
        out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell["outputs"]
    ]
    return "".join("".join(part) for part in found)


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_it_runs_and_says_of_privacy_what_it_has_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kept, found = code_cells(json.loads(NOTEBOOK.read_text())), code_cells(executed(tmp_path))
    compared = [n for n, cell in enumerate(kept) if SAME in cell["metadata"].get("tags", ())]
    assert len(compared) == 2
    for number in compared:
        same = text(found[number]) == text(kept[number])
        assert same, "rewrite its outputs: python -m tests.test_notebook"
    assert "epsilon proven: 2.99" in text(found[compared[1]])


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FED_DPSD_HOME"] = f"{folder}/home"
        os.environ["PYTHONPATH"] = str(ROOT)
        notebook = executed(folder)
    for cell in code_cells(notebook):
        cell["execution_count"] = None
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = None
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(notebook, NOTEBOOK)
