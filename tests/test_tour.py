"""The notebook runs from its first cell to its last, and its pictures are in it."""

import os
import re

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

TOUR = ROOT / "evaluation" / "tour.ipynb"
LIGHTER = {  # one thread beside other tests, and no report
    "(config.run, dir=": "(config.run, report=False, threads=1, dir=",
    "images=4)": "images=4, threads=1)",
    '"precision": "fp32"}': '"precision": "fp32", "threads": 1}',
}


def pictures(notebook) -> int:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return sum("image/jpeg" in output.get("data", {}) for output in outputs)


def test_the_notebook_has_its_pictures_and_no_path_of_a_machine():
    text = TOUR.read_text()
    assert pictures(nbformat.reads(text, as_version=4)) == 4 and len(text) < 1_000_000
    words = re.sub('"image/jpeg": "[^"]*"', "", text)  # whose letters may be any
    assert not re.search("/(home|root|tmp)/", words)


@pytest.mark.faults
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MPP_TOUR_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MPP_TOUR_STEPS", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type != "code" else cell.update(outputs=[])
        for there, here in LIGHTER.items():
            cell.source = cell.source.replace(there, here)
    assert all(any(here in cell.source for cell in notebook.cells) for here in LIGHTER.values())
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert pictures(notebook) == 4
