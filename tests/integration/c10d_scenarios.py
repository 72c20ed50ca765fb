"""PyTorch's own ways to train, on whatever backend torch.distributed has; `test_c10d_parity` runs them over two.

Each scenario trains a small model for `STEPS` steps and returns all of its parameters. What a step costs here is the
dispatch of each operation on a `DTensor`, so the optimizer is one that has few, for all parameters at once; and it is
SGD, which also shows a gradient that is some factor too large.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 4  # the first builds buckets, the second uses them again, and momentum carries them on
WIDTH, BLOCKS, BATCH = 16, 3, 8

Parameters = list[Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def build(blocks: int = BLOCKS) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": params} for params in (split, plain) if params]  # one operation takes no mix of them
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9, foreach=True)


def train(model: nn.Module, data_rank: int, *, clip: bool = True, steps: int = STEPS) -> Parameters:
    optimizer = optimizer_of(model)
    for step in range(steps):
        x, y = batch(step, data_rank)
        functional.mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


def whole(parameters: Any) -> Parameters:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


# ---------------------------------------------------------------------- data parallel


def ddp(_: Path) -> Parameters:
    return train(DistributedDataParallel(build(), bucket_cap_mb=0.005), dist.get_rank())  # type: ignore[arg-type]


def ddp_with_a_hook(_: Path) -> Parameters:
    model = DistributedDataParallel(build(), static_graph=True, gradient_as_bucket_view=True)
    model.register_comm_hook(None, allreduce_hook)
    return train(model, dist.get_rank())


def sharded(mesh: Any, **policy: Any) -> nn.Module:
    model = build()
    for block in model:
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def fsdp2(_: Path) -> Parameters:
    return train(sharded(init_device_mesh("cpu", (dist.get_world_size(),))), dist.get_rank())


def fsdp2_mixed(_: Path) -> Parameters:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = optimizer_of(model)
    x, y = batch(0, dist.get_rank())
    functional.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
    optimizer.step()
    return whole(model.parameters())


def hsdp(_: Path) -> Parameters:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return train(sharded(mesh), dist.get_rank())


# ---------------------------------------------------------------------- tensor parallel


def tensor_parallel(_: Path) -> Parameters:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build()
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, 0, clip=False)  # clipping takes no mix of DTensors and tensors


def sequence_parallel(_: Path) -> Parameters:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    rows = RowwiseParallel(output_layouts=Shard(0))
    columns_of_rows = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    plan = {"0": ColwiseParallel(), "2": rows, "3": SequenceParallel(sequence_dim=0), "4": columns_of_rows}
    parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
    return train(model, 0, clip=False)  # clipping takes no mix of DTensors and tensors


# ---------------------------------------------------------------------- pipelines


def pipeline(schedule: Any, stages_per_rank: int) -> Parameters:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = world_size * stages_per_rank
    blocks = build(count)
    mine = [blocks[rank + i * world_size] for i in range(stages_per_rank)]
    stages = [PipelineStage(block, rank + i * world_size, count, torch.device("cpu")) for i, block in enumerate(mine)]
    run = schedule(
        stages[0] if stages_per_rank == 1 else stages, n_microbatches=BATCH // 2, loss_fn=functional.mse_loss
    )
    model = nn.ModuleList(mine)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = batch(step, 0)
        inputs = (x,) if rank == 0 else ()
        run.step(*inputs, **({"target": y} if rank == world_size - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


def pipeline_gpipe(_: Path) -> Parameters:
    return pipeline(ScheduleGPipe, 1)


def pipeline_1f1b(_: Path) -> Parameters:
    return pipeline(Schedule1F1B, 1)


def pipeline_interleaved(_: Path) -> Parameters:
    return pipeline(ScheduleInterleaved1F1B, 2)


# ---------------------------------------------------------------------- checkpoints


def checkpoint(directory: Path) -> Parameters:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = sharded(mesh)
    train(saved, dist.get_rank(), clip=False, steps=1)
    dcp.save(get_model_state_dict(saved), checkpoint_id=directory)
    loaded = sharded(mesh)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(loaded, state)
    restored, expected = whole(loaded.parameters()), whole(saved.parameters())
    assert all(torch.equal(a, b) for a, b in zip(restored, expected, strict=True))
    return restored


SCENARIOS: tuple[Callable[[Path], Parameters], ...] = (
    ddp,
    ddp_with_a_hook,
    fsdp2,
    fsdp2_mixed,
    hsdp,
    tensor_parallel,
    sequence_parallel,
    pipeline_gpipe,
    pipeline_1f1b,
    pipeline_interleaved,
    checkpoint,
)


def run_all(backend: str, directory: Path, names: Sequence[str]) -> dict[str, Parameters]:
    """The parameters after each scenario over `backend`."""
    dist.init_process_group(backend, init_method="axon://")
    try:
        return {f.__name__: f(directory / backend) for f in SCENARIOS if not names or f.__name__ in names}
    finally:
        dist.destroy_process_group()


def compare(directory: str, names: Sequence[str] = (), nodes: int = 1) -> dict[str, float]:
    """Run scenarios over axon, as if on `nodes` hosts, and over gloo; by scenario, the largest difference."""
    import axon_ps.parallel

    os.environ["AXON_PS_NODE"] = f"node{int(os.environ['RANK']) * nodes // int(os.environ['WORLD_SIZE'])}"
    with axon_ps.World.init():
        ours = run_all("axon", Path(directory), names)
        theirs = run_all("gloo", Path(directory), names)
    return {
        name: max(float((a.float() - b.float()).abs().max()) for a, b in zip(ours[name], theirs[name], strict=True))
        for name in ours
    }
