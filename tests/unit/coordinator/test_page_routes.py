"""What the page asks of the coordinator: the feed and the log over HTTP and TLS, and who is turned away."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import trustme

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.history.logs import COORDINATOR
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server import feed as feed_module
from axon_ps.coordinator.server.feed import Feed
from axon_ps.coordinator.server.page.routes import ASSETS, page_routes
from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.coordinator.server.shell import Shell
from axon_ps.coordinator.server.standby import Switch
from axon_ps.rpc.http import HttpServer
from axon_ps.rpc.security import Security
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.wire.v1 import logs_pb2

PLAIN = Security()
Ask = Callable[[str], Awaitable[aiohttp.ClientResponse]]


def serving(
    test: Callable[[Ask, Shell, Switch], Awaitable[None]],
    security: Security = PLAIN,
    client: ssl.SSLContext | bool = True,
    token: str = "",
) -> None:
    """A leading coordinator's page, for a test that asks for paths of it."""

    async def main() -> None:
        store = MemoryStateStore()
        shell = Shell(CoordinatorState(CoordinatorConfig(job="job"), asyncio.get_running_loop().time()), store)
        feed, switch = Feed(shell), Switch(store)
        switch.servicer = CoordinatorServicer(shell, feed)
        server = HttpServer("127.0.0.1", 0, security)
        server.add(*page_routes(switch))
        url = await server.start()
        try:
            async with aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {token}"} if token else None
            ) as session:
                await test(lambda path: session.get(url + path, ssl=client), shell, switch)
        finally:
            feed.close()
            await server.stop()
            await shell.close()

    asyncio.run(main())


def logged(shell: Shell, *texts: str) -> None:
    shell.state.history.logs.add(COORDINATOR, "here", [logs_pb2.LogRecord(at_s=1.0, text=text) for text in texts])


def test_the_page_under_tls_with_an_observers_token(tmp_path: Path) -> None:
    authority = trustme.CA()
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(key)
    for part in pair.cert_chain_pems:
        part.write_to_path(chain, append=True)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)

    async def test(ask: Ask, shell: Shell, switch: Switch) -> None:
        for path in (*(p.name for p in ASSETS.iterdir()), ""):
            reply = await ask("" if path == "index.html" else path)
            assert reply.status == 200
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
            await reply.read()
        async with await ask("api/feed") as reply:
            line = await reply.content.readline()
            assert json.loads(line.removeprefix(b"data: "))["status"]["job"] == "job"
        assert (await ask("api/operator")).status == 403

    security = Security(cert_file=str(chain), key_file=str(key), token="of-the-job", observer_token="of-an-observer")
    serving(test, security, trusted, "of-an-observer")


def test_pages_of_the_log_follow_each_other() -> None:
    async def test(ask: Ask, shell: Shell, switch: Switch) -> None:
        logged(shell, "one", "two")
        first = await (await ask("api/logs")).json()
        assert [r["text"] for r in first["records"]] == ["one", "two"]
        logged(shell, "three")
        next_page = f"api/logs?history={first['history']}&after={first['records'][-1]['number']}"
        assert [r["text"] for r in (await (await ask(next_page)).json())["records"]] == ["three"]
        again = await (await ask("api/logs?history=another&after=2")).json()
        assert len(again["records"]) == 3
        for wrong in ("x", "nan", "1e999"):
            assert (await ask(f"api/logs?after={wrong}")).status in (200, 400)

    serving(test)


def test_one_reader_too_many_is_told_so_and_a_standby_says_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_READERS", 1)

    async def test(ask: Ask, shell: Shell, switch: Switch) -> None:
        async with await ask("api/feed") as reply:
            await reply.content.readline()
            refused = await ask("api/feed")
            assert (refused.status, "follow the job already" in await refused.text()) == (503, True)
        switch.servicer, switch.why = None, "the coordinator at other:1 leads"
        for path in ("api/feed", "api/logs"):
            refused = await ask(path)
            assert (refused.status, await refused.text()) == (503, "the coordinator at other:1 leads\n")

    serving(test)


def test_a_feed_that_is_closed_is_no_error_of_ours() -> None:
    async def test(ask: Ask, shell: Shell, switch: Switch) -> None:
        assert switch.servicer is not None
        switch.servicer.feed.close()
        assert (await ask("api/feed")).status == 503

    serving(test)
