"""A coordinator on loopback in the test's own event loop, and clients that record the events they receive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from axon_ps.coordinator.client.session import CoordinatorClient, Event, OperatorClient
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server.server import serve
from axon_ps.rpc.security import Security
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.storage.state_store import SqliteStateStore
from axon_ps.types import DType, Membership, OptimizerSpec, Role
from axon_ps.wire.events import Ready
from deadlines import HANG_S

T = TypeVar("T")

SPEC = JobSpec(layout=Layout(units=(build_unit("block", [("block.weight", (128, 128), DType.F32)]),)))
OPTIMIZER = OptimizerSpec(name="sgd", groups=({"lr": 0.1},), group_of=(0,))
SOON_S = HANG_S
"""How long anything may take that should take milliseconds: tests wait for events, never for time."""

_ports = itertools.count(1)
"""Where shard servers say that they listen; no two the same."""


class Member(CoordinatorClient):
    """A client with a memory."""

    def __init__(self, address: str, role: Role, **options: Any) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()
        options = {"job": "job", "node": "node-a", "security": Security(), **options}
        if role is Role.SHARD:
            options.setdefault("listen_address", f"127.0.0.1:{next(_ports)}")
        super().__init__(address, role=role, on_event=self._remember, **options)

    def _remember(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    def received(self, kind: type[T]) -> list[T]:
        return [e for e in self.events if isinstance(e, kind)]

    async def until(self, what: Callable[[], T]) -> T:
        """Wait until `what` is true of the events received."""
        async with asyncio.timeout(SOON_S):
            while not (found := what()):
                self._news.clear()
                await self._news.wait()
        return found

    async def wait_for(self, kind: type[T], after: int = 0) -> T:
        """The first event of a kind beyond the `after` first ones of it."""
        return await self.until(lambda: self.received(kind)[after:] or None) and self.received(kind)[after]  # type: ignore[return-value]

    async def until_complete(self) -> Membership:
        await self.until(lambda: self.membership is not None and self.membership.complete)
        assert self.membership is not None
        return self.membership

    async def until_initialized(self) -> None:
        """Each member learns of it for itself: that one knows says nothing of the others."""
        await self.until(lambda: self.job_state is not None and self.job_state.initialized)


class Coordinator:
    """One coordinator that may be stopped and started again on its port and its state file."""

    def __init__(self, tmp_path: Path, security: Security | None = None, **config: Any) -> None:
        self.config = CoordinatorConfig(**{"job": "job", "world_size": 2, "num_shards": 1, **config})
        self.security = security or Security()
        self.path = tmp_path / "state.db"
        self.port = 0
        self._members: list[CoordinatorClient | OperatorClient] = []
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._serve(ready.set_result))
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        self.port = ready.result()

    async def _serve(self, ready: Callable[[int], None]) -> None:
        with SqliteStateStore(self.path) as store:
            await serve(self.config, "127.0.0.1", self.port, self.security, store, ready, self._stop)

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task
            self._task = None

    def member(self, role: Role, **options: Any) -> Member:
        """A client that is not started yet."""
        member = Member(self.address, role, **options)
        self._members.append(member)
        return member

    async def join(self, role: Role, **options: Any) -> Member:
        member = self.member(role, **options)
        await member.start(SOON_S)
        return member

    def operator(self, **options: Any) -> OperatorClient:
        operator = OperatorClient(self.address, **{"security": self.security, "job": self.config.job, **options})
        self._members.append(operator)
        return operator

    async def assembled(self, workers: int = 2) -> tuple[list[Member], Member]:
        """A complete job whose server says that it holds first values."""
        shard = await self.join(Role.SHARD)
        members = [await self.join(Role.WORKER) for _ in range(workers)]
        for m in members:
            await m.until_complete()
            await m.register(SPEC, OPTIMIZER)
        shard.initialized(version=0, epoch=0)
        for m in (*members, shard):
            await m.until_initialized()
        return members, shard

    async def close(self) -> None:
        for member in self._members:
            await member.close()
        await self.stop()


@contextlib.asynccontextmanager
async def coordinator(tmp_path: Path, **config: Any) -> AsyncIterator[Coordinator]:
    c = Coordinator(tmp_path, **config)
    await c.start()
    try:
        yield c
    finally:
        await c.close()


def ready(shard: Member, generation: int, step: int, sum_of_squares: float) -> Ready:
    """The report of a shard server that holds all slices."""
    assert shard.job_state is not None
    assert shard.job_state.placement is not None
    number = shard.job_state.placement.number
    return Ready(generation=generation, step=step, sums_of_squares=(sum_of_squares,), placement=number)
