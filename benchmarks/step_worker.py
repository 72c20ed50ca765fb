"""One worker of the whole-step benchmark: the same model and loop over FSDP2 with gloo, or over axon_ps.

It is started by whole_step.py. Rank 0 prints READY before the timed steps and DONE after them, and waits for a line on
its standard input each time, so that the parent reads the counters of cards and processes while no rank works. The last
line of every rank is its result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 64
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard")
Batches = Iterator[tuple[Tensor, Tensor, bool]]
"""Micro-batches of a step: input, target, and whether it is the last."""
Step = Callable[[Batches], Tensor]


class Device(torch.autograd.Function):
    """An emulated accelerator: the thread waits, using no processor, in forward and twice as long in backward."""

    length: ClassVar[float] = 1.0
    """Length of this micro-batch's sequences, with a mean of 1: the accelerator's time is proportional to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds = seconds * Device.length
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


def go_first() -> None:
    """Give this thread priority over all others of the machine, if permitted: beside an accelerator it needs little."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)


class Block(nn.Module):
    """A residual MLP block of 2 x width^2 parameters: a transformer's layer without its attention."""

    def __init__(self, width: int, device_s: float) -> None:
        super().__init__()
        self.device_s = device_s
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return Device.apply(x, self.device_s) if self.device_s else x


class ResidualMLP(nn.Module):
    """`blocks` blocks and a small classifier; 8 x 1024 wide are 16.9 million parameters."""

    def __init__(self, width: int, blocks: int, device_s: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, device_s / blocks / 3) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


@dataclass(frozen=True)
class Side:
    """The interface of a system to the loop."""

    rank: int
    world_size: int
    step: Step  # forward and backward of every micro-batch, optimizer step; returns the last loss
    barrier: Callable[[], None]
    close: Callable[[], None]
    trace: Any = None  # a step_trace.Trace, on the side axon if asked for
    leased_bytes: Callable[[], float] = lambda: 0.0  # payload passed in shared memory so far
    digest: Callable[[], str] = lambda: ""  # digest of the bits of all parameters, f32; on the side axon


def fsdp2(options: argparse.Namespace) -> Side:
    """Make the side of PyTorch's fully_shard over gloo, with AdamW fused on the sharded parameters."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    shape: tuple[int, ...] = (dist.get_world_size(),)
    if options.strategy == "hybrid_shard":  # replicas are hosts
        per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (dist.get_world_size() // per_host, per_host)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    dtype = getattr(torch, options.dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model = ResidualMLP(options.width, options.blocks, options.device_s)
    reshard = options.strategy != "shard_grad_op"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)

    def step(batches: Batches) -> Tensor:
        for x, target, is_last in batches:
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]  # of `fully_shard`
            loss = F.cross_entropy(model(x).float(), target)
            loss.backward()
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Side(dist.get_rank(), dist.get_world_size(), step, dist.barrier, dist.destroy_process_group)


def axon(options: argparse.Namespace) -> Side:
    """Make the side of axon_ps: the same model, loss and optimizer; state on the shard servers."""
    import axon_ps
    from axon_ps.parallel import AdamW, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    trace = None
    if options.trace:
        from step_trace import Trace

        trace = Trace()
    world = axon_ps.World.init()
    dtype = getattr(torch, options.dtype)
    wire = options.wire or dtype
    model = FullyShardedDataParallel(
        ResidualMLP(options.width, options.blocks, options.device_s),
        world.default_group,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        mixed_precision=MixedPrecision(param_dtype=dtype, wire_dtype=wire, reduce_dtype=wire),
        cpu_offload=CPUOffload(options.offload),
        unit_types={Block},
    )
    optimizer = AdamW(model.parameters(), lr=options.lr)
    if options.device_s:
        go_first()

    def step(batches: Batches) -> Tensor:
        for x, target, is_last in batches:
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(x).float(), target)
                loss.backward()
        if options.clip:
            model.clip_grad_norm(options.clip)
        if not optimizer.step().committed:
            raise RuntimeError("a step was not committed: the figures would not be of whole steps")
        optimizer.zero_grad()
        return loss.detach()

    def leased_bytes() -> float:
        found = world.statistics()
        return sum(found[name] for name in ("leased_bytes_in", "leased_bytes_out"))

    def digest() -> str:
        found = hashlib.sha256()
        for _, values in model.full_parameters():
            found.update(values.numpy().tobytes())
        return found.hexdigest()

    return Side(
        rank=world.rank,
        world_size=world.world_size,
        step=step,
        barrier=lambda: void(world.gather_json(None)),
        close=world.close,
        trace=trace,
        leased_bytes=leased_bytes,
        digest=digest,
    )


def void(_: Any) -> None:
    """Drop a value."""


def ask(side: Side, word: str) -> None:
    """Stop all ranks, print `word` for the parent, and wait until it answers."""
    side.barrier()
    if side.rank == 0:
        print(word, flush=True)
        sys.stdin.readline()
    side.barrier()


def lengths_of(rank: int, step: int, options: argparse.Namespace) -> list[float]:
    """Return the lengths of a rank's sequences in a step, one for each micro-batch.

    They are log-uniform over `spread`, with a mean of 1.
    """
    if options.spread == 1.0:
        return [1.0] * options.micro
    mean = (options.spread - 1.0) / math.log(options.spread)
    random = Random(f"{rank} {step} {options.order}")
    return [options.spread ** random.random() / mean for _ in range(options.micro)]


def batches(data: torch.Generator, lengths: list[float], options: argparse.Namespace) -> Batches:
    """Yield the micro-batches of a step, whose sequences have these lengths for the emulated accelerator."""
    for number, length in enumerate(lengths, 1):
        Device.length = length
        x = torch.randn(options.tokens, options.width, generator=data)
        yield x, torch.randint(CLASSES, (options.tokens,), generator=data), number == len(lengths)


def run(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, then time the steps."""
    data = torch.Generator().manual_seed(1000 + side.rank)
    times_s: list[float] = []
    losses: list[float] = []
    for number in range(-options.warmup, options.steps):
        if number == 0:
            ask(side, "READY")
            leased_bytes = side.leased_bytes()
            begin_s = last_s = time.perf_counter()
        lengths = lengths_of(side.rank, number, options)
        loss = side.step(batches(data, lengths, options))
        if number >= 0:
            now_s = time.perf_counter()
            times_s.append(now_s - last_s)
            if side.trace is not None:
                side.trace.step(last_s, now_s)
            last_s = now_s
        losses.append(round(float(loss), 4))
    whole_s = time.perf_counter() - begin_s
    ask(side, "DONE")
    leased_bytes = side.leased_bytes() - leased_bytes
    traced = {}
    if side.trace is not None:
        traced = {"trace": {name: round(value, 4) for name, value in side.trace.summary().items()}}
        if side.rank == 0:
            side.trace.write(options.trace)
    return traced | {
        "rank": side.rank,
        "median_s": statistics.median(times_s),
        "mean_s": whole_s / options.steps,
        "times_s": [round(t, 4) for t in times_s],
        "losses": losses,
        "leased_bytes": leased_bytes / options.steps,
        "digest": side.digest(),
        "device_s": [options.device_s * sum(lengths_of(side.rank, n, options)) for n in range(options.steps)],
    }


