"""One socket of a bulk call: frames in and out. See `rpc.bulk`, Note: [The frames of a bulk connection].

Note: [Few wake-ups]
    A socket is readable as soon as one packet is there, and an event loop that looks each time spends more on looking
    than the kernel on copying. So a reader that needs many bytes is woken when `LOW_WATER_BYTES` of them are there, or
    the last one (SO_RCVLOWAT; the kernel wakes it earlier where it cannot store as many, and at the end).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final, TypeVar

import numpy as np

from axon_ps.rpc.bulk import hangups
from axon_ps.rpc.channels import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from axon_ps.rpc.stream import Place

LOW_WATER_BYTES: Final = 256 << 10
"""See Note: [Few wake-ups]."""

LARGE_BYTES: Final = 64 << 10
"""After a frame of this size the event loop has a turn, also if the socket never made us wait."""

FIRST_BYTES: Final = 512
"""How much of a large frame `Place` sees: more than the header of any chunk that has a payload."""

SILENCE_MS: Final = int(1000 * (KEEPALIVE_S + KEEPALIVE_TIMEOUT_S))
"""A connection whose peer's machine has acknowledged nothing for this long is broken, as one of gRPC's is."""

Buffer = bytes | memoryview
T = TypeVar("T")


class Kind(IntEnum):
    """The kinds of frames."""

    MESSAGE = 0
    HELLO = 1
    END = 2
    STATUS = 3


_NO_LINGER: Final = struct.pack("ii", 1, 0)
HEAD: Final = struct.Struct("<BI")


class FrameError(ConnectionError):
    """The peer sends no frames of ours."""


class Connection:
    """Frames over a socket. One task may receive while another sends. One event loop.

    Args:
        sock: connected; a TLS one may have its handshake before it. It is ours from now on.
        max_bytes: the longest frame that is accepted.

    Attributes:
        closed: whether this end has closed it.
        max_bytes: the longest frame that is accepted.
    """

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(KEEPALIVE_S))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(KEEPALIVE_TIMEOUT_S))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.closed = False
        self.max_bytes = max_bytes
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._low_water = 0 if isinstance(sock, ssl.SSLSocket) else 1  # 0: it would hold back TLS records
        self._head = memoryview(bytearray(HEAD.size))
        self._readers: set[asyncio.Future[None]] = set()
        self._writers: set[asyncio.Future[None]] = set()
        self._hangups = hangups.of_this_loop()

    def on_hangup(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once, when the peer has closed the connection, or it has broken."""
        self._hangups.watch(self._fd, callback)

    def peer(self) -> str:
        """The address of the other end, as gRPC writes it."""
        try:
            host, port, *_ = self._sock.getpeername()
        except (OSError, ValueError):
            return ""
        return f"ipv6:[{host}]:{port}" if self._sock.family == socket.AF_INET6 else f"ipv4:{host}:{port}"

    async def handshake(self) -> None:
        """The handshake of TLS, if it is a connection of TLS.

        Raises:
            OSError: it failed: one of the ends does not trust the other.
        """
        if isinstance(self._sock, ssl.SSLSocket):
            await self._attempt(self._sock.do_handshake)

    async def receive(self, place: Place | None = None) -> tuple[Kind, memoryview]:
        """The next frame.

        Args:
            place: where a large one goes, or its end does; then what comes before that is returned.

        Raises:
            FrameError: the peer sends no frames of ours, or too long ones.
            OSError: the connection is over.
        """
        await self._fill(self._head)
        number, size = HEAD.unpack(self._head)
        if number > max(Kind) or size > self.max_bytes:
            raise FrameError(
                f"a frame of kind {number} with {size} bytes came; kinds go to {max(Kind)}, bytes to {self.max_bytes}"
            )
        if size >= LARGE_BYTES:
            body = await self._receive_large(size, place)
            await asyncio.sleep(0)
        else:
            body = memoryview(bytearray(size))
            await self._fill(body)
        return Kind(number), body

    async def send(self, kind: Kind, *buffers: Buffer) -> None:
        """Send a frame made of `buffers`; returns when the kernel has all of it.

        Raises:
            OSError: the connection is over; also if this was cancelled before, in the middle of a frame.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        size = sum(view.nbytes for view in views)
        views.insert(0, memoryview(HEAD.pack(kind, size)))
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                await self._send_all(views, lambda left: self._sock.send(left[0]))
            else:
                await self._send_all(views, self._sock.sendmsg)
        except asyncio.CancelledError:
            self.close(abort=True)
            raise
        if size >= LARGE_BYTES:
            await asyncio.sleep(0)

    def shut_down(self) -> None:
        """Send nothing more. The peer gets what was sent before."""
        if not self.closed:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()

    async def discard(self) -> None:
        """Drop what comes in until the peer closes the connection.

        Raises:
            OSError: it broke.
        """
        dropped = memoryview(bytearray(LARGE_BYTES))
        while await self._attempt(partial(self._sock.recv_into, dropped)):
            pass

    def wake_writers(self) -> None:
        """Have those who wait to send fail: the peer takes nothing more."""
        _fail(self._writers)

    def close(self, *, abort: bool = False) -> None:
        """End the connection; whoever waits on it fails. Harmless when repeated.

        Args:
            abort: drop what the peer has not taken yet, and tell it now: else it learns of the end when it has.
        """
        if self.closed:
            return
        if abort:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.closed = True
        self._hangups.forget(self._fd)
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        _fail(self._readers)
        _fail(self._writers)

    # ------------------------------------------------------------------ inside

    async def _receive_large(self, size: int, place: Place | None) -> memoryview:
        first = memoryview(bytearray(FIRST_BYTES))
        await self._fill(first)
        if place is not None and (found := place(first, size)) is not None:
            start, target = found
            here = FIRST_BYTES - start
            target[:here] = first[start:]
            await self._fill(target[here:])
            return first[:start]
        body: memoryview = np.empty(size, np.uint8).data
        body[:FIRST_BYTES] = first
        await self._fill(body[FIRST_BYTES:])
        return body

    async def _fill(self, view: memoryview) -> None:
        position, size = 0, view.nbytes
        while position < size:
            left = view[position:]
            got = await self._attempt(partial(self._sock.recv_into, left), wanted_bytes=left.nbytes)
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            position += got

    async def _send_all(self, views: list[memoryview], send: Callable[[list[memoryview]], int]) -> None:
        while views:
            sent = await self._attempt(partial(send, views), writes=True)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    async def _attempt(self, operation: Callable[[], T], *, writes: bool = False, wanted_bytes: int = 1) -> T:
        """Perform an operation of the socket as soon as it need not wait."""
        while True:
            if self.closed:
                raise ConnectionResetError("this end closed the connection")
            try:
                return operation()
            except (BlockingIOError, InterruptedError):
                await (self._writable() if writes else self._readable(wanted_bytes))
            except ssl.SSLWantReadError:
                await self._readable(1)
            except ssl.SSLWantWriteError:
                await self._writable()

    async def _readable(self, wanted_bytes: int) -> None:
        """See Note: [Few wake-ups]."""
        low_water = min(wanted_bytes, LOW_WATER_BYTES)
        if self._low_water not in (0, low_water):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        await self._wait(self._readers, self._loop.add_reader, self._loop.remove_reader)

    async def _writable(self) -> None:
        await self._wait(self._writers, self._loop.add_writer, self._loop.remove_writer)

    async def _wait(
        self, waiting: set[asyncio.Future[None]], add: Callable[..., None], remove: Callable[[int], object]
    ) -> None:
        """Wait until the socket is ready for one direction; several tasks may."""
        future: asyncio.Future[None] = self._loop.create_future()
        if not waiting:
            add(self._fd, _wake, waiting)
        waiting.add(future)
        try:
            await future
        finally:
            waiting.discard(future)
            if not waiting and not self.closed:
                remove(self._fd)


def _wake(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _fail(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(ConnectionResetError("the connection is over"))
