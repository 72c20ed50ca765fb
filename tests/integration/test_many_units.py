"""A model of as many tiny units as a job may have is registered while another one trains; nobody is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import axon_ps
from axon_ps.coordinator.core.models import MAX_SERVER_SLICES
from axon_ps.parallel import FSDP, AdamW
from axon_ps.testing import LocalCluster
from deadlines import WHOLE_S


class Scale(torch.nn.Module):
    """One parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))


def train_beside(units: int) -> dict[str, Any]:
    """Train a small model while a thread registers one of many units; what became of both."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=WHOLE_S) as world:
        model = FSDP(torch.nn.Linear(8, 8), world.default_group, name="small")
        optimizer = AdamW(model.parameters(), lr=1e-3)
        refused: list[str] = []

        def register() -> None:
            try:
                tiny = FSDP(
                    torch.nn.Sequential(*(Scale() for _ in range(units))),
                    world.default_group,
                    name="tiny",
                    unit_types={Scale},
                )
                AdamW(tiny.parameters(), lr=1e-3)
            except axon_ps.errors.AxonError as error:
                refused.append(str(error))

        def step() -> bool:
            model(torch.ones(2, 8)).sum().backward()
            result = optimizer.step()
            optimizer.zero_grad()
            return result.committed

        before = [step() for _ in range(3)]
        generation = world.membership.generation
        thread = threading.Thread(target=register)
        thread.start()
        during = []
        while thread.is_alive():
            during.append(step())
        thread.join()
        after = [step() for _ in range(20)]
        return {
            "before": before,
            "during": during,
            "after": after,
            "generations": world.membership.generation - generation,
            "refused": refused,
        }


@pytest.mark.parametrize("more", [0, 1], ids=["the most", "one more"])
def test_a_model_of_very_many_units_beside_one_that_trains(more: int) -> None:
    units = MAX_SERVER_SLICES - 1 + more  # one is the small model's
    with LocalCluster(shards=1, world_size=1, lease_s=5.0) as cluster:
        found: Any = cluster.run_workers(train_beside, args=(units,), timeout_s=WHOLE_S)[0].value
        slices = sum(model.slices for model in cluster.status().models)
    assert found["during"]
    assert all([*found["before"], *found["during"], *found["after"]])
    assert found["generations"] == 0, "somebody was lost"
    assert bool(found["refused"]) == bool(more), found["refused"]
    assert slices == (1 if more else units + 1)
    if more:
        assert "is refused, nothing has changed" in found["refused"][0]
