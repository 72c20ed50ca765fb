"""New calls use the newest certificate, and earlier calls end on theirs. Tests of `rpc/renewed_channel.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from axon_ps.rpc.renewed_channel import RenewedChannel


class Call:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)


class Channel:
    """One connection: the calls that were made on it, and how it was closed."""

    def __init__(self, chain: object) -> None:
        self.chain = chain
        self.methods: list[tuple[str, str]] = []
        self.calls: list[tuple[str, Call]] = []
        self.closed: list[float | None] = []

    def _method(self, kind: str, name: str) -> Callable[[str], Call]:
        self.methods.append((kind, name))

        def call(request: str) -> Call:
            self.calls.append((request, Call()))
            return self.calls[-1][1]

        return call

    def unary_unary(self, name: str) -> Callable[[str], Call]:
        return self._method("unary_unary", name)

    def stream_stream(self, name: str) -> Callable[[str], Call]:
        return self._method("stream_stream", name)

    def get_state(self, *, try_to_connect: bool) -> tuple[object, bool]:
        return self.chain, try_to_connect

    async def close(self, grace: float | None = None) -> None:
        self.closed.append(grace)


class Source:
    """A source of certificates, and the connections made with them."""

    def __init__(self) -> None:
        self.chain: Any = "first"
        self.made: list[Any] = []

    def current(self) -> Any:
        return self.chain

    def connect(self, chain: object) -> Any:
        self.made.append(Channel(chain))
        return self.made[-1]


def run(body: Callable[[Source, RenewedChannel], Awaitable[None]]) -> None:
    async def test() -> None:
        source: Any = Source()
        await body(source, RenewedChannel(source, source.connect))

    asyncio.run(test())


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_call_under_way_keeps_its_connection_open_until_it_ends() -> None:
    async def body(source: Source, channel: RenewedChannel) -> None:
        method = channel.unary_unary("/a/b")
        first, second = method("1"), method("2")
        newest = channel.newest()
        source.chain = "second"
        method("3")
        assert channel.newest() is not newest
        old, new = source.made
        assert [(c.chain, [request for request, _ in c.calls]) for c in source.made] == [
            ("first", ["1", "2"]),
            ("second", ["3"]),
        ]
        first.end()
        await turns()
        assert not old.closed
        second.end()
        await turns()
        assert (old.closed, new.closed) == ([None], [])

    run(body)


def test_a_connection_without_calls_is_closed_at_once() -> None:
    async def body(source: Source, channel: RenewedChannel) -> None:
        source.chain = "second"
        assert channel.get_state(try_to_connect=True) == ("second", True)
        await turns()
        assert source.made[0].closed == [None]

    run(body)


def test_a_method_is_made_once_for_each_connection() -> None:
    async def body(source: Source, channel: RenewedChannel) -> None:
        one, other = channel.unary_unary("/a/b"), channel.stream_stream("/a/c")
        for _ in range(2):
            for _ in range(2):
                one(""), other("")
            source.chain = "second"
        methods = [("unary_unary", "/a/b"), ("stream_stream", "/a/c")]
        assert [c.methods for c in source.made] == [methods, methods]

    run(body)


def test_closing_ends_every_connection_and_makes_no_other() -> None:
    async def body(source: Source, channel: RenewedChannel) -> None:
        call = channel.unary_unary("/a/b")("1")
        source.chain = "second"
        channel.newest()
        await channel.close(2.0)
        assert [c.closed for c in source.made] == [[2.0], [2.0]]
        source.chain = "third"
        channel.newest()
        call.end()
        await turns()
        assert [c.closed for c in source.made] == [[2.0], [2.0]]

    run(body)
