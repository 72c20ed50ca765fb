"""A program of torch's FSDP2 on a mesh, in the manner of torchtitan, with our `fully_shard`; a test's workers run it.

Each process trains the same model with plain torch, too, and returns how far its parameters are from that.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import axon_ps
from axon_ps.errors import StepAborted
from axon_ps.parallel import fully_shard, sharded_model
from deadlines import WHOLE_S

DIM, HEADS, LAYERS, VOCAB, LENGTH, ROWS, MAX_NORM, MICROBATCHES = 16, 4, 2, 32, 8, 8, 0.5, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for block in self.layers.values():
            x = block(x)
        return x if self.output is None else self.output(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def made() -> Llama:
    torch.manual_seed(3)
    return Llama()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def tensor_parallel(model: Llama, tp: DeviceMesh) -> None:
    """Divide a model as torchtitan does, with sequence parallelism of the norms."""
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, {name: style for name, style in plan.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def prune(model: Llama, stage: int, stages: int) -> None:
    """Leave a stage of a pipeline, with its names."""
    layers = [str(i) for i in range(LAYERS) if i * stages // LAYERS == stage]
    model.layers = nn.ModuleDict({name: model.layers[name] for name in layers})
    model.tok_embeddings = model.tok_embeddings if stage == 0 else None
    model.norm, model.output = (model.norm, model.output) if stage == stages - 1 else (None, None)


def train_plainly(model: Llama, replicas_of: Mapping[int, Iterable[int]], dp: int) -> None:
    """Train with plain torch the steps that committed, each on the samples of these replicas."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, replicas in replicas_of.items():
        optimizer.zero_grad()
        tokens = torch.cat([batch(step)[replica::dp] for replica in replicas])
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a training on one worker.

    Attributes:
        differs: the most by which a parameter differs from plain torch's.
        divided_differs: the same of DTensors of the state dict; by name.
        committed: by committed step, the number of replicas in it.
        norms: of the gradients of each.
    """

    differs: float
    divided_differs: dict[str, float]
    committed: dict[int, int]
    norms: list[float]


def join(store: Path) -> axon_ps.World:
    """Join the job, and torch's process group with ranks that are not the job's."""
    world = axon_ps.World.init(timeout_s=20.0, join_timeout_s=WHOLE_S)
    size = world.world_size
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=size - 1 - world.rank, world_size=size)
    return world


def train(store: Path, dp: int, pp: int, tp: int, steps: int, killed: int) -> Trained:
    """Train a model on a mesh. The worker of torch's rank `killed` is killed in the middle; -1 = none."""
    torch.set_num_threads(1)
    world = join(store)
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    model, stage, replica = made(), mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    prune(model, stage, pp)
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = None
    if pp > 1:
        staged = PipelineStage(model, stage, pp, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = ScheduleGPipe(staged, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    committed: dict[int, int] = {}
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens = batch(step)[replica::dp]
        if schedule is None:
            loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        else:
            given = (tokens[:, :-1],) if stage == 0 else ()
            schedule.step(*given, target=tokens[:, 1:] if stage == pp - 1 else None)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if (dist.get_rank(), step) == (killed, steps // 2):
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(StepAborted):
            optimizer.step()  # an aborted one is made again by those who are left
            committed[step] = world.num_replicas
            norms.append(float(norm))
    plain = made()
    train_plainly(plain, {step: range(dp) if n == dp else (replica,) for step, n in committed.items()}, dp)
    theirs = {name: param.detach() for name, param in plain.named_parameters()}
    ours = dict(sharded_model(model).full_parameters())
    state = model.state_dict()
    boxes = {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}
    assert sorted(ours) == sorted(theirs)
    trained = Trained(
        differs=max(float((ours[name] - theirs[name]).abs().max()) for name in theirs),
        divided_differs={name: float((boxes[name] - theirs[name]).abs().max()) for name in boxes},
        committed=committed,
        norms=norms,
    )
    world.close()
    return trained
