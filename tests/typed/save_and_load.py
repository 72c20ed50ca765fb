"""Checkpoints: written by the servers at once or in the background, loaded, and restored as a whole."""

from __future__ import annotations

import tempfile
from typing import assert_type

import torch
from torch import nn

import axon_ps
from axon_ps import CheckpointInfo
from axon_ps.parallel import FSDP, AdamW


def main(world: axon_ps.World) -> int:
    """Save two checkpoints and load the first; return its version."""
    model = FSDP(nn.Linear(4, 2), world)
    optimizer = AdamW(model.parameters(), lr=0.1)
    directory = world.agree("directory", tempfile.mkdtemp())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.is_main_process:
        info = assert_type(world.save_checkpoint(f"{directory}/1", extra={"epoch": 1}), CheckpointInfo)
        saving = world.save_checkpoint(f"{directory}/2", async_op=True)
        assert_type(saving.wait(), CheckpointInfo)
        print(info.uri, info.version)
    world.barrier()
    print(sorted(model.state_dict()))
    model.load_checkpoint(f"{directory}/1", optimizer)
    return assert_type(model.version, int)


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))
