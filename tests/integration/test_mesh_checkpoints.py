"""A checkpoint of a mesh goes on at another one, in real processes, with parameters and moments as plain torch has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from axon_ps.storage.export import export_model
from deadlines import WHOLE_S
from mesh_checkpoint_program import plain

PROGRAM = Path(__file__).with_name("mesh_checkpoint_program.py")
STEPS = 5

pytestmark = pytest.mark.timeout(900)  # for three runs at most, each of which has a deadline


def train(directory: Path, mesh: str, first: int, loaded: Path | None = None) -> Path:
    """Train for some steps at "DPxPPxTP"; returns the checkpoint at the end."""
    dp, pp, tp = map(int, mesh.split("x"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AXON_PS_")}
    options = ["--nproc-per-node", str(dp * pp * tp), "--shards", "2"]
    arguments = [directory, dp, pp, tp, first, first + STEPS, *([] if loaded is None else [loaded])]
    done = subprocess.run(
        [sys.executable, "-m", "axon_ps.cli.main", "run", *options, str(PROGRAM), *map(str, arguments)],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WHOLE_S,
    )
    assert done.returncode == 0, done.stdout
    for rank in range(dp * pp * tp):
        result = json.loads((directory / f"result.{rank}").read_text())
        assert result["difference"] < 1e-5
        assert (result["names"], result["loaded"], result["version"]) == (True, first, first + STEPS)
    return directory / mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 replicas of 2 workers with tensor parallelism."""
    return train(tmp_path_factory.mktemp("saved"), "2x1x2", 0)


@pytest.mark.parametrize("mesh", ["1x1x4", "4x1x1"])
def test_training_goes_on_at_another_mesh(tmp_path: Path, saved: Path, mesh: str) -> None:
    train(tmp_path, mesh, STEPS, saved)


def test_stages_go_on_from_boxes_and_one_worker_from_stages(tmp_path: Path, saved: Path) -> None:
    stages = train(tmp_path, "2x2x1", STEPS, saved)
    train(tmp_path, "1x1x1", 2 * STEPS, stages)


def test_exports_have_whole_tensors(tmp_path: Path, saved: Path) -> None:
    export_model(str(saved), str(tmp_path / "model.safetensors"))
    found, wanted = load_file(tmp_path / "model.safetensors"), plain(STEPS).state_dict()
    assert sorted(found) == sorted(wanted)
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5
