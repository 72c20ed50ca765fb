"""A stream's ends: who cancelled, who closed, what broke, and what can still be read."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from axon_ps.errors import Broken, Closed, Unreachable
from axon_ps.rpc import channels
from axon_ps.rpc.channels import connect
from axon_ps.rpc.deadlines import Deadline, retry
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import membership_pb2, session_pb2, shard_pb2, status_pb2
from rpc_fakes import COORDINATOR, SHARD, run, serving, until_nobody_answers, write_forever

REQUEST = session_pb2.SessionRequest(leave=membership_pb2.Leave(reason="x"))


async def echo(context: Any) -> None:
    """A session that sends each request's reason back."""
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(session_pb2.SessionEvent(decision=session_pb2.DecisionEvent(reason=request.leave.reason)))


async def silent(context: Any) -> None:
    """A session that reads once and sends nothing."""
    await context.read()
    await asyncio.get_running_loop().create_future()


def test_echo() -> None:
    async def main() -> None:
        async with serving(COORDINATOR, session=echo) as s:
            stream = s.stub.open("Session")
            for _ in range(3):
                await stream.write(REQUEST)
                assert (await stream.read()).decision.reason == "x"
            await stream.done_writing()
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.read() is grpc.aio.EOF
            assert stream.done()

    run(main())


def test_several_tasks_may_write() -> None:
    async def main() -> None:
        async with serving(COORDINATOR, session=echo) as s:
            stream = s.stub.open("Session")
            await asyncio.gather(*(stream.write(REQUEST) for _ in range(20)))
            await stream.done_writing()
            assert len([event async for event in stream]) == 20

    run(main())


def test_all_messages_before_a_good_end_can_be_read_later() -> None:
    async def all_gather(context: Any) -> None:
        for i in range(50):
            await context.write(bytes([i]))
        written.set()

    async def main() -> None:
        async with serving(all_gather=all_gather) as s:
            stream = s.stub.open("AllGather")
            await written.wait()
            for _ in range(100):  # let the status arrive, if it can
                await asyncio.sleep(0)
            assert [m async for m in stream] == [bytes([i]) for i in range(50)]

    written = asyncio.Event()
    run(main())


def test_writing_after_a_half_close_is_closed() -> None:
    async def main() -> None:
        async with serving(COORDINATOR, session=echo) as s:
            stream = s.stub.open("Session")
            await stream.done_writing()
            with pytest.raises(Closed, match="half-closed"):
                await stream.write(REQUEST)

    run(main())


def test_writing_after_a_good_end_is_closed() -> None:
    async def reduce_scatter(context: Any) -> None:
        await context.write(shard_pb2.ReduceScatterReply(chunks=3))

    async def main() -> None:
        async with serving(reduce_scatter=reduce_scatter) as s:
            stream = s.stub.open("ReduceScatter")
            reading = asyncio.ensure_future(stream.read())
            with pytest.raises(Closed, match="ended by the peer"):
                await write_forever(stream, b"")
            await stream.done_writing()
            assert (await reading).chunks == 3

    run(main())


