"""`make lab NAME=group-soak`: two groups with overlapping members, used from several threads, for thousands of calls.

    python -m axon_ps_lab.campaigns.group_soak [--calls 10000] [--backends shm grpc hierarchical]

There are three ranks. All of them are one group, and the last two are the other; each group is used by a thread of its
own. Every result is checked, and the resident memory is compared: that of every rank after a tenth of the calls and at
the end, that of every shard server before the calls and at the end.
"""

from __future__ import annotations

import argparse
import sys
import threading

import numpy as np
import psutil

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.testing import LocalCluster
from axon_ps.types import ReduceOp, Role

CALLS_A_ROUND = 3
MOST_GROWTH_BYTES = 8 << 20


def use(group: ProcessGroup, rounds: int) -> int:
    """Make the calls of one group; returns the number of wrong rounds."""
    wrong = 0
    rank, n = group.rank, group.world_size
    for i in range(rounds):
        total = group.all_reduce(np.array([rank + i])).item()
        gathered = group.all_gather(np.array([rank], np.uint8)).tolist()
        best = group.all_reduce(np.full(3, rank, np.int32), ReduceOp.MAX).tolist()
        wrong += (total, gathered, best) != (sum(range(n)) + n * i, list(range(n)), [n - 1] * 3)
    return wrong


def worker(calls: int) -> tuple[int, int]:
    """Run one rank; returns the number of wrong rounds, and the bytes by which its memory grew."""
    with axon_ps.World.init(timeout_s=300.0) as world:
        groups = [world.new_group([0, 1, 2]), world.new_group([2, 1])]
        mine = [g for g in groups if g.contains(world.rank)]
        in_all = calls // (CALLS_A_ROUND * len(groups))
        wrong: list[int] = []
        memory = []
        for rounds in (in_all // 10, in_all - in_all // 10):
            threads = [threading.Thread(target=lambda g=g, p=rounds: wrong.append(use(g, p))) for g in mine]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            memory.append(psutil.Process().memory_info().rss)
        world.barrier("done")
        return (sum(wrong) if len(wrong) == 2 * len(mine) else -1), memory[1] - memory[0]


def main() -> None:
    """Run every backend; exits with 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="collectives of both groups together")
    parser.add_argument("--backends", nargs="+", default=["shm", "grpc"])
    options = parser.parse_args()
    failed = False
    for backend in options.backends:
        with LocalCluster(shards=2, world_size=3, environment={"AXON_PS_BACKEND": backend}) as cluster:
            servers = [psutil.Process(cluster.process(Role.SHARD, i).pid) for i in range(2)]
            before = [server.memory_info().rss for server in servers]
            results = [r.value for r in cluster.run_workers(worker, args=(options.calls,), timeout_s=600.0)]
            grown = [s.memory_info().rss - b for s, b in zip(servers, before, strict=True)]
        wrong = sum(abs(w) for w, _ in results)
        growth = [g for _, g in results]
        bad = wrong != 0 or max(growth) > MOST_GROWTH_BYTES or max(grown) > 8 * MOST_GROWTH_BYTES
        failed = failed or bad
        mib = [f"{g / 2**20:+.1f}" for g in growth]
        servers_mib = [f"{g / 2**20:+.1f}" for g in grown]
        print(
            f"{backend}: {options.calls} calls, {wrong} rounds wrong, ranks grew by {mib} MiB, servers by {servers_mib}"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
