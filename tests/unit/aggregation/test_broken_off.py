"""Ranks whose connection breaks in the midst of a collective: nobody gets a wrong result, or waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from axon_ps.aggregation.client.client import Buffers, CollectiveClient, GroupHandle
from axon_ps.aggregation.core.operations import GRACE_S, TOMBSTONE_S
from axon_ps.errors import Broken, Closed
from axon_ps.reduction.call import Call, Operation
from axon_ps.rpc.security import Security
from axon_ps.types import Array, DType, Member, Membership, ReduceOp, Role
from axon_ps.wire.v1.common_pb2 import CallContext
from collective_driver import Servers

CALL = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(4,), op=ReduceOp.SUM)


def data(rank: int) -> Array:
    return np.full(4, 10.0**rank, np.float32)


@pytest.mark.parametrize("gone", range(3))
@pytest.mark.parametrize("last", range(3))
def test_data_of_a_rank_that_broke_off_is_not_taken_for_added(gone: int, last: int) -> None:
    servers = Servers(3)
    order = [*(rank for rank in range(3) if rank != last), last]
    streams = {}
    for rank in order[:2] if last != gone else order:
        streams[rank] = servers.join(rank, CALL, data(rank))
    servers.leave(streams[gone])
    if last != gone:
        streams[last] = servers.join(last, CALL, data(last))
    others = [(stream, 0) for rank, stream in streams.items() if rank != gone]
    servers.run(others)
    servers.tick(GRACE_S)
    servers.run(others)
    if last == gone:  # it had sent everything: the others have the sum, all of it
        assert all(stream.received[0][1].tolist() == [111.0] * 4 for stream, _ in others)
    else:
        assert all(isinstance(stream.error, Broken) and not stream.received for stream, _ in others)


@pytest.mark.parametrize("stripe", range(2))
def test_a_rank_that_gives_up_before_it_has_come_ends_the_others_wait(stripe: int) -> None:
    servers = Servers(2, stripes=2)
    waits = servers.join(0, CALL, data(0), stripe=stripe)
    gives_up = servers.join(1, CALL, data(1)[:0], stripe=stripe, gives_up=True)
    servers.run([(waits, stripe), (gives_up, stripe)])
    assert gives_up.over
    assert gives_up.error is None
    assert not waits.over
    servers.tick(GRACE_S)
    servers.run([(waits, stripe)])
    assert "rank 1 broke off" in str(waits.error)
    servers.tick(TOMBSTONE_S)
    servers.assert_nothing_left()


def test_a_rank_that_comes_after_another_has_given_up_learns_it_at_once() -> None:
    servers = Servers(2)
    servers.run([(servers.join(1, CALL, data(1)[:0], gives_up=True), 0)])
    servers.tick(GRACE_S)
    with pytest.raises(Broken, match="rank 1 broke off"):
        servers.join(0, CALL, data(0))
    servers.assert_nothing_left()


def test_a_first_message_that_comes_after_its_rank_has_given_up_changes_nothing() -> None:
    servers = Servers(2)
    waits = servers.join(0, CALL, data(0))
    servers.run([(servers.join(1, CALL, data(1)[:0], gives_up=True), 0)])
    servers.leave(servers.join(1, CALL, data(1)))
    servers.tick(GRACE_S)
    servers.run([(waits, 0)])
    assert isinstance(waits.error, Broken) or waits.received[0][1].tolist() == [11.0] * 4
    servers.tick(TOMBSTONE_S)
    servers.assert_nothing_left()


def test_what_a_rank_has_done_already_it_does_not_give_up() -> None:
    servers = Servers(2)
    streams = [servers.join(rank, CALL, data(rank)) for rank in range(2)]
    while servers.write(streams[1]) or servers.read(streams[1]):
        pass
    assert streams[1].over
    servers.run([(servers.join(1, CALL, data(1)[:0], gives_up=True), 0)])
    servers.tick(GRACE_S)
    servers.run([(streams[0], 0)])
    assert streams[0].error is None
    assert streams[0].received[0][1].tolist() == [11.0] * 4
    servers.assert_nothing_left()


def test_a_server_that_leaves_breaks_a_collective_off_and_does_not_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = CollectiveClient(Security(), CallContext)
        server = Member(role=Role.SHARD, rank=0, incarnation="s", node="h", address="127.0.0.1:1")
        members = {"workers": (), "shards": (server,), "num_replicas": 0, "complete": True}
        client.set_members(Membership(generation=1, step=1, version=0, **members))
        group = GroupHandle(name="g", rank=0, ranks=(0, 1), members=("a", "b"))
        values = data(0)
        buffers = Buffers(source=values, target=values, source_starts=(0,), target_starts=(0,))

        async def closed(*_: Any) -> None:
            raise Closed("Collective at 127.0.0.1:1 was cancelled by this side")

        monkeypatch.setattr(client, "_run_stripe", closed)
        monkeypatch.setattr(client, "_give_up", closed)
        with pytest.raises(Broken, match="shard server that took part has left"):
            await client.collective(group, CALL, buffers, 5.0)
        await client._peers.close()
        with pytest.raises(Closed):
            await client.collective(group, CALL, buffers, 5.0)
        await client.close()

    asyncio.run(test())
