"""An elastic loader: every sample of an epoch once, whoever comes and goes."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import TensorDataset

import axon_ps
from axon_ps import StepResult
from axon_ps.parallel import FSDP, SGD, ElasticLoader


def main(world: axon_ps.World) -> int:
    """Train two epochs; return the number of samples that were used."""
    model = FSDP(nn.Linear(8, 1), world)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = ElasticLoader(TensorDataset(torch.ones(32, 8)), model, batch_size=8, shuffle=True)
    for epoch in loader.epochs(2):
        assert_type(epoch, int)
        for (batch,) in loader:
            model(batch).square().mean().backward()
            result = assert_type(optimizer.step(commit={"seen": loader.position.samples}), StepResult)
            optimizer.zero_grad()
            if world.is_main_process and result.committed:
                print(epoch, result.version, result.grad_norm)
    return assert_type(loader.position.samples, int)


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))
