"""A program of torch's FSDP2 in the manner of torchtitan. A test runs it, and with our `fully_shard` in its place.

Usage: llama_program.py OUT CHECKPOINT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

DIM, HEADS, LAYERS, VOCAB, LENGTH, ROWS, STEPS, HALF = 16, 2, 2, 32, 8, 12, 10, 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


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
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


class ModelWrapper:
    """torchtitan's: the model for DCP."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class OptimizersContainer:
    """torchtitan's: the optimizer for DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=FLAT)


def build() -> tuple[Any, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    with torch.device("meta"):
        model = Llama()
    for name, block in model.layers.named_children():
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False)  # type: ignore[no-untyped-call]
        model.layers.register_module(name, torch.compile(wrapped, backend="eager", fullgraph=True))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(value.shape, generator=generator) for name, value in Llama().state_dict().items()}
    values = {name: 1 + 0 * value if value.dim() == 1 else 0.1 * value for name, value in values.items()}
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: range) -> list[float]:
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        mine = tokens[rank * ROWS // size : (rank + 1) * ROWS // size]
        logits = model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main(out: str, checkpoint: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer, schedule = build()
    losses = train(model, optimizer, schedule, range(HALF))
    state = {"model": ModelWrapper(model), "optimizer": OptimizersContainer(model, optimizer), "schedule": schedule}
    dcp.save(state, checkpoint_id=checkpoint)
    losses += train(model, optimizer, schedule, range(HALF, STEPS))

    model, optimizer, schedule = build()  # as a new run
    state = {"model": ModelWrapper(model), "optimizer": OptimizersContainer(model, optimizer), "schedule": schedule}
    dcp.load(state, checkpoint_id=checkpoint)
    resumed = train(model, optimizer, schedule, range(HALF, STEPS))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([losses, resumed]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
