"""The training script of the rolling upgrade; it runs with the oldest axon_ps of the protocol and with this one.

    python upgrade_worker.py END        # trains until the version in the file END is reached

It prints a line with the file of its axon_ps, and then a line of JSON for each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import axon_ps
from axon_ps.parallel import FSDP, AdamW


def main() -> None:
    """Train."""
    end, last = Path(sys.argv[1]), 0
    torch.set_num_threads(1)
    print(json.dumps({"package": axon_ps.__file__}), flush=True)
    with axon_ps.World.init(timeout_s=120) as world:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        model = FSDP(module, world.default_group, unit_types={torch.nn.Linear})
        optimizer = AdamW(model.parameters(), lr=1e-3)
        while not last or model.version < last:
            data = torch.randn(4, 64, generator=torch.Generator().manual_seed(model.version * 2 + world.rank))
            model(data).square().mean().backward()
            result = optimizer.step()
            optimizer.zero_grad()
            line = {"version": result.version, "committed": result.committed, "reason": result.reason}
            print(json.dumps(line), flush=True)
            if not last and end.exists():
                last = int(end.read_text() or 0)


if __name__ == "__main__":
    main()
