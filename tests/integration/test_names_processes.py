"""What is named after torch's and the Rust crates' things, in real processes: through shared memory and through gRPC.

On threads each has a test of its own; here is that nothing of it needs threads. One job does it all, for its processes
cost more than what they do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest
from axon_ps.parallel import DDP, FSDP, SGD, Mesh, SyncBatchNorm
from axon_ps.testing import LocalCluster, preloaded
from deadlines import HANG_S

RANKS = 3
ROWS = (0, 3, 3, 8)
"""Where each rank's part of the batch begins; the second's is empty."""


def messages(group: ProcessGroup) -> None:
    """Objects, exchanges and uneven counts; who cannot send tells the others."""
    me, right, left = group.rank, (group.rank + 1) % RANKS, (group.rank - 1) % RANKS
    values = [{"rank": r, 7: ("x" * 100_000 * r, b"\0", np.arange(r))} for r in range(RANKS)]
    for found, value in zip(axon_ps.all_gather_object(values[me], group), values, strict=True):
        assert found["rank"] == value["rank"]
        assert found[7][:2] == value[7][:2]
        assert found[7][2].tolist() == value[7][2].tolist()
    assert axon_ps.broadcast_object_list([me, str(me)], 2, group) == [2, "2"]
    assert axon_ps.scatter_object_list(["a", "b", "c"], 1, group) == "abc"[me]
    assert axon_ps.gather_object(me, 2, group) == ([0, 1, 2] if me == 2 else None)
    with pytest.raises(InvalidRequest if me == 1 else Disagreement, match="given a set, which cannot be sent"):
        axon_ps.all_gather_object({me} if me == 1 else me, group)
    into = [None]
    if me == 0:
        axon_ps.send_object_list([me], right, group)
    assert axon_ps.recv_object_list(into, left, group) == left == into[0]
    if me:
        axon_ps.send_object_list([me], right, group)
    large = np.full(1 << 20, float(me))  # too large for anybody's buffers: a send waits for its receiver
    assert axon_ps.sendrecv(large, right, left, group)[-1] == left
    rows = np.arange(3 * me, dtype=np.float32) + 100 * me  # me rows for each
    parts = axon_ps.all_to_all(rows, input_counts=[me] * RANKS, output_counts=list(range(RANKS)), group=group)
    assert parts.tolist() == [float(100 * r + r * me + i) for r in range(RANKS) for i in range(r)]


def moved(group: ProcessGroup) -> None:
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    mesh = Mesh(group, shard=RANKS)
    chunks = {dim: whole.chunk(RANKS, dim) for dim in (0, 1)}
    rows, columns = chunks[0][group.rank], chunks[1][group.rank]
    torch.testing.assert_close(mesh.redistribute(rows, [Shard(0)], [Shard(1)], shape=whole.shape), columns)
    torch.testing.assert_close(mesh.redistribute(columns, [Shard(1)], [Replicate()], shape=whole.shape), whole)
    torch.testing.assert_close(mesh.redistribute(whole / RANKS, [Partial()], [Shard(0)]), rows)


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def batch() -> torch.Tensor:
    return torch.randn(ROWS[-1], 1, 6, 6, generator=torch.Generator().manual_seed(2))


def plain() -> list[dict[str, torch.Tensor]]:
    """One process with the whole batch: its state after each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = []
    for _ in range(4):
        (model(batch()).square().sum() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def step(model: Any, optimizer: Any, rank: int) -> dict[str, Any]:
    model(batch()[ROWS[rank] : ROWS[rank + 1]]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name.removeprefix("module."): value.clone().numpy() for name, value in model.state_dict().items()}


def everything(uri: str) -> Any:
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        group = world.default_group
        for backend in ("shm", "grpc"):
            some = world.new_group(range(RANKS), backend=backend)
            assert some.backend == backend
            messages(some)
            moved(some)
        model: Any = DDP(SyncBatchNorm.convert_sync_batchnorm(network(), some), group)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        under_ddp = [step(model, optimizer, world.rank) for _ in range(4)]

        model = FSDP(SyncBatchNorm.convert_sync_batchnorm(network()), group, unit_types={nn.Conv2d, SyncBatchNorm})
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        under_fsdp = [step(model, optimizer, world.rank)]
        saving = world.save_checkpoint(uri, async_op=True) if world.is_main_process else None
        under_fsdp += [step(model, optimizer, world.rank) for _ in range(3)]
        saved = world.gather_json(saving.wait(20.0).version if saving is not None else None)[0]
        model.load_checkpoint(uri)
        loaded = {name: value.numpy() for name, value in model.state_dict().items()}
        return under_ddp, under_fsdp, saved, loaded


def test_every_name_works_between_processes(tmp_path: Any) -> None:
    with preloaded(["torch", "axon_ps.parallel"]), LocalCluster(shards=1, world_size=RANKS) as cluster:
        results = [r.value for r in cluster.run_workers(everything, args=(str(tmp_path / "saved"),))]
    expected = plain()
    for under_ddp, under_fsdp, saved, loaded in results:
        for states in (under_ddp, under_fsdp):
            for found, wanted in zip(states, expected, strict=True):
                assert set(found) == set(wanted)
                for name, value in wanted.items():
                    np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
        assert 1 <= saved <= 4  # of one version, though training went on
        trained = under_fsdp[saved - 1]
        assert all(np.array_equal(loaded[name], trained[name]) for name in loaded if "weight" in name or "bias" in name)
