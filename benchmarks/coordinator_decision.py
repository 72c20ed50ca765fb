"""Time of a step's decision: from the last vote until every member has the decision.

The coordinator is a process of its own, as in production; all members are in this process. Two times are measured for
each size and store: until the first and the last member have the decision, and that of the store alone for the records
of one decision. etcd has one member, or three, all on this machine and its disk. Without it (apt-get install
etcd-server) its rows are left out.

    python benchmarks/coordinator_decision.py [--quick] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from axon_ps.coordinator.client.session import CoordinatorClient, Event, JobState
from axon_ps.coordinator.core.records import decision_record, progress_record
from axon_ps.rpc.security import Security
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.storage.state_store import SharedStateStore, open_store
from axon_ps.types import Decision, DType, ModelProgress, OptimizerSpec, Outcome, Role
from axon_ps.wire.events import Ready, Vote
from axon_ps_lab import report
from axon_ps_lab.etcd import LocalEtcd, is_installed

SERVER = """
import asyncio, sys
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server.server import serve
from axon_ps.host.malloc import collect_rarely, limit_arenas
from axon_ps.storage.state_store import open_store
from axon_ps.rpc.security import Security

state, workers, shards = sys.argv[1].partition(":"), int(sys.argv[2]), int(sys.argv[3])
collect_rarely()
limit_arenas()
config = CoordinatorConfig(job="bench", world_size=workers, num_shards=shards)
with open_store(state[0], state[2]) as store:
    ready = lambda port: print(port, flush=True)
    asyncio.run(serve(config, "127.0.0.1", 0, Security(), store, ready, asyncio.Event()))
"""

HYPER = {"lr": 1e-3}
SIZES = ((2, 2), (16, 4), (64, 8))
"""Numbers of workers and shard servers."""


def model_of(shards: int) -> tuple[JobSpec, OptimizerSpec]:
    """Return a model of two units for each shard server."""
    units = tuple(build_unit(f"u{i}", [(f"u{i}.w", (1 << 16,), DType.F32)]) for i in range(shards * 2))
    return JobSpec(layout=Layout(units=units)), OptimizerSpec(name="adamw", groups=(HYPER,), group_of=(0,) * len(units))


class Bench:
    """All members of one job, and the times at which they last received a decision."""

    def __init__(self, port: int, workers: int, shards: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.members = [self._member(Role.SHARD, i) for i in range(shards)]
        self.members += [self._member(Role.WORKER, i) for i in range(workers)]
        self.shards, self.workers = self.members[:shards], self.members[shards:]
        self.received: list[float] = []
        self.news = asyncio.Event()

    def _member(self, role: Role, rank: int) -> CoordinatorClient:
        return CoordinatorClient(
            self.address,
            job="bench",
            role=role,
            node="bench",
            security=Security(),
            listen_address=f"127.0.0.1:{rank + 1}" if role is Role.SHARD else "",
            requested_rank=rank,
            on_event=self._receive,
        )

    def _receive(self, event: Event) -> None:
        if isinstance(event, Decision):
            self.received.append(time.perf_counter())
            if len(self.received) == len(self.members):
                self.news.set()
        elif isinstance(event, JobState):
            self.news.set()

    async def start(self) -> None:
        """Join, and register a model."""
        for member in self.members:
            await member.start(30.0)
        await self.register()

    async def register(self) -> None:
        """Register a model, and wait until the servers have its values."""
        spec, optimizer = model_of(len(self.shards))
        for worker in self.workers:
            await worker.register(spec, optimizer)
        for shard in self.shards:
            shard.initialized(version=0, epoch=0)
        while not all(m.job_state is not None and m.job_state.initialized for m in self.members):
            self.news.clear()
            await self.news.wait()

    async def step(self, number: int, before_s: float = 0.0) -> tuple[float, float]:
        """Make one step; returns seconds from the last vote to the first and to the last decision.

        Args:
            number: number of the step.
            before_s: seconds that all other workers vote earlier.
        """
        self.received.clear()
        self.news.clear()
        generation = self.members[0].context().generation
        for shard in self.shards:
            state = shard.job_state
            assert state is not None
            assert state.placement is not None
            sums = (1.0,) * 2  # of two slices each
            shard.ready(
                Ready(generation=generation, step=number, sums_of_squares=sums, placement=state.placement.number)
            )
        for worker in self.workers:
            if worker is self.workers[-1] and before_s:
                await asyncio.sleep(before_s)
            worker.vote(Vote(generation=generation, step=number, max_norm=1.0, hyper=(HYPER,)))
        began = time.perf_counter()
        async with asyncio.timeout(30.0):
            await self.news.wait()
        return self.received[0] - began, self.received[-1] - began


async def measure(port: int, workers: int, shards: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the times in ms to the first and to the last member, of each step."""
    bench = Bench(port, workers, shards)
    await bench.start()
    times = [await bench.step(number) for number in range(1, steps + 1)][steps // 10 :]
    await asyncio.gather(*(m.close() for m in bench.members))
    return [first * 1e3 for first, _ in times], [last * 1e3 for _, last in times]


def store_alone(state: str, steps: int) -> list[float]:
    """Return the times in ms that the store takes for the records of one decision."""
    times = []
    name, _, address = state.partition(":")
    with open_store(name, address) as store:
        if isinstance(store, SharedStateStore):
            store.campaign()
        store.load()
        for step in range(steps):
            decision = Decision(step=step, generation=3, outcome=Outcome.COMMIT, version=step, hyper=(HYPER,))
            progress = ModelProgress(model=0, step=step, version=step)
            records = [decision_record(decision), progress_record(progress)]
            began = time.perf_counter()
            store.apply(records)
            times.append((time.perf_counter() - began) * 1e3)
    return times


def row(what: str, times: Sequence[float]) -> dict[str, str | float]:
    """Return the median, 95th percentile and worst of some times in ms."""
    ordered = sorted(times)
    p95 = ordered[int(len(ordered) * 0.95)]
    return {"what": what, "median_ms": statistics.median(ordered), "p95_ms": p95, "max_ms": ordered[-1]}


def in_process(state: str, workers: int, shards: int, steps: int) -> tuple[list[float], list[float]]:
    """Run `measure` with a coordinator of its own."""
    command = [sys.executable, "-c", SERVER, state, str(workers), str(shards)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            return asyncio.run(measure(int(server.stdout.readline()), workers, shards, steps))
        finally:
            server.kill()


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50 steps, writes no file")
    parser.add_argument("--directory", default=None, help="where the sqlite file is made: on the disk that matters")
    options = parser.parse_args()
    steps = 50 if options.quick else 300
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
        stores = {"sqlite": f"sqlite:{directory}"}
        if is_installed():
            for members in (1, 3):
                stores[f"etcd of {members}"] = f"etcd:{stack.enter_context(LocalEtcd(members)).address}"
        rows = [row(f"the store alone ({name})", store_alone(f"{at}/alone", steps)) for name, at in stores.items()]
        for workers, shards in SIZES:
            for name, at in {"memory": "memory:", **stores}.items():
                first, last = in_process(f"{at}/{workers}", workers, shards, steps)
                what = f"{workers} workers, {shards} shard servers, {name}"
                rows += [row(f"{what}: first member", first), row(f"{what}: last member", last)]
    columns = ("what", "median_ms", "p95_ms", "max_ms")
    report.table("From the last vote to the decision", columns, [[r[c] for c in columns] for r in rows])
    if not options.quick:
        report.write("coordinator_decision", rows, steps=steps)


if __name__ == "__main__":
    main()
