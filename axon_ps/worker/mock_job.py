"""A job inside this process: the coordinator, the shard servers and their clients on one event loop.

Each worker is a thread (`ThreadWorker`) with a real `World`, so parameters, steps, checkpoints and the key-value store
are those of a real job. Only collectives differ: by default they are those of `MockBackend`.

The services are those of real jobs (`coordinator.server`, `shard.server`), reached through `rpc.carriers.in_process`.
There are no sockets, no ports and no other processes, and any number of such jobs may exist at once.

Owns: the loop, the services and their end, once every worker has left. Refuses: to know what the workers do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from axon_ps.collectives.backends.base import GroupStore
from axon_ps.collectives.backends.mock import NODE, MockBackend
from axon_ps.collectives.store import MemoryStore
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server import server as coordinator_server
from axon_ps.errors import InvalidRequest
from axon_ps.host import fork
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.carriers.in_process import PORT, new_network
from axon_ps.rpc.security import Security
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.server import server as shard_server
from axon_ps.shard.server.model_shell import warm_up
from axon_ps.shard.server.server import ShardConfig
from axon_ps.sharding.job import JobSpec
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.worker.environment import WorkerConfig
from axon_ps.worker.worker import Worker

JOB: Final = "mock"
START_S: Final = 30.0
"""Seconds that a service may take to begin, or a worker to join. Nothing outside this process takes part."""

REPLACED_S: Final = 0.2
"""Seconds that the others wait for the replacement of a worker that has left. None can join, so it is short."""

_END_S: Final = 5.0
"""Seconds that the services may take to end."""

_Serve = Callable[[Callable[[int], None]], Awaitable[None]]


class MockJob:
    """The services of one job.

    Args:
        world_size: its workers, each of which calls `leave` in the end.
        shards: its shard servers.

    Attributes:
        loop: the loop of the services and of the workers' clients.
        coordinator: the coordinator's address.
        store: for the rendezvous of groups of threads.

    Raises:
        ConfigurationError: there is less than one server.
    """

    def __init__(self, world_size: int, shards: int) -> None:
        config = CoordinatorConfig(
            job=JOB, world_size=world_size, num_shards=shards, join_timeout_s=REPLACED_S, in_worker=True
        )
        self.store = MemoryStore()
        self._network = new_network()
        self.coordinator = f"{self._host('coordinator')}:{PORT}"
        self._world_size = world_size
        self._left = itertools.count(1)
        self._services: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        self.loop = BackgroundLoop("axon-ps-mock", settle_s=0.0)
        try:
            self.loop.run(self._start(config), START_S)
        except BaseException:
            self.loop.close()
            raise

    def leave(self) -> None:
        """Count a worker that has left, and end the job with the last one."""
        if next(self._left) < self._world_size:
            return
        try:
            self.loop.run(self._end(), 2 * _END_S)
        finally:
            self.loop.close()

    def lost(self) -> None:
        """Count a worker that was freed without `leave`, and end the job with the last one.

        Any thread may call it. It does not block.
        """
        if next(self._left) >= self._world_size:
            self.loop.end()

    async def _start(self, config: CoordinatorConfig) -> None:
        security, store = Security(), MemoryStateStore()
        host = self._host("coordinator")
        stop = asyncio.Event()
        await self._begin(
            lambda ready: coordinator_server.serve(config, host, PORT, security, store, ready, stop), stop
        )
        for rank in range(config.num_shards):
            await self._begin_shard(rank)

    async def _begin_shard(self, rank: int) -> None:
        host, stop = self._host(f"shard-{rank}"), asyncio.Event()
        config = ShardConfig(
            coordinator=self.coordinator, job=JOB, host=host, port=PORT, node=host, rank=rank, threads=1
        )
        await self._begin(lambda ready: shard_server.serve(config, ready, stop), stop)

    async def _begin(self, serve: _Serve, stop: asyncio.Event) -> None:
        """Run a service until `stop` is set; return once it serves."""
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task: asyncio.Task[Any] = asyncio.ensure_future(serve(ready.set_result))
        self._services.append((task, stop))
        await asyncio.wait([ready, task], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    async def _end(self) -> None:
        """Stop the services, in the reverse of the order in which they began."""
        for task, stop in reversed(self._services):
            stop.set()
            await asyncio.wait([task], timeout=_END_S)

    def _host(self, name: str) -> str:
        return name + self._network


class ThreadWorker(Worker):
    """A worker that is a thread. The job ends when the last one is closed, or freed.

    Args:
        job: the job.
        rank: its rank.
        world_size: threads of the job.
        node: the node that it appears to be on.
    """

    threads = True

    def __init__(self, job: MockJob, rank: int, world_size: int, node: str) -> None:
        self._job = job
        self.loop = job.loop
        self.config = WorkerConfig(
            coordinator=job.coordinator,
            job=JOB,
            rank=rank,
            world_size=world_size,
            node=node,
            backend=MockBackend.name,
            direct_memory=False,
        )
        self._on_collected = fork.finalize(self, job.lost)

    def make_shards(self) -> ShardGroup:
        """See `Worker.make_shards`."""
        return _Shards(self.config.security)

    def make_store(self, coordinator: CoordinatorClient, timeout_s: float) -> GroupStore:
        """See `Worker.make_store`."""
        return self._job.store

    async def wait_for_others(self) -> None:
        """Return at once: the services end with the last worker."""

    def close(self) -> None:
        """See `Worker.close`."""
        if self._on_collected.detach() is not None:
            self._job.leave()


class _Shards(ShardGroup):
    """The servers of this process."""

    @staticmethod
    def warm_up(spec: JobSpec) -> None:
        """Compile the servers' code here, too. On the shared event loop this would block the whole job."""
        ShardGroup.warm_up(spec)
        warm_up(spec)


def thread_workers(world_size: int, *, shards: int = 1, nodes: int | Sequence[str] = 1) -> list[ThreadWorker]:
    """Make a job in this process, and return its workers by rank.

    Args:
        world_size: number of workers.
        shards: shard servers of their job.
        nodes: number of nodes they appear to be on, with equally many on each; or the node of each worker, by rank.

    Raises:
        InvalidRequest: there is less than one worker or node, or the nodes would have different numbers of workers.
        ConfigurationError: there is less than one server.
    """
    if world_size < 1:
        raise InvalidRequest(f"a world was asked for with {world_size} ranks; it needs at least 1")
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            raise InvalidRequest(f"{world_size} ranks cannot be on {nodes} nodes; every node needs the same number")
        nodes = [f"{NODE}-{rank * nodes // world_size}" for rank in range(world_size)]
    job = MockJob(world_size, shards)
    return [ThreadWorker(job, rank, world_size, node) for rank, node in enumerate(nodes)]
