"""The notebook of examples/ in a real kernel: functions of its cells train, a server is killed, no step is missing."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "kill_a_server.ipynb"


@pytest.mark.filterwarnings("ignore")  # of the kernel's and its client's libraries
def test_the_notebook_runs_and_no_step_is_missing_when_a_server_dies(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = [cell.source for cell in notebook.cells if cell.cell_type == "code" and not cell.execution_count]
    assert committed == [], "the notebook is committed as executed"
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "shard server 0 is dead" in text
    assert "versions 1 to 400 - none missing: True" in text
    pause = re.search(r"longest pause around the death: ([\d.]+) s", text)
    print(pause and pause[0])
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
