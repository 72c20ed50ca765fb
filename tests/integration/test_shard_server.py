"""Shard servers with a real coordinator: joining, steps by votes, checkpoints, draining, and what ends them.

Tests of `shard/server/server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server.server import serve as serve_coordinator
from axon_ps.errors import AxonError, Broken, ConfigurationError, PermissionDenied, StorageFull, Unreachable
from axon_ps.rpc.security import Security
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.server.server import ShardConfig, serve
from axon_ps.storage.contents import verify
from axon_ps.storage.manifest import list_checkpoints
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.types import Decision, Membership, OptimizerSpec, Outcome, Role
from axon_ps.wire.events import Event, JobState, Vote
from deadlines import HANG_S
from shard_fakes import spec_of

SPEC = spec_of(3000, 200)
OPTIMIZER = OptimizerSpec(name="adamw", groups=({"lr": 0.01},), group_of=(0, 0))
TOKEN = Security(token="secret")


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 40))


class Process:
    """What runs until it is told to stop: a server in a task of its own."""

    def __init__(self, serve: Callable[[Callable[[int], None], asyncio.Event], Any]) -> None:
        self.stop = asyncio.Event()
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] = asyncio.create_task(serve(self._port.set_result, self.stop))

    async def port(self) -> int:
        await asyncio.wait([self.task, self._port], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task
        return self._port.result()

    async def end(self) -> None:
        self.stop.set()
        await self.task


@contextlib.asynccontextmanager
async def coordinator(shards: int, workers: int = 1) -> AsyncIterator[str]:
    config = CoordinatorConfig(job="j", world_size=workers, num_shards=shards)
    store = MemoryStateStore()
    process = Process(lambda ready, stop: serve_coordinator(config, "127.0.0.1", 0, TOKEN, store, ready, stop))
    try:
        yield f"127.0.0.1:{await process.port()}"
    finally:
        await process.end()


def shard(address: str, **changes: Any) -> Process:
    config = ShardConfig(**{"coordinator": address, "job": "j", "security": TOKEN, "threads": 2, **changes})
    return Process(lambda ready, stop: serve(config, ready, stop))


class Worker:
    """A worker's session and its connections to the shard servers."""

    def __init__(self, address: str) -> None:
        self.shards = ShardGroup(TOKEN)
        self.news = asyncio.Event()
        self.events: list[Event] = []
        self.session = CoordinatorClient(
            address, job="j", role=Role.WORKER, node="n", security=TOKEN, on_event=self._on_event
        )

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self.news.set()
        if isinstance(event, Membership):
            self.shards.set_members(event)
        elif isinstance(event, JobState) and event.placement is not None:
            self.shards.set_placement(event.placement)

    async def until(self, kind: type[Any], wanted: Callable[[Any], bool]) -> Any:
        while True:
            for event in self.events:
                if isinstance(event, kind) and wanted(event):
                    return event
            self.news.clear()
            await self.news.wait()

    async def start(self) -> None:
        await self.session.start(10)
        await self.until(Membership, lambda m: m.complete)
        await self.session.register(SPEC, OPTIMIZER)
        self.shards.set_spec(SPEC)

    async def upload(self, value: float) -> None:
        for unit, u in enumerate(SPEC.layout.units):
            values = np.full(u.numel, value, np.float32)
            await self.shards.upload(unit, values, context=self.session.context, timeout_s=HANG_S)
        await self.until(JobState, lambda job: job.initialized)

    async def step(self, number: int) -> Decision:
        membership = self.session.membership
        assert membership is not None
        for unit, u in enumerate(SPEC.layout.units):
            grad = np.full(u.numel, number, np.float32)
            await self.shards.reduce_scatter(
                unit, grad, step=number, replica=0, context=self.session.context, timeout_s=HANG_S
            )
        self.session.vote(Vote(generation=membership.generation, step=number, hyper=({"lr": 0.01},)))
        decision: Decision = await self.until(Decision, lambda d: d.step == number)
        return decision

    async def gather(self, version: int, epoch: int = 0) -> list[Any]:
        outs = [np.zeros(u.numel, np.float32) for u in SPEC.layout.units]
        at = {"min_version": version, "epoch": epoch}
        for unit, out in enumerate(outs):
            await self.shards.gather(unit, out, context=self.session.context, timeout_s=HANG_S, **at)
        return outs

    async def close(self) -> None:
        await self.session.close()
        await self.shards.close()


