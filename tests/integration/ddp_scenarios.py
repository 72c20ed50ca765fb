"""Trainings with DDP, ours and torch's, on the same model and data; `test_ddp_parity` compares what they come to.

Each scenario is a function of `Side`, which wraps a module and says who we are; it returns tensors that must agree.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.compress.registry import compressor
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.parallel import DDP, GradientSynchronizer, GradSyncStrategy, comm_hook
from axon_ps.reduction import ops as reduction
from axon_ps.types import DType, ReduceOp
from deadlines import HANG_S

STEPS, BATCH, WIDTH = 4, 4, 8
SMALL_MB = 0.001  # some buckets even for a small model


@dataclass
class Side:
    """One of the two, and the ranks it trains on."""

    ours: ProcessGroup | None
    theirs: Any
    rank: int
    size: int
    trained: list[Tensor] = field(default_factory=list)  # what `plain` has come to; torch's side of many scenarios

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Our wrapper or torch's, with its name of the bucket size."""
        if self.ours is not None:
            return DDP(module, self.ours, bucket_size_mb=SMALL_MB, **options)
        options.pop("grad_sync_strategy", None)
        return TorchDDP(module, process_group=self.theirs, bucket_cap_mb=SMALL_MB, **options)  # type: ignore[arg-type]


class Net(nn.Module):
    """Batch norm's buffers, a tied matrix, a branch, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.last.weight = self.first.weight  # [2 WIDTH, WIDTH]
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, branch: bool = True, never: bool = True) -> Tensor:
        x = self.second(torch.tanh(self.norm(self.first(x)))) + self.frozen
        if branch:
            x = x + self.branch(x)
        if never:
            x = x + self.never(x)
        return self.last(x)


def build(rank: int = 0) -> Net:
    torch.manual_seed(17 + rank)  # the wrapper makes them the same
    return Net()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def state(side: Side, model: Any) -> list[Tensor]:
    """Parameters, and rank 0's buffers; the parameters must have the same bits on every rank.

    The buffers of other ranks are their own after a forward, and when they become rank 0's again is ours to choose.
    """
    assert all(name.startswith("module.") for name in model.state_dict())
    if side.ours is not None:
        for name, param in model.named_parameters():
            everybody = side.ours.all_gather(param.detach().reshape(1, -1))
            assert all(torch.equal(everybody[0], row) for row in everybody), f"{name} differs between ranks"
    named = dict(model.named_parameters())
    return [v.detach().clone() for name, v in model.state_dict().items() if name in named or side.rank == 0]


def train(side: Side, model: Any, *, steps: int = STEPS, set_to_none: bool = True) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        functional.mse_loss(model(batch(step, side.rank)), torch.zeros(BATCH, 2 * WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return state(side, model)


def plain(side: Side) -> list[Tensor]:
    side.trained = side.trained or train(side, side.wrap(build(side.rank)))
    return side.trained


def synchronous(side: Side) -> list[Tensor]:
    if side.ours is None:
        return plain(side)
    return train(side, side.wrap(build(side.rank), grad_sync_strategy=GradSyncStrategy.SYNCHRONOUS))


def views(side: Side) -> list[Tensor]:
    model = side.wrap(build(side.rank), gradient_as_bucket_view=True)
    trained = train(side, model, set_to_none=False)
    if side.ours is not None:
        memory = {view.data_ptr() for bucket in model.buckets for view in bucket.views}
        assert {p.grad.data_ptr() for p in model.parameters() if p.requires_grad} <= memory
        assert model.statistics()["buckets"] > 1
        for flat in (bucket.flat for bucket in model.buckets if side.ours.backend == "shm"):
            assert shared_arrays.find(flat.data_ptr(), flat.nbytes) is not None
    return trained


def by_hand(side: Side) -> list[Tensor]:
    """NO_SYNC and `sync_gradients()`, against torch's own way."""
    if side.ours is None:
        return plain(side)
    model = side.wrap(build(side.rank), grad_sync_strategy=GradSyncStrategy.NO_SYNC)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        functional.mse_loss(model(batch(step, side.rank)), torch.zeros(BATCH, 2 * WIDTH)).backward()
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return state(side, model)


