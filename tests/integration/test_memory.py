"""Memory promises as formulas against counters, and the counters against what the kernel says of real processes."""

from __future__ import annotations

import mmap
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.testing import LocalCluster
from deadlines import HANG_S

WIDTH, BLOCKS, BATCH, STEPS = 512, 4, 4, 3
BLOCK_NUMEL = 2 * WIDTH * WIDTH + 2 * WIDTH  # two matrices with biases: one unit
ROOT_NUMEL = 2 * WIDTH  # the norm
CHUNK_BYTES = 1 << 20
MIB = 1 << 20


class Block(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks and a norm, which is the root."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x))


def train(strategy: str, precision: dict[str, torch.dtype], blocks: int = BLOCKS) -> dict[str, Any]:
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = parallel.FSDP(
            Model(blocks),
            world.default_group,
            sharding_strategy=parallel.ShardingStrategy[strategy],
            mixed_precision=parallel.MixedPrecision(**precision),
            unit_types={Block},
        )
        optimizer = parallel.AdamW(model, lr=1e-3)
        for step in range(STEPS):
            torch.manual_seed(step)
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            assert optimizer.step().committed
            optimizer.zero_grad()
        worker = model.statistics()
        model.state_dict()  # comes when every unit has been updated; while one is, its frames are being exchanged
        world.barrier("trained")
        servers = [world.server_statistics(m.rank) for m in world.membership.shards]
        world.barrier("measured")
        return {"worker": worker, "servers": servers}


@pytest.mark.parametrize(
    ("precision", "compute", "wire"),
    [
        ({}, 4, 4),
        ({"param_dtype": torch.bfloat16}, 2, 2),
        ({"wire_dtype": torch.bfloat16}, 4, 2),
    ],
    ids=["f32", "bf16", "bf16 wire"],
)
@pytest.mark.parametrize("replication", [1, 2])
def test_full_shard_memory_and_traffic(
    precision: dict[str, torch.dtype], compute: int, wire: int, replication: int
) -> None:
    with LocalCluster(shards=2, world_size=2, replication=replication) as cluster:
        results = cluster.run_workers(train, args=("FULL_SHARD", precision))
    for result in results:
        worker, servers = result.value["worker"], result.value["servers"]
        # worker: parameters in memory = the root + the unit in use + one unit's worth prefetched; with a narrower wire,
        # what is prefetched waits in wire buffers, which count too
        root, unit = compute * ROOT_NUMEL + (wire * ROOT_NUMEL if wire != compute else 0), compute * BLOCK_NUMEL
        assert unit < worker["peak_param_memory_bytes"] <= root + 2 * unit
        # worker: gradients on their way = at most two units as they travel
        assert 0 < worker["peak_grad_buffer_bytes"] <= 2 * wire * BLOCK_NUMEL
        # servers: master 4 + two moments 8 + accumulator 4 = 16 bytes per parameter on each that holds it, plus one
        # wire copy, the primary's
        owned = BLOCKS * BLOCK_NUMEL + ROOT_NUMEL
        total = {k: sum(s[k] for s in servers) for k in servers[0]}
        kept = total["master_bytes"] + total["state_bytes"] + total["accumulator_bytes"]
        assert kept == replication * 16 * owned
        # what a backup costs in traffic: the sum, f32, once a step, from the primary; with Adam's state it would be 3 x
        # (as bf16 where gradients are; what processes of a host lease each other is f32, if it is not small)
        sums = 4 * BLOCKS * BLOCK_NUMEL + wire * ROOT_NUMEL
        assert total["bytes_forwarded"] == total["bytes_followed"] == STEPS * (replication - 1) * sums
        # (in shared memory, so each slice has a page for its tag, and ends with a page; as f32 it is the master itself;
        # the root is so small that it may be in frames)
        copies = total["frame_bytes"] + total["shared_bytes"]
        copied = 0 if wire == 4 else wire * owned
        assert copied < copies <= copied + (2 * BLOCKS + 1) * 2 * mmap.PAGESIZE


@pytest.mark.parametrize("environment", [{}, {"AXON_PS_DIRECT_MEMORY": "0"}], ids=["mapped", "gathered"])
def test_shard_grad_op_keeps_all_parameters_once(environment: dict[str, str]) -> None:
    with LocalCluster(shards=1, world_size=1, environment=environment) as cluster:
        (result,) = cluster.run_workers(train, args=("SHARD_GRAD_OP", {}))
    whole = 4 * (BLOCKS * BLOCK_NUMEL + ROOT_NUMEL)
    assert result.value["worker"]["peak_param_memory_bytes"] == whole


def test_a_server_process_is_no_larger_than_its_counters() -> None:
    blocks, workers = 24, 3
    with LocalCluster(shards=1, world_size=workers) as cluster:
        server = psutil.Process(cluster.process("shard").pid)
        empty_bytes = server.memory_info().rss
        cluster.run_workers(train, args=("FULL_SHARD", {}, blocks))
        grown_bytes = server.memory_info().rss - empty_bytes
    owned = blocks * BLOCK_NUMEL + ROOT_NUMEL
    # 16 bytes a parameter + the f32 wire copy, + compiled kernels and what is in flight: per worker and direction a
    # window of chunks (lookahead 16 MiB) at most
    assert 20 * owned < grown_bytes <= 20 * owned + 96 * MIB + workers * 2 * 16 * CHUNK_BYTES
