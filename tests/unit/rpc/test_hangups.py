"""The end of a connection is found behind data that is not read. Tests of `rpc/carriers/bulk/hangups.py`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from axon_ps.rpc.carriers.bulk.hangups import Hangups, of_this_loop
from deadlines import HANG_S


def run(body: Callable[[Hangups, socket.socket, socket.socket], Awaitable[None]]) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            hangups = of_this_loop()
            await asyncio.wait_for(body(hangups, ours, theirs), HANG_S)
            hangups.forget(ours.fileno())

    asyncio.run(test())


def test_a_peer_that_closes_behind_unread_data_is_noticed_once() -> None:
    async def body(hangups: Hangups, ours: socket.socket, theirs: socket.socket) -> None:
        closed, calls = asyncio.Event(), list[int]()
        hangups.watch(ours.fileno(), lambda: (calls.append(1), closed.set()))
        theirs.sendall(b"data")
        await asyncio.sleep(0)
        assert not closed.is_set(), "data is not an end"
        theirs.close()
        await closed.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        assert calls == [1]
        assert ours.recv(9) == b"data"

    run(body)


def test_a_socket_that_is_not_watched_any_more_is_forgotten() -> None:
    async def body(hangups: Hangups, ours: socket.socket, theirs: socket.socket) -> None:
        first, second = asyncio.Event(), asyncio.Event()
        hangups.watch(ours.fileno(), first.set)
        hangups.forget(ours.fileno())
        hangups.forget(ours.fileno())
        mine, other = socket.socketpair()
        with mine:
            hangups.watch(mine.fileno(), second.set)
            theirs.close(), other.close()
            await second.wait()
            hangups.forget(mine.fileno())
        assert not first.is_set()

    run(body)


def test_each_event_loop_has_its_own() -> None:
    async def one() -> tuple[Hangups, bool]:
        return of_this_loop(), of_this_loop() is of_this_loop()

    (first, same), (second, _) = asyncio.run(one()), asyncio.run(one())
    assert same
    assert first is not second
