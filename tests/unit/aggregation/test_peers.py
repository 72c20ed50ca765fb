"""Calls wait for the servers that they need, as these come, go and move. Tests of `aggregation/client/peers.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.aggregation.client.peers import Peers
from axon_ps.errors import Closed, Timeout
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.types import Member, Membership, Role
from deadlines import HANG_S


def members(complete: bool = True, **ports: int) -> Membership:
    """Servers "s0", "s1", ... by their ports."""
    shards = tuple(
        Member(role=Role.SHARD, rank=int(name[1:]), incarnation=name, node="n", address=f"127.0.0.1:{port}")
        for name, port in ports.items()
    )
    return Membership(generation=1, step=1, version=0, workers=(), shards=shards, num_replicas=0, complete=complete)


def run(body: Callable[[Peers], Awaitable[None]]) -> None:
    async def test() -> None:
        peers = Peers(Security(), connections=2)
        try:
            await asyncio.wait_for(body(peers), HANG_S)
        finally:
            await peers.close()

    asyncio.run(test())


async def waiting(call: Awaitable[Any]) -> asyncio.Future[Any]:
    """A call that does not end before the members change."""
    task = asyncio.ensure_future(call)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def test_ranks_are_those_of_the_newest_complete_membership() -> None:
    async def body(peers: Peers) -> None:
        call = await waiting(peers.ranks(Deadline(HANG_S)))
        peers.set_members(members(complete=False, s1=1))
        assert not call.done()
        peers.set_members(members(s1=1, s0=2))
        assert await call == (0, 1)
        peers.set_members(members(complete=False, s0=2))
        assert await peers.ranks(Deadline(0.0)) == (0, 1), "a lost server is expected back"
        assert (peers.has(0), peers.has(1)) == (True, False)

    run(body)


def test_a_server_has_a_few_connections_and_they_are_made_once() -> None:
    async def body(peers: Peers) -> None:
        call = await waiting(peers.stub(0, 0, Deadline(HANG_S)))
        peers.set_members(members(s0=1))
        first = await call
        again, second, third = [await peers.stub(0, connection, Deadline(0.0)) for connection in (0, 1, 2)]
        assert first is again is third
        assert first is not second

    run(body)


def test_a_server_at_another_address_gets_another_connection() -> None:
    async def body(peers: Peers) -> None:
        peers.set_members(members(s0=1, s1=2))
        before = [await peers.stub(rank, 0, Deadline(0.0)) for rank in (0, 1)]
        peers.set_members(members(s0=3, s1=2))
        after = [await peers.stub(rank, 0, Deadline(0.0)) for rank in (0, 1)]
        assert before[0] is not after[0]
        assert before[1] is after[1]

    run(body)


def test_servers_that_do_not_come_in_time_are_named() -> None:
    async def body(peers: Peers) -> None:
        with pytest.raises(Timeout, match="the job's shard servers did not become known within 0 s"):
            await peers.ranks(Deadline(0.0))
        peers.set_members(members(s0=1))
        with pytest.raises(Timeout, match="shard server 7 was not there within 0 s"):
            await peers.stub(7, 0, Deadline(0.0))

    run(body)


def test_closing_ends_every_wait() -> None:
    async def body(peers: Peers) -> None:
        calls = [
            await waiting(call)
            for call in (peers.ranks(Deadline(None)), peers.stub(0, 0, Deadline(None)), peers.wait(HANG_S))
        ]
        await peers.close()
        for call in calls:
            with pytest.raises(Closed, match="the connections to the shard servers were closed"):
                await call
        peers.set_members(members(s0=1))
        with pytest.raises(Closed):
            await peers.stub(0, 0, Deadline(None))
        assert peers.closed

    run(body)


def test_the_farthest_server_is_that_with_the_longest_shortest_round_trip() -> None:
    async def body(peers: Peers) -> None:
        assert peers.longest_rtt_s == 0.0
        peers.set_members(members(s0=1, s1=2))
        for rank, connection, rtt_s in ((0, 0, 0.3), (0, 1, 0.1), (1, 0, 0.2), (1, 1, 0.0)):
            stub: Any = await peers.stub(rank, connection, Deadline(0.0))
            stub.bulk = SimpleNamespace(rtt_s=rtt_s, close=lambda: asyncio.sleep(0))
        assert [peers.rtt_s(rank) for rank in (0, 1, 2)] == [0.1, 0.2, 0.0]
        assert peers.longest_rtt_s == 0.2

    run(body)