def compute_only(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of this process's forward and backward alone in the loop, and the model's size."""
    model = ResidualMLP(options.width, options.blocks, options.device_s).to(getattr(torch, options.dtype))
    if options.device_s:
        go_first()
    times_s = []
    for _ in range(5):
        x = torch.randn(options.tokens, options.width, dtype=getattr(torch, options.dtype))
        begin_s = time.perf_counter()
        F.cross_entropy(model(x).float(), torch.zeros(options.tokens, dtype=torch.long)).backward()
        times_s.append(time.perf_counter() - begin_s)
    return {
        "compute_s": statistics.median(times_s),
        "block_numel": sum(p.numel() for p in model.blocks[0].parameters()),
        "root_numel": sum(p.numel() for p in model.head.parameters()),
    }


def parse() -> argparse.Namespace:
    """Parse the command line that whole_step.py writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("fsdp2", "axon", "compute"))
    parser.add_argument("--strategy", choices=STRATEGIES, default="full_shard")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--wire", choices=("int8", "int4"), default=None, help="what travels, on the side axon; None: dtype"
    )
    parser.add_argument("--offload", choices=("none", "params"), default="none", help="what host memory has a copy of")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--device-s", type=float, default=0.0, help="seconds a step that an emulated accelerator takes")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--spread", type=float, default=1.0, help="the longest sequence over the shortest one")
    parser.add_argument("--order", default="", help="lengths are drawn anew for each, the batches are the same")
    parser.add_argument("--trace", type=Path, help="side axon: write rank 0's spans here")
    return parser.parse_args()


def begin() -> None:
    """Set the number of threads, and the seed of the first values, equally everywhere."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)


def serve(make: Callable[[argparse.Namespace], Side], options: argparse.Namespace) -> None:
    """Make a side, run it with the parent, and print its result."""
    begin()
    side = make(options)
    result = run(side, options)
    side.close()
    print(json.dumps(result), flush=True)


def main() -> None:
    """Run one worker to its end."""
    options = parse()
    if options.side == "compute":
        begin()
        print(json.dumps(compute_only(options)))
    else:
        serve({"fsdp2": fsdp2, "axon": axon}[options.side], options)


if __name__ == "__main__":
    main()
