"""Real shard servers over real gRPC, with a coordinator that says what the test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from axon_ps.errors import AxonError
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server
from axon_ps.rpc.service import Stub, service_handler
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.server.links import Links
from axon_ps.shard.server.servicer import ShardServicer
from axon_ps.shard.server.shell import ShardShell
from axon_ps.sharding import placement as placements
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import (
    Array,
    Decision,
    DType,
    Member,
    Membership,
    OptimizerSpec,
    Outcome,
    Role,
)
from axon_ps.wire.events import Copied, Event, JobState, Ready, SnapshotFile
from axon_ps.wire.v1 import common_pb2, shard_pb2
from deadlines import HANG_S

WORKERS_NODE = ""
"""What workers call their host. Servers are on "n": there both read each other's memory."""
BULK_PORT: int | None = None
"""As of `rpc.server.Server`."""

SERVICE = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
TIMEOUT_S = HANG_S


def spec_of(*numels: int, frozen: Sequence[int] = (), param: DType = DType.F32, **options: int) -> JobSpec:
    """One parameter a unit."""
    layout = Layout(
        units=tuple(
            build_unit(f"u{i}", [(f"p{i}", (n,), DType.F32)], trainable=i not in frozen) for i, n in enumerate(numels)
        )
    )
    sizes = {"chunk_numel": 256, "min_slice_numel": 64, **options}
    return JobSpec(layout=layout, precision=WirePrecision(param=param), options=PlanOptions(**sizes))


class FakeReports:
    """What a shard server reports, kept; and its rank."""

    def __init__(self, rank: int, *, replicated: bool = False) -> None:
        self.rank = rank
        self._replicated = replicated
        self.ready_for: list[tuple[int, int, float]] = []
        self.addends: list[int] = []  # the last one in each of these
        self.ready_by: set[tuple[int, int, int]] = set()  # (generation, step, placement)
        self.copied_slices: list[Copied] = []
        self.initialized_at: list[tuple[int, int]] = []
        self.memory_errors: list[AxonError] = []
        self.snapshots: asyncio.Queue[tuple[int, tuple[SnapshotFile, ...], AxonError | None]] = asyncio.Queue()
        self.restores: asyncio.Queue[AxonError | int] = asyncio.Queue()

    def ready(self, ready: Ready, replica: int | None = None) -> None:
        self.ready_for.append((ready.generation, ready.step, math.fsum(ready.sums_of_squares)))
        self.addends.append(ready.last_addend)
        self.ready_by.add((ready.generation, ready.step, ready.placement))

    def copied(self, copied: Copied) -> None:
        assert self._replicated, "nothing is to be copied here"
        self.copied_slices.append(copied)

    def initialized(self, *, version: int, epoch: int, model: int = 0) -> None:
        self.initialized_at.append((version, epoch))
        self.restores.put_nowait(version)

    def snapshot_report(self, id: int, files: tuple[SnapshotFile, ...] = (), error: AxonError | None = None) -> None:
        self.snapshots.put_nowait((id, files, error))

    def out_of_memory(self, model: int, placement: int, error: AxonError) -> None:
        self.memory_errors.append(error)

    def restore_report(self, epoch: int, error: AxonError, *, model: int = 0) -> None:
        self.restores.put_nowait(error)


class Job:
    """Shard servers and workers of one job; the test is the coordinator."""

    def __init__(self, spec: JobSpec, workers: int) -> None:
        self.spec = spec
        self.generation = 1
        self.step = 1
        self.version = self.epoch = 0
        self.workers = list(range(workers))
        self.shells: list[ShardShell] = []
        self.reports: list[FakeReports] = []
        self.servers: list[Server] = []
        self.groups: dict[int, ShardGroup] = {}
        self.addresses: list[str] = []

    @property
    def membership(self) -> Membership:
        return Membership(
            generation=self.generation,
            step=self.step,
            version=self.version,
            workers=tuple(
                Member(role=Role.WORKER, rank=rank, incarnation=f"worker-{rank}", node="n", replica=replica)
                for replica, rank in enumerate(self.workers)
            ),
            shards=tuple(
                Member(role=Role.SHARD, rank=rank, incarnation=f"shard-{rank}", node="n", address=address)
                for rank, address in enumerate(self.addresses)
            ),
            num_replicas=len(self.workers),
            complete=True,
        )

    def tell(self, event: Event, *, servers: Sequence[int] | None = None) -> None:
        """An event for shard servers; membership goes to workers too."""
        for rank, shell in enumerate(self.shells):
            if servers is None or rank in servers:
                shell.on_event(event)
        if isinstance(event, Membership):
            for group in self.groups.values():
                group.set_members(event)

    def context(self, rank: int = 0) -> Callable[[], common_pb2.CallContext]:
        """As a worker whose coordinator session is up to date."""
        return lambda: common_pb2.CallContext(job="j", generation=self.generation, incarnation=f"worker-{rank}")

    async def upload(self, values: Sequence[Array], epoch: int = 0) -> None:
        self.epoch = max(self.epoch, epoch)
        for unit, whole in enumerate(values):
            await self.groups[0].upload(unit, whole, context=self.context(), timeout_s=TIMEOUT_S, epoch=epoch)

    async def push(self, rank: int, unit: int, grad: Array | None, **changes: Any) -> None:
        arguments = {"step": self.step, "replica": rank, "context": self.context(rank), "timeout_s": TIMEOUT_S}
        await self.groups[rank].reduce_scatter(unit, grad, **{**arguments, **changes})

    async def gather(self, rank: int, unit: int, dtype: Any = np.float32, **changes: Any) -> tuple[int, Array]:
        out = np.full(self.spec.layout.units[unit].numel, 7, dtype)
        arguments = {"min_version": self.version, "epoch": self.epoch, "context": self.context(rank)}
        arguments["timeout_s"] = TIMEOUT_S
        return await self.groups[rank].gather(unit, out, **{**arguments, **changes}), out

    def decide(self, outcome: Outcome = Outcome.COMMIT, *, servers: Sequence[int] | None = None) -> None:
        """The step ends; call `advance` when every server was told."""
        version = self.version + (outcome is Outcome.COMMIT)
        decision = Decision(step=self.step, generation=self.generation, outcome=outcome, version=version)
        self.tell(decision, servers=servers)

    def commit(self) -> None:
        self.decide()
        self.advance()

    def advance(self) -> None:
        self.step += 1
        self.version += 1

    def regenerate(self, workers: Sequence[int] | None = None) -> None:
        """A new generation, which every server and worker hears of."""
        self.generation += 1
        self.step += 1
        self.workers = self.workers if workers is None else list(workers)
        self.tell(self.membership)

    def statistics(self, name: str) -> float:
        return sum(shell.engine.statistics()[name] for shell in self.shells)

    def raw(self, server: int = 0) -> Stub:
        """A bare stub, for what our own client would not send."""
        return Stub(connect(self.servers[server].address, Security(), connection=5), SERVICE)


