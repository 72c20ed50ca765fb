"""Unary methods are read as streams of one message: the wait for it has an end, and a reset leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from hyperframe.frame import RstStreamFrame

from axon_ps.rpc.auth import interceptor
from axon_ps.wire.v1 import shard_pb2
from axon_ps_lab.fuzz.hostile.http2 import connected
from rpc_fakes import run, serving
from test_shielded import used_bytes

STATS = "/axon_ps.wire.v1.Shard/Stats"
CHECK = "/grpc.health.v1.Health/Check"
RESETS, CONNECTIONS = 50, 60
STEADY_BYTES = 2000
LOST_BYTES = 96
"""What gRPC's own server loses with each reset call."""


async def stats(request: Any, context: Any) -> shard_pb2.StatsReply:
    return shard_pb2.StatsReply()


async def status_of_call(channel: grpc.aio.Channel, path: str, *messages: bytes, ends: bool) -> tuple[Any, str]:
    """How a call ends that sends these messages, and then nothing or the end of its own half."""
    call = channel.stream_stream(path)()
    for message in messages:
        await call.write(message)
    if ends:
        await call.done_writing()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.read()
    return await call.code(), str(await call.details())


@pytest.mark.parametrize("path", [STATS, CHECK, "/grpc.health.v1.Health/Watch"])
def test_a_call_without_its_message_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "FIRST_MESSAGE_S", 0.05)

    async def main() -> None:
        async with serving(stats=stats) as s:
            code, details = await status_of_call(s.channel, path, ends=False)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert f"a call of {path} stayed without its message for 0.05 s" in details
            code, details = await status_of_call(s.channel, path, ends=True)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"a call of {path} ended without its message" in details

    run(main())


def test_a_message_that_cannot_be_parsed_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(stats=stats) as s:
            for path in (STATS, CHECK):
                code, details = await status_of_call(s.channel, path, b"\xff", ends=True)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "cannot be parsed" in details

    run(main())
    assert "Traceback" not in caplog.text


def test_an_unknown_method_is_unimplemented() -> None:
    async def main() -> None:
        async with serving(stats=stats) as s:
            code, _ = await status_of_call(s.channel, "/nowhere/Nothing", ends=False)
            assert code is grpc.StatusCode.UNIMPLEMENTED

    run(main())


def test_calls_that_are_reset_leave_no_memory_behind() -> None:
    async def reset(port: int) -> None:
        async with connected(port, "") as c:
            await c.begin()
            for stream in range(1, 2 * RESETS, 2):
                await c.send(c.call(stream, CHECK), RstStreamFrame(stream, error_code=8))
            await c.drained(0.02)

    async def main() -> None:
        async with serving(stats=stats) as s:

            async def used_after(connections: int) -> int:
                for _ in range(connections):
                    await reset(s.server.port)
                before, used = 0, used_bytes()
                while abs(used - before) > STEADY_BYTES:  # connections that were left are still being closed
                    await asyncio.sleep(0.3)
                    before, used = used, used_bytes()
                return used

            before = await used_after(CONNECTIONS)
            assert await used_after(CONNECTIONS) - before < LOST_BYTES / 2 * RESETS * CONNECTIONS

    run(main())
