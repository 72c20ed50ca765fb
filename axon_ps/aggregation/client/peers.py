"""A member's view of the shard servers of its job: ranks, addresses and connections.

All of it runs on one event loop. Callers wait until the members are known, or a lost server is back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

from axon_ps.aggregation.client.probes import ECHO_BYTES, Probes, Wait, Waits
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import Broken, Closed, Timeout
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.carriers.bulk.client import BULK, bulk_client
from axon_ps.rpc.channels import Channel, connect
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import EOF, Stub
from axon_ps.types import Member, Membership
from axon_ps.wire.v1 import common_pb2, shard_pb2

MakeContext = Callable[[], common_pb2.CallContext]
"""Returns the caller: job, generation and incarnation."""

_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["Shard"]


class Peers:
    """The shard servers' addresses and connections.

    Args:
        security: TLS and token.
        connections: number of connections per server.
    """

    def __init__(self, security: Security, connections: int) -> None:
        self._security = security
        self._connections = connections
        self._ranks: tuple[int, ...] = ()
        self._members: dict[int, Member] = {}
        self._stubs: dict[tuple[int, int], tuple[str, Channel, Stub]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._waits = Waits()
        self._probes: Probes | None = None

    def probe(self, report: ConnectivityReport, context: MakeContext, *, everybody: bool = False) -> None:
        """Begin to probe servers, and report those that do not answer. Call it before the first `set_members`.

        Args:
            report: receives the results.
            context: returns the caller.
            everybody: whether each server is also probed once when this member does not wait for it.
        """
        me = context().incarnation
        self._probes = Probes(report, self._waits, partial(self._echo, context), me, everybody=everybody)

    def waiting(self) -> Wait:
        """Return the context of a call in which this member will wait for servers."""
        return self._waits.begin()

    def set_members(self, membership: Membership) -> None:
        """Set the current shard servers. Connections to servers that left, or have a new address, are closed."""
        self._members = {m.rank: m for m in membership.shards}
        if membership.complete:
            self._ranks = tuple(sorted(self._members))
        for key, (address, channel, stub) in list(self._stubs.items()):
            member = self._members.get(key[0])
            if member is None or member.address != address:
                del self._stubs[key]
                task = asyncio.get_running_loop().create_task(_close(channel, stub))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        if self._probes is not None and not self._closed:
            self._probes.set_members(membership)
        self.wake()

    async def ranks(self, deadline: Deadline) -> tuple[int, ...]:
        """Return the shard servers' ranks in the last complete membership, ascending. Waits until there is one.

        Raises:
            Timeout: no membership was complete before the deadline.
            Closed: the connections were closed.
        """
        while not self._ranks:
            if deadline.expired:
                raise Timeout(f"the job's shard servers did not become known within {deadline.timeout_s:g} s")
            await self.wait(deadline.remaining())
        self._check_open()
        return self._ranks

    @property
    def closed(self) -> bool:
        """True if all connections were closed by `close`."""
        return self._closed

    def has(self, server: int) -> bool:
        """Return True if a shard server is a member."""
        return server in self._members

    async def stub(self, server: int, connection: int, deadline: Deadline) -> Stub:
        """Return the client of a shard server, once the server is a member.

        Raises:
            Timeout: it did not become a member in time.
            Closed: the connections were closed.
        """
        key = (server, connection % self._connections)
        if (known := self._stubs.get(key)) is not None:
            return known[2]
        while (member := self._members.get(server)) is None:
            if deadline.expired:
                raise Timeout(f"shard server {server} was not there within {deadline.timeout_s:g} s")
            await self.wait(deadline.remaining())
        self._check_open()
        if key not in self._stubs:
            channel = connect(member.address, self._security, connection=key[1], to=Principal.SHARD)
            stub, opens = (Stub(channel, service, self._security) for service in (_SERVICE, BULK))
            stub.bulk = bulk_client(opens, member.address, self._security, Principal.SHARD)
            self._stubs[key] = member.address, channel, stub
        return self._stubs[key][2]

    def rtt_s(self, server: int) -> float:
        """Return the shortest round trip to a shard server measured so far, in seconds; 0 before the first."""
        bulks = (stub.bulk for (rank, _), (_, _, stub) in list(self._stubs.items()) if rank == server)
        return min((bulk.rtt_s for bulk in bulks if bulk is not None and bulk.rtt_s), default=0.0)

    @property
    def longest_rtt_s(self) -> float:
        """The round trip to the shard server that is farthest away, in seconds. It may be called by other threads."""
        return max(map(self.rtt_s, list(self._members)), default=0.0)

    async def wait(self, timeout_s: float) -> None:
        """Wait for a change of members, at most `timeout_s`.

        Raises:
            Closed: the connections were closed.
        """
        self._check_open()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await asyncio.wait([future], timeout=None if math.isinf(timeout_s) else timeout_s)
        finally:
            if not future.done():
                self._waiting.remove(future)
        self._check_open()

    async def close(self) -> None:
        """Close every connection. Calls under way fail. It may be repeated."""
        self._closed = True
        self.wake()
        if self._probes is not None:
            await self._probes.close()
        stubs, self._stubs = self._stubs, {}
        for _, channel, stub in stubs.values():
            await _close(channel, stub)
        await asyncio.gather(*self._closing)

    async def _echo(self, context: MakeContext, server: int) -> None:
        """Have a shard server send `ECHO_BYTES` back.

        Raises:
            Broken: it did not send them.
            AxonError: it refuses.
        """
        stub = await self.stub(server, 0, Deadline(None))
        async with await stub.open_bulk("Echo") as stream:
            await stream.write(shard_pb2.EchoMessage(context=context(), payload=bytes(ECHO_BYTES)))
            reply = await stream.read()
        if reply is EOF or len(reply.payload) != ECHO_BYTES:
            raise Broken(f"{stream.target} sent something else back than it got")

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the connections to the shard servers were closed")

    def wake(self) -> None:
        """Wake all callers that wait for a change."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


async def _close(channel: Channel, stub: Stub) -> None:
    await channel.close()
    if stub.bulk is not None:
        await stub.bulk.close()
