"""A process of torchft, for `chaos_torchft.py`: its lighthouse, or a worker as in torchft's own example train_ddp.py.

It is run by the Python that has torchft. A worker writes down the samples of every attempt before it computes with
them, and whether the attempt has committed. Its data loader continues after its last committed batch, as if it were
saved with every step, which torchft recommends.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

INPUTS, LAYERS, SEED = 16, 3, 7


def serve(heartbeat_s: float) -> None:
    """Run the lighthouse, as in torchft's README except for the tolerated silence of a worker."""
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=int(1000 * heartbeat_s),
    )
    print(lighthouse.address(), flush=True)
    while True:
        time.sleep(3600)


def build(width: int) -> nn.Module:
    """Make the model of `axon_ps_lab.chaos.training`."""
    torch.manual_seed(SEED)
    middle = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), *middle, nn.Linear(width, 1))


def train(lighthouse: str, replica: int, notes: Path, begin: int, options: argparse.Namespace) -> None:
    """Train without end, on every `workers`-th batch from `begin` on."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = build(options.width)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"chaos_{replica}_",
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, sgd)
    generator = torch.Generator().manual_seed(SEED)
    each = options.batch // options.workers
    with open(notes, "a", encoding="utf-8") as file:
        number = begin
        while True:
            first = (number * options.workers + replica) * each
            file.write(json.dumps({"attempt": number, "samples": list(range(first, first + each))}) + "\n")
            file.flush()
            optimizer.zero_grad()
            x, y = torch.randn(each, INPUTS, generator=generator), torch.randn(each, 1, generator=generator)
            before = manager.current_step()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if manager.current_step() > before:
                took_part = manager.is_participating()
                found = {"committed": number, "used": took_part, "of": manager.num_participants()}
                file.write(json.dumps(found | {"at": time.monotonic()}) + "\n")
                file.flush()
            number += 1
            time.sleep(options.pause_s)


def main() -> None:
    """Run the lighthouse, or a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=float, default=0.0, help="be the lighthouse, with this heartbeat timeout")
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=183)
    parser.add_argument("--pause-s", type=float, default=0.04)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    train(options.lighthouse, options.replica, options.notes, options.begin, options)


if __name__ == "__main__":
    main()
