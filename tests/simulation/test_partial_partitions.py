"""Links between members are cut, those with the coordinator are not: steps go on while they are, and all come back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence

import pytest

from simulate import virtual
from simulated_job import COMPUTE_S, Job
from simulated_network import Network
from virtual_loop import VirtualLoop

LEASE_S = 5.0
STEPS = 14
PAUSE_S = LEASE_S + 2.0 + COMPUTE_S
"""Longest time without a step: a lease, in which one finds out, and is reported, and the step that is made then."""

ONE_WORKER, ONE_SERVER = [("worker-1", "shard-0")], [("shard-0", "shard-1")]
MOST_WORKERS = [("worker-0", "shard-2"), ("worker-1", "shard-2")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What services log of faults is no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def partitioned(job: Job, links: Sequence[tuple[str, str]], way: str) -> None:
    """Cut links of a job that trains, until it has trained enough; then heal them."""
    loop, network = job.loop, job.network
    for role in job.roles:
        job.start(role)
    while job.committed < 2:
        await asyncio.sleep(0.1)
    for one, other in links:
        network.cut(*((other, one) if way == "back" else (one, other)), one_way=way != "both")
    known, since_s = job.committed, loop.time()
    while job.committed < STEPS - 1:
        await asyncio.sleep(0.1)
        if job.committed > known:
            known, since_s = job.committed, loop.time()
        assert loop.time() - since_s <= PAUSE_S, f"no step after version {known}"
    for one, other in links:
        network.heal(one, other)
    async with asyncio.timeout(120.0):
        while not all(task.done() for role, task in job.tasks.items() if role.startswith("worker")):
            await asyncio.sleep(0.5)
    for task in job.tasks.values():
        if task.done():
            task.result()


@pytest.mark.parametrize("way", ["both", "there", "back"])
@pytest.mark.parametrize(
    ("links", "min_workers"),
    [(ONE_WORKER, 1), (ONE_WORKER, None), (ONE_SERVER, None), (MOST_WORKERS, None)],
    ids=["a worker that may go", "a worker that is needed", "two servers", "most workers and a server"],
)
def test_steps_go_on(links: Sequence[tuple[str, str]], min_workers: int | None, way: str) -> None:
    for seed in range(2):
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
                loop.run_until_complete(partitioned(job, links, way))
        finally:
            loop.set_exception_handler(lambda *_: None)
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(1))
            asyncio.set_event_loop(None)
            loop.close()
