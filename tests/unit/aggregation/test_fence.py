"""A rank may be ahead of the server that it calls, but not far, and the server does not wait for ever."""

from __future__ import annotations

import asyncio

import pytest

from axon_ps.aggregation.server import shell as shell_module
from axon_ps.aggregation.server.shell import CollectiveShell
from axon_ps.errors import Broken, InvalidRequest
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
