"""DiLoCo and local SGD: plain modules with plain optimizers, synchronised every few steps."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import axon_ps
from axon_ps import StepResult
from axon_ps.parallel import DiLoCo, LocalSGD


def main(world: axon_ps.World) -> int:
    """Train both; return their outer steps."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    inner = torch.optim.AdamW(net.parameters(), lr=4e-4)
    diloco = DiLoCo(
        net, inner, world, inner_steps=2, outer_lr=0.7, wire_dtype="int8", unit_types=nn.Linear, name="diloco"
    )
    for _ in range(4):
        net(torch.randn(4, 8)).square().mean().backward()
        assert_type(diloco.step(), StepResult | None)
        inner.zero_grad()
    with diloco.synced_parameters():
        print(net(torch.ones(1, 8)))

    other = nn.Linear(8, 1)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    local = LocalSGD(other, plain, world, inner_steps=2, name="local")
    for _ in range(2):
        other(torch.randn(4, 8)).square().mean().backward()
        local.step()
        plain.zero_grad()
    return assert_type(diloco.version, int) + local.version


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))
