"""The worker of a world: a process, here, or a thread (`mock_job`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from axon_ps.collectives.backends.base import GroupStore
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.shard.client.client import ShardGroup
from axon_ps.worker.bootstrap.job import FormedJob
from axon_ps.worker.environment import WorkerConfig


class Worker(ABC):
    """A worker that is about to join a job.

    Attributes:
        threads: True if workers are threads of one process.
        config: its configuration.
        loop: the background loop.
    """

    threads: ClassVar[bool]
    config: WorkerConfig
    loop: BackgroundLoop

    @abstractmethod
    def make_shards(self) -> ShardGroup:
        """Make its client of the shard servers."""

    @abstractmethod
    def make_store(self, coordinator: CoordinatorClient, timeout_s: float) -> GroupStore:
        """Make the store for the rendezvous of groups."""

    @abstractmethod
    async def wait_for_others(self) -> None:
        """Block until no other worker needs the services of this one. Call it when this worker has left."""

    @abstractmethod
    def close(self) -> None:
        """End the loop, and the services started for the job. Repeated calls do nothing."""


class JobStore:
    """The job's key-value store, as a `collectives.backends.base.GroupStore`."""

    def __init__(self, loop: BackgroundLoop, coordinator: CoordinatorClient, timeout_s: float) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._timeout_s = timeout_s

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._loop.run(self._coordinator.kv_put(key, value, timeout_s=self._timeout_s))

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key as soon as there is one."""
        return self._loop.run(self._coordinator.kv_wait(key, timeout_s=timeout_s))

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._loop.run(self._coordinator.kv_delete(key, timeout_s=self._timeout_s))


class ProcessWorker(Worker):
    """A worker that is a process.

    Args:
        job: the job; closed with the worker, or if this raises.
    """

    threads = False

    def __init__(self, job: FormedJob) -> None:
        self._job = job
        self.config = job.config
        try:
            self.loop = BackgroundLoop(name="axon-ps")
        except BaseException:
            job.close()
            raise

    def make_shards(self) -> ShardGroup:
        """See `Worker.make_shards`."""
        return ShardGroup(self.config.security, node=self.config.node if self.config.direct_memory else "")

    def make_store(self, coordinator: CoordinatorClient, timeout_s: float) -> GroupStore:
        """See `Worker.make_store`."""
        return JobStore(self.loop, coordinator, timeout_s)

    async def wait_for_others(self) -> None:
        """See `FormedJob.wait_for_others`."""
        await self._job.wait_for_others()

    def close(self) -> None:
        """See `Worker.close`."""
        self.loop.close()
        self._job.close()
