"""Members hear of placements and decisions in the same order, but not at the same time: whatever the delays, steps end.

Real shard servers and clients over gRPC. The coordinator here changes the placement at random, as the real one may, and
each member gets its events late, by a random time of its own. The oracle is a sum in numpy, of whole numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import numpy as np
import pytest

from axon_ps.sharding import placement as placements
from axon_ps.types import Array, Decision, Outcome
from axon_ps.wire.events import Event, JobState
from shard_fakes import TIMEOUT_S, CuttingProxy, Job, job, spec_of

SPEC = spec_of(1500, 700, chunk_numel=128)
SERVERS, WORKERS, STEPS = 3, 2, 12
LATEST_S = 0.02
"""How much later than it was sent a member may get an event."""


class Coordinator:
    """Sends every member the same events, each at its own time, and decides a step when all report on it."""

    def __init__(self, made: Job, rng: random.Random) -> None:
        self.made, self.rng = made, rng
        self.placement = placements.new_placement(SPEC.plan(SERVERS), [placements.Server(r) for r in range(SERVERS)], 2)
        self.known = [0] * WORKERS
        """The version that each worker knows to be committed."""
        self._copying_since: dict[tuple[int, int], int] = {}  # by slice and server: number of the placement
        self._queues: list[asyncio.Queue[Event]] = []
        self._tasks = [
            asyncio.create_task(self._deliver(get))
            for get in (*(shell.on_event for shell in made.shells), *map(self._worker, range(WORKERS)))
        ]

    def send(self, event: Event) -> None:
        for queue in self._queues:
            queue.put_nowait(event)

    async def _deliver(self, get: Callable[[Event], None]) -> None:
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._queues.append(queue)
        while True:
            event = await queue.get()
            if self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.random() * LATEST_S)
            get(event)

    def _worker(self, rank: int) -> Callable[[Event], None]:
        def get(event: Event) -> None:
            if isinstance(event, JobState) and event.placement is not None:
                self.made.groups[rank].set_placement(event.placement)
            elif isinstance(event, Decision):
                self.known[rank] = event.version

        return get

    def change(self, *, between_steps: bool) -> None:
        """Copy, drop or promote something, at random; primaries change between two steps only."""
        placement, before = self.placement, self.placement
        for index, h in enumerate(placement.holders):
            others = [rank for rank in range(SERVERS) if rank not in h.servers]
            what = self.rng.random()
            if between_steps:
                if what < 0.4 and len(h.complete) > 1:
                    placement = placement.changed({index: h.with_primary(self.rng.choice(h.complete[1:]))})
            elif what < 0.2 and others:
                placement = placement.changed({index: h.with_copying(self.rng.choice(others))})
            elif what < 0.4 and len(h.complete) > 1:
                placement = placement.changed({index: h.without(self.rng.choice(h.servers[1:]))})
        if placement is not before:
            self.set_placement(placement)

    def set_placement(self, placement: placements.Placement) -> None:
        number, before = self.placement.number + 1, self.placement.holders
        self.placement = placements.Placement(placement.holders, placement.num_cuts, number, placement.replication)
        for index, h in enumerate(placement.holders):
            self._copying_since |= {(index, rank): number for rank in h.copying if rank not in before[index].copying}
        self.send(JobState(initialized=True, version=self.made.version, placement=self.placement))

    def take_copied(self) -> None:
        """What servers have got they hold from the next placement on; not what they have dropped, and get again."""
        for reports in self.made.reports:
            while reports.copied_slices:
                copied = reports.copied_slices.pop(0)
                wanted = [
                    i
                    for i in copied.slices
                    if reports.rank in self.placement.holders[i].copying
                    and self._copying_since[i, reports.rank] <= copied.placement
                ]
                if wanted:
                    self.set_placement(self.placement.copied(wanted, reports.rank, range(99)))

    @property
    def ready(self) -> bool:
        """Whether every server that holds something has reported on the step, by the present placement."""
        report = self.made.generation, self.made.step, self.placement.number
        return all(report in self.made.reports[rank].ready_by for rank in self.placement.servers)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def until(true: Callable[[], bool], often: Callable[[], None] = lambda: None) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not true():
            often()
            await asyncio.sleep(0.001)


async def train(made: Job, coordinator: Coordinator, rank: int, values: list[Array]) -> None:
    """One worker: gather what the step before made, compare it, and push gradients of whole numbers."""
    version = coordinator.known[rank]
    context = made.context(rank)
    for unit, right in enumerate(values):
        out = np.empty(right.size, np.float32)
        at = await made.groups[rank].gather(unit, out, min_version=version, context=context, timeout_s=TIMEOUT_S)
        assert at == version
        np.testing.assert_array_equal(out, right)
    await asyncio.gather(
        *(made.push(rank, unit, np.full(v.size, rank + 1 + unit, np.float32)) for unit, v in enumerate(values))
    )


async def run(seed: int, *, cuts: bool = False) -> None:
    rng = random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(job(SPEC, servers=SERVERS, workers=WORKERS, replication=2))
        proxies = []
        if cuts:  # every connection to a server breaks after so many bytes, the first ones at least
            for address in made.addresses:
                limits = [rng.randrange(500, 9_000) for _ in range(20)]
                proxies.append(await stack.enter_async_context(CuttingProxy(address, up=limits)))
            made.addresses = [proxy.address for proxy in proxies]
            made.tell(made.membership)
        coordinator = Coordinator(made, rng)
        stack.push_async_callback(coordinator.close)
        await asyncio.sleep(0)
        values = [np.zeros(unit.numel, np.float32) for unit in SPEC.layout.units]
        await made.upload(values)
        for _ in range(STEPS):
            steps = [asyncio.create_task(train(made, coordinator, rank, values)) for rank in range(WORKERS)]
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(rng.random() * LATEST_S)
                coordinator.change(between_steps=False)
            await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
            await until(lambda: coordinator.ready, coordinator.take_copied)
            coordinator.change(between_steps=True)
            made.advance()
            coordinator.send(Decision(step=made.step - 1, generation=1, outcome=Outcome.COMMIT, version=made.version))
            values = [v - sum(rank + 1 + unit for rank in range(WORKERS)) for unit, v in enumerate(values)]
            await until(lambda: coordinator.known == [made.version] * WORKERS)
        assert all(proxy.cuts > 1 for proxy in proxies)


@pytest.mark.parametrize("seed", range(6))
def test_steps_end_whoever_hears_of_a_placement_first(seed: int) -> None:
    asyncio.run(run(seed))


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_that_is_lost_with_its_connection_is_sent_again(seed: int) -> None:
    asyncio.run(run(seed, cuts=True))
