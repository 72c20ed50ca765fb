"""Awaiting operations that must not be cancelled in the middle.

Note: [A read that is cancelled]
    gRPC delivers a message only if a task still awaits it. When the task that reads is cancelled while a message is on
    its way, the message stays in memory forever, with the 64 KiB in which its last bytes were received
    (github.com/grpc/grpc/issues/43360). So a read is never cancelled: its call is, which ends the read soon, and then
    the task gets its cancellation. It is the same on a server, where gRPC cancels the servicer's task, and the call,
    because its client has gone.

Note: [An operation that is cancelled]
    gRPC's asyncio layer frees an operation (a read, a write, the end of a call) in the task that awaits it. So an
    operation that is cancelled is never freed. *Measured*: each call that a client resets leaves 96 to 220 bytes
    forever, also without a token. A reset cancels the servicer's task. So there, too, every operation is awaited to its
    end: it ends at once.

Note: [A unary call that is reset]
    gRPC reads the message of a unary call itself, in the task that it cancels when the client resets the call. So the
    read is never freed (see Note: [An operation that is cancelled]), and without a reset it waits forever. No token has
    been checked by then. So a server offers its unary methods as streams of one message, which are the same on the wire
    (`auth.interceptor`). *Measured*: a reset call leaves 2 bytes instead of 96. A call takes 0.72 ms instead of 0.59 ms
    on a busy machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

CANCEL_WAIT_S: Final = 1.0
"""Seconds until a coroutine that does not end after `stop` is cancelled itself."""

T = TypeVar("T")


def _nothing() -> None:
    pass


class Shielded(Generic[T]):
    """Awaits a coroutine to its end and delays a cancellation of the task until then.

    It is like `asyncio.shield`, but without another task and iteration of the loop, for frequent calls.

    Args:
        coroutine: the coroutine, which must not be cancelled.
        stop: called once the task is cancelled; makes the coroutine end soon.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], stop: Callable[[], object] = _nothing) -> None:
        self._coroutine = coroutine
        self._stop = stop
        self._future: asyncio.Future[Any] | None = None
        self._stopped = False

    def __await__(self) -> Generator[Any, Any, T]:
        cancelled: asyncio.CancelledError | None = None
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                self._future = future = self._coroutine.send(None)
                try:
                    yield None if future is None else _Uncancelled(future, self._request_stop)
                except asyncio.CancelledError as error:
                    if future is None:
                        self._request_stop()
                    if self._stopped:
                        cancelled = error  # else it is the future's
                except Exception:
                    pass  # it is the future's, and the coroutine finds it there
        except StopIteration as end:
            result: T = end.value
        except (Exception, asyncio.CancelledError):
            if cancelled is None:
                raise
        if cancelled is not None:
            raise cancelled
        return result

    def drop(self) -> None:
        """Cancel the coroutine, and not the task."""
        if self._future is not None:
            self._future.cancel()

    def _request_stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon(self._stop)
            self._loop.call_later(CANCEL_WAIT_S, self.drop)


class _Uncancelled:
    """A proxy of a future for the task that awaits it: it wakes the task when it is done, and cannot be cancelled."""

    def __init__(self, future: asyncio.Future[Any], cancel: Callable[[], None]) -> None:
        self._asyncio_future_blocking = True  # asyncio's flag of an awaited future, moved to this one
        future._asyncio_future_blocking = False
        self._cancel = cancel
        self.add_done_callback = future.add_done_callback
        self.get_loop = future.get_loop

    def cancel(self, msg: object = None) -> bool:
        """Return False, since it is not cancelled; the task gets its cancellation when it wakes."""
        self._cancel()
        return False
