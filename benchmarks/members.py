"""How a job's control plane grows: real sessions of so many members with one coordinator, a process of its own.

All members live in a second process, so both have a core of a machine with two. Measured per size: until everybody has
the complete membership, and the processor time of the coordinator for that; its memory a member; a barrier of all
workers; from the last vote to the decision in the last member's hands; and until everybody knows of a death.

    python benchmarks/members.py [--sizes 64 256 1024]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import _report
from axon_ps.rpc.security import Security
from axon_ps.types import Membership
from cluster import cpu_s, rss_mib
from coordinator_decision import SERVER, Bench

SHARDS = 4
STEPS = 20
LIMIT_S = 300.0


class Members(Bench):
    """All members of one job, in this process."""

    async def until(self, reached: Callable[[Membership], bool]) -> float:
        """Seconds until every member's membership is as wanted."""
        began = time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            while not all(m.membership is not None and reached(m.membership) for m in self.members):
                await asyncio.sleep(0.002)
        return time.perf_counter() - began

    async def join(self) -> float:
        """Seconds until every member has the complete membership."""
        began = time.perf_counter()
        await asyncio.gather(*(m.start(LIMIT_S) for m in self.members))
        await self.until(lambda known: known.complete)
        return time.perf_counter() - began

    async def barrier(self, name: str) -> float:
        """Seconds until all workers have passed."""
        began = time.perf_counter()
        await asyncio.gather(*(w.barrier(name, timeout_s=LIMIT_S) for w in self.workers))
        return time.perf_counter() - began

    async def death(self) -> float:
        """Seconds until everybody knows that the last worker, whose connection breaks, is none any more."""
        gone = self.workers.pop()
        self.members.remove(gone)
        known = self.members[0].membership
        assert known is not None
        assert gone._task is not None
        gone._closing = True  # it does not come back
        gone._task.cancel()
        return await self.until(lambda now: now.generation > known.generation)


async def measure(port: int, pid: int, size: int) -> dict[str, float]:
    """One row."""
    job = Members(port, size - SHARDS, SHARDS)
    before_s, before_mib = cpu_s(pid), rss_mib(pid)
    joined_s = await job.join()
    row = {"members": float(size), "join_s": joined_s, "join_coordinator_cpu_s": cpu_s(pid) - before_s}
    row["coordinator_kib_a_member"] = 1024 * (rss_mib(pid) - before_mib) / size
    row["barrier_s"] = statistics.median([await job.barrier(f"b{i}") for i in range(5)])
    await job.register()
    decided = [(await job.step(number))[1] for number in range(1, STEPS + 1)]
    row["decision_ms"] = 1e3 * statistics.median(decided)
    row["death_s"] = await job.death()
    await asyncio.gather(*(m.close() for m in job.members))
    return row


def in_process(size: int) -> dict[str, float]:
    """`measure` with a coordinator of its own."""
    command = [sys.executable, "-c", SERVER, "memory:", str(size - SHARDS), str(SHARDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            return asyncio.run(measure(int(server.stdout.readline()), server.pid, size))
        finally:
            server.kill()


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1000], help="members")
    parser.add_argument("--quick", action="store_true", help="64 and 128 alone, writes no file")
    options = parser.parse_args()
    rows = []
    for size in (64, 128) if options.quick else options.sizes:
        rows.append(in_process(size))
        print(f"{size} members joined in {rows[-1]['join_s']:.2f} s", file=sys.stderr, flush=True)
    _report.table("Members of one job", list(rows[0]), [list(row.values()) for row in rows])
    if not options.quick:
        print(_report.write("members", rows, shard_servers=SHARDS, security=str(Security())))


if __name__ == "__main__":
    main()
