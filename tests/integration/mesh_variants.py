"""Models with tensor parallelism on two workers: other forms of parameters and values. Each is compared with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from axon_ps.parallel import fully_shard, sharded_model
from mesh_training import Llama, batch, join, loss_of, made, tensor_parallel

STEPS = 5


def simply_parallel(model: Llama, tp: DeviceMesh) -> None:
    """Divide the linear layers alone: norms and embeddings are plain tensors, the same on all workers."""
    for block in model.layers.values():
        feed_forward = {"feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel()}
        qkv = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        parallelize_module(block, tp, {**qkv, "attention.wo": RowwiseParallel(), **feed_forward})


def losses_of(model: Llama, optimizer: torch.optim.Optimizer, first: int = 0) -> list[float]:
    """Train a few steps."""
    losses = []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        tokens = batch(step)
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def wrapped(shard: Callable[..., Any], mesh: DeviceMesh, divide: Callable[..., None], **options: Any) -> Llama:
    """A model that is divided on the axis tp, and sharded on the axis dp."""
    model = made()
    divide(model, mesh["tp"])
    for name, block in list(model.layers.items()):
        if options.get("checkpoints"):
            model.layers[name] = checkpoint_wrapper(block)
    if options.get("frozen"):
        freeze(model)
    given = {key: value for key, value in options.items() if key not in ("checkpoints", "frozen")}
    for block in model.layers.values():
        shard(block, mesh=mesh["dp"], **given)
    shard(model, mesh=mesh["dp"], **given)
    return model


def freeze(model: Llama) -> None:
    """Freeze a block, but for one of its norms."""
    for name, param in model.layers["0"].named_parameters():
        param.requires_grad_("ffn_norm" in name)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def compared(mesh: DeviceMesh, divide: Callable[..., None], **options: Any) -> float:
    """The most by which our losses differ from those of plain torch, or with a policy from FSDP2's on this mesh."""
    ours, other = wrapped(fully_shard, mesh, divide, **options), made()
    if options.get("frozen"):
        freeze(other)
    if "mp_policy" in options:
        other = wrapped(theirs.fully_shard, mesh, divide, **options)
    pairs = zip(losses_of(ours, adamw(ours)), losses_of(other, adamw(other)), strict=True)
    return max(abs(a - b) for a, b in pairs)


def full(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Full tensors of a state dict. Every worker calls it."""
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in values.items()}


def states(mesh: DeviceMesh) -> Iterator[tuple[str, bool]]:
    """State dicts of a model and its optimizer, taken and given back in both forms."""
    model = wrapped(fully_shard, mesh, tensor_parallel)
    optimizer = adamw(model)
    losses_of(model, optimizer)
    taken, moments = model.state_dict(), optimizer.state_dict()
    values = full(taken)
    on_servers = dict(sharded_model(model).full_parameters())
    yield "values of the state dict", all(torch.equal(values[name], on_servers[name]) for name in on_servers)
    after = losses_of(model, optimizer, STEPS)
    for form, given in (("of DTensors", taken), ("of full tensors", values)):
        model.load_state_dict(given)
        optimizer.load_state_dict(moments)
        now = dict(sharded_model(model).full_parameters())
        yield f"values loaded {form}", all(torch.equal(values[name], now[name]) for name in now)
        yield f"losses after loading {form}", losses_of(model, optimizer, STEPS) == after
    params = dict(model.named_parameters())
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    alike = (
        isinstance(state[i]["exp_avg"], DTensor) == isinstance(params[name], DTensor) for i, name in enumerate(names)
    )
    yield "forms of the moments", all(alike)


def variants(store: Path) -> dict[str, float | bool]:
    """Differences from torch by name; True where something is as it should be."""
    torch.set_num_threads(1)
    world = join(store)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    bf16 = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found: dict[str, float | bool] = {
        "sequence parallel": compared(mesh, tensor_parallel),
        "plain parameters": compared(mesh, simply_parallel),
        "resident": compared(mesh, tensor_parallel, reshard_after_forward=False),
        "activation checkpoints": compared(mesh, tensor_parallel, checkpoints=True),
        "frozen": compared(mesh, tensor_parallel, frozen=True),
        "bfloat16": compared(mesh, tensor_parallel, mp_policy=bf16),
        **dict(states(mesh)),
    }
    world.close()
    return found
