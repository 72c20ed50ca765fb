"""A servicer whose methods are given one by one, and a server and stub around it, all on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from axon_ps.errors import Broken, Unreachable
from axon_ps.rpc.channels import connect
from axon_ps.rpc.in_process import InProcessServer, is_in_process, new_network
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server, listen
from axon_ps.rpc.service import Stream, Stub, method_name, service_handler
from axon_ps.wire.v1 import coordinator_pb2, shard_pb2

SHARD = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
HOST = ["127.0.0.1"]
"""Where `serving` serves."""

COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` within 20 seconds."""
    return asyncio.run(asyncio.wait_for(coro, 20))


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
    server = listen(host, 0, security, [handler], [descriptor.full_name])
    address = f"{host}:{await server.start()}"
    channel = connect(address, client)
    try:
        yield Served(server, address, channel, Stub(channel, descriptor, client))
    finally:
        await channel.close()
        await server.stop(0)


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
