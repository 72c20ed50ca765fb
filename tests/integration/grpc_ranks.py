"""Ranks of a group over real shard servers, each with a session and connections of its own, threads of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from axon_ps.aggregation.client.client import CollectiveClient
from axon_ps.collectives.backends.base import GroupContext
from axon_ps.collectives.backends.grpc import GrpcBackend, GrpcCalls
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.events import Event
from axon_ps.wire.v1 import shard_pb2
from deadlines import HANG_S

JOIN_TIMEOUT_S = HANG_S


class NoStore:
    """The gRPC backend meets on the servers and needs no store."""

    def put(self, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def wait(self, key: str, timeout_s: float) -> bytes:
        raise AssertionError(key)

    def delete(self, key: str) -> None:
        raise AssertionError(key)


class Rank:
    """One worker of a job: a session with the coordinator and what its collectives need."""

    def __init__(self, address: str, job: str, security: Security, rank: int) -> None:
        self.loop = BackgroundLoop(f"rank-{rank}")
        self.coordinator = CoordinatorClient(
            address,
            job=job,
            role=Role.WORKER,
            node="n",
            security=security,
            requested_rank=rank,
            on_event=self._on_event,
        )
        self.client = self.loop.run(self._make_client(security))
        self.loop.run(self.coordinator.start(JOIN_TIMEOUT_S))

    async def _make_client(self, security: Security) -> CollectiveClient:
        return CollectiveClient(security, self.coordinator.context)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Membership):
            self.client.set_members(event)

    def members(self, n: int) -> tuple[Member, ...]:
        """The workers, once all have joined."""
        self.loop.run(_joined(self.coordinator, n), JOIN_TIMEOUT_S)
        membership = self.coordinator.membership
        assert membership is not None
        return membership.workers

    def stats(self, server: int) -> dict[str, float]:
        """The counters of a shard server."""
        return self.loop.run(self._stats(server))

    async def _stats(self, server: int) -> dict[str, float]:
        deadline = Deadline(JOIN_TIMEOUT_S)
        stub = await self.client._peers.stub(server, 0, deadline)
        reply = await stub.call("Stats", shard_pb2.StatsRequest(context=self.coordinator.context()))
        return dict(reply.values)

    def close(self) -> None:
        """Leave the job."""
        self.loop.run(self.client.close())
        self.loop.run(self.coordinator.close("done"))
        self.loop.close()

    def backend(self, name: str, members: Sequence[Member], position: int) -> GrpcBackend:
        """Our end of a group."""
        context = GroupContext(
            name=name,
            rank=position,
            ranks=tuple(m.rank for m in members),
            members=tuple(members),
            store=NoStore(),
        )
        return GrpcBackend(context, GrpcCalls(loop=self.loop, client=self.client))


class Ranks:
    """The workers of a job of `n`, in threads."""

    def __init__(self, address: str, job: str, security: Security, n: int, members: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(2 * n)
        self._ranks: list[Rank] = self.each(lambda rank: Rank(address, job, security, rank), range(n))
        self._members = n if members is None else members

    def group(self, name: str, positions: Sequence[int] | None = None) -> list[GrpcBackend]:
        """A backend of each of our ranks that is in a new group of workers; all of them, unless `positions` says."""
        members = self._ranks[0].members(self._members)
        chosen = [members[p] for p in positions] if positions is not None else list(members)
        ours = {rank.coordinator.rank: rank for rank in self._ranks}
        return [ours[m.rank].backend(name, chosen, i) for i, m in enumerate(chosen) if m.rank in ours]

    def stats(self, name: str) -> float:
        """A counter, of all servers together."""
        membership = self._ranks[0].coordinator.membership
        assert membership is not None
        return sum(self._ranks[0].stats(server)[name] for server in range(len(membership.shards)))

    def each(self, do: Callable[..., Any], *over: Any) -> list[Any]:
        """`do` on all of `over` at once, results in order."""
        return list(self._threads.map(do, *over))

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """A future of `do`."""
        return self._threads.submit(do, *arguments)

    def close(self) -> None:
        """Everybody leaves."""
        for rank in self._ranks:
            rank.close()
        self._threads.shutdown()


async def _joined(coordinator: CoordinatorClient, n: int) -> None:
    while coordinator.membership is None or len(coordinator.membership.workers) < n:
        await asyncio.sleep(0.01)
