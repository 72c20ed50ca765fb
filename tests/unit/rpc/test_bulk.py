"""Bulk calls are as gRPC's: the same tests, and what is their own. Tests of `rpc/auth/tls_contexts.py`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import rpc_fakes
from axon_ps.errors import Broken, Closed, InvalidRequest, PermissionDenied
from axon_ps.rpc.auth.identity import Identity, Principal
from axon_ps.rpc.auth.tokens import mint, new_secret, verified
from axon_ps.rpc.carriers.bulk import client, server
from axon_ps.rpc.carriers.bulk.client import BulkCall
from axon_ps.rpc.carriers.bulk.connection import HEAD, FrameKind
from axon_ps.rpc.channels import MAX_MESSAGE_BYTES
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server
from axon_ps.rpc.service import Stub
from axon_ps.rpc.stream import EOF
from axon_ps.wire.v1 import bulk_pb2, shard_pb2
from rpc_fakes import SHARD, run, serving, write_forever
from stream_tests import RAISED, STREAM_TESTS, name_of


@pytest.fixture(autouse=True)
def _bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_fakes, "BULK", [True])


@pytest.mark.parametrize("test", STREAM_TESTS, ids=name_of)
def test_as_over_grpc(test: Callable[[], None]) -> None:
    test()


def test_messages_go_over_a_socket_of_their_own_and_not_over_grpc() -> None:
    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            assert isinstance(stream._call, BulkCall)
            await stream.write((b"\0" * 100, memoryview(np.zeros(1 << 20, np.float32))))
            assert (await stream.read()).chunks == 100 + (4 << 20)

    run(main())


@pytest.mark.parametrize("why", ["no port", "a port that nobody listens at"])
def test_where_there_is_none_calls_go_over_grpc(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            if why == "no port":
                monkeypatch.setattr(s.stub.bulk, "_caller", Stub(s.channel, SHARD))
            else:
                monkeypatch.setattr(client, "_connected", refuse)
            for _ in range(2):
                stream = await Stub.open_bulk(s.stub, "ReduceScatter")
                assert not isinstance(stream._call, BulkCall)
            assert (len(refused) == 1) == (why != "no port"), "it is not attempted again so soon"

    async def refuse(host: str, port: int) -> Any:
        refused.append(port)
        raise ConnectionRefusedError("nobody listens")

    refused: list[int] = []
    monkeypatch.setattr(rpc_fakes, "BulkStub", PlainBulkStub)
    run(main())


def test_a_connection_that_is_not_answered_leaves_its_socket_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop would take the next socket of that number for it, and never say that something has come."""
    made: list[int] = []

    async def unanswered(host: str, port: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        made.append(ours.fileno())
        asyncio.get_running_loop().call_later(0.01, theirs.close)
        return ours

    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            monkeypatch.setattr(client, "_connected", unanswered)
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            assert not isinstance(stream._call, BulkCall)
            assert not asyncio.get_running_loop().remove_reader(made[0])

    run(main())


def test_what_would_take_too_many_files_goes_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "max_bulk_calls", lambda: 2)
    monkeypatch.setattr(client, "_under_way", WeakSet())

    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            streams = [await Stub.open_bulk(s.stub, "ReduceScatter") for _ in range(3)]
            assert [isinstance(stream._call, BulkCall) for stream in streams] == [True, True, False]
            streams[0].cancel()
            assert isinstance((await Stub.open_bulk(s.stub, "ReduceScatter"))._call, BulkCall)

    monkeypatch.setattr(rpc_fakes, "BulkStub", PlainBulkStub)
    run(main())


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\xff" * 64,
        HEAD.pack(FrameKind.HELLO, 1 << 30),
        HEAD.pack(FrameKind.MESSAGE, 4) + b"data",
        HEAD.pack(FrameKind.HELLO, 4) + b"\xff\xff\xff\xff",
        HEAD.pack(FrameKind.HELLO, 34) + bulk_pb2.BulkHello(capability=b"\0" * 32).SerializeToString(),
    ],
    ids=["nothing", "http", "noise", "too long", "no hello", "no message", "a wrong capability"],
)
def test_whoever_shows_no_capability_is_hung_up_on(first: bytes) -> None:
    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            await Stub.open_bulk(s.stub, "ReduceScatter")
            with await stranger(s.server) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, first)
                if not first:
                    sock.shutdown(socket.SHUT_WR)
                await until_hung_up(sock)

    run(main())


def test_strangers_are_few_and_members_come_in_once_they_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 3)

    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            await Stub.open_bulk(s.stub, "ReduceScatter")
            strangers = [await stranger(s.server) for _ in range(3)]
            with await stranger(s.server) as fourth:
                await until_hung_up(fourth)
            for each in strangers:
                each.close()
            bulk: Any = s.server
            while bulk._bulk._strangers:
                await asyncio.sleep(0)
            assert isinstance((await Stub.open_bulk(s.stub, "ReduceScatter"))._call, BulkCall)

    run(main())


def test_a_client_that_leaves_behind_unread_data_cancels_its_call() -> None:
    async def full(context: Any) -> None:
        await context.read()
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        async with serving(reduce_scatter=full) as s:
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            writing = asyncio.ensure_future(write_forever(stream, b"\0" * (1 << 20)))
            await started.wait()
            await asyncio.sleep(0)
            stream.cancel()
            await cancelled.wait()
            with pytest.raises(Closed):
                await writing

    started, cancelled = asyncio.Event(), asyncio.Event()
    run(main())


def test_a_server_that_ends_a_call_under_a_write_is_heard() -> None:
    async def refuse(context: Any) -> None:
        await context.read()
        raise RAISED

    async def main() -> None:
        async with serving(reduce_scatter=refuse) as s:
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            with pytest.raises(InvalidRequest, match="offset 7"):
                await write_forever(stream, b"\0" * (8 << 20))

    run(main())


def test_the_end_of_the_stream_of_the_capability_ends_the_calls_made_with_it() -> None:
    """As when a peer froze, and gRPC's pings found it."""

    async def main() -> None:
        async with serving(reduce_scatter=silent) as s:
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            await stream.write(b"x")
            await s.channel.close()
            with pytest.raises(Broken):
                await stream.read()
            assert isinstance(s.server, Server)
            while s.server._bulk is not None and s.server._bulk._serving:
                await asyncio.sleep(0)

    run(main())


def test_a_longer_message_than_the_limit_ends_the_call() -> None:
    async def main() -> None:
        async with serving(reduce_scatter=count_bytes) as s:
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            call: Any = stream._call
            await call._connection._send_all([HEAD.pack(FrameKind.MESSAGE, MAX_MESSAGE_BYTES + 1)], HEAD.size)
            with pytest.raises(InvalidRequest, match="67108865 bytes"):
                await stream.read()

    run(main())


def test_over_tls_a_call_has_the_role_of_its_capability() -> None:
    secret = new_secret()
    roles = {r: Security(token=secret, tls=True).acting(r, "job") for r in (Principal.SHARD, Principal.WORKER)}

    async def main(role: Principal, method: str) -> None:
        async with serving(
            security=roles[Principal.SHARD], client=roles[role], reduce_scatter=count_bytes, replicate=count_bytes
        ) as s:
            stream = await Stub.open_bulk(s.stub, method)
            assert isinstance(stream._call, BulkCall)
            await stream.write((b"\0" * 7, memoryview(bytes(1 << 20))))
            await stream.read()

    run(main(Principal.WORKER, "ReduceScatter"))
    run(main(Principal.SHARD, "Replicate"))
    with pytest.raises(PermissionDenied, match=r"worker.*Shard.Replicate needs the role shard"):
        run(main(Principal.WORKER, "Replicate"))


def test_revoking_ends_a_call_under_way() -> None:
    secret = new_secret()
    token = mint(secret, Identity(Principal.WORKER, "job"), 600.0)

    async def main() -> None:
        client = Security(token=token)
        security = Security(token=secret).acting(Principal.SHARD, "job")
        async with serving(security=security, client=client, reduce_scatter=silent) as s:
            stream = await Stub.open_bulk(s.stub, "ReduceScatter")
            await stream.write(b"x")
            await asyncio.sleep(0)
            s.server.revocations.set({verified(token, [secret], "job").id: "it was lost"})
            with pytest.raises((PermissionDenied, Broken), match=r"it was lost|Socket closed"):
                await stream.read()

    run(main())


class PlainBulkStub(Stub):
    """A stub that makes bulk calls where it is told so."""

    def __init__(self, channel: Any, descriptor: Any, security: Security) -> None:
        super().__init__(channel, descriptor, security)
        self.bulk = client.bulk_client(Stub(channel, client.BULK, security), self.peer, security, None)


async def count_bytes(context: Any) -> None:
    """Says how long each message is."""
    while (message := await context.read()) is not EOF:
        await context.write(shard_pb2.ReduceScatterReply(chunks=len(message)))


async def silent(context: Any) -> None:
    """Reads once, and never answers."""
    await context.read()
    await asyncio.get_running_loop().create_future()


async def stranger(served: Any) -> socket.socket:
    """A connection to the port of bulk connections."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served._bulk._port))
    return sock


async def until_hung_up(sock: socket.socket) -> None:
    """Read to the end of a connection, on which nothing comes."""
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
