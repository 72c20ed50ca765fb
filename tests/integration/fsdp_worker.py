"""What a worker does in the jobs of the table of strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import axon_ps
from axon_ps import errors, parallel
from axon_ps.sharding.plan import PlanOptions
from parity_model import MAX_NORM, Block, Values, batch, build, groups

OPTIONS = {"lr": 3e-3}
DECAY = 0.05
SERVER_MEMORY = ("master_bytes", "accumulator_bytes", "state_bytes", "residual_bytes", "frame_bytes", "shared_bytes")
PRECISIONS: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16 wire": {"wire_dtype": torch.bfloat16},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
    "int8": {"wire_dtype": "int8"},
    "int4": {"wire_dtype": "int4"},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        strategy: name of the sharding strategy.
        offload: name of what is on the host.
        precision: name of the precision.
        workers: world size.
        servers: shard servers.
        per_node: workers of an (emulated) node.
        local: NO_SHARD: whether torch's optimizer makes the steps, and not ours.
        parts: backwards of a step, each of a part of the batch; the gradients of all are sent.
    """

    strategy: str
    offload: str = "NONE"
    precision: str = "f32"
    workers: int
    servers: int = 1
    per_node: int = 1
    local: bool = False
    parts: int = 1


def wrap(case: Case, world: axon_ps.World, **options: Any) -> parallel.FSDP:
    """The transformer, wrapped as the case says."""
    return parallel.FSDP(
        build(),
        world.default_group,
        sharding_strategy=parallel.ShardingStrategy[case.strategy],
        cpu_offload=parallel.CPUOffload[case.offload],
        mixed_precision=parallel.MixedPrecision(**PRECISIONS[case.precision]),
        intra_node_size=case.per_node if case.strategy == "HYBRID_SHARD" else None,
        unit_types={Block},
        **({"plan_options": PlanOptions(chunk_numel=512, min_slice_numel=128)} | options),
    )


def optimizer_of(case: Case, model: parallel.FSDP) -> Any:
    """AdamW, ours or torch's."""
    kind = torch.optim.AdamW if case.local else parallel.AdamW
    return kind(groups(model, DECAY), **OPTIONS)  # frozen parameters are in no group of torch's


def train(
    case: Case, model: parallel.FSDP, optimizer: Any, world: axon_ps.World, steps: range, max_norm: float = MAX_NORM
) -> list[float]:
    """Gradient norms. Under CPUOffload.FULL every batch comes in two halves, the first inside `no_sync()`."""
    norms = []
    for step in steps:
        tokens = batch(step, world.rank)
        if case.offload == "FULL":
            with model.no_sync():
                (model(tokens[:2]) / 2).backward()
            (model(tokens[2:]) / 2).backward()
        else:
            for part in tokens.chunk(case.parts):
                (model(part) / case.parts).backward()
        norm = model.clip_grad_norm(max_norm) if max_norm else None
        result = optimizer.step()
        norms.append(norm if result is None else result.grad_norm)
        assert result is None or result.committed, result.reason
        optimizer.zero_grad()
    return norms


def values_of(model: parallel.FSDP) -> Values:
    """The state dict as numpy."""
    return {name: value.float().numpy().copy() for name, value in model.state_dict().items()}


def run_case(world: axon_ps.World, case: Case, steps: int, max_norm: float = MAX_NORM) -> Any:
    """Final values and gradient norms."""
    model = wrap(case, world)
    optimizer = optimizer_of(case, model)
    norms = train(case, model, optimizer, world, range(steps), max_norm)
    return values_of(model), norms


# ---------------------------------------------------------------------- checkpoints


def save_and_go_on(world: axon_ps.World, case: Case, uri: str, steps: int) -> Any:
    """Values at the end of a run, of the same run resumed, and what the checkpoint said."""
    model = wrap(case, world)
    optimizer = optimizer_of(case, model)
    train(case, model, optimizer, world, range(steps), 0.0)
    saved = model.save_checkpoint(uri, optimizer, extra={"step": steps})
    train(case, model, optimizer, world, range(steps, 2 * steps), 0.0)
    first = values_of(model)
    info = model.load_checkpoint(uri, optimizer)
    train(case, model, optimizer, world, range(steps, 2 * steps), 0.0)
    return first, values_of(model), (info.version, dict(info.extra), saved is not None)


