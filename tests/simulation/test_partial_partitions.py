"""Links between members are cut, those with the coordinator are not: steps go on while they are, and all come back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from axon_ps_lab.interleavings.job import COMPUTE_S, Job
from axon_ps_lab.interleavings.network import Network
from axon_ps_lab.interleavings.simulate import virtual
from axon_ps_lab.interleavings.virtual_loop import VirtualLoop

LEASE_S = 5.0
STEPS = 14
START_S = 60.0
UNDISTURBED_S = 3.0 * COMPUTE_S
"""Longest time without a step where one step may be aborted, and nobody is waited for."""

PAUSE_S = LEASE_S + 2.0 + COMPUTE_S
"""Longest time without a step: a lease, in which one finds out, and is reported, and the step that is made then."""

ONE_WORKER, ONE_SERVER = [("worker-1", "shard-0")], [("shard-0", "shard-1")]
MOST_WORKERS = [("worker-0", "shard-2"), ("worker-1", "shard-2")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the services: their log of faults is no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def trained(job: Job, versions: int, pause_s: float) -> None:
    """Return when so many steps have committed; none may take longer than that."""
    known, since_s = job.committed, job.loop.time()
    while job.committed < versions:
        await asyncio.sleep(0.1)
        if job.committed > known:
            known, since_s = job.committed, job.loop.time()
        assert job.loop.time() - since_s <= pause_s, f"no step after version {known}"


async def over(job: Job) -> None:
    """Return when all workers have made all steps."""
    async with asyncio.timeout(120.0):
        while not all(task.done() for role, task in job.tasks.items() if role.startswith("worker")):
            await asyncio.sleep(0.5)
    for task in job.tasks.values():
        if task.done():
            task.result()


async def partitioned(job: Job, links: Sequence[tuple[str, str]], way: str) -> None:
    """Cut links of a job that trains, until it has trained enough; then heal them."""
    for role in job.roles:
        job.start(role)
    await trained(job, 2, START_S)
    for one, other in links:
        job.network.cut(*((other, one) if way == "back" else (one, other)), one_way=way != "both")
    await trained(job, STEPS - 1, PAUSE_S)
    for one, other in links:
        job.network.heal(one, other)
    await over(job)


async def joined_in_vain(job: Job) -> None:
    """A shard server reaches nobody but the coordinator when it joins a job that trains."""
    for role in job.roles:
        job.start(role)
    await trained(job, 2, START_S)
    job.kill("shard-2")
    await trained(job, 4, PAUSE_S)
    for other in ("shard-0", "shard-1"):
        job.network.cut("shard-2", other)
    job.start("shard-2")
    await trained(job, STEPS - 1, UNDISTURBED_S)
    for other in ("shard-0", "shard-1"):
        job.network.heal("shard-2", other)
    await over(job)


def simulated(seed: int, play: Callable[[Job], Coroutine[Any, Any, None]], min_workers: int | None = None) -> None:
    """A job of two workers and three shard servers."""
    rng = random.Random(seed)
    loop = VirtualLoop(random.Random(rng.random()))
    network = Network(loop)
    asyncio.set_event_loop(loop)
    try:
        with virtual(loop, network, rng):
            job = Job(
                loop,
                network,
                workers=2,
                shards=3,
                steps=STEPS,
                queue_bytes=1 << 20,
                collectives=seed > 0,
                min_workers=min_workers,
            )
            loop.run_until_complete(play(job))
    finally:
        loop.set_exception_handler(lambda *_: None)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(1))
        asyncio.set_event_loop(None)
        loop.close()


@pytest.mark.parametrize("way", ["both", "there", "back"])
@pytest.mark.parametrize(
    ("links", "min_workers"),
    [(ONE_WORKER, 1), (ONE_WORKER, None), (ONE_SERVER, None), (MOST_WORKERS, None)],
    ids=["a worker that may go", "a worker that is needed", "two servers", "most workers and a server"],
)
def test_steps_go_on(links: Sequence[tuple[str, str]], min_workers: int | None, way: str) -> None:
    for seed in range(2):
        simulated(seed, lambda job: partitioned(job, links, way), min_workers)


def test_a_server_that_joins_and_reaches_nobody_stops_no_step() -> None:
    for seed in range(2):
        simulated(seed, joined_in_vain)
