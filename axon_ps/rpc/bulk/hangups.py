"""Sockets that were closed by their peers: found also behind data that is not read yet.

A read finds the end of a connection only after all that was sent before it, and a task that waits for something else
reads nothing. The kernel knows at once (EPOLLRDHUP), so one epoll for each event loop asks it.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from weakref import WeakKeyDictionary

_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Hangups] = WeakKeyDictionary()


class Hangups:
    """Of one event loop; use `of_this_loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Have `callback` called once, when the peer of a socket has closed the connection, or it has broken."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, fd: int) -> None:
        """Watch a socket no more; before it is closed. Harmless when repeated."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _look(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if (callback := self._callbacks.get(fd)) is not None:
                callback()


def of_this_loop() -> Hangups:
    """The one of the running event loop."""
    loop = asyncio.get_running_loop()
    if (hangups := _of_loop.get(loop)) is None:
        hangups = _of_loop[loop] = Hangups(loop)
    return hangups