def with_a_synchronizer(side: Side) -> list[Tensor]:
    """`GradientSynchronizer`, given the gradients one by one."""
    if side.ours is None:
        return plain(side)
    model = side.wrap(build(side.rank), grad_sync_strategy=GradSyncStrategy.NO_SYNC)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    params = [param for param in model.parameters() if param.requires_grad]
    synchronizer = GradientSynchronizer(GradSyncStrategy.OVERLAPPED, 100, group=side.ours)
    synchronizer.prepare(params[::-1])
    for step in range(STEPS):
        functional.mse_loss(model(batch(step, side.rank)), torch.zeros(BATCH, 2 * WIDTH)).backward()
        for i, param in enumerate(params[::-1]):
            synchronizer.add_gradient(i, param.grad)
        for param, average in zip(params[::-1], synchronizer.sync_all(), strict=True):
            param.grad.copy_(average)
        synchronizer.clear()
        optimizer.step()
        optimizer.zero_grad()
    return state(side, model)


def two_dtypes(side: Side) -> list[Tensor]:
    module = build(side.rank)
    module.branch = nn.Sequential(Cast(torch.bfloat16), nn.Linear(WIDTH, WIDTH).bfloat16(), Cast(torch.float32))
    return train(side, side.wrap(module))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def unused(side: Side, **options: Any) -> list[Tensor]:
    """`never` on no rank, `branch` on some ranks in some steps, and none on any in others."""
    model = side.wrap(build(side.rank), find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        used = step != 2 and (step + side.rank) % 2 == 0
        model(batch(step, side.rank), branch=used, never=False).square().mean().backward()
        grads = [model.module.never.weight.grad, model.module.branch.weight.grad]
        somebody = step != 2 and any((step + rank) % 2 == 0 for rank in range(side.size))
        assert [grad is None for grad in grads] == [True, not somebody]
        optimizer.step()
        optimizer.zero_grad()
    return state(side, model)


def unused_views(side: Side) -> list[Tensor]:
    return unused(side, gradient_as_bucket_view=True)


def accumulation(side: Side, **options: Any) -> list[Tensor]:
    model = side.wrap(build(side.rank), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                model(batch(3 * step + micro, side.rank)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return state(side, model)


def accumulation_views(side: Side) -> list[Tensor]:
    return accumulation(side, gradient_as_bucket_view=True)


def uneven(side: Side) -> list[Tensor]:
    """Ranks with different numbers of batches."""
    module = build(side.rank)
    module.norm = nn.LayerNorm(2 * WIDTH)  # type: ignore[assignment]  # torch broadcasts buffers from another rank
    model = side.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join() if side.ours is not None else Join([model]):
        for step in range(2 + 2 * ((side.rank + 1) % 3)):
            model(batch(step, side.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(side, model)


def in_fp16(side: Side) -> list[Tensor]:
    model = side.wrap(build(side.rank))
    if side.ours is not None:
        model.register_comm_hook("fp16")
    else:
        model.register_comm_hook(side.theirs, fp16_compress_hook)
    return train(side, model)


def hooked(name: str, **options: Any) -> Callable[[Side], list[Tensor]]:
    def scenario(side: Side) -> list[Tensor]:
        if side.ours is None:
            return plain(side)
        model = side.wrap(build(side.rank))
        model.register_comm_hook(comm_hook(name, **options))
        return train(side, model)

    return scenario


def own_function(side: Side) -> list[Tensor]:
    if side.ours is None:
        return plain(side)
    model = side.wrap(build(side.rank))
    model.register_comm_hook(lambda bucket, group: group.all_reduce(bucket.flat.div_(group.size)))
    return train(side, model)


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def post_accumulate(when: str) -> Callable[[Side], list[Tensor]]:
    """Hooks that change gradients, on one rank more than on the others: the average is of what they leave."""

    def scenario(side: Side) -> list[Tensor]:
        module, kept = build(side.rank), []
        model = None if when == "before" else side.wrap(module)
        for param in (p for p in module.parameters() if p.requires_grad):
            for _ in range(1 + side.rank):
                param.register_post_accumulate_grad_hook(halve)
            param.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.abs().sum()))
        trained = train(side, model or side.wrap(module))
        local = torch.stack([k for k in kept if torch.isfinite(k)])
        return [*trained, local.sort().values]

    return scenario


def two_forwards(side: Side) -> list[Tensor]:
    """Two forwards of a module with buffers, then one backward through both."""
    model = side.wrap(build(side.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        first, second = model(batch(2 * step, side.rank)), model(batch(2 * step + 1, side.rank))
        (first.square().mean() + second.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(side, model)


# Every scenario, and how much it may differ from torch's result: largest difference over largest value of a tensor.
SCENARIOS: dict[str, tuple[Callable[[Side], list[Tensor]], float]] = {
    "plain": (plain, 1e-6),
    "synchronous": (synchronous, 1e-6),
    "views": (views, 1e-6),
    "by hand": (by_hand, 1e-6),
    "with a synchronizer": (with_a_synchronizer, 1e-6),
    "two dtypes": (two_dtypes, 1e-2),
    "unused": (unused, 1e-6),
    "unused, views": (unused_views, 1e-6),
    "accumulation": (accumulation, 1e-5),
    "accumulation, views": (accumulation_views, 1e-5),
    "uneven": (uneven, 1e-6),
    "own function": (own_function, 1e-6),
    "hooks registered before": (post_accumulate("before"), 1e-6),
    "hooks registered after": (post_accumulate("after"), 1e-6),
    "two forwards, one backward": (two_forwards, 1e-6),
    "bf16": (hooked("bf16"), 5e-3),
    "bf16 with feedback": (hooked("bf16", error_feedback=True), 5e-3),
    "fp16": (in_fp16, 1e-3),
    "int8": (hooked("int8"), 1.5e-2),
    "int8 without feedback": (hooked("int8", error_feedback=False), 2e-2),
    "top-k of all": (hooked("top_k", fraction=1.0), 1e-6),
}


def warm_up() -> None:
    """What every worker would import or load by itself when it first trains."""
    model = build()
    model(batch(0, 0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name in ("int8", "top_k"):
        compressor(name).warm_up()
    for dtype in (DType.F32, DType.BF16, DType.F16):
        storage = [np.zeros(8, dtype.numpy) for _ in range(3)]
        reduction.reduce_into(storage[0], storage[1:], ReduceOp.AVERAGE, dtype)


def main(arguments: list[str]) -> None:
    """Every scenario on the first 1, 2, ... ranks, two of which share a node; writes differences and tolerances.

    Args:
        arguments: how many ranks there are, and the directory for this rank's rows: name, ranks, difference, tolerance.
    """
    largest, directory, rank = int(arguments[0]), Path(arguments[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    os.environ["AXON_PS_NODE"] = f"node{int(rank) // 2}"
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        dist.init_process_group("gloo", init_method="axon://")
        try:
            found: list[tuple[str, int, float, float]] = []
            for size in range(1, largest + 1):
                ours, theirs = world.new_group(list(range(size))), dist.new_group(list(range(size)))
                if world.rank < size:
                    assert ours.backend == ("hierarchical" if size > 2 else "shm")
                    found += _compare(ours, theirs)
        finally:
            dist.destroy_process_group()
    (directory / f"{rank}.json").write_text(json.dumps(found))


def _compare(ours: ProcessGroup, theirs: Any) -> list[tuple[str, int, float, float]]:
    found = []
    our_side, their_side = Side(ours, None, ours.rank, ours.size), Side(None, theirs, ours.rank, ours.size)
    for name, (scenario, tolerance) in SCENARIOS.items():
        mine, expected = scenario(our_side), scenario(their_side)
        difference = max(_difference(a, b) for a, b in zip(mine, expected, strict=True))
        found.append((name, ours.size, difference, tolerance))
    return found


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-3))
