"""HYBRID_SHARD with several nodes on one host: the same training as under FULL_SHARD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from axon_ps import World, parallel
from axon_ps.testing import run_threads
from axon_ps.types import Grouping
from parity_model import Values, batch, wrapped

STEPS = 4


def train(world: World, strategy: str, size: int | None) -> tuple[Values, list[float], Any]:
    """Values, gradient norms, and the workers that make a replica together."""
    torch.set_num_threads(1)
    model = wrapped(world, sharding_strategy=parallel.ShardingStrategy[strategy], intra_node_size=size)
    optimizer = parallel.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        model(batch(step, world.rank)).backward()
        model.clip_grad_norm_(0.5)
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.committed, result.reason
        norms.append(result.grad_norm)
    values = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    return values, norms, (world.membership.grouping, world.num_replicas, world.replica)


@pytest.mark.parametrize(("size", "replicas"), [(2, [0, 0, 1, 1]), (1, [0, 1, 2, 3])])
def test_parts_of_a_host_train_as_full_shard_does(size: int, replicas: list[int]) -> None:
    full = run_threads(train, 4, args=("FULL_SHARD", None))
    parts = run_threads(train, 4, args=("HYBRID_SHARD", size))
    assert [found[2] for found in parts] == [(Grouping(by_node=True, size=size), 4 // size, r) for r in replicas]
    for (values, norms, _), (expected, expected_norms, _) in zip(parts, full, strict=True):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, value in values.items():
            np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)
