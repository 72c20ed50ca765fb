"""Growth of a job's control plane with the number of members, with one coordinator, a process of its own.

All members are in a second process, so both have a core of a machine with two. They are either real members with a
session each, or hosts of 40 with real host sessions (see `hosts.py`). Measured for each size are:

- the time until all members have the complete membership, and the coordinator's processor time for that;
- the coordinator's memory for each member;
- a barrier of all workers;
- the time until all members have a decision, from the vote of all at once, and from the last vote after the others;
- the time until all members know of a death.

    python benchmarks/members.py [--sizes 64 256 1000] [--hosts 25 250]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from axon_ps.rpc.security import Security
from axon_ps.types import Membership
from axon_ps_lab import report
from cluster import cpu_s, rss_mib
from coordinator_decision import SERVER, Bench
from hosts import Hosts

SHARDS = 4
STEPS = 20
LIMIT_S = 300.0
ON_A_HOST = 40


class Members(Bench):
    """All members of one job, in this process, each with a session."""

    async def until(self, reached: Callable[[Membership], bool]) -> float:
        """Return the seconds until every member's membership meets the condition."""
        began = time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            while not all(m.membership is not None and reached(m.membership) for m in self.members):
                await asyncio.sleep(0.002)
        return time.perf_counter() - began

    async def join(self) -> float:
        """Let all members join; returns seconds until every member has the complete membership."""
        began = time.perf_counter()
        await asyncio.gather(*(m.start(LIMIT_S) for m in self.members))
        await self.until(lambda known: known.complete)
        return time.perf_counter() - began

    async def barrier(self, name: str) -> float:
        """Return the seconds until all workers have passed a barrier."""
        began = time.perf_counter()
        await asyncio.gather(*(w.barrier(name, timeout_s=LIMIT_S) for w in self.workers))
        return time.perf_counter() - began

    async def decided_s(self, number: int, before_s: float = 0.0) -> float:
        """Return the seconds until all members have a step's decision; see `Bench.step`."""
        return (await self.step(number, before_s))[1]

    async def death(self) -> float:
        """Break the last worker's connection; returns seconds until all others know that it is no longer a member."""
        gone = self.workers.pop()
        self.members.remove(gone)
        known = self.members[0].membership
        assert known is not None
        assert gone._task is not None
        gone._closing = True  # it does not come back
        gone._task.cancel()
        return await self.until(lambda now: now.generation > known.generation)

    async def close(self) -> None:
        """Let all members leave."""
        await asyncio.gather(*(m.close() for m in self.members))


async def measure(port: int, pid: int, size: int, hosts: int) -> dict[str, float]:
    """Measure one row."""
    job = Hosts(port, size - SHARDS, hosts, SHARDS) if hosts else Members(port, size - SHARDS, SHARDS)
    before_s, before_mib = cpu_s(pid), rss_mib(pid)
    joined_s = await job.join()
    row = {"members": float(size), "host_sessions": float(hosts), "join_s": joined_s}
    row["join_coordinator_cpu_s"] = cpu_s(pid) - before_s
    row["coordinator_kib_a_member"] = 1024 * (rss_mib(pid) - before_mib) / size
    gc.freeze()  # pauses of this process should not count as the coordinator's
    row["barrier_s"] = statistics.median([await job.barrier(f"b{i}") for i in range(5)])
    await job.register()
    together = [await job.decided_s(number) for number in range(1, STEPS + 1)]
    last = [await job.decided_s(number, 0.2 + size / 1e4) for number in range(STEPS + 1, STEPS + 6)]
    row["decision_ms"] = 1e3 * statistics.median(together)
    row["decision_after_last_vote_ms"] = 1e3 * statistics.median(last)
    row["death_s"] = await job.death()
    await job.close()
    return row


def in_process(size: int, hosts: int) -> dict[str, float]:
    """Run `measure` with a coordinator of its own."""
    command = [sys.executable, "-c", SERVER, "memory:", str(size - SHARDS), str(SHARDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            return asyncio.run(measure(int(server.stdout.readline()), server.pid, size, hosts))
        finally:
            server.kill()


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128, 256, 512, 1000], help="members")
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 6, 25, 62, 125, 250], help=f"of {ON_A_HOST} each")
    parser.add_argument("--quick", action="store_true", help="128 members and 2 hosts alone, writes no file")
    options = parser.parse_args()
    sizes, hosts = ([128], [2]) if options.quick else (options.sizes, options.hosts)
    rows = []
    for size, count in [*((size, 0) for size in sizes), *((count * ON_A_HOST, count) for count in hosts)]:
        rows.append(in_process(size, count))
        on = f" on {count} hosts" if count else ""
        print(f"{size} members{on} joined in {rows[-1]['join_s']:.2f} s", file=sys.stderr, flush=True)
    report.table("Members of one job", list(rows[0]), [list(row.values()) for row in rows])
    if not options.quick:
        print(report.write("members", rows, shard_servers=SHARDS, security=str(Security())))


if __name__ == "__main__":
    main()
