"""A worker that trains under traces and writes its numbers, and those of the servers, before and after the steps."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps.parallel import SGD
from axon_ps.parallel import FullyShardedDataParallel as FSDP


def numbers(world: axon_ps.World) -> dict[str, Any]:
    found: dict[str, Any] = {"worker": world.statistics()}
    if world.rank == 0:
        found["shards"] = [world.server_statistics(i) for i in range(world.num_shards)]
    return found


def main(directory: Path, steps: int, pause_s: float) -> None:
    """Train, and write RANK.json."""
    torch.manual_seed(0)
    pause = threading.Event()
    with axon_ps.World.init() as world:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
        model = FSDP(nn.Sequential(*layers, nn.Linear(64, 8)), world.default_group, unit_types={nn.Sequential})
        optimizer = SGD(model.parameters(), lr=0.1)
        world.barrier("ready")
        before, outcomes = numbers(world), []
        world.barrier("go")
        while sum(outcomes) < steps:
            model(torch.randn(4, 64)).square().mean().backward()
            outcomes.append(optimizer.step().committed)
            optimizer.zero_grad()
            pause.wait(pause_s)
            (directory / f"{world.rank}.step").write_text(str(len(outcomes)))
        model.reshard_parameters()  # what was prefetched for another step
        world.barrier("trained")
        after = numbers(world) | {"outcomes": outcomes, "fsdp": model.statistics(), "version": world.version}
        world.barrier("counted")
        partial = directory / f"{world.rank}.partial"
        partial.write_text(json.dumps({"before": before, "after": after}))
        os.replace(partial, directory / f"{world.rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
