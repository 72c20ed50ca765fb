"""A mesh with tensor parallelism on one axis, data parallelism on the other, and a pipeline."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import axon_ps
from axon_ps import ProcessGroup
from axon_ps.parallel import DDP, ColumnParallelLinear, Mesh, Pipeline, RowParallelLinear, clip_grad_norm


class Mlp(nn.Module):
    """Two matrices, sharded among the ranks of a group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, group=group, gather_output=False, dtype="float32")
        self.down = RowParallelLinear(16, 8, group=group, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y: [batch, 8] of x: [batch, 8]."""
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


def train(model: DDP, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Train, with clipping over all axes of the mesh."""
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        clip_grad_norm(model, 1.0, mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()


def main(world: axon_ps.World) -> float:
    """Train in both ways; return the loss of the pipeline."""
    mesh = Mesh(world.default_group, data=-1, tensor=world.world_size)
    tensor = assert_type(mesh.group("tensor"), ProcessGroup)
    model = DDP(Mlp(tensor), mesh.group("data"))
    train(model, torch.optim.AdamW(model.parameters()), mesh)

    stages = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)]
    pipeline = Pipeline.from_modules(
        stages,
        num_stages=world.world_size,
        group=world.default_group,
        num_microbatches=4,
        schedule="1f1b",
        loss_fn=nn.functional.mse_loss,
    )
    loss = assert_type(pipeline.step(torch.ones(8, 8), torch.zeros(8, 1)), torch.Tensor)
    return loss.item()


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))
