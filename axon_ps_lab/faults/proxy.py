"""`TcpProxy`: a proxy between clients and a server on loopback that can disturb their connections.

All proxies of a test run on one event loop in one thread (`Proxies`). Each direction of a connection is read by one
task and written by another, with a bounded queue between them, so that bytes can be delayed without being lost. TCP's
guarantees hold until a connection is ended.

The connections of a process are found in `/proc` when a disturbance needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from axon_ps.errors import InvalidRequest
from axon_ps_lab.faults.fault import Fault

Returned = TypeVar("Returned")

_READ_BYTES = 1 << 16
_QUEUED = 256  # reads of a direction that wait to be written
_CALL_S = 10.0
_TICK_S = 0.05
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class ProxiesStalled(Exception):
    """The thread of the proxies did not run, so nothing was forwarded: the test or its machine is at fault."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """A disturbance.

    Attributes:
        kind: a fault of connections, but for PARTITION and CUT.
        seconds: duration of the silence, the delay, the resets or the slow link; 0 for a single event.
        every_s: RESETS: the interval.
        bytes_per_s: SLOW_LINK: the rate.
    """

    kind: Fault
    seconds: float = 0.0
    every_s: float = 0.1
    bytes_per_s: float = 1e6

    @property
    def heals_after_s(self) -> float:
        """Seconds until the disturbance is over."""
        return 2 * self.seconds if self.kind is Fault.DELAY else self.seconds


class _Clients:
    """The processes whose connections are disturbed, also those that they open meanwhile.

    The files of a process are read once, and once for each later connection. Reading them for each piece of data could
    keep the thread of all proxies busy for many seconds.
    """

    def __init__(self, processes: Collection[int]) -> None:
        self._processes = processes
        self._theirs: set[tuple[int, int]] = set()
        self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        self._theirs |= connections_of(self._processes)  # closed ones stay: their last bytes may be on their way

    def have(self, connection: _Connection) -> bool:
        """Return True if the client of a connection is one of these processes."""
        if connection.opened >= self._looked:
            self._look()
        return connection.ports in self._theirs


@dataclass(eq=False)
class _Rule:
    """A current disturbance of one proxy."""

    what: Disturbance
    clients: _Clients | None
    began: float

    def deliver_at(self, read_at: float) -> float:
        """Return the time at which bytes that were read at `read_at` may be written."""
        ends = self.began + self.what.seconds
        if self.what.kind is Fault.BLACK_HOLE:
            return ends
        if self.what.kind is Fault.DELAY and self.began <= read_at < ends:
            return read_at + self.what.seconds
        return read_at

    def pause_s(self, count: int) -> float:
        """Return the time that so many bytes take."""
        if self.what.kind is not Fault.SLOW_LINK:
            return 0.0
        return min(count / self.what.bytes_per_s, max(0.0, self.began + self.what.seconds - time.monotonic()))


class _Connection:
    """A client's connection to the proxy, and the proxy's to the server."""

    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client, self.server = client, server
        self.ports = (int(client.getpeername()[1]), int(client.getsockname()[1]))
        self.opened = time.monotonic()
        self._cut = False
        self._reset = False
        self._up: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
        self._down: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Forward bytes until both directions have ended, or one is broken."""
        self._tasks = [
            asyncio.ensure_future(task)
            for task in (
                self._read(self.client, self._up, upward=True),
                self._read(self.server, self._down, upward=False),
                self._write(self._up, self.server),
                self._write(self._down, self.client),
            )
        ]
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            self._reset |= any(not t.cancelled() and t.exception() is not None for t in done)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)  # the sockets are not in use any more
            for end in (self.client, self.server):
                _close(end, reset=self._reset)

    def reset(self) -> None:
        """End the connection with a reset on both sides."""
        self._reset = True
        for task in self._tasks:
            task.cancel()

    def half_close(self) -> None:
        """End the client's direction; its later bytes are dropped."""
        if not self._cut:
            self._cut = True
            self._tasks.append(asyncio.ensure_future(self._up.put((0.0, b""))))

    async def _read(self, source: socket.socket, queue: asyncio.Queue[tuple[float, bytes]], *, upward: bool) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            data = await loop.sock_recv(source, _READ_BYTES)
            if not (upward and self._cut):
                await queue.put((time.monotonic(), data))

    async def _write(self, queue: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            read_at, data = await queue.get()
            while (late_s := self.proxy.deliver_at(self, read_at) - time.monotonic()) > 0:
                await asyncio.sleep(late_s)
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, data)
            if (pause_s := self.proxy.pause_s(self, len(data))) > 0:
                await asyncio.sleep(pause_s)


