"""A pool of open streams: a client's choice of the next one, and the end of a server's idle ones.

Note: [Streams are pooled]
    Opening a stream costs both ends as much as moving a hundred kilobytes, and ending it without an error costs another
    round trip. So frequent calls use streams that stay open, one call at a time on each. Both ends know from the
    messages when a call is over. A call that fails ends the stream, with its error.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from axon_ps.errors import Closed, Timeout
from axon_ps.rpc.calls.protocol import EOF, ServerCall
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.service import Stub

NEVER = Deadline(None)


class Poolable(Protocol):
    """A stream, or an object that wraps a stream."""

    async def is_free(self) -> bool:
        """Return True if it can be used again."""

    def cancel(self) -> None:
        """End it, and the call under way on it: every task that waits gets `Closed`."""

    @property
    def target(self) -> str:
        """The method and the address, for errors."""


T = TypeVar("T", bound=Poolable)


class StreamPool(Generic[T]):
    """A client's streams of one method, to any number of servers. Everything runs on one event loop.

    Args:
        open: opens another stream.
        max_idle: most idle streams to one server that stay open; as many as are usually in use at once.
    """

    def __init__(self, open: Callable[[Stub], Awaitable[T]], max_idle: int) -> None:
        self._open = open
        self._max_idle = max_idle
        self._idle: WeakKeyDictionary[Stub, list[T]] = WeakKeyDictionary()

    def acquire(self, stub: Stub, deadline: Deadline = NEVER) -> Acquired[T]:
        """Return a context with a stream for one call; an error ends it, else it goes back to the pool.

        Raises:
            Timeout: the call was not over in time.
        """
        return Acquired(self, stub, deadline)

    async def take(self, stub: Stub, deadline: Deadline) -> T:
        """Take an idle stream, or open one.

        Raises:
            Timeout: none could be opened in time.
        """
        idle = self._idle.setdefault(stub, [])
        while idle:
            stream = idle.pop()
            if await stream.is_free():
                return stream
            stream.cancel()  # it may only be older than our credentials
        return await self._opened(stub, deadline)

    def give(self, stub: Stub, stream: T) -> None:
        """Return a stream whose call is over."""
        idle = self._idle.setdefault(stub, [])
        if len(idle) < self._max_idle:
            idle.append(stream)
        else:
            stream.cancel()

    async def _opened(self, stub: Stub, deadline: Deadline) -> T:
        remaining_s = deadline.remaining()
        try:
            async with asyncio.timeout(remaining_s if remaining_s < math.inf else None):
                return await self._open(stub)
        except TimeoutError:
            raise Timeout(f"{stub.peer} did not answer within {deadline.timeout_s:g} s") from None


class Acquired(Generic[T]):
    """The context of a call, for `StreamPool.acquire`."""

    __slots__ = ("_deadline", "_pool", "_stream", "_stub", "_timer")
    _stream: T

    def __init__(self, pool: StreamPool[T], stub: Stub, deadline: Deadline) -> None:
        self._pool, self._stub, self._deadline = pool, stub, deadline
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> T:
        self._stream = await self._pool.take(self._stub, self._deadline)
        if (remaining_s := self._deadline.remaining()) < math.inf:  # cheaper than asyncio.timeout, for frequent calls
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._stream.cancel)
        return self._stream

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is None:
            self._pool.give(self._stub, self._stream)
            return
        self._stream.cancel()
        if isinstance(error, Closed) and self._deadline.expired:
            raise Timeout(f"{self._stream.target} did not answer within {self._deadline.timeout_s:g} s") from None


class IdleStreams:
    """A server's streams on which no call is under way: a server that stops does not wait for them."""

    def __init__(self) -> None:
        self._idle: set[ServerCall] = set()
        self._draining = False

    @property
    def draining(self) -> bool:
        """True if `drain` was called."""
        return self._draining

    async def next(self, stream: ServerCall) -> Any:
        """Return the first message of a stream's next call; `EOF`: the stream is over, or we are draining."""
        if self._draining:
            return EOF
        self._idle.add(stream)
        try:
            return await stream.read()
        finally:
            self._idle.discard(stream)

    def drain(self) -> None:
        """End the idle streams, now and from now on."""
        self._draining = True
        for stream in self._idle:
            stream.end_input()
