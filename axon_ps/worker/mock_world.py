"""Worlds of threads: all that a `World` offers, in one process, without any server to start.

Each thread has a real `World`, of a job whose coordinator and shard servers are in this process too
(`worker.mock_job`), so parameters, steps, checkpoints and the key-value store do what they do in a real job. Only
collectives are other ones: those of `MockBackend`, by default.

Owns: `MockWorld`, one per thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from axon_ps.collectives import current_world
from axon_ps.collectives.backends.base import Backend, Store
from axon_ps.collectives.backends.mock import NODE, MockBackend
from axon_ps.collectives.group_base import MakeBackend
from axon_ps.collectives.selection import BackendMaker
from axon_ps.errors import InvalidRequest
from axon_ps.host import fork
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.server.model_shell import warm_up
from axon_ps.sharding.job import JobSpec
from axon_ps.worker.environment import WorkerConfig
from axon_ps.worker.mock_job import JOB, START_S, MockJob
from axon_ps.worker.world import World

TIMEOUT_S = 60.0


class MockWorld(World):
    """One thread's world. Made by `World.mock`; a context manager, inside which it is this thread's current world.

    Close every one, or leave its `with`: the job ends with the last. One that nothing refers to is closed, too.

    Args:
        job: the job.
        rank: its rank.
        world_size: threads of the job.
        node: the node that it appears to be on.
        timeout_s: default deadline of every operation, in seconds.
    """

    def __init__(self, job: MockJob, rank: int, world_size: int, node: str, timeout_s: float) -> None:
        self._job = job
        config = WorkerConfig(
            coordinator=job.coordinator,
            job=JOB,
            rank=rank,
            world_size=world_size,
            node=node,
            backend=MockBackend.name,
            direct_memory=False,
        )
        super().__init__(config, timeout_s=timeout_s, loop=job.loop)
        self._on_collected = fork.finalize(self, job.lost)

    def make_current(self) -> None:
        """Make it `World.current()` in this thread until it is closed or freed."""
        current_world.enter_thread(self)

    def __enter__(self) -> MockWorld:
        self.make_current()
        return self

    def _make_shards(self, config: WorkerConfig) -> ShardGroup:
        return _Shards(config.security)

    def _make_backends(self) -> MakeBackend:
        return BackendMaker(self._make_grpc, threads=True)

    def _make_store(self, timeout_s: float) -> Store:
        return self._job.store

    def _end_loop(self) -> None:
        if self._on_collected.detach() is not None:
            self._job.leave()


class _Shards(ShardGroup):
    """The servers of this process."""

    @staticmethod
    def warm_up(spec: JobSpec) -> None:
        """Compile what the servers need, too: here, since on the shared event loop everybody would wait for it."""
        ShardGroup.warm_up(spec)
        warm_up(spec)


def create_worlds(
    world_size: int, *, shards: int = 1, nodes: int | Sequence[str] = 1, timeout_s: float = TIMEOUT_S
) -> list[MockWorld]:
    """Worlds for as many threads, by rank; all of them have joined.

    Args:
        world_size: how many.
        shards: shard servers of their job.
        nodes: how many nodes they appear to be on, each with as many; or the node of each, by rank.
        timeout_s: default deadline of every operation, in seconds.

    Raises:
        InvalidRequest: there is less than one, or not the same number for every node.
        ConfigurationError: there is less than one server.
    """
    if world_size < 1:
        raise InvalidRequest(f"a world was asked for with {world_size} ranks; it needs at least 1")
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            raise InvalidRequest(f"{world_size} ranks cannot be on {nodes} nodes; every node needs the same number")
        nodes = [f"{NODE}-{rank * nodes // world_size}" for rank in range(world_size)]
    job = MockJob(world_size, shards)
    worlds = [MockWorld(job, rank, world_size, node, timeout_s) for rank, node in enumerate(nodes)]

    async def join() -> None:
        await asyncio.wait_for(asyncio.gather(*(w._coordinator.start(START_S) for w in worlds)), START_S)

    try:
        job.loop.run(join(), 2 * START_S)
        for world in worlds:
            world.view.wait_complete(START_S)
            world.view.newcomers()
    except BaseException:
        for world in worlds:
            world.close()
        raise
    return worlds


def world_of_backend(backend: Backend) -> MockWorld:
    """The world of a `MockBackend`'s rank, of a job in this process that begins when the first rank asks for its own.

    After an error: the next one that asks tries again.
    """
    assert isinstance(backend, MockBackend)
    nodes = [member.node for member in backend.context.members]
    worlds = backend.get_or_make("mock/worlds", lambda: create_worlds(len(nodes), nodes=nodes))
    return worlds[backend.rank]
