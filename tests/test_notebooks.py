"""The notebooks of docs/notebooks/ run as they are, show one progress bar and HTML, and nothing in red."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Where .ci/run has built the site (see test_site.py).
BUILT = "JAXTRAIN_BUILT_SITE"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The name of a kernel that is this interpreter, with this checkout."""
    folder = tmp_path / "jupyter" / "kernels" / "this"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")]))
    return "this"


def executed(path, kernel, folder):
    """The notebook with its outputs; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name=kernel, resources=resources).execute()
    return notebook


def test_notebooks_are_kept_without_outputs():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None


@pytest.mark.long
def test_first_run(kernel, tmp_path):
    if BUILT in os.environ:  # the site's builder has run it, in a kernel of this environment
        kept = Path(os.environ[BUILT]).parent / "jupyter_execute" / "notebooks" / "first_run.ipynb"
        notebook = nbformat.read(kept, as_version=4)
        cells = nbformat.read(FOLDER / "first_run.ipynb", as_version=4).cells
        assert [cell.source for cell in notebook.cells] == [cell.source for cell in cells], "the site is of other files"
    else:
        notebook = executed(FOLDER / "first_run.ipynb", kernel, tmp_path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    displays = [output.data["text/html"] for output in outputs if output.output_type == "display_data"]
    (progress,) = displays
    assert '<progress value="200" max="200"' in progress
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    (card,) = [data["text/html"] for data in results if "text/html" in data]
    assert "Result of runs/first" in card
    assert "data:image/svg+xml;base64," in card
    assert len([data for data in results if "image/png" in data]) == 1
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    # A run of 200 steps on the digits is right on more than nine of ten held-out rows.
    assert float(said.rpartition("rows, ")[2].split("%")[0]) > 90
    assert "'output/kernel': (256, 10)" in results[-1]["text/plain"], "what it exports"
