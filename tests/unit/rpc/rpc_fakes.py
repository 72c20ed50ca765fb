"""A servicer whose methods are given one by one, and a server and stub around it, all on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from axon_ps.errors import Broken, Unreachable
from axon_ps.rpc.calls.protocol import ClientCall, Destination, Message
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.bulk import client as bulk_client_module
from axon_ps.rpc.carriers.bulk.client import bulk_client
from axon_ps.rpc.carriers.in_process import InProcessServer, is_in_process, new_network
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server, listen
from axon_ps.rpc.service import Stream, Stub, method_name, service_handler
from axon_ps.wire.v1 import coordinator_pb2, shard_pb2

SHARD = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
HOST = ["127.0.0.1"]
"""Where `serving` serves."""

BULK = [False]
"""Whether its stub makes bulk calls of streaming ones."""

COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` within two minutes, which only a hang takes."""
    return asyncio.run(asyncio.wait_for(coro, 120))


class FakeServicer:
    """Every method of a service; those that are not given must not be called."""

    def __init__(self, descriptor: Any, **methods: Callable[..., Awaitable[Any]]) -> None:
        async def unexpected(*_: Any) -> None:
            raise AssertionError("this method was not expected to be called")

        for method in descriptor.methods:
            setattr(self, method_name(method.name), methods.pop(method_name(method.name), unexpected))
        assert not methods, f"no such methods: {methods}"


@dataclass
class Served:
    """A started server with one channel and one stub to it."""

    server: Server | InProcessServer
    address: str
    channel: grpc.aio.Channel
    stub: Stub


@asynccontextmanager
async def serving(
    descriptor: Any = SHARD,
    *,
    security: Security | None = None,
    client: Security | None = None,
    **methods: Callable[..., Awaitable[Any]],
) -> AsyncIterator[Served]:
    """Serve a fake of `descriptor` at `HOST`, on a free port; `client` is `security` where it is not given."""
    security = security or Security()
    client = client or security
    handler = service_handler(descriptor, FakeServicer(descriptor, **methods))
    host = HOST[0] + new_network() if is_in_process(HOST[0]) else HOST[0]
    server = listen(host, 0, security, [handler], [descriptor.full_name], 0 if BULK[0] else None)
    address = f"{host}:{await server.start()}"
    channel = connect(address, client)
    stub = BulkStub(channel, descriptor, client) if BULK[0] else Stub(channel, descriptor, client)
    try:
        yield Served(server, address, channel, stub)
    finally:
        await channel.close()
        if stub.bulk is not None:
            await stub.bulk.close()
        await server.stop(0)


class BulkStub(Stub):
    """A stub all of whose streams are bulk calls, opened as those of gRPC: connected when they are first used."""

    def __init__(self, channel: grpc.aio.Channel, descriptor: Any, security: Security) -> None:
        super().__init__(channel, descriptor, security)
        self.bulk = bulk_client(Stub(channel, bulk_client_module.BULK, security), self.peer, security, None)

    def open(self, method: str, *, timeout_s: float | None = None) -> Stream:
        """A stream whose call is bulk."""
        grpc_stream = super().open(method, timeout_s=timeout_s)
        grpc_stream._call.cancel()
        grpc_stream._call = LateCall(super().open_bulk(method))
        return grpc_stream


class Relay:
    """Passes bytes on between clients and a server, and counts what the server has been sent."""

    def __init__(self, port: int) -> None:
        self.sent_bytes = 0
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break all connections."""
        for task in self._tasks:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, back, counts=True))
                group.create_task(self._pass(there, writer, counts=False))
        finally:
            back.transport.abort()
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.sent_bytes += counts * len(data)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class LateCall:
    """A bulk call that connects when it is first used."""

    def __init__(self, opening: Coroutine[Any, Any, Stream]) -> None:
        self._opening = asyncio.ensure_future(opening)
        self._call: ClientCall | None = None
        self._cancelled = False

    async def _connected(self) -> ClientCall:
        if self._call is None:
            self._call = (await asyncio.shield(self._opening))._call
            assert isinstance(self._call, bulk_client_module.BulkCall), "it fell back to gRPC"
        return self._call

    async def read(self, destination: Destination | None = None) -> Any:
        return await (await self._connected()).read(destination)

    async def write(self, message: Message) -> None:
        await (await self._connected()).write(message)

    async def done_writing(self) -> None:
        await (await self._connected()).done_writing()

    def cancel(self) -> None:
        self._opening.cancel()
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def done(self) -> bool:
        return self._cancelled if self._call is None else self._call.done()

    async def status(self) -> CallStatus:
        return await (await self._connected()).status()


async def write_forever(stream: Stream, message: Any) -> None:
    """Write until that fails."""
    while True:
        await stream.write(message)


async def until_nobody_answers(call: Callable[[], Awaitable[Any]]) -> None:
    """Call until that is `Unreachable`: the first calls may still go to a connection that is about to end."""
    while True:
        try:
            await call()
        except Unreachable:
            return
        except Broken:
            continue