@contextlib.asynccontextmanager
async def job(
    spec: JobSpec,
    *,
    servers: int = 1,
    workers: int = 1,
    replication: int = 1,
    optimizer: OptimizerSpec | None = None,
    queue_bytes: int = 0,
) -> AsyncIterator[Job]:
    """A running job, configured, with no values yet."""
    made = Job(spec, workers)
    present = [placements.Server(rank) for rank in range(servers)]
    placement = placements.new_placement(spec.plan(servers), present, replication)
    try:
        for rank in range(servers):
            shell = ShardShell("j", threads=2, queue=QueueLimit(queue_bytes))
            made.shells.append(shell)
            reports = FakeReports(rank, replicated=replication > 1)
            made.reports.append(reports)
            shell.reports = reports
            if replication > 1:
                shell.links = Links(Security(), "n", "j", f"shard-{rank}")
            handler = service_handler(SERVICE, ShardServicer(shell))
            server = Server("127.0.0.1", 0, Security(), [handler], [SERVICE.full_name], BULK_PORT)
            await server.start()
            made.servers.append(server)
            made.addresses.append(server.address)
        for rank in range(workers):
            made.groups[rank] = ShardGroup(Security(), node=WORKERS_NODE)
            made.groups[rank].set_spec(spec)
            made.groups[rank].set_placement(placement)
        groups = tuple(0 if spec.layout.units[u].trainable else -1 for u, _ in spec.layout.parameters())
        chosen = optimizer or OptimizerSpec(name="sgd", groups=({"lr": 1.0},), group_of=groups)
        made.tell(made.membership)
        made.tell(JobState(spec=spec, optimizer=chosen, placement=placement))
        for shell in made.shells:
            await shell.model().order.idle.wait()
        yield made
        for shell in made.shells:
            assert not shell.failure.done(), shell.failure.exception()
    finally:
        for group in made.groups.values():
            await group.close()
        for server in made.servers:
            await server.stop(0)
        for shell in made.shells:
            await shell.close()


@contextlib.asynccontextmanager
async def cutting(j: Job, *, up: Sequence[int] = (), down: Sequence[int] = ()) -> AsyncIterator[CuttingProxy]:
    """What carries the bytes between worker 0 and server 0 breaks after so many; see `CuttingProxy`."""
    bulk: Any = j.servers[0]._bulk
    target = j.addresses[0] if bulk is None else f"127.0.0.1:{bulk._port}"
    async with CuttingProxy(target, up=up, down=down) as proxy:
        if bulk is None:
            j.addresses[0] = proxy.address
        else:
            bulk._port = int(proxy.address.rpartition(":")[2])
            j.groups[0].set_members(dataclasses.replace(j.membership, shards=()))  # its connections are closed
        j.groups[0].set_members(j.membership)
        yield proxy


class CuttingProxy:
    """Passes TCP on to `target`, and breaks connections, one after the other, after so many bytes.

    Args:
        target: "host:port".
        up: bytes from the client after which the connection breaks, per connection that is to break; None = never.
        down: the same for bytes from the server.
    """

    def __init__(self, target: str, *, up: Sequence[int] = (), down: Sequence[int] = ()) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._limits = {"up": list(up), "down": list(down)}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.cuts = 0

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(self._pump(reader, there_writer, "up"), self._pump(there_reader, writer, "down"))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, there_writer):
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        limits = self._limits[direction]
        passed = 0
        while data := await reader.read(16384):
            passed += len(data)
            if limits and passed > limits[0]:
                limits.pop(0)
                self.cuts += 1
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
