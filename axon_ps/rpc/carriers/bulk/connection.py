"""One socket of a bulk call: frames in and out. See `rpc.carriers.bulk`, Note: [The frames of a bulk connection].

Note: [Few wake-ups]
    A socket is readable as soon as one packet is there. An event loop that reads each time spends more time on waking
    than the kernel on copying. So a reader that needs many bytes is woken when `LOW_WATER_BYTES` of them are there, or
    the last one (SO_RCVLOWAT; the kernel wakes it earlier if it cannot store as many, and at the end). The loop's
    callback reads the bytes, and the waiting task runs only when all of them are there. The loop watches the socket
    until bytes come for which no task waits. A socket that was read empty is not read again until the loop reports that
    it is readable: a connection with alternating requests and replies costs one system call for each message.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from typing import Any, Final, TypeVar

import numpy as np

from axon_ps.rpc.calls.protocol import Buffer, Destination
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.bulk import hangups
from axon_ps.rpc.channels import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from axon_ps.wire.v1 import bulk_pb2

LOW_WATER_BYTES: Final = 512 << 10
"""See Note: [Few wake-ups]."""

LARGE_BYTES: Final = 64 << 10
"""After a frame of at least this size the task yields to the event loop, even if the socket never blocks."""

BUFFER_BYTES: Final = 4 << 10
"""Bytes that are read ahead, and copied once more, so that several small messages are read at once."""

FIRST_BYTES: Final = 512
"""Bytes of a large frame that `Destination` gets: more than the header of any chunk that has a payload."""

SILENCE_MS: Final = int(1000 * (KEEPALIVE_S + KEEPALIVE_TIMEOUT_S))
"""A connection is broken after so many ms in which the peer's machine acknowledged nothing, as with gRPC."""

T = TypeVar("T")


class FrameKind(IntEnum):
    """The kinds of frames."""

    MESSAGE = 0
    HELLO = 1
    END = 2
    STATUS = 3


_KINDS: Final = tuple(FrameKind)
_NO_LINGER: Final = struct.pack("ii", 1, 0)
HEAD: Final = struct.Struct("<BI")


def frame_of_status(status: CallStatus) -> bytes:
    """Encode a status as the last frame of a call."""
    return bulk_pb2.BulkStatus(code=status.number, details=status.details, error=status.error).SerializeToString()


def status_of_frame(frame: memoryview) -> CallStatus:
    """Decode the last frame of a call.

    Raises:
        DecodeError: the frame is malformed.
    """
    message = bulk_pb2.BulkStatus.FromString(bytes(frame))
    return CallStatus.numbered(message.code, message.details, message.error)


class FrameError(ConnectionError):
    """The peer sends bytes that are not a frame of this protocol."""


class FairLock:
    """A fair lock of tasks, which costs next to nothing if no task waits. For one event loop.

        await lock.wait() if lock.taken else lock.take()
        try: ...
        finally: lock.leave()

    Attributes:
        taken: whether a task has the lock.
    """

    __slots__ = ("_waiting", "taken")

    def __init__(self) -> None:
        self.taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> None:
        """Take the lock, which is free."""
        self.taken = True

    async def wait(self) -> None:
        """Wait for the lock, and take it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Release the lock, to the next task that waits."""
        self.taken = False
        while self._waiting and not self.taken:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                self.taken = True


