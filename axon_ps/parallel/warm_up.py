"""Loading all that a first training step loads, before it: for processes that stand by to replace a worker.

torch imports half of itself when the first optimizer is made, and starts its engine in the first backward. Our own
loops for compressed parameters and gradients are compiled, or read from disk, when they are first used.
"""

from __future__ import annotations

import torch

from axon_ps.compress.int4 import Int4
from axon_ps.compress.int8 import Int8
from axon_ps.shard.client import transfers


def warm_up() -> None:
    """Make one training step of a single weight on the CPU, without random numbers, and load the compression loops."""
    weight = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float32, device="cpu"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torch.nn.functional.linear(torch.ones(1, 1, dtype=torch.float32, device="cpu"), weight).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    Int8().warm_up()
    Int4().warm_up()
    transfers.warm_up()
