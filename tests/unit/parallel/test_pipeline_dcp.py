"""A pipeline's optimizer through torch.distributed.checkpoint, in one process: what is loaded, and what is refused.

Tests of `parallel/pipeline/dcp.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from axon_ps.errors import InvalidRequest, LayoutMismatch
from axon_ps.parallel.pipeline import OptimizerState, Pipeline, PipelineStage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tied() -> Pipeline:
    """Two linear layers with one weight, as stages made by hand."""
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    stages = [PipelineStage(first), PipelineStage(last)]
    return Pipeline(stages, num_microbatches=1, loss_fn=torch.sum, tied=[((0, "weight"), (1, "weight"))])


def stepped(pipeline: Pipeline, lr: float = 0.1) -> torch.optim.Optimizer:
    """An Adam that has its state."""
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=lr)
    pipeline.step(torch.ones(2, 3))
    optimizer.step()
    return optimizer


def test_copies_of_a_shared_parameter_have_one_key() -> None:
    pipeline = tied()
    keys = list(pipeline.parameter_names().values())
    assert keys == ["stages.0.weight", "stages.0.weight", "stages.1.bias"]
    assert list(OptimizerState(pipeline, stepped(pipeline)).state_dict()["state"]) == list(dict.fromkeys(keys))


def test_state_and_options_come_back(tmp_path: Path) -> None:
    saved, other = tied(), tied()
    optimizer, loaded = stepped(saved), stepped(other, lr=5.0)
    dcp.save({"optimizer": OptimizerState(saved, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other.step(torch.full((2, 3), 7.0))
    loaded.step()
    dcp.load({"optimizer": OptimizerState(other, loaded)}, checkpoint_id=tmp_path, no_dist=True)
    assert loaded.param_groups[0]["lr"] == 0.1
    for ours, theirs in zip(other.parameters(), saved.parameters(), strict=True):
        assert {k: v.tolist() for k, v in loaded.state[ours].items()} == {
            k: v.tolist() for k, v in optimizer.state[theirs].items()
        }


def test_an_optimizer_without_its_state_is_refused(tmp_path: Path) -> None:
    saved, other = tied(), tied()
    dcp.save({"optimizer": OptimizerState(saved, stepped(saved))}, checkpoint_id=tmp_path, no_dist=True)
    fresh = torch.optim.Adam(other.parameters())
    with pytest.raises(LayoutMismatch, match=r"zero gradients before you load"):
        dcp.load({"optimizer": OptimizerState(other, fresh)}, checkpoint_id=tmp_path, no_dist=True)
    assert not fresh.state
    with pytest.raises(InvalidRequest, match="make it of pipeline.parameters"):
        OptimizerState(other, torch.optim.SGD(nn.Linear(2, 2).parameters()))