class Connection:
    """Frames over a socket. One task may receive while others send, one after the other. For one event loop.

    Args:
        sock: a connected socket, which this object then owns; the handshake of a TLS socket may be still to come.
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
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._buffered = _Reading(self._buffer, 0)  # bytes from _begin to its count were read and are not used yet
        self._begin = 0
        self._readers: list[_Reading] = []
        self._watched = False
        self._empty = False  # whether the socket was read empty, and the loop has not reported new bytes since
        self._waits = 0  # number of waits of tasks for the socket
        self._sending = FairLock()
        self._writers: set[asyncio.Future[None]] = set()
        self._hangups = hangups.of_this_loop()

    def on_hangup(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once, when the peer has closed the connection, or it has broken."""
        self._hangups.watch(self._fd, callback)

    def peer(self) -> str:
        """Return the address of the other end, in gRPC's format."""
        try:
            host, port, *_ = self._sock.getpeername()
        except (OSError, ValueError):
            return ""
        return f"ipv6:[{host}]:{port}" if self._sock.family == socket.AF_INET6 else f"ipv4:{host}:{port}"

    async def handshake(self) -> None:
        """Perform the TLS handshake, if it is a TLS connection.

        Raises:
            OSError: it failed: one of the ends does not trust the other.
        """
        if isinstance(self._sock, ssl.SSLSocket):
            await self._attempt(self._sock.do_handshake)

    async def receive(self, destination: Destination | None = None) -> tuple[FrameKind, memoryview]:
        """Receive the next frame.

        Args:
            destination: returns the destination of a large frame, or of its end; then only the bytes before that are
                returned.

        Raises:
            FrameError: the peer sends bytes that are not a frame, or a frame that is too long.
            OSError: the connection is over.
        """
        if self._buffered.count - self._begin < HEAD.size:
            await self._read_more(HEAD.size)
        number, size = HEAD.unpack_from(self._buffer, self._begin)
        self._begin += HEAD.size
        if number >= len(_KINDS) or size > self.max_bytes:
            raise FrameError(
                f"a frame of kind {number} with {size} bytes came; kinds go to {len(_KINDS) - 1}, bytes to "
                f"{self.max_bytes}"
            )
        if size >= LARGE_BYTES:
            waits = self._waits
            body = await self._receive_large(size, destination)
            if self._waits == waits:
                await asyncio.sleep(0)
        elif size <= self._buffered.count - self._begin:
            body = memoryview(bytes(self._buffer[self._begin : self._begin + size]))
            self._begin += size
        else:
            body = memoryview(bytearray(size))
            await self._fill(body)
        return _KINDS[number], body

    async def send(self, kind: FrameKind, *buffers: Buffer) -> None:
        """Send a frame made of `buffers`; returns when the kernel has all of it.

        Raises:
            OSError: the connection is over; also if an earlier call was cancelled in the middle of a frame.
        """
        size = sum(buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in buffers)
        views: list[Buffer] = [HEAD.pack(kind, size), *(buffer for buffer in buffers if len(buffer))]
        waits = self._waits
        await self._sending.wait() if self._sending.taken else self._sending.take()
        try:
            await self._send_all(views, size + HEAD.size)
        except asyncio.CancelledError:
            self.close(abort=True)
            raise
        finally:
            self._sending.leave()
        if size >= LARGE_BYTES and self._waits == waits:
            await asyncio.sleep(0)

    def shut_down(self) -> None:
        """Send nothing more. The peer gets all frames that were sent before."""
        if not self.closed:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()

    async def discard(self) -> None:
        """Drop all received bytes.

        Raises:
            OSError: the peer closed the connection, or it broke.
        """
        dropped = memoryview(bytearray(LARGE_BYTES))
        while True:
            await self._read(_Reading(dropped, 1))

    def wake_readers(self) -> None:
        """Have the task that waits to receive fail, because nothing more is wanted."""
        _fail(reading.done for reading in self._readers)

    def wake_writers(self) -> None:
        """Have the tasks that wait to send fail, because the peer reads nothing more."""
        _fail(self._writers)

    def close(self, *, abort: bool = False) -> None:
        """End the connection; every task that waits on it fails. Harmless when repeated.

        Args:
            abort: drop the bytes that the peer has not read yet, so that it gets an error at once; else it sees the end
                after it has read them.
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
        self.wake_readers()
        self.wake_writers()

    # ------------------------------------------------------------------ inside

    async def _receive_large(self, size: int, destination: Destination | None) -> memoryview:
        await self._read_more(FIRST_BYTES)
        first = memoryview(bytes(self._buffer[self._begin : self._begin + FIRST_BYTES]))
        if destination is not None and (found := destination(first, size)) is not None:
            start, target = found
            self._begin += start
            await self._fill(target)
            return first[:start]
        body: memoryview = np.empty(size, np.uint8).data
        await self._fill(body)
        return body

    async def _fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has."""
        held = min(self._buffered.count - self._begin, view.nbytes)
        view[:held] = self._buffer[self._begin : self._begin + held]
        self._begin += held
        await self._read(_Reading(view[held:], view.nbytes - held))

    def _read_more(self, count: int) -> Awaitable[None]:
        """Read until at least `count` bytes are in the buffer; more may come with them."""
        buffered, held = self._buffered, self._buffered.count - self._begin
        self._buffer[:held] = self._buffer[self._begin : buffered.count]
        self._begin, buffered.count, buffered.needed = 0, held, count
        return self._read(buffered)

    async def _read(self, reading: _Reading) -> None:
        """Read until all bytes that are needed were read."""
        while reading.count < reading.needed:
            if self.closed:
                raise ConnectionResetError("this end closed the connection")
            try:
                if self._empty or not self._advance(reading):
                    await self._readable(reading)
            except ssl.SSLWantWriteError:
                await self._writable()

    def _advance(self, reading: _Reading) -> bool:
        """Read without waiting; returns True if all bytes that are needed were read."""
        while reading.count < reading.needed:
            try:
                got = self._sock.recv_into(reading.view[reading.count :])
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
                return False
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            reading.count += got
        self._empty = self._low_water > 0 and reading.count < reading.view.nbytes
        return True

    async def _send_all(self, views: list[Buffer], left: int) -> None:
        send = self._send_first if isinstance(self._sock, ssl.SSLSocket) else self._sock.sendmsg
        while True:
            left -= (sent := await self._attempt(send, views))
            if not left:
                return
            rest = [memoryview(view).cast("B") for view in views]
            while sent >= rest[0].nbytes:
                sent -= rest.pop(0).nbytes
            rest[0] = rest[0][sent:]
            views[:] = rest

    def _send_first(self, views: list[Buffer]) -> int:
        return self._sock.send(views[0])

    async def _attempt(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Perform an operation of the socket as soon as it does not block; `_read` is for reading."""
        while True:
            if self.closed:
                raise ConnectionResetError("this end closed the connection")
            try:
                return operation(*arguments)
            except ssl.SSLWantReadError:
                await self._readable(_Reading(self._buffer, 0))
            except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
                await self._writable()

    async def _readable(self, reading: _Reading) -> None:
        """Wait until enough was read, or the caller has to act; see Note: [Few wake-ups]."""
        self._waits += 1
        self._set_low_water(reading)
        if not self._watched:
            self._loop.add_reader(self._fd, self._on_readable)
            self._watched = True
        reading.done = self._loop.create_future()
        self._readers.append(reading)
        try:
            await reading.done
        finally:
            self._readers.remove(reading)

    def _on_readable(self) -> None:
        """Read for the tasks that wait. See Note: [Few wake-ups]."""
        was_empty, self._empty = self._empty, False
        waiting = [reading for reading in self._readers if not reading.done.done()]
        for reading in waiting:
            try:
                if self._advance(reading):
                    reading.done.set_result(None)
                else:
                    self._set_low_water(reading)
            except OSError as error:
                reading.done.set_exception(error)
        if not (waiting or was_empty or self.closed):  # else the bytes may have been read since
            self._loop.remove_reader(self._fd)
            self._watched = False

    def _set_low_water(self, reading: _Reading) -> None:
        low_water = min(max(1, reading.needed - reading.count), LOW_WATER_BYTES)
        if self._low_water not in (0, low_water):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    async def _writable(self) -> None:
        """Wait until bytes can be sent; several tasks may wait."""
        self._waits += 1
        future: asyncio.Future[None] = self._loop.create_future()
        if not self._writers:
            self._loop.add_writer(self._fd, _wake, self._writers)
        self._writers.add(future)
        try:
            await future
        finally:
            self._writers.discard(future)
            if not self._writers and not self.closed:
                self._loop.remove_writer(self._fd)


class _Reading:
    """A read into memory.

    Args:
        view: its destination.
        needed: number of bytes that are enough.

    Attributes:
        count: number of bytes that were read.
        done: the future of the task that waits for it.
    """

    __slots__ = ("count", "done", "needed", "view")
    done: asyncio.Future[None]

    def __init__(self, view: memoryview, needed: int) -> None:
        self.view, self.needed = view, needed
        self.count = 0


def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _fail(waiting: Iterable[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(ConnectionResetError("the connection is over"))
