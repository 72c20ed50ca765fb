"""What the workers of `test_finishing` do, in processes of their own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import axon_ps
from axon_ps.parallel import FSDP, AdamW, BoundedStaleness, ShardingStrategy

POLICIES: dict[str, Any] = {"sync": {}, "bounded": {"policy": BoundedStaleness(max_staleness=1)}}


def train(policy: str, steps_per_rank: int) -> tuple[int, float, bool]:
    """Rank r makes `steps_per_rank` (r + 1) steps that commit, and ends. The longest step, and whether it was alone."""
    world = axon_ps.World.init(timeout_s=120)
    torch.manual_seed(0)
    model = FSDP(
        torch.nn.Linear(8, 8), world.default_group, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, **POLICIES[policy]
    )
    optimizer = AdamW(model.parameters(), lr=1e-3)
    committed, longest_s = 0, 0.0
    while committed < steps_per_rank * (world.rank + 1):
        begun = time.monotonic()
        model(torch.ones(2, 8)).sum().backward()
        committed += optimizer.step().committed
        optimizer.zero_grad()
        longest_s = max(longest_s, time.monotonic() - begun)
    return committed, longest_s, world.world_size == 1


def messages(backend: str, numel: int) -> list[float]:
    """Everybody sends to rank 0 in the background and ends at once; rank 0 receives when all have gone."""
    world = axon_ps.World.init(timeout_s=120)
    group = world.new_group(list(range(world.world_size)), backend=backend)
    group.barrier()
    if world.rank:
        group.send(np.full(numel, world.rank, np.float32), dst=0, async_op=True)
        return []
    received, data = [], np.zeros(numel, np.float32)
    if numel < 1000:  # small ones are kept; of large ones the senders wait until they are taken
        deadline = time.monotonic() + 20.0
        while world.world_size > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert world.world_size == 1
    for source in range(1, group.world_size):
        group.recv(data, src=source, timeout_s=120)
        received.append(float(data.mean()))
    begun = time.monotonic()
    for source in (1, -1):
        try:
            group.recv(data, src=source, timeout_s=120)
        except axon_ps.errors.Broken:
            continue
        raise AssertionError("nobody is left who could have sent this")
    assert time.monotonic() - begun < 10.0
    return received


def idle(seconds: float) -> str:
    """Rank 1 joins, registers and then does nothing; the others train."""
    world = axon_ps.World.init(timeout_s=120)
    torch.manual_seed(0)
    model = FSDP(torch.nn.Linear(8, 8), world.default_group)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    if world.rank == 1:
        time.sleep(seconds)
        try:
            model(torch.ones(2, 8))
        except axon_ps.errors.Timeout as error:
            return str(error)
        raise AssertionError("it was not told")
    committed = 0
    while committed < 3:
        model(torch.ones(2, 8)).sum().backward()
        committed += optimizer.step().committed
        optimizer.zero_grad()
    return ",".join(str(m.rank) for m in world.membership.workers)