def test_steps_checkpoint_restore_and_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(2) as address:
            shards = [shard(address), shard(address)]
            ports = [await s.port() for s in shards]
            worker = Worker(address)
            await worker.start()
            await worker.upload(1.0)
            step = (await worker.until(Membership, lambda m: m.complete)).step
            assert (await worker.step(step)).outcome is Outcome.COMMIT
            after_one = await worker.gather(1)
            saved = await worker.session.save_checkpoint(str(tmp_path / "one"), '{"epoch": 3}')
            assert saved.version == 1
            assert verify(str(tmp_path)).extra == {"epoch": 3}
            assert (await worker.step(step + 1)).version == 2
            assert not np.array_equal((await worker.gather(2))[0], after_one[0])
            restored = await worker.session.restore_checkpoint(str(tmp_path))
            assert restored.version == 1
            again = await worker.gather(1, epoch=1)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(again, after_one, strict=True))
            statistics = await worker.shards.stats(0, context=worker.session.context)
            assert statistics["restores"] == 1
            await worker.close()
            for s in shards:
                await s.end()
            for port in ports:
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)

    run(scenario())


def test_health_says_not_serving_while_it_drains() -> None:
    async def scenario() -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        async with coordinator(1) as address:
            server = shard(address)
            port = await server.port()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="axon_ps.wire.v1.Shard")
                statuses = []
                watch = stub.Watch(request)
                statuses.append((await watch.read()).status)
                server.stop.set()
                statuses.append((await watch.read()).status)
                serving = health_pb2.HealthCheckResponse
                assert statuses == [serving.SERVING, serving.NOT_SERVING]
                watch.cancel()
            await server.end()

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"security": Security(token="wrong")}, PermissionDenied, "token"),
        ({"job": "other"}, PermissionDenied, "other"),
        ({"coordinator": "127.0.0.1:1", "join_timeout_s": 0.2}, Unreachable, "nobody answers at 127.0.0.1:1"),
        ({"host": "0.0.0.0", "security": Security()}, ConfigurationError, "0.0.0.0"),
    ],
)
def test_what_keeps_a_server_from_starting(changes: dict[str, Any], error: type[AxonError], words: str) -> None:
    async def scenario() -> None:
        async with coordinator(1) as address:
            server = shard(address, **changes)
            with pytest.raises(error, match=words):
                await server.port()

    run(scenario())


def test_a_port_in_use_is_named() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            async with coordinator(1) as address:
                with pytest.raises(ConfigurationError, match="in use"):
                    await shard(address, port=taken.getsockname()[1]).port()

    run(scenario())


def test_a_coordinator_that_stays_away_ends_the_server_with_the_reason() -> None:
    async def scenario() -> None:
        async with coordinator(1) as address:
            server = shard(address, reconnect_timeout_s=0.2)
            await server.port()
        with pytest.raises(Broken, match=address):
            await server.task

    run(scenario())


@pytest.mark.parametrize(
    ("advertise", "host", "expected"),
    [
        ("", "127.0.0.1", "127.0.0.1:{port}"),
        ("box", "127.0.0.1", "box:{port}"),
        ("box:77", "127.0.0.1", "box:77"),
        ("[::1]:77", "127.0.0.1", "[::1]:77"),
        ("::1", "127.0.0.1", "[::1]:{port}"),
        ("", "0.0.0.0", socket.gethostname() + ":{port}"),
    ],
)
def test_where_workers_are_told_to_find_it(advertise: str, host: str, expected: str) -> None:
    from axon_ps.shard.server.server import _advertised

    config = ShardConfig(coordinator="", job="j", host=host, advertise=advertise)
    assert _advertised(config, 5) == expected.format(port=5)


# ---------------------------------------------------------------------- a disk that runs full


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted = tmp_path / "tiny"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"this machine does not let us mount a tmpfs: {made.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.tmpfs
def test_a_full_disk_leaves_the_last_checkpoint_and_training_alone(tiny_disk: Path) -> None:
    """A checkpoint has 38 KB: the first fits on the disk of 64 KiB, the second does not."""

    async def scenario() -> None:
        async with coordinator(1) as address:
            server = shard(address)
            await server.port()
            worker = Worker(address)
            await worker.start()
            await worker.upload(1.0)
            step = (await worker.until(Membership, lambda m: m.complete)).step
            await worker.step(step)
            await worker.session.save_checkpoint(str(tiny_disk / "c"))
            before = sorted((p.name, p.stat().st_size) for p in (tiny_disk / "c").iterdir())
            await worker.step(step + 1)
            with pytest.raises(StorageFull, match="no space left"):
                await worker.session.save_checkpoint(str(tiny_disk / "c"))
            assert sorted((p.name, p.stat().st_size) for p in (tiny_disk / "c").iterdir()) == before
            assert verify(str(tiny_disk)).version == 1
            with pytest.raises(StorageFull):
                await worker.session.save_checkpoint(str(tiny_disk / "d"))
            assert [m.version for m in list_checkpoints(str(tiny_disk))] == [1]
            assert (await worker.step(step + 2)).version == 3
            await worker.close()
            await server.end()

    run(scenario())
