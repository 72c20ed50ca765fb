"""A rank may be ahead of the server that it calls, but not far, and the server does not wait for ever."""

from __future__ import annotations

import asyncio

import pytest

from axon_ps.aggregation.server import shell as shell_module
from axon_ps.aggregation.server.shell import CollectiveShell
from axon_ps.errors import Broken, InvalidRequest
from axon_ps.shard.server.shell import ShardShell
from axon_ps.types import Membership
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk


def begins(generation: int) -> bytes:
    """The first message of an operation of a generation."""
    context = common_pb2.CallContext(job="j", generation=generation, incarnation="w")
    return encode_chunk(CollectiveChunk(begin=CollectiveBegin(context=context)), None)


def test_a_generation_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "FENCE_S", 0.02)

    async def main() -> None:
        shell = CollectiveShell("j")
        with pytest.raises(InvalidRequest, match=f"generation {1 << 62} is none of this job's; this server knows 0"):
            await shell.open(begins(1 << 62))
        with pytest.raises(Broken, match=r"has not heard of generation 1 within 0\.02 s; it knows 0"):
            await shell.open(begins(1))
        assert not shell._membership_waiters
        shell.close()

    asyncio.run(main())


@pytest.mark.parametrize("generation", [1, 3, 1 << 40])
def test_a_caller_of_a_state_that_is_lost_is_refused_for_the_present(generation: int) -> None:
    """Its generations say nothing: it, or this server, is about to learn that it has to end."""

    async def main() -> None:
        shell, shards = CollectiveShell("j"), ShardShell("j")
        membership = Membership(
            generation=3, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=False, state_id="new"
        )
        shell.on_membership(membership)
        shards.on_event(membership)
        context = common_pb2.CallContext(job="j", generation=generation, incarnation="w", state_id="old")
        begin = encode_chunk(CollectiveChunk(begin=CollectiveBegin(context=context)), None)
        for call in (shell.open(begin), shards.fence.worker(context), shards.fence.server(context)):
            with pytest.raises(Broken, match="of another state of the job than this server's"):
                await call
        shell.close()
        await shards.close()

    asyncio.run(main())


def test_so_is_one_that_called_before_this_process_had_joined() -> None:
    async def main() -> None:
        shell, shards = CollectiveShell("j"), ShardShell("j")
        context = common_pb2.CallContext(job="j", generation=3, incarnation="w", state_id="old")
        begin = encode_chunk(CollectiveChunk(begin=CollectiveBegin(context=context)), None)
        calls = [asyncio.ensure_future(call) for call in (shell.open(begin), shards.fence.worker(context))]
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls), "the generation is not known here yet"
        membership = Membership(
            generation=3, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=False, state_id="new"
        )
        shell.on_membership(membership)
        shards.on_event(membership)
        for call in calls:
            with pytest.raises(Broken, match="of another state of the job than this server's"):
                await call
        shell.close()
        await shards.close()

    asyncio.run(main())
