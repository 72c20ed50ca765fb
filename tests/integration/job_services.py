"""Coordinators and shard servers of many jobs, in a thread of the test's process: a few milliseconds each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from unittest import mock

from axon_ps.coordinator.client import heartbeat
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server import server as coordinator_server
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.security import Security
from axon_ps.shard.server import server as shard_server
from axon_ps.shard.server.server import ShardConfig
from axon_ps.storage.state_store import MemoryStateStore
from deadlines import HANG_S

TOKEN = "test-token"
LEASE_S = 60.0
"""Of members; and heartbeats come no more often than three times in it, which a hundred servers spend a core on."""


class JobServices:
    """The services of jobs, by (workers, servers).

    Args:
        jobs: see above.
        threads: of each shard server.
        join_timeout_s: how long a job waits for members that it has lost.

    Attributes:
        addresses: per job, its coordinator's "host:port".
    """

    def __init__(self, jobs: Sequence[tuple[int, int]], threads: int = 1, join_timeout_s: float = 600.0) -> None:
        self._jobs = jobs
        self._threads = threads
        self._join_timeout_s = join_timeout_s
        self.addresses: list[str] = []

    def __enter__(self) -> JobServices:
        self._patch = mock.patch.object(heartbeat, "MEASURE_S", LEASE_S)
        self._patch.start()
        self._loop = BackgroundLoop(name="job services")
        self._stop = self._loop.run(self._make_stop())
        self._shards: list[Future[None]] = []
        self._coordinators: list[Future[None]] = []
        for workers, servers in self._jobs:
            address: asyncio.Future[str] = self._loop.run(self._future())
            self._coordinators.append(self._loop.submit(self._coordinator(workers, servers, address)))
            self.addresses.append(self._loop.run(self._wait(address, self._coordinators[-1])))
            for _ in range(servers):
                self._shards.append(self._loop.submit(self._shard(self.addresses[-1])))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.end_shards()
            self._end(self._stop[1], self._coordinators)
        finally:
            self._loop.close()
            self._patch.stop()

    def end_shards(self) -> None:
        """Stop the shard servers, and wait until they have ended."""
        self._end(self._stop[0], self._shards)

    def _end(self, stop: asyncio.Event, running: Sequence[Future[None]]) -> None:
        self._loop.run(self._set(stop))
        for future in running:
            future.result(20.0)

    async def _make_stop(self) -> tuple[asyncio.Event, asyncio.Event]:
        return asyncio.Event(), asyncio.Event()

    async def _future(self) -> asyncio.Future[str]:
        return asyncio.get_running_loop().create_future()

    async def _wait(self, address: asyncio.Future[str], coordinator: Future[None]) -> str:
        """The coordinator's address; what it ended with, if it never listened."""
        ended = asyncio.wrap_future(coordinator)
        await asyncio.wait({address, ended}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        return await asyncio.wait_for(address, 0)

    async def _set(self, stop: asyncio.Event) -> None:
        stop.set()

    async def _coordinator(self, workers: int, servers: int, address: asyncio.Future[str]) -> None:
        await coordinator_server.serve(
            CoordinatorConfig(
                world_size=workers, num_shards=servers, lease_s=LEASE_S, join_timeout_s=self._join_timeout_s
            ),
            "127.0.0.1",
            0,
            Security(token=TOKEN),
            MemoryStateStore(),
            lambda port: address.set_result(f"127.0.0.1:{port}"),
            self._stop[1],
        )

    async def _shard(self, coordinator: str) -> None:
        config = ShardConfig(
            coordinator=coordinator, job="default", threads=self._threads, security=Security(token=TOKEN), grace_s=0.5
        )
        await shard_server.serve(config, lambda port: None, self._stop[0])