@pytest.mark.parametrize("what", ["read", "iterate", "write"])
def test_cancelling_a_stream_closes_it_for_other_tasks(what: str) -> None:
    async def reduce_scatter(context: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def use(stream: Any) -> None:
        if what == "read":
            await stream.read()
        elif what == "iterate":
            async for _ in stream:
                pass
        else:
            await write_forever(stream, b"x" * (1 << 20))

    async def main() -> None:
        descriptor = SHARD if what == "write" else COORDINATOR
        method = "ReduceScatter" if descriptor is SHARD else "Session"
        methods = {"reduce_scatter": reduce_scatter} if descriptor is SHARD else {"session": silent}
        async with serving(descriptor, **methods) as s:
            stream = s.stub.open(method)
            await stream.write(b"")
            task = asyncio.ensure_future(use(stream))
            for _ in range(20):
                await asyncio.sleep(0)
            stream.cancel()
            with pytest.raises(Closed, match=f"{method} at {s.address} was cancelled by this side"):
                await task
            with pytest.raises(Closed):
                await stream.write(b"")
            stream.cancel()

    run(main())


@pytest.mark.parametrize("turns", range(4))
def test_cancelling_a_stream_that_is_not_connected_yet(turns: int) -> None:
    async def main() -> None:
        async with serving(COORDINATOR, session=echo) as s:
            stream = s.stub.open("Session")
            writing = asyncio.ensure_future(stream.write(REQUEST))
            for _ in range(turns):
                await asyncio.sleep(0)
            stream.cancel()
            with pytest.raises(Closed, match="was cancelled by this side"):
                await writing
                await stream.read()

    run(main())


def test_a_task_cancelled_while_reading_takes_the_stream_with_it() -> None:
    async def main() -> None:
        async with serving(COORDINATOR, session=silent) as s:
            stream = s.stub.open("Session")
            await stream.write(REQUEST)
            task = asyncio.ensure_future(stream.read())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert stream.done()
            with pytest.raises(Closed):
                await stream.read()

    run(main())


@pytest.mark.parametrize("how", ["deleted", "broken out of", "left"])
def test_a_stream_that_is_left_is_cancelled(how: str) -> None:
    async def all_gather(context: Any) -> None:
        try:
            while True:
                await context.write(b"x" * (1 << 20))
        finally:
            ended.set()

    async def main() -> None:
        async with serving(all_gather=all_gather) as s:
            stream = s.stub.open("AllGather")
            if how == "left":
                async with stream:
                    await stream.read()
            elif how == "deleted":
                await stream.read()
                del stream
            else:
                async for _ in stream:
                    break
                del stream
            gc.collect()
            await ended.wait()

    ended = asyncio.Event()
    run(main())


def test_a_server_that_stops_breaks_its_streams() -> None:
    async def main() -> None:
        async with serving(COORDINATOR, session=silent) as s:
            stream = s.stub.open("Session")
            await stream.write(REQUEST)
            reading = asyncio.ensure_future(stream.read())
            await s.server.stop(0)
            with pytest.raises(Broken) as caught:
                await reading
            assert type(caught.value) is Broken

    run(main())


SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server
from axon_ps.rpc.service import service_handler
from rpc_fakes import COORDINATOR, FakeServicer
from axon_ps.wire.v1 import session_pb2

async def forever(*_):
    await asyncio.get_running_loop().create_future()

async def main():
    async def session(context):
        await context.write(session_pb2.SessionEvent())
        await asked.wait()
        await context.write(session_pb2.SessionEvent())
        await forever()

    async def status(request, context):
        asked.set()
        await forever()

    asked = asyncio.Event()
    servicer = FakeServicer(COORDINATOR, session=session, status=status)
    handler = service_handler(COORDINATOR, servicer)
    server = Server("127.0.0.1", int(sys.argv[2]), Security(), [handler], [])
    print(await server.start(), flush=True)
    await forever()

asyncio.run(main())
"""


class ServerProcess:
    """A server in a process of its own, to be killed."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(Path(__file__).parent), str(port)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def server_process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.kill()


def test_a_server_that_is_killed_breaks_calls_and_comes_back(server_process: ServerProcess) -> None:
    async def main() -> None:
        address = f"127.0.0.1:{server_process.port}"
        channel = connect(address, Security())
        stub = Stub(channel, COORDINATOR)
        stream = stub.open("Session")
        await stream.read()
        unary = asyncio.ensure_future(stub.call("Status", status_pb2.StatusRequest()))
        await stream.read()  # the call has arrived
        reading = asyncio.ensure_future(stream.read())
        server_process.kill()
        with pytest.raises(Broken, match=f"broke during Session at {address}") as caught:
            await reading
        assert type(caught.value) is Broken
        with pytest.raises(Broken):
            await unary
        await until_nobody_answers(lambda: stub.open("Session").read())
        again = await asyncio.to_thread(ServerProcess, server_process.port)
        try:
            deadline = Deadline(10)
            await retry(lambda: stub.open("Session").read(), until=deadline, on=(Unreachable,))
            assert deadline.remaining() > 7, "reconnecting took more than 3 s"
        finally:
            again.kill()
        await channel.close()

    run(main())


def test_a_server_that_freezes_breaks_calls(server_process: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"grpc.keepalive_time_ms": 100, "grpc.keepalive_timeout_ms": 100, "grpc.http2.ping_timeout_ms": 100}
    assert quick.keys() <= dict(channels.CLIENT_OPTIONS).keys()
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", tuple({**dict(channels.CLIENT_OPTIONS), **quick}.items()))

    async def main() -> None:
        channel = connect(f"127.0.0.1:{server_process.port}", Security())
        stream = Stub(channel, COORDINATOR).open("Session")
        await stream.read()
        server_process.freeze()
        with pytest.raises(Broken, match="broke during Session"):
            await stream.read()
        await channel.close()

    run(main())


def test_lanes_are_connections_of_their_own() -> None:
    async def stats(request: Any, context: Any) -> shard_pb2.StatsReply:
        peers.add(context.peer())
        return shard_pb2.StatsReply()

    async def main() -> None:
        async with serving(stats=stats) as s:
            channels = [connect(s.address, Security(), connection=n) for n in (1, 2, 3)]
            for channel in (s.channel, *channels, s.channel, *channels):
                await Stub(channel, SHARD).call("Stats", shard_pb2.StatsRequest())
            for channel in channels:
                await channel.close()

    peers: set[str] = set()
    run(main())
    assert len(peers) == 4
