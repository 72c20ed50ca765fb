"""The promises of a call, over every carrier: see `axon_ps.rpc.calls`.

A carrier is tested at the seam: a `ClientCall` at one end, a servicer with its `ServerCall` at the other.

Tests of `rpc/carriers/grpc.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

import rpc_fakes
from axon_ps.errors import AxonError, Broken, Busy, GenerationChanged, InternalError, InvalidRequest, Timeout
from axon_ps.rpc.auth.credentials import EVERYBODY, Revocations
from axon_ps.rpc.calls import method
from axon_ps.rpc.calls.method import method_of
from axon_ps.rpc.calls.protocol import EOF, CallOver, ClientCall, ServerCall
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.in_process import SUFFIX
from axon_ps.rpc.channels import carrier_of, connect
from axon_ps.rpc.multiplex.client import MultiplexedClient
from axon_ps.rpc.multiplex.server import MultiplexedServer
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub, service_handler
from axon_ps.rpc.status import error_of_status
from axon_ps.rpc.stream_pool import IdleStreams
from rpc_fakes import COORDINATOR, SHARD, FakeServicer, Relay, Served, run, serving

PATH = f"/{SHARD.full_name}/Collective"
"""A method whose messages are bytes both ways."""

MIB = 1 << 20
MOST_UNREAD = 64
"""MiB; more than any carrier holds for a reader, with the buffers of sockets."""

ALL = ("gRPC", "socket", "memory", "multiplexed")
WITH_DEADLINES = ("gRPC", "memory")
"""The others have callers with deadlines."""

WITH_BACK_PRESSURE = ("gRPC", "socket", "memory")
"""A call on a shared stream must not hold up the others: `multiplex` ends the call of a reader that is far behind."""

WITH_CONNECTIONS = ("gRPC", "socket", "multiplexed")
Behaviour = Callable[[ServerCall], Awaitable[None]]


def over(*carriers: str) -> Any:
    """Run a test over each of some carriers."""
    return pytest.mark.parametrize("carrier", carriers)


@dataclass
class Carried:
    """A client and a server.

    Attributes:
        open: begins a call.
        served: the server.
        cut: breaks the connections between them.
    """

    open: Callable[..., Awaitable[ClientCall]]
    served: Served
    cut: Callable[[], None] = lambda: None


@contextlib.asynccontextmanager
async def carried(carrier: str, behaviour: Behaviour) -> AsyncIterator[Carried]:
    """Serve a method over a carrier."""
    make = {"gRPC": over_grpc, "socket": over_sockets, "memory": in_memory, "multiplexed": multiplexed}[carrier]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc_fakes, "HOST", [f"server{SUFFIX}" if carrier == "memory" else "127.0.0.1"])
        patch.setattr(rpc_fakes, "BULK", [carrier == "socket"])
        async with make(behaviour) as made:
            yield made


@contextlib.asynccontextmanager
async def in_memory(behaviour: Behaviour) -> AsyncIterator[Carried]:
    async with serving(collective=behaviour) as served:

        async def open(timeout_s: float | None = None) -> ClientCall:
            return carrier_of(served.channel).open(PATH, timeout_s, None)

        yield Carried(open, served)


@contextlib.asynccontextmanager
async def over_grpc(behaviour: Behaviour) -> AsyncIterator[Carried]:
    async with serving(collective=behaviour) as served, Relay(served.server.port) as relay:
        channel = connect(relay.address, Security())

        async def open(timeout_s: float | None = None) -> ClientCall:
            return carrier_of(channel).open(PATH, timeout_s, None)

        yield Carried(open, served, relay.cut)
        await channel.close()


@contextlib.asynccontextmanager
async def over_sockets(behaviour: Behaviour) -> AsyncIterator[Carried]:
    async with serving(collective=behaviour) as served:
        calls: list[Any] = []

        async def open() -> ClientCall:
            assert served.stub.bulk is not None
            call = await served.stub.bulk.open(PATH)
            assert call is not None
            calls.append(call)
            return call

        def cut() -> None:
            for call in calls:
                call._connection._sock.shutdown(socket.SHUT_RDWR)

        yield Carried(open, served, cut)


@contextlib.asynccontextmanager
async def multiplexed(behaviour: Behaviour) -> AsyncIterator[Carried]:
    services = [service_handler(SHARD, FakeServicer(SHARD, collective=behaviour))]

    def found(name: str, _: object) -> Any:
        return method_of(services, f"/{SHARD.full_name}/{name}")

    async def host_session(context: ServerCall) -> None:
        await MultiplexedServer(context, found, EVERYBODY, Revocations()).run()

    async with serving(COORDINATOR, host_session=host_session) as served, Relay(served.server.port) as relay:
        channel = connect(relay.address, Security())
        client = MultiplexedClient(Stub(channel, COORDINATOR).open("HostSession"), "the server")
        running = asyncio.ensure_future(client.run())
        await client.began()

        async def open() -> ClientCall:
            return client.open("Collective")

        try:
            yield Carried(open, served, relay.cut)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close()


async def rest(call: ClientCall) -> tuple[list[bytes], CallStatus]:
    """Read a call to its end."""
    messages: list[bytes] = []
    while (message := await call.read()) is not EOF:
        messages.append(bytes(message))
    return messages, await call.status()


async def write_until_over(call: ClientCall, message: bytes = b"x") -> None:
    with contextlib.suppress(CallOver):
        while True:
            await call.write(message)
            await asyncio.sleep(0)


async def echo(call: ServerCall) -> None:
    while (message := await call.read()) is not EOF:
        await call.write(bytes(message))
    await call.write(b"the end")


class Waiting:
    """A servicer that waits for one thing after its first message, until it is cancelled."""

    def __init__(self, kind: str) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()
        self._kind = kind

    async def __call__(self, call: ServerCall) -> None:
        await call.read()
        await call.write(b"began")
        self.began.set()
        try:
            while self._kind == "reads":
                if await call.read() is EOF:  # a broken connection may look so first
                    await asyncio.Event().wait()
            while self._kind == "writes":
                await call.write(bytes(MIB))
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        except (asyncio.CancelledError, CallOver):
            self.cancelled.set()
            raise


KINDS = pytest.mark.parametrize("kind", ["reads", "writes", "computes"])


# ---------------------------------------------------------------------- messages


@over(*ALL)
def test_messages_come_in_order_and_the_half_close_after_them(carrier: str) -> None:
    sent = [bytes([i]) * size for i, size in enumerate((0, 1, 5, 100_000, 3, MIB, 0, 70_000, 2))]

    async def main() -> None:
        async with carried(carrier, echo) as c:
            call = await c.open()
            reading = asyncio.ensure_future(rest(call))
            for message in sent:
                await call.write(message)
            await call.write((b"a tuple ", memoryview(b"of parts")))
            await call.done_writing()
            messages, status = await reading
            assert messages == [*sent, b"a tuple of parts", b"the end"]
            assert status.is_ok
            assert call.done()

    run(main())


@over(*ALL)
def test_messages_of_several_writers_do_not_mix(carrier: str) -> None:
    async def main() -> None:
        async with carried(carrier, echo) as c:
            call = await c.open()
            reading = asyncio.ensure_future(rest(call))
            sent = [bytes([i]) * (200_000 + i) for i in range(8)]
            await asyncio.gather(*map(call.write, sent))
            await call.done_writing()
            messages, _ = await reading
            assert sorted(messages[:-1]) == sent

    run(main())


@over(*ALL)
def test_messages_before_the_status_can_still_be_read(carrier: str) -> None:
    async def fails(call: ServerCall) -> None:
        for i in range(3):
            await call.write(bytes([i]))
        raise Busy("come back later")

    async def main() -> None:
        async with carried(carrier, fails) as c:
            messages, status = await rest(await c.open())
            assert messages == [b"\0", b"\1", b"\2"]
            assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(main())


@over(*WITH_BACK_PRESSURE)
@pytest.mark.parametrize("writer", ["client", "server"])
def test_a_writer_waits_for_a_reader_that_is_far_behind(carrier: str, writer: str) -> None:
    written = 0
    may_read = asyncio.Event()

    async def write_all(call: ClientCall | ServerCall) -> None:
        nonlocal written
        for _ in range(2 * MOST_UNREAD):
            await call.write(bytes(MIB))
            written += 1

    async def read_all(call: ClientCall | ServerCall) -> None:
        await may_read.wait()
        for _ in range(2 * MOST_UNREAD):
            assert len(await call.read()) == MIB

    async def serve(call: ServerCall) -> None:
        await (read_all if writer == "client" else write_all)(call)

    async def main() -> None:
        async with carried(carrier, serve) as c:
            call = await c.open()
            using = asyncio.ensure_future((write_all if writer == "client" else read_all)(call))
            before = -1
            while before != written:
                before = written
                await asyncio.sleep(0.05)
            assert written < MOST_UNREAD
            may_read.set()
            await using
            assert (await rest(call))[1].is_ok

    run(main())


# ---------------------------------------------------------------------- the end


ERRORS = (Busy("later"), InvalidRequest("offset 7"), GenerationChanged("worker 3 left", 8), Broken("shard 1"))


@over(*ALL)
@pytest.mark.parametrize("raised", [*ERRORS, KeyError("oops")], ids=lambda error: type(error).__name__)
def test_an_error_of_the_servicer_arrives_as_it_was_raised(carrier: str, raised: Exception) -> None:
    async def fails(call: ServerCall) -> None:
        await call.read()
        raise raised

    async def main() -> None:
        async with carried(carrier, fails) as c:
            call = await c.open()
            await call.write(b"x")
            _, status = await rest(call)
            arrived = error_of_status(status, "here", "Collective")
            if isinstance(raised, AxonError):
                assert (type(arrived), str(arrived)) == (type(raised), str(raised))
            else:
                assert type(arrived) is InternalError
                assert "Collective failed: KeyError: 'oops'" in str(arrived)
            assert await call.status() == status, "there is one status"
            call.cancel()
            assert await call.status() == status

    run(main())


@over(*ALL)
def test_an_end_of_the_server_ends_the_clients_writes(carrier: str) -> None:
    async def fails(call: ServerCall) -> None:
        await call.read()
        raise Busy("come back later")

    async def main() -> None:
        async with carried(carrier, fails) as c:
            call = await c.open()
            await write_until_over(call)
            await call.done_writing()
            assert (await call.status()).code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert call.done()

    run(main())


@over(*ALL)
@KINDS
def test_a_client_cancels_its_call_on_both_sides(carrier: str, kind: str) -> None:
    async def main() -> None:
        servicer = Waiting(kind)
        async with carried(carrier, servicer) as c:
            call = await c.open()
            await call.write(b"x")
            assert await call.read() == b"began"
            await servicer.began.wait()
            reading = asyncio.ensure_future(rest(call))
            await asyncio.sleep(0)
            call.cancel()
            _, status = await reading
            assert status.local
            assert call.done()
            with pytest.raises(CallOver):
                await call.write(b"y")
            await call.done_writing()
            await servicer.cancelled.wait()

    run(main())


@over(*ALL)
@pytest.mark.parametrize("how", ["reads", "writes"])
def test_a_task_that_is_cancelled_cancels_its_call(carrier: str, how: str) -> None:
    async def main() -> None:
        servicer = Waiting("computes")
        async with carried(carrier, servicer) as c:
            call = await c.open()
            await call.write(b"x")
            assert await call.read() == b"began"
            using = asyncio.ensure_future(rest(call) if how == "reads" else write_until_over(call, bytes(MIB)))
            for _ in range(20):
                await asyncio.sleep(0)
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
            if how == "writes" and carrier == "multiplexed":  # its writes do not wait
                call.cancel()
            assert (await call.status()).local
            await servicer.cancelled.wait()

    run(main())


@over(*ALL)
def test_a_server_that_stops_ends_its_calls(carrier: str) -> None:
    async def main() -> None:
        servicer = Waiting("computes")
        async with carried(carrier, servicer) as c:
            call = await c.open()
            await call.write(b"x")
            assert await call.read() == b"began"
            stopping = asyncio.ensure_future(c.served.server.stop(0))
            _, status = await rest(call)
            assert type(error_of_status(status, answered=True)) is Broken
            await servicer.cancelled.wait()
            await stopping

    run(main())


@over(*WITH_CONNECTIONS)
@KINDS
def test_a_connection_that_breaks_ends_the_call_on_both_sides(carrier: str, kind: str) -> None:
    async def main() -> None:
        servicer = Waiting(kind)
        async with carried(carrier, servicer) as c:
            call = await c.open()
            await call.write(b"x")
            assert await call.read() == b"began"
            c.cut()
            _, status = await rest(call)
            assert type(error_of_status(status, answered=True)) is Broken
            await servicer.cancelled.wait()

    run(main())


@over(*WITH_DEADLINES)
def test_a_deadline_ends_the_call_on_both_sides(carrier: str) -> None:
    async def main() -> None:
        servicer = Waiting("computes")
        async with carried(carrier, servicer) as c:
            call = await c.open(timeout_s=0.2)
            await call.write(b"x")
            _, status = await rest(call)
            assert type(error_of_status(status)) is Timeout
            assert not status.local
            await servicer.cancelled.wait()

    run(main())


@over(*ALL)
def test_a_call_without_a_first_message_ends(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with carried(carrier, echo) as c:
            monkeypatch.setattr(method, "FIRST_MESSAGE_S", 0.05)
            _, status = await rest(await c.open())
            assert type(error_of_status(status)) is Timeout
            assert "a stream of Collective stayed without a message for 0.05 s" in status.details
            call = await c.open()
            await call.write(b"x")
            assert await call.read() == b"x"
            await asyncio.sleep(0.1)
            assert not call.done()

    run(main())


# ---------------------------------------------------------------------- the servicer's end


@over(*ALL)
def test_a_server_ends_a_stream_that_no_call_uses(carrier: str) -> None:
    idle = IdleStreams()

    async def serve(call: ServerCall) -> None:
        while (message := await idle.next(call)) is not EOF:
            await call.write(bytes(message))

    async def main() -> None:
        async with carried(carrier, serve) as c:
            call = await c.open()
            await call.write(b"x")
            assert await call.read() == b"x"
            while not idle._idle:
                await asyncio.sleep(0.001)
            idle.drain()
            assert (await rest(call))[1].is_ok
            later = await c.open()
            assert (await rest(later))[1].is_ok

    run(main())


@over(*ALL)
def test_a_servicer_knows_its_call(carrier: str) -> None:
    async def serve(call: ServerCall) -> None:
        assert not call.received
        taken = asyncio.Event()
        assert await call.read() == b"x"
        assert call.received
        assert not call.done()
        assert call.peer().startswith("" if carrier == "memory" else "ipv4:127.0.0.1:")
        if call.send_soon is None:
            await call.write(b"written")
        else:
            assert call.send_soon(b"written")
        if call.receive(lambda message: message is EOF and taken.set()):
            await taken.wait()

    async def main() -> None:
        async with carried(carrier, serve) as c:
            call = await c.open()
            await call.write(b"x")
            await call.done_writing()
            messages, status = await rest(call)
            assert messages == [b"written"]
            assert status.is_ok

    run(main())
