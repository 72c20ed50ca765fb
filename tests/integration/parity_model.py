"""A small transformer, its batches, and how it is trained: once by plain torch, once by workers on shard servers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps_lab.campaigns.exact_model import Linear, integers

VOCAB, WIDTH, HEADS, CONTEXT, BATCH = 31, 16, 2, 12, 4
STEPS = 5
MAX_NORM = 0.5

OURS: dict[str, Any] = {
    kind.__name__: kind for kind in (parallel.SGD, parallel.Adam, parallel.AdamW, parallel.Adagrad, parallel.RMSprop)
}
"""By the name that torch has for the same."""

Values = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


_ONE_GENERATOR = threading.Lock()
"""Held while a model draws its values: threads have one generator in common."""


class Block(nn.Module):
    """Attention and MLP. No key bias: its true gradient is zero, so that any optimizer would amplify rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            project(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks between a tied embedding and head; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build() -> Transformer:
    """The same model in every process and thread."""
    with _ONE_GENERATOR:
        torch.manual_seed(1234)
        return Transformer()


def batch(step: int, replica: int) -> torch.Tensor:
    """tokens: i64[BATCH, CONTEXT + 1]; different for every step and replica."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator)


def groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def distance(values: Values, expected: Values) -> float:
    """The largest ||a - b|| / ||b|| over all tensors."""
    assert sorted(values) == sorted(expected)
    return max(float(np.linalg.norm(values[n].astype(np.float64) - e) / np.linalg.norm(e)) for n, e in expected.items())


def train_plain(kind: str, options: Mapping[str, Any], replicas: int, steps: int = STEPS) -> tuple[Values, list[float]]:
    """Plain torch on the joined batch of all replicas; final values and gradient norms."""
    model = build()
    options = dict(options)
    optimizer = getattr(torch.optim, kind)(groups(model, options.pop("weight_decay", 0.0)), **options)
    norms = []
    for step in range(steps):
        model(torch.cat([batch(step, r) for r in range(replicas)])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.numpy() for name, value in model.state_dict().items()}, norms


def wrapped(world: axon_ps.World, **options: Any) -> parallel.FSDP:
    """The model, a unit for each block, cut so finely that every shard server has slices of it."""
    plan = PlanOptions(chunk_numel=512, min_slice_numel=128)
    return parallel.FSDP(build(), world.default_group, unit_types={Block}, plan_options=plan, **options)


def train_sharded(
    world: axon_ps.World,
    kind: str,
    options: Mapping[str, Any],
    strategy: str,
    precision: Mapping[str, torch.dtype] | None = None,
    steps: int = STEPS,
    max_norm: float = MAX_NORM,
    prefetch: bool = True,
) -> tuple[Values, list[float], dict[str, float]]:
    """One worker's part of the same; final values, gradient norms, statistics."""
    options = dict(options)
    model = wrapped(
        world,
        sharding_strategy=parallel.ShardingStrategy[strategy],
        mixed_precision=parallel.MixedPrecision(**(precision or {})),
        prefetch=prefetch,
    )
    optimizer = OURS[kind](groups(model, options.pop("weight_decay", 0.0)), **options)
    norms = []
    for step in range(steps):
        model(batch(step, world.replica)).backward()
        if max_norm:
            model.clip_grad_norm(max_norm)
        result = optimizer.step()
        assert result.committed, result.reason
        assert result.version == step + 1
        norms.append(result.grad_norm)
        optimizer.zero_grad()
    values = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    statistics = model.statistics()
    return values, norms, statistics


def train_lion(world: axon_ps.World) -> Any:
    """The weight of a `Linear` after 20 steps of Lion."""
    options = PlanOptions(chunk_numel=100, min_slice_numel=64)
    model = parallel.FSDP(Linear(1000), world.default_group, plan_options=options)
    optimizer = parallel.Lion(model, lr=1e-2, weight_decay=0.1)
    for step in range(20):
        model(integers(step, world.replica)).backward()
        assert optimizer.step().committed
        optimizer.zero_grad()
    return model.state_dict()["weight"].numpy().copy()


def plain(replicas: Sequence[int]) -> Values:
    """What plain torch makes of it, with SGD of momentum 0.9, given how many replicas took part in each step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, count in enumerate(replicas):
        model(torch.cat([batch(step, r) for r in range(count)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def assert_close(values: Values, expected: Values) -> None:
    """They are equal but for the order of additions."""
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
