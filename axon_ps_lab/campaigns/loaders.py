"""`make lab NAME=loaders`: training from data loaders, 20 runs of each cell, and the errors when a loader worker dies.

The cells combine loaders (without workers, or with one or four by fork, spawn or forkserver), FSDP, DDP or PyTorch's
own DDP over the backend "axon", and runs with and without shared memory. A run is a new loader, and so new processes,
for an epoch of training steps on two ranks; each rank does half of the runs. A run is well when every batch is right,
every step done and no process left. Besides, a worker of a loader is killed with every kind and start method, and forks
of a program try all calls of `loader_worker.refusals`.

    python -m axon_ps_lab.campaigns.loaders [--runs 20] [--kind fsdp] [--method fork]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from axon_ps.testing import LocalCluster, preloaded
from axon_ps_lab.campaigns import loader_worker

MEMORY = {"shared memory": {}, "gRPC only": loader_worker.WITHOUT_SHARED_MEMORY}
RANKS = 2
_LIMIT_S = 1800.0


def cases_of(kind: str, methods: Sequence[str], times: int) -> bool:
    """Run all cells of one kind; returns True if all of them went well."""
    good = True
    cases = [*([(0, "fork")] if "fork" in methods else []), *((n, method) for n in (1, 4) for method in methods)]
    for memory, environment in MEMORY.items():
        begun = time.monotonic()
        with LocalCluster(shards=1, world_size=RANKS, lease_s=30.0) as cluster:
            args = (kind, cases, -(-times // RANKS))
            results = cluster.run_workers(
                loader_worker.runs, args=args, env=environment, timeout_s=_LIMIT_S, check=False
            )
        well = {case: sum((r.value or {}).get(f"{case[0]} {case[1]}", 0) for r in results) for case in cases}
        for (workers, method), count in well.items():
            print(f"{kind:5} {memory:14} {workers} workers {method:11} {count:3} of {times}", flush=True)
        print(f"      {time.monotonic() - begun:.0f} s", *(r.error for r in results if r.error), flush=True)
        good &= all(count >= times for count in well.values()) and not any(r.error for r in results)
    return good


def deaths_of(kind: str, methods: Sequence[str]) -> bool:
    """Kill a loader worker with each start method; returns True if torch's own error results."""
    good = True
    for method in methods:
        with LocalCluster(shards=1) as cluster:
            (result,) = cluster.run_workers(loader_worker.killed, args=(kind, method), timeout_s=300.0, check=False)
        message = result.value or result.error
        print(f"{kind:5} a loader worker is killed  {method:11} {message.splitlines()[0]}", flush=True)
        good &= str(message).startswith("DataLoader worker (pid")
    return good


def refusals() -> bool:
    """Run a program whose forks try everything; returns True if all but the harmless tries raise `Misuse`."""
    with LocalCluster(shards=1) as cluster:
        (result,) = cluster.run_workers(Path(loader_worker.__file__), timeout_s=300.0)
    messages: dict[str, str] = json.loads(result.output.splitlines()[-1])
    for what, message in messages.items():
        print(f"fork  {what:20} {message[:60] or 'nothing'}", flush=True)
    return sum(message.startswith("Misuse") for message in messages.values()) == len(messages) - len(
        loader_worker.HARMLESS
    )


def main() -> int:
    """Run the campaign; returns 0 if every run was well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kind", choices=loader_worker.KINDS, action="append", help="only this one; may be repeated")
    parser.add_argument("--method", choices=loader_worker.METHODS, action="append", help="the same of start methods")
    options = parser.parse_args()
    with preloaded(("torch", "torch.distributed.tensor", "axon_ps.parallel", "axon_ps.worker.world")):
        good = refusals()
        for kind in options.kind or loader_worker.KINDS:
            methods = options.method or loader_worker.METHODS
            good &= cases_of(kind, methods, options.runs)
            good &= deaths_of(kind, methods)
    print("all well" if good else "NOT all well")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