def go_on(world: axon_ps.World, case: Case, uri: str, steps: int) -> Any:
    """Values at the end of a run that began from a checkpoint."""
    model = wrap(case, world)
    optimizer = optimizer_of(case, model)
    model.load_checkpoint(uri, optimizer)
    train(case, model, optimizer, world, range(steps, 2 * steps), 0.0)
    return values_of(model)


def replace(world: axon_ps.World, case: Case, directory: str) -> Any:
    """Values after they were replaced in every way, and whether training goes on from them."""
    model = wrap(case, world)
    optimizer = optimizer_of(case, model)
    train(case, model, optimizer, world, range(2), 0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: 2 * value for name, value in before.items()})
    doubled = values_of(model)
    model.load_state_dict({"norm.weight": torch.ones(16)}, strict=False)
    partly = values_of(model)
    model.update_shards(torch.cat([before[name].flatten() for name, _ in model.full_parameters()]))
    if world.is_main_process:
        dcp.save({"model": model.state_dict()}, checkpoint_id=directory, no_dist=True)
    world.barrier("saved")
    model.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=directory, no_dist=True)
    model.load_state_dict(loaded["model"])
    again = values_of(model)
    train(case, model, optimizer, world, range(2, 4), 0.0)  # moments were kept
    return {name: value.numpy() for name, value in before.items()}, doubled, partly, again, values_of(model)


class Swapped(nn.Module):
    """Runs its layers in an order of its own."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(False) for _ in order)
        self.norm = nn.LayerNorm(WIDTH)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return self.norm(x)


def diverge(world: axon_ps.World, case: Case) -> Any:
    """What a worker is told whose node runs units in different orders; whether the job moved."""
    order = [0, 1, 2] if world.rank == 0 else [0, 2, 1]
    model = parallel.FSDP(
        Swapped(order),
        world.default_group,
        sharding_strategy=parallel.ShardingStrategy[case.strategy],
        unit_types={Layer},
    )
    optimizer = parallel.SGD(model, lr=0.1)
    try:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    except errors.Disagreement as error:
        return str(error), world.version
    return "", world.version


# ---------------------------------------------------------------------- traffic and memory

WIDTH, BLOCKS = 96, 5


class Layer(nn.Module):
    """One unit; with an adapter, the rest of it is frozen."""

    def __init__(self, adapter: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, 8, bias=False) if adapter else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return y if self.adapter is None else y + self.adapter(x) @ self.adapter.weight


class Stack(nn.Module):
    """Layers of one size and a norm, the root."""

    def __init__(self, adapter: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(adapter) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        if adapter:
            for name, p in self.named_parameters():
                p.requires_grad_("adapter" in name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x))


def measure(world: axon_ps.World, case: Case, adapter: bool) -> Any:
    """Bytes that a step brings from the servers and sends there, memory as estimated and as measured."""
    model = parallel.FSDP(
        Stack(adapter),
        world.default_group,
        sharding_strategy=parallel.ShardingStrategy[case.strategy],
        cpu_offload=parallel.CPUOffload[case.offload],
        mixed_precision=parallel.MixedPrecision(**PRECISIONS[case.precision]),
        unit_types={Layer},
    )
    optimizer = optimizer_of(case, model)
    received, sent, memory = [], [], {}
    for step in range(5):
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        received.append(world.statistics()["bytes_in"])  # all that this step gathers has arrived
        if step == 2:
            memory = model.statistics() | dataclasses.asdict(model.memory_stats())
        if step >= 2:  # nothing is gathered speculatively where gradients are clipped
            model.clip_grad_norm(1e9)
        optimizer.step()
        sent.append(world.statistics()["bytes_out"])  # all that it pushes has been summed
        optimizer.zero_grad()
    world.barrier("measured")
    statistics = [world.server_statistics(shard.rank) for shard in world.membership.shards]
    of_servers = int(sum(of_one[kind] for of_one in statistics for kind in SERVER_MEMORY))
    traffic = int(received[-1] - received[-2]), int(sent[-1] - sent[-2])
    return *traffic, dataclasses.asdict(model.memory_estimate()), memory, of_servers
