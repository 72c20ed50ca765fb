"""A model on a mesh of workers, trained from a checkpoint of another mesh. `test_mesh_checkpoints.py` runs it.

Usage: mesh_checkpoint_program.py DIRECTORY DP PP TP FIRST LAST [LOADED]

It trains from step FIRST to LAST, from the checkpoint LOADED if there is one, saves a checkpoint DPxPPxTP, and reports
how far its parameters are from those of plain torch. After the first step the optimizer loads its own state dict.
Stages of pp hand their activations on by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import axon_ps
from axon_ps.parallel import fully_shard, sharded_model

ROWS, WIDTH, MAX_NORM = 8, 8, 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12, bias=False)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))

    def forward(self, x: torch.Tensor, stage: int | None = None) -> torch.Tensor:
        """Of one stage, or of all of them."""
        x = self.first(x) if stage in (None, 0) else x
        return self.last(x) if stage in (None, 1) else x


def made() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 12, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1)


def plain(steps: int) -> Net:
    """The model that plain torch makes of all samples."""
    model = made()
    optimizer = optimizer_of(model)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, stage: int, peers: list[int]) -> None:
    """Run forward and backward of one stage."""
    if len(peers) == 1:
        nn.functional.mse_loss(model(x), y).backward()
    elif stage == 0:
        out, grad = model(x, 0), torch.empty(x.shape)
        dist.send(out.detach().contiguous(), peers[1])
        dist.recv(grad, peers[1])
        out.backward(grad)
    else:
        given = torch.empty(x.shape)
        dist.recv(given, peers[0])
        given.requires_grad_()
        nn.functional.mse_loss(model(given, 1), y).backward()
        assert given.grad is not None
        dist.send(given.grad, peers[0])


def divided(model: Net, mesh: DeviceMesh, stages: int, stage: int) -> Net:
    if mesh["tp"].size() > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
    if stages > 1:
        for name in ("norm", "head") if stage == 0 else ("up", "down"):
            setattr(model, name, None)
    for child in model.children():
        fully_shard(child, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def main() -> None:
    directory, (dp, pp, tp, first, last) = Path(sys.argv[1]), map(int, sys.argv[2:7])
    dist.init_process_group("gloo")
    world = axon_ps.World.init()
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh["pp"].get_local_rank()
    model = divided(made(), mesh, pp, stage)
    optimizer = optimizer_of(model)
    sharded = sharded_model(model)
    if len(sys.argv) > 7:
        sharded.load_checkpoint(sys.argv[7], optimizer)
    loaded = sharded.version
    mine, peers = slice(mesh["dp"].get_local_rank(), None, dp), mesh["pp"].mesh.flatten().tolist()
    for step in range(first, last):
        optimizer.zero_grad()
        x, y = batch(step)
        train(model, x[mine], y[mine], stage, peers)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if step == first:  # the moments go out and in, too
            optimizer.load_state_dict(optimizer.state_dict())
    sharded.save_checkpoint(str(directory / f"{dp}x{pp}x{tp}"), optimizer)
    ours, theirs = dict(sharded.full_parameters()), dict(plain(last).named_parameters())
    result = {
        "names": sorted(ours) == sorted(theirs),
        "difference": max(float((ours[name] - theirs[name]).detach().abs().max()) for name in theirs),
        "loaded": loaded,
        "version": sharded.version,
    }
    (directory / f"result.{dist.get_rank()}").write_text(json.dumps(result))
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
