"""A small transformer of tensor-parallel layers (or, without a group, of plain ones), and how processes train it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.parallel import (
    DDP,
    ColumnParallelLinear,
    DistributedSampler,
    Mesh,
    RowParallelLinear,
    TensorParallelAttention,
    clip_grad_norm,
)
from axon_ps.parallel.tensor import (
    distributed_optimizer_state_dict,
    distributed_state_dict,
    full_optimizer_state_dict,
    full_state_dict,
    gather_from_group,
    load_full_state_dict,
    scatter_to_group,
    sum_gradients,
)
from deadlines import HANG_S

VOCAB, WIDTH, HEADS, CONTEXT, SAMPLES, BATCH = 31, 16, 4, 12, 40, 8
STEPS, MAX_NORM = 6, 0.5

Cases = list[tuple[int, int, bool]]
"""Sizes of data and tensor, and whether sequences are split."""


class PlainAttention(nn.Module):
    """Causal self-attention with `TensorParallelAttention`'s names."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if group is None:
            self.attention: nn.Module = PlainAttention()
            self.up: nn.Module = nn.Linear(WIDTH, 4 * WIDTH)
            self.down: nn.Module = nn.Linear(4 * WIDTH, WIDTH)
            return
        options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        self.attention = TensorParallelAttention(WIDTH, HEADS, causal=True, bias=False, **options)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **options)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, **options)
        if sequence_parallel:
            sum_gradients(self.norm1, group)
            sum_gradients(self.norm2, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks between an embedding and a head, which are replicated; returns the loss."""

    def __init__(self, group: ProcessGroup | None = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block(group, sequence_parallel) for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self._group = group if sequence_parallel else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        if self._group is None:
            x = self.blocks(x)
        else:
            x = gather_from_group(self.blocks(scatter_to_group(x, self._group, 1)), self._group, 1)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def initial() -> dict[str, torch.Tensor]:
    """The same full state dict in every process."""
    torch.manual_seed(1234)
    return Transformer().state_dict()


def samples() -> torch.Tensor:
    """tokens: i64[SAMPLES, CONTEXT + 1]."""
    return torch.randint(0, VOCAB, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(5))


def train(model: nn.Module, replicas: int, replica: int, mesh: Mesh | None = None) -> list[float]:
    """This replica's part of the steps, over more than one epoch; gradient norms."""
    data, norms = samples(), []
    sampler = DistributedSampler(data, replicas, replica, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    while len(norms) < STEPS:
        indices = iter(sampler)
        while len(norms) < STEPS and len(sampler):
            batch = data[[next(indices) for _ in range(BATCH // replicas)]]
            model(batch).backward()
            norms.append(float(clip_grad_norm(model, MAX_NORM, mesh=mesh)))
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance(len(batch))
        sampler.set_epoch(sampler.epoch + 1)
    return norms


def train_plain() -> tuple[dict[str, torch.Tensor], list[float]]:
    """All of it in this process."""
    model = Transformer()
    model.load_state_dict(initial())
    norms = train(model, 1, 0)
    return model.state_dict(), norms


def train_on_meshes(world: axon_ps.World, cases: Cases) -> list[Any]:
    """For each (data, tensor, sequence_parallel): the full state dict after training, and the gradient norms."""
    results = []
    for data, tensor, sequence_parallel in cases:
        mesh = Mesh(world.default_group, data=data, tensor=tensor)
        module = Transformer(mesh.group("tensor"), sequence_parallel)
        load_full_state_dict(module, initial())
        model = DDP(module, mesh.group("data")) if data > 1 else module
        norms = train(model, data, mesh.coordinate("data"), mesh)
        full = {name: value.numpy().copy() for name, value in full_state_dict(module).items()}
        results.append((full, norms, mesh.group("tensor").backend))
    return results


def checkpoint_by_dcp(world: axon_ps.World, directory: str) -> None:
    """Train as 2 x 2, save with torch.distributed.checkpoint, load as 1 x 4; bit for bit the same, and it goes on."""
    dist.init_process_group("axon", init_method="axon://")

    def build(**axes: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        mesh = Mesh(world.default_group, **axes)
        module = Transformer(mesh.group("tensor"))
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        return module, optimizer, mesh.device_mesh()["tensor"]

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        module(samples()[:BATCH]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return full_state_dict(module)

    def state(module: nn.Module, optimizer: torch.optim.Optimizer, device_mesh: Any) -> dict[str, Any]:
        return {
            "model": distributed_state_dict(module, device_mesh),
            "optimizer": distributed_optimizer_state_dict(module, optimizer, device_mesh),
        }

    module, optimizer, device_mesh = build(data=2, tensor=2)
    load_full_state_dict(module, initial())
    expected = {name: value.clone() for name, value in step(module, optimizer).items()}
    dcp.save(state(module, optimizer, device_mesh), checkpoint_id=directory)
    other, other_optimizer, other_mesh = build(tensor=4)
    step(other, other_optimizer)  # so that the optimizer has a state to be filled
    dcp.load(state(other, other_optimizer, other_mesh), checkpoint_id=directory)
    loaded = full_state_dict(other)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    theirs = full_optimizer_state_dict(other, other_optimizer)["state"]
    for name, values in full_optimizer_state_dict(module, optimizer)["state"].items():
        assert all(torch.equal(theirs[name][key], value) for key, value in values.items())
    after, expected = step(other, other_optimizer), step(module, optimizer)
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


def everything(cases: Cases, directory: str) -> list[Any]:
    """Both, in one process."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        results = train_on_meshes(world, cases)
        checkpoint_by_dcp(world, directory)
        world.barrier("done")
    return results
