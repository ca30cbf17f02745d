"""The notebook runs in a kernel's own loop, from top to bottom."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of the kernel's client
async def test_every_cell_runs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    await NotebookClient(notebook, timeout=55, kernel_name="python3").async_execute()
    shown = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    assert "['ps', 'helper']" in shown
    assert "division by zero on ps\n" in shown
    assert "[3, 7]" in shown
    assert "[5, 4, 3, 2, 1]" in shown
    first, last = next(text for text in shown if text.startswith("loss ")).removeprefix("loss ").split(" -> ")
    assert float(last) < float(first) / 4


def test_it_is_kept_without_outputs():
    """They would be stale, and differ from run to run."""
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []
