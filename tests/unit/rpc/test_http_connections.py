"""Strangers at the HTTP endpoint: half a head, no handshake, nothing read, nonsense; and somebody else's client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from axon_ps.rpc import http, listener
from axon_ps.rpc.http import HttpServer, Route, healthz, taken
from axon_ps.rpc.security import Security
from deadlines import HANG_S
from rpc_fakes import run

MOST = 8
SECRET = Security(token="of-the-job")
AUTHORIZED = "Authorization: Bearer of-the-job\r\n"
HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-More: "
LARGE_BYTES = 8 << 20


async def large(_: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(LARGE_BYTES))


async def feed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            async with taken(request):
                await response.write(bytes(1 << 16))
            await asyncio.sleep(0.01)
    return response


@contextlib.asynccontextmanager
async def serving(security: Security = SECRET) -> AsyncIterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, security)
    server.add(
        healthz(lambda: True),
        Route(path="/page", handler=large, row="GET /"),
        Route(path="/large", handler=large, row="GET /metrics"),
        Route(path="/feed", handler=feed, row="GET /api/feed"),
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "max_http_connections", lambda: MOST)


class Client:
    """A connection of which one decides what is sent and read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connected(cls, server: HttpServer, sent: bytes = b"", receive_bytes: int = 0) -> Client:
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        client = cls(*await asyncio.open_connection(sock=sock, limit=1 << 12))
        client.writer.write(sent)
        return client

    async def ended(self) -> bytes:
        """The bytes that came until the server ended the connection."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""
            finally:
                self.close()

    async def head(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            return await self.reader.readuntil(b"\r\n")

    def close(self) -> None:
        self.writer.transport.abort()


def request(path: str, headers: str = AUTHORIZED) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


async def answered(server: HttpServer, path: str = "/healthz", **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(server.url.rstrip("/") + path, headers=headers) as r:
        return r.status


def test_half_sent_heads_take_no_more_than_there_are() -> None:
    async def main() -> None:
        async with serving() as server:
            clients = [await Client.connected(server, HALF) for _ in range(5 * MOST)]
            assert await answered(server) == 200
            for client in clients[: 4 * MOST]:  # the oldest
                assert await client.ended() == b""
            assert len(server._connections) <= MOST
            for client in clients:
                client.close()

    run(main())


def test_a_head_has_a_deadline_and_so_has_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HTTP_HEAD_S", 0.3)

    async def main() -> None:
        async with serving() as server:
            silent, half = await Client.connected(server), await Client.connected(server, HALF)
            idle = await Client.connected(server, request("/healthz", ""))
            trickling = asyncio.create_task(trickle(half))
            assert await silent.ended() == b""
            assert await half.ended() == b""
            assert (await idle.ended()).startswith(b"HTTP/1.1 200 OK")
            await trickling

    async def trickle(client: Client) -> None:
        """A byte now and then is no head."""
        with contextlib.suppress(ConnectionError):
            while not client.reader.at_eof():
                client.writer.write(b"x")
                await client.writer.drain()
                await asyncio.sleep(0.01)

    run(main())


def test_who_has_shown_credentials_is_not_put_out_for_one_who_has_not() -> None:
    async def main() -> None:
        async with serving() as server:
            feeds = [await Client.connected(server, request("/feed")) for _ in range(MOST - 1)]
            for client in feeds:
                assert await client.head() == b"HTTP/1.1 200 OK\r\n"
            strangers = [await Client.connected(server, HALF) for _ in range(3)]
            for client in strangers[:2]:
                assert await client.ended() == b""
            last = await Client.connected(server, request("/feed"))
            assert await last.head() == b"HTTP/1.1 200 OK\r\n"
            refused = await Client.connected(server)
            assert (await refused.ended()).startswith(b"HTTP/1.1 503 ")
            feeds[0].close()
            while (status := await status_of(server)) == 503:  # until the server has noticed
                await asyncio.sleep(0.01)
            assert status == 200
            for client in (*feeds[1:], last):
                assert not client.reader.at_eof()
            for client in (*feeds, *strangers, last):
                client.close()

    async def status_of(server: HttpServer) -> int:
        try:
            return await answered(server)
        except aiohttp.ClientError:  # the 503 came before the request was sent
            return 503

    run(main())


@pytest.mark.parametrize("path", ["/large", "/feed", "/page"])
def test_who_takes_nothing_loses_the_connection(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HTTP_ANSWER_S", 0.3)

    async def main() -> None:
        async with serving() as server:
            clients = [await Client.connected(server, request(path), receive_bytes=4096) for _ in range(MOST)]
            for client in clients:
                client.writer.transport.pause_reading()
            async with asyncio.timeout(HANG_S):
                while server._admitted or any(p.transport is not None for p in server._connections):
                    await asyncio.sleep(0.02)
            assert await answered(server) == 200
            for client in clients:
                client.close()

    run(main())


def test_handshakes_that_do_not_come_are_put_out(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "server.crt")
    pair.private_key_pem.write_to_path(tmp_path / "server.key")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    security = Security(token="t", cert_file=str(tmp_path / "server.crt"), key_file=str(tmp_path / "server.key"))

    async def main() -> None:
        async with serving(security) as server:
            clients = [await Client.connected(server, b"\x16\x03\x01") for _ in range(3 * MOST)]
            url = f"{server.url}healthz"
            async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
                assert response.status == 200
            for client in clients[: 2 * MOST]:
                assert await client.ended() == b""
            for client in clients:
                client.close()

    run(main())


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "method": b"G\x00T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "version": b"GET / HTTP/9.9.9\r\nHost: localhost\r\n\r\n",
    "header": b"GET /healthz HTTP/1.1\r\nHost localhost\r\n\r\n",
    "long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000 + b"\r\n",
    "two lengths": b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length": b"POST /large HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "smuggled": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks": b"POST /large HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n",
    "escape": b"GET /\x1b[31m HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "host": b"GET /large HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n",
    "origin": b"POST /large HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\nConnection: close\r\n\r\n",
    "authorization": b"GET /large HTTP/1.1\r\nHost: localhost\r\nAuthorization: \xff\xfe\r\nConnection: close\r\n\r\n",
    "path": b"GET /%zz%ff%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "broken off": b"POST /large HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc",
}


@pytest.mark.parametrize("security", [SECRET, Security()], ids=["token", "no token"])
def test_nonsense_is_refused_and_logged_at_most_once(security: Security, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with serving(security) as server:
            for name, sent in MALFORMED.items():
                client = await Client.connected(server, sent)
                if client.writer.can_write_eof():
                    client.writer.write_eof()
                got = await client.ended()
                assert got == b"" or 400 <= int(got.split()[1]) < 500, (name, got[:200])
                client.close()
            assert await answered(server) == 200

    for handler in logging.getLogger("axon_ps.rpc.http.server").filters:
        vars(handler).update(_logged_s=-http._LOG_EVERY_S)
    run(main())
    said = [r for r in caplog.records if not r.getMessage().startswith("HTTP at ")]
    assert [record.getMessage() for record in said if record.exc_info or record.levelno >= logging.WARNING] == []
    assert len([r for r in said if "malformed HTTP request" in r.getMessage()]) == 1
    assert all(record.getMessage().isprintable() for record in said)


def test_when_no_more_files_can_be_opened_it_is_said_by_name_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "AGAIN_S", 0.05)

    async def main() -> None:
        async with serving() as server:
            loop, client = asyncio.get_running_loop(), socket.socket()
            client.setblocking(False)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with without_files(client.fileno()):
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                await loop.sock_sendall(client, request("/healthz", "Connection: close\r\n"))
                async with asyncio.timeout(HANG_S):
                    while "cannot be accepted" not in caplog.text:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)  # further tries say nothing
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
            got = b""
            async with asyncio.timeout(HANG_S):
                while data := await loop.sock_recv(client, 1000):
                    got += data
            client.close()
            assert got.startswith(b"HTTP/1.1 200 OK")

    run(main())
    (record,) = [r for r in caplog.records if "cannot be accepted" in r.getMessage()]
    assert "HTTP connections cannot be accepted: this process may open no more than" in record.getMessage()
    assert "ulimit -n" in record.getMessage()


@contextlib.contextmanager
def without_files(highest: int) -> Any:
    """This process can open no more files, while its limit is what it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket().detach())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            socket.close(number)
