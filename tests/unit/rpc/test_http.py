"""The HTTP endpoint: what is served to whom, asked by somebody else's client."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from axon_ps.errors import ConfigurationError, Misuse
from axon_ps.rpc.http import HttpServer, Route, healthz
from axon_ps.rpc.security import Security
from rpc_fakes import run

TOKENS = Security(token="of-the-job", observer_token="of-an-observer")


async def hello(_: web.Request) -> web.StreamResponse:
    return web.Response(text="hello")


def answers(
    security: Security, *requests: dict[str, Any], client: ssl.SSLContext | bool = True
) -> list[tuple[int, str]]:
    """What an endpoint with some routes answers to each request: status and text."""

    async def main() -> list[tuple[int, str]]:
        server = HttpServer("127.0.0.1", 0, security)
        server.add(
            Route(path="/read", handler=hello, row="GET /metrics"),
            Route(path="/do", handler=hello, method="POST", row="POST /api/servers/RANK/drain"),
            healthz(lambda: False),
        )
        url = await server.start()
        got = []
        try:
            async with aiohttp.ClientSession() as session:
                for request in requests:
                    options = {"method": "GET", "headers": {}} | request
                    path = options.pop("path")
                    async with session.request(url=url.rstrip("/") + path, ssl=client, **options) as response:
                        got.append((response.status, await response.text()))
        finally:
            await server.stop()
        return got

    return run(main())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/read", "GET", {}, 401),
        ("/read", "GET", bearer("wrong"), 401),
        ("/read", "GET", bearer("of-an-observer"), 200),
        ("/read", "GET", bearer("of-the-job"), 200),
        ("/read", "GET", bearer("of-the-job") | {"Host": "a-name.example"}, 200),
        ("/do", "POST", bearer("of-an-observer"), 403),
        ("/do", "POST", bearer("of-the-job"), 200),
        ("/do", "POST", bearer("of-the-job") | {"Origin": "https://elsewhere.example"}, 403),
        ("/healthz", "GET", {}, 503),
        ("/nothing", "GET", bearer("of-the-job"), 404),
    ],
)
def test_who_may_ask_for_what(path: str, method: str, headers: dict[str, str], status: int) -> None:
    ((given, _),) = answers(TOKENS, {"path": path, "method": method, "headers": headers})
    assert given == status


def test_a_refusal_says_why_and_no_token() -> None:
    (unknown, denied) = answers(
        TOKENS,
        {"path": "/read", "headers": bearer("wrong")},
        {"path": "/do", "method": "POST", "headers": bearer("of-an-observer")},
    )
    assert unknown == (401, "the token is none of this server's; is it the token of this job?\n")
    assert denied[0] == 403
    assert denied[1].startswith("the role of these credentials is observer, which may call Coordinator.Describe, ")
    assert denied[1].endswith("; POST /api/servers/RANK/drain needs the role operator\n")


@pytest.mark.parametrize(
    ("headers", "method", "status"),
    [
        ({}, "GET", 200),
        ({"Host": "localhost:1"}, "GET", 200),
        ({"Host": "[::1]:1"}, "GET", 200),
        ({"Host": "rebound.example:1"}, "GET", 403),
        ({"Host": "127.0.0.1:5", "Origin": "http://127.0.0.1:5"}, "POST", 200),
        ({"Origin": "http://elsewhere.example"}, "POST", 403),
        ({"Origin": "null"}, "POST", 403),
    ],
)
def test_without_a_token_no_other_sites_page_can_ask(headers: dict[str, str], method: str, status: int) -> None:
    path = "/read" if method == "GET" else "/do"
    ((given, _),) = answers(Security(), {"path": path, "method": method, "headers": headers})
    assert given == status


def test_with_a_certificate_it_is_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "server.crt")
    pair.private_key_pem.write_to_path(tmp_path / "server.key")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    security = Security(token="t", cert_file=str(tmp_path / "server.crt"), key_file=str(tmp_path / "server.key"))
    assert answers(security, {"path": "/read", "headers": bearer("t")}, client=context) == [(200, "hello")]


def test_beyond_loopback_it_wants_what_grpc_wants() -> None:
    with pytest.raises(ConfigurationError, match="needs a secret of the job"):
        HttpServer("0.0.0.0", 0, Security())
    with pytest.raises(ConfigurationError, match="port 70000 does not exist"):
        HttpServer("127.0.0.1", 70000, Security())


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    async def main() -> None:
        first = HttpServer("127.0.0.1", 0, Security())
        await first.start()
        try:
            with pytest.raises(Misuse):
                first.add(healthz(lambda: True))
            with pytest.raises(
                ConfigurationError,
                match=f"cannot listen for HTTP connections on port {first.port} of 127.0.0.1: Address already in use",
            ):
                await HttpServer("127.0.0.1", first.port, Security()).start()
        finally:
            await first.stop()

    run(main())