def _close(end: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    end.close()


class TcpProxy:
    """Forwards connections to a server. `Proxies.open` makes it, and any thread may use it.

    Attributes:
        address: "host:port" where clients connect.
        upstream: (host, port) of the server; may be changed. None = there is no server: connections are reset.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, upstream: tuple[str, int] | None) -> None:
        self._loop = loop
        self.upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: set[_Connection] = set()
        self._rules: list[_Rule] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def disturb(self, what: Disturbance, clients: Collection[int] | None = None) -> None:
        """Start disturbing connections, also those that are opened meanwhile.

        Args:
            what: the disturbance.
            clients: process ids of the clients whose connections are disturbed; None = all.

        Raises:
            InvalidRequest: a proxy cannot disturb connections so.
            ProxiesStalled: the thread of the proxies did not run.
        """
        _run(self._loop, self._disturb(what, None if clients is None else _Clients(clients)))

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    # ------------------------------------------------------------------ on the loop's thread

    async def serve(self) -> None:
        """Accept connections until closed."""
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            self._start(self._connect(client))

    async def _connect(self, client: socket.socket) -> None:
        client.setblocking(False)
        server = socket.socket()
        server.setblocking(False)
        try:
            if self.upstream is None:
                raise ConnectionRefusedError
            await self._loop.sock_connect(server, self.upstream)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(self, client, server)
        except OSError:
            for end in (client, server):
                _close(end, reset=True)
            return
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    def deliver_at(self, connection: _Connection, read_at: float) -> float:
        """Return the time at which bytes that were read from a connection may be written."""
        moment = read_at
        for rule in self._rules:
            if _matches(rule.clients, connection):
                moment = max(moment, rule.deliver_at(read_at))
        return moment

    def pause_s(self, connection: _Connection, count: int) -> float:
        """Return the time for which a connection is busy with so many bytes."""
        return max((r.pause_s(count) for r in self._rules if _matches(r.clients, connection)), default=0.0)

    async def _disturb(self, what: Disturbance, clients: _Clients | None) -> None:
        if what.kind in (Fault.BLACK_HOLE, Fault.DELAY, Fault.SLOW_LINK):
            rule = _Rule(what, clients, time.monotonic())
            self._rules.append(rule)
            self._loop.call_later(what.heals_after_s + 0.1, self._rules.remove, rule)
        elif what.kind is Fault.HALF_CLOSE:
            for connection in self._matching(clients):
                connection.half_close()
        elif what.kind is Fault.RESET:
            self._reset(clients)
        elif what.kind is Fault.RESETS:
            self._start(self._reset_for(what, clients))
        else:
            raise InvalidRequest(f"a proxy cannot disturb connections by {what.kind.value}; add it to `TcpProxy`")

    async def _reset_for(self, what: Disturbance, clients: _Clients | None) -> None:
        ends = time.monotonic() + what.seconds
        while time.monotonic() < ends:
            self._reset(clients)
            await asyncio.sleep(what.every_s)

    def _reset(self, clients: _Clients | None) -> None:
        for connection in self._matching(clients):
            connection.reset()

    def _matching(self, clients: _Clients | None) -> list[_Connection]:
        return [c for c in self._connections if _matches(clients, c)]

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every connection and stop listening."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()


def _matches(clients: _Clients | None, connection: _Connection) -> bool:
    """Return True if the client of a connection is one of these; None = any."""
    return clients is None or clients.have(connection)


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Returned]) -> Returned:
    """Run a coroutine on the thread of the proxies; returns its result.

    Raises:
        ProxiesStalled: the thread did not run.
    """
    running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return running.result(_CALL_S)
    except TimeoutError:
        running.cancel()
        raise ProxiesStalled(f"the thread of the proxies did not answer within {_CALL_S:g} s") from None


class Proxies:
    """The thread of all proxies of a test, as a context manager.

    Attributes:
        stalled_s: the longest time for which the thread did not run, and no proxy forwarded anything. It may be set to
            0.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="axon-ps-proxies", daemon=True)
        self._all: list[tuple[TcpProxy, asyncio.Task[None]]] = []
        self._watching: asyncio.Task[None] | None = None
        self.stalled_s = 0.0

    def __enter__(self) -> Proxies:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self

    def open(self, upstream: tuple[str, int] | None = None) -> TcpProxy:
        """Start a proxy that listens on a port of loopback."""
        return _run(self._loop, self._open(upstream))

    async def _open(self, upstream: tuple[str, int] | None) -> TcpProxy:
        proxy = TcpProxy(self._loop, upstream)
        self._all.append((proxy, self._loop.create_task(proxy.serve())))
        return proxy

    async def _watch(self) -> None:
        self._watching = asyncio.current_task()
        while True:
            began = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.stalled_s = max(self.stalled_s, time.monotonic() - began - _TICK_S)

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for proxy, serving in self._all:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await proxy.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _run(self._loop, self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()


def owner_of(port: int, processes: Collection[int]) -> int:
    """Return the process of these that listens on a TCP port; -1 = none."""
    return next((pid for pid in processes if port in listening_ports(pid)), -1)


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports that a process listens on."""
    return {_port(fields[1]) for fields in _sockets_of([pid]) if fields[3] == _LISTENS}


def connections_of(processes: Collection[int]) -> set[tuple[int, int]]:
    """Return the local and the remote TCP port of each socket; one local port may be that of many connections."""
    return {(_port(fields[1]), _port(fields[2])) for fields in _sockets_of(processes)}


def _sockets_of(processes: Collection[int]) -> Iterator[list[str]]:
    """Return the fields of the TCP sockets of processes."""
    files = {file for pid in processes for file in _files_of(pid)}
    return (fields for fields in _sockets() if f"socket:[{fields[9]}]" in files)


def _port(address: str) -> int:
    """Return the port of an address in the kernel's table."""
    return int(address.rpartition(":")[2], 16)


def _sockets() -> Iterator[list[str]]:
    """Yield the fields of each entry of the kernel's tables of TCP sockets."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        yield from map(str.split, _lines(table))


def _files_of(pid: int) -> Iterator[str]:
    """Yield the open files of a process, by their names."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.readlines()[1:]
    except OSError:
        return []
