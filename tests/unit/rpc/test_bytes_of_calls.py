"""Bytes of callers: refused before they come, few at a time, and nothing of them left when the call was answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from hyperframe.frame import DataFrame

import rpc_fakes
from axon_ps.errors import Busy, InvalidRequest, PermissionDenied
from axon_ps.rpc import channels, limits
from axon_ps.rpc.auth import interceptor
from axon_ps.rpc.carriers.in_process import SUFFIX
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server
from axon_ps.rpc.service import Stub, service_handler
from axon_ps.wire.v1 import coordinator_pb2, membership_pb2, session_pb2
from axon_ps_lab.fuzz.hostile.http2 import connected
from deadlines import HANG_S
from rpc_fakes import COORDINATOR, FakeServicer, Relay, run, serving

MIB = 1 << 20
SECRET = Security(token="of-the-job")
KV = "/axon_ps.wire.v1.Coordinator/KV"
CHECK = "/grpc.health.v1.Health/Check"
REFUSED = 24
"""Calls of 1 MiB each."""

LEFT_BYTES = 4 * MIB
"""So much may be left after all of them: the last one may not be over on the server."""


async def put(request: coordinator_pb2.KVRequest, context: Any) -> coordinator_pb2.KVReply:
    return coordinator_pb2.KVReply(found=True)


@contextlib.asynccontextmanager
async def coordinator_like(security: Security = SECRET, **methods: Any) -> AsyncIterator[Server]:
    """A server whose calls are small."""
    handler = service_handler(COORDINATOR, FakeServicer(COORDINATOR, **methods))
    server = Server("127.0.0.1", 0, security, [handler], [COORDINATOR.full_name], options=channels.CALL_OPTIONS)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def of_bytes(number: int) -> coordinator_pb2.KVRequest:
    return coordinator_pb2.KVRequest(op=1, key="k", value=bytes(number))


# ---------------------------------------------------------------------- before they come


def test_of_a_message_with_a_wrong_token_only_a_window_arrives() -> None:
    async def main() -> None:
        async with coordinator_like() as server, Relay(server.port) as relay:
            channel = channels.connect(relay.address, Security())
            stub = Stub(channel, COORDINATOR, Security(token="wrong"))
            calls = [stub.call("KV", of_bytes(12 * MIB)) for _ in range(5)]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, PermissionDenied)
                assert "the token is none of this server's" in str(outcome)
            await channel.close()
            assert relay.sent_bytes < 5 * 2 * channels.CALL_LOOKAHEAD_BYTES

    run(main())


def test_a_message_that_is_too_long_for_a_coordinator_is_refused_by_its_length() -> None:
    async def main() -> None:
        async with coordinator_like(kv=put) as server, Relay(server.port) as relay:
            channel = channels.connect(relay.address, SECRET)
            stub = Stub(channel, COORDINATOR, SECRET)
            assert (await stub.call("KV", of_bytes(channels.MAX_CALL_BYTES - 100))).found
            before = relay.sent_bytes
            with pytest.raises(InvalidRequest, match=r"KV at .*: a message is too large .*vs. 16777216"):
                await stub.call("KV", of_bytes(60 * MIB))
            await channel.close()
            assert relay.sent_bytes - before < channels.MAX_CALL_BYTES + 4 * MIB

    run(main())


# ---------------------------------------------------------------------- few at a time


def test_calls_of_one_connection_that_wait_for_their_messages_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "MAX_READS", 2)

    async def main() -> None:
        async with coordinator_like(kv=put) as server, connected(server.port, SECRET.token) as c:
            await c.begin()
            reads = interceptor_of(server)._reads
            message = of_bytes(10).SerializeToString()
            body = b"\0" + len(message).to_bytes(4, "big") + message
            await c.send(*(c.call(stream, KV) for stream in (1, 3, 5)), DataFrame(5, body, flags=["END_STREAM"]))
            async with asyncio.timeout(HANG_S):
                while [calls.number for calls in reads._connections.values()] != [3]:
                    await asyncio.sleep(0.01)
            stub = Stub(channel := channels.connect(server.address, SECRET), COORDINATOR, SECRET)
            assert (await stub.call("KV", of_bytes(10))).found
            await channel.close()
            assert [calls.number for calls in reads._connections.values()] == [3]  # also the one that has come
            await c.send(DataFrame(3, body, flags=["END_STREAM"]))  # its turn
            async with asyncio.timeout(HANG_S):
                while [calls.number for calls in reads._connections.values()] != [1]:
                    await asyncio.sleep(0.01)

    run(main())


def test_strangers_whose_messages_do_not_come_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    most = limits.MAX_READS_OF_STRANGERS

    async def main() -> None:
        async with coordinator_like() as server:
            channel = channels.connect(server.address, Security())
            waiting = [channel.stream_stream(CHECK)() for _ in range(3 * most)]
            ends = asyncio.as_completed([status_of(call) for call in waiting], timeout=HANG_S)
            for end in itertools.islice(ends, 2 * most):
                code, details = await end
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"the messages of {most} callers without credentials are waited for" in details
            assert not all(call.done() for call in waiting)
            for _ in range(most):
                check = channel.unary_unary(CHECK)
                assert await check(b"") == b"\x08\x01"
            assert len(interceptor_of(server)._reads._strangers) <= most
            await channel.close()
            for end in ends:
                await end

    async def status_of(call: Any) -> tuple[Any, str]:
        return await call.code(), await call.details()

    run(main())


def interceptor_of(server: Server) -> interceptor.CallInterceptor:
    found = [o for o in gc.get_objects() if type(o) is interceptor.CallInterceptor and o._guard is server._guard]
    return found[0]  # gRPC keeps it


# ---------------------------------------------------------------------- nothing left


@contextlib.contextmanager
def measured() -> Iterator[list[int]]:
    """Bytes that Python has allocated meanwhile and that are there still, without the garbage collector."""
    grown = [0]
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield grown
        grown[0] = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()


async def refuses(request: coordinator_pb2.KVRequest, context: Any) -> coordinator_pb2.KVReply:
    value = request.value
    raise InvalidRequest(f"{len(value)} bytes")


async def refuses_later(request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterReply:
    """As the coordinator's shell does: the error is a future's."""
    value = request.SerializeToString()
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(answer.set_exception, Busy(f"{len(value)} bytes"))
    return await answer


async def refuses_a_message(context: Any) -> None:
    message = await context.read()
    raise InvalidRequest(f"{len(message.leave.reason)} characters")


async def many(stub: Stub, method: str) -> None:
    text = "x" * MIB
    for _ in range(REFUSED):
        if method == "Session":
            stream = stub.open("Session")
            await stream.write(session_pb2.SessionRequest(leave=membership_pb2.Leave(reason=text)))
            with pytest.raises(InvalidRequest, match=f"^{MIB} characters"):
                await stream.read()
        elif method == "KV":
            with pytest.raises(InvalidRequest, match=f"^{MIB} bytes"):
                await stub.call("KV", of_bytes(MIB))
        else:
            with pytest.raises(Busy, match="bytes"):
                await stub.call("Register", coordinator_pb2.RegisterRequest(name=text))


@pytest.mark.parametrize(
    ("carrier", "method"),
    [
        *itertools.product(["gRPC", "gRPC with a token", "in process"], ["KV", "Register", "Session"]),
        ("bulk", "Session"),  # other calls are made over gRPC
    ],
)
def test_what_was_refused_leaves_nothing(carrier: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_fakes, "BULK", [carrier == "bulk"])
    monkeypatch.setattr(rpc_fakes, "HOST", ["here" + SUFFIX if carrier == "in process" else "127.0.0.1"])
    security = SECRET if "token" in carrier else Security()
    methods = {"kv": refuses, "register": refuses_later, "session": refuses_a_message}

    async def main() -> int:
        async with serving(COORDINATOR, security=security, **methods) as s:
            await many(s.stub, method)  # what is made once
            with measured() as grown:
                await many(s.stub, method)
            return grown[0]

    assert run(main()) < LEFT_BYTES
