"""Detection of sockets that were closed by their peers, also behind data that is not read yet.

A read finds the end of a connection only after all data that was sent before it, and a task that waits for something
else does not read. The kernel reports the end at once (EPOLLRDHUP), to one epoll for each event loop.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from weakref import WeakKeyDictionary

_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Hangups] = WeakKeyDictionary()


class Hangups:
    """The closed sockets of one event loop; use `of_this_loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Have `callback` called once, when the peer of a socket has closed the connection, or it has broken."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, fd: int) -> None:
        """Stop watching a socket, before it is closed. Harmless when repeated."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _look(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if (callback := self._callbacks.get(fd)) is not None:
                callback()


def of_this_loop() -> Hangups:
    """Return the object of the running event loop."""
    loop = asyncio.get_running_loop()
    if (hangups := _of_loop.get(loop)) is None:
        hangups = _of_loop[loop] = Hangups(loop)
    return hangups
