"""A worker that trains a little, writes its numbers and those of the servers to a file, and stays until it may go."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import axon_ps
from axon_ps.parallel import SGD
from axon_ps.parallel import FullyShardedDataParallel as FSDP

STEPS = 6


def main(directory: Path) -> None:
    """Train, write RANK.json, and wait for the file `go`."""
    torch.manual_seed(0)
    with axon_ps.World.init() as world:
        model = FSDP(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), world.default_group)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        world.default_group.all_reduce(torch.ones(100))
        world.barrier("trained")
        numbers = {"worker": world.statistics(), "fsdp": model.statistics(), "version": world.version}
        if world.rank == 0:
            numbers["shards"] = [world.server_statistics(i) for i in range(world.num_shards)]
        partial = directory / f"{world.rank}.partial"
        partial.write_text(json.dumps(numbers))
        os.replace(partial, directory / f"{world.rank}.json")
        paused = threading.Event()
        while not (directory / "go").exists():
            paused.wait(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
