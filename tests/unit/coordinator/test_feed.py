"""The feed: everything first, then increments; a slow reader gets everything again; readers end with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server import feed as feed_module
from axon_ps.coordinator.server.feed import Feed, FeedMessage
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import Broken, Busy
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.wire.v1 import watch_pb2


def run(test: Callable[[Feed, Shell], Awaitable[None]]) -> None:
    async def main() -> None:
        state = CoordinatorState(CoordinatorConfig(job="job"), asyncio.get_running_loop().time())
        shell = Shell(state, MemoryStateStore())
        feed = Feed(shell)
        try:
            await test(feed, shell)
        finally:
            feed.close()
            await shell.close()

    asyncio.run(main())


def event(message: FeedMessage) -> watch_pb2.WatchEvent:
    return watch_pb2.WatchEvent.FromString(message.encoded)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "TICK_S", 0.01)


def test_a_reader_gets_everything_then_what_is_new() -> None:
    async def test(feed: Feed, shell: Shell) -> None:
        shell.state.history.happened("changed", "before", shell.now())
        reader = feed.read()
        first = event(await anext(reader))
        assert first.begins
        assert [e.text for e in first.events] == ["before"]
        assert first.status.job == "job"
        assert first.status.HasField("membership")
        shell.state.history.happened("changed", "after", shell.now())
        second = event(await anext(reader))
        assert not second.begins
        assert [e.text for e in second.events] == ["after"]
        assert not second.status.HasField("membership")
        assert second.history == first.history
        await reader.aclose()

    run(test)


def test_readers_have_one_encoding_and_a_slow_one_gets_everything_again() -> None:
    async def test(feed: Feed, shell: Shell) -> None:
        slow, a, b = feed.read(), feed.read(), feed.read()
        await anext(slow)
        await asyncio.gather(anext(a), anext(b))
        x, y = await asyncio.gather(anext(a), anext(b))
        assert x is y
        assert x.json is y.json
        assert json.loads(x.json)["history"] == event(x).history
        assert not event(x).begins
        assert event(await anext(slow)).begins
        for reader in (slow, a, b):
            await reader.aclose()

    run(test)


def test_readers_are_bounded_and_end_with_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(feed: Feed, shell: Shell) -> None:
        monkeypatch.setattr(feed_module, "MAX_READERS", 1)
        reader = feed.read()
        await anext(reader)
        with pytest.raises(Busy, match="1 readers"):
            await anext(feed.read())
        shell.state.history.happened("finished", "all is done", shell.now())
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        feed.close()
        assert event(await waiting).events[-1].text == "all is done"
        with pytest.raises(Broken, match="its history ends"):
            await anext(reader)

    run(test)
