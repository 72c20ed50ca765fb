"""Calls inside the process are as calls over a socket: the same tests, and what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import rpc_fakes
from axon_ps.errors import Closed, Misuse, Unreachable
from axon_ps.rpc.carriers.in_process import MAX_QUEUED_BYTES, SUFFIX, InProcessServer, new_network
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import shard_pb2
from rpc_fakes import SHARD, run, serving
from stream_tests import RAISED, STREAM_TESTS, name_of
from tests.unit.rpc import test_service as service
from tests.unit.rpc import test_stream_pool as pool_tests

SAME: list[Callable[[], None]] = [
    *STREAM_TESTS,
    service.test_a_unary_call,
    partial(service.test_errors_arrive_from_unary_calls, RAISED),
    service.test_deadlines,
    service.test_nobody_listens,
    service.test_a_service_that_is_not_there,
    pool_tests.test_a_server_that_stops_ends_idle_streams_now_and_later,
]


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_fakes, "HOST", [f"server{SUFFIX}"])


@pytest.mark.parametrize("test", SAME, ids=name_of)
def test_as_over_a_socket(test: Callable[[], None]) -> None:
    test()


def test_who_writes_more_than_a_stream_holds_waits_for_the_reader() -> None:
    message, written = b"x" * (1 << 20), 0

    async def reduce_scatter(context: Any) -> None:
        await reading.wait()
        while await context.read() != b"":
            pass
        await context.write(shard_pb2.ReduceScatterReply(chunks=written))

    async def write(stream: Any) -> None:
        nonlocal written
        for _ in range(16):
            await stream.write(message)
            written += 1
        await stream.write(b"")

    async def main() -> None:
        async with serving(reduce_scatter=reduce_scatter) as s:
            stream = s.stub.open("ReduceScatter")
            writing = asyncio.ensure_future(write(stream))
            for _ in range(50):
                await asyncio.sleep(0)
            assert written == MAX_QUEUED_BYTES // len(message)
            reading.set()
            assert (await stream.read()).chunks == 16
            await writing

    reading = asyncio.Event()
    run(main())


def test_an_address_has_one_server_and_another_network_has_its_own() -> None:
    async def main() -> None:
        first, second = "server" + new_network(), "server" + new_network()
        assert first != second
        server = InProcessServer(first, [])
        await server.start()
        with pytest.raises(Misuse, match="already"):
            await InProcessServer(first, []).start()
        await InProcessServer(second, []).start()
        await server.stop(0)
        await InProcessServer(first, []).start()

    run(main())


def test_a_server_of_another_event_loop_does_not_answer() -> None:
    host = "server" + new_network()
    server = InProcessServer(host, [])
    run(server.start())

    async def main() -> None:
        with pytest.raises(Unreachable, match="a server of another event loop"):
            await Stub(connect(server.address, Security()), SHARD).call("Stats", shard_pb2.StatsRequest())

    run(main())


def test_a_channel_that_was_closed_ends_its_calls() -> None:
    async def stats(request: Any, context: Any) -> None:
        entered.set()
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with serving(stats=stats) as s:
            call = asyncio.ensure_future(s.stub.call("Stats", shard_pb2.StatsRequest()))
            await entered.wait()
            await s.channel.close()
            with pytest.raises(Closed, match="was closed before Stats was done"):
                await call

    entered = asyncio.Event()
    run(main())
