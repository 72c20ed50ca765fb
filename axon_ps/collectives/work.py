"""`Work`: a handle on an operation in the background, and the two places where operations run.

`LoopWork` is a coroutine on the background loop (streams to servers). `WorkQueue` runs calls one after the other
(of a group): on the caller's thread if it waits and the queue is empty, else on a thread that is started when needed.

Note: [Callbacks]
    A callback of a user may begin a collective and wait for it, so it never runs on a thread that performs collectives.
    `CallbackThreads` runs them: each on a thread that is not blocked by another callback.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from axon_ps.errors import Closed, Timeout, again
from axon_ps.host import fork
from axon_ps.rpc.background_loop import CANCEL_WAIT_S, BackgroundLoop

T = TypeVar("T")

IDLE_S = 10.0
"""Seconds that a thread for callbacks stays idle before it ends."""

_logger = logging.getLogger(__name__)


class Awaited(Protocol):
    """A pending operation; `wait` may be called any number of times."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until it is done; after a `Timeout` it goes on."""

    def is_completed(self) -> bool:
        """Return True if it ended, with a result or an error."""


class Work(Generic[T]):
    """A handle on a pending operation. `wait` may be called from any thread and any number of times.

    Args:
        future: its result.
        what: its name in error messages ("gathering unit 3").
    """

    def __init__(self, future: concurrent.futures.Future[T], what: str) -> None:
        self._future = future
        self.what = what

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until it is done and return its result.

        Args:
            timeout_s: seconds to wait; None = until its own deadline.

        Raises:
            Timeout: it is not done yet; it goes on, and may be waited for again.
            AxonError: it failed with this error.
        """
        began = time.monotonic()
        try:
            error = self._future.exception(timeout_s)
        except TimeoutError as late:
            if timeout_s is None or time.monotonic() < began + timeout_s:
                raise  # by a signal handler of the user's
            raise Timeout(f"{self.what} is not done after {timeout_s} s; it goes on, wait again or cancel it") from late
        except concurrent.futures.CancelledError as cancelled:
            raise Closed(f"{self.what} was cancelled") from cancelled
        if error is not None:
            raise again(error).with_traceback(error.__traceback__)
        return self._future.result()

    def is_completed(self) -> bool:
        """Return True if it ended, with a result or an error."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return the error with which it failed; None if it succeeded or is not done."""
        if not self._future.done() or self._future.cancelled():
            return None
        return self._future.exception()

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call `callback(self)` when it has ended, on a thread for callbacks: it may wait for other operations.

        Callbacks of several operations may run at the same time. Their errors are logged.
        """
        self.on_end(lambda work: CALLBACKS.run(partial(callback, work)))

    def on_end(self, callback: Callable[[Work[T]], object]) -> None:
        """Call `callback(self)` on the thread that completes it, or at once if it has ended; it must not block."""
        self._future.add_done_callback(lambda _: callback(self))


class LoopWork(Work[T]):
    """A coroutine that runs on the background loop.

    Args:
        loop: the loop that runs it.
        coroutine: the coroutine; it is started at once.
        what: its name in error messages.
    """

    def __init__(self, loop: BackgroundLoop, coroutine: Coroutine[Any, Any, T], what: str) -> None:
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        try:
            super().__init__(loop.submit(self._run(coroutine)), what)
        except Closed:
            coroutine.close()
            raise

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        if self._cancelled:
            coroutine.close()
            raise asyncio.CancelledError
        return await coroutine

    def cancel(self) -> None:
        """Cancel it and block until it has stopped, so that its buffers are free; bytes already sent stay sent.

        Raises:
            Timeout: it ignores its cancellation, so its buffers are still in use.
        """
        self._cancelled = True
        if self._future.done():
            return
        with contextlib.suppress(Closed):  # the loop was closed meanwhile, and cancels all that runs on it
            self._loop.submit(self._cancel_task())
        if concurrent.futures.wait([self._future], CANCEL_WAIT_S).not_done:
            raise Timeout(
                f"{self.what} ignores its cancellation since {CANCEL_WAIT_S:g} s; its buffers are still in use, so "
                "they must not be used again"
            )

    async def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()


class CallbackThreads:
    """Runs calls of users' code, each begun at once, in the order given; see Note: [Callbacks].

    Args:
        name: name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Condition()
        self._queue: deque[Callable[[], object]] = deque()
        self._idle = 0

    def run(self, call: Callable[[], object]) -> None:
        """Run a call on a thread that is idle, or on a new one; its errors are logged."""
        with self._mutex:
            self._queue.append(call)
            if len(self._queue) > self._idle:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            else:
                self._mutex.notify()

    def _serve(self) -> None:
        while True:
            with self._mutex:
                self._idle += 1
                found = self._mutex.wait_for(lambda: self._queue, IDLE_S)
                self._idle -= 1
                if not found:
                    return
                call = self._queue.popleft()
            try:
                call()
            except Exception:
                _logger.exception("a callback of an operation failed")
            del call  # so that an idle thread keeps no result alive


CALLBACKS = CallbackThreads("axon-ps-callback")
"""The threads for callbacks of this process."""


class WorkQueue:
    """Runs calls one after the other, in order of submission.

    A call of `run` is made on its caller's thread if the queue is empty. Any other is made on the queue's own thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Condition()
        self._running = threading.Lock()
        self._queue: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, call: Callable[[], T]) -> T:
        """Run a call after all that were submitted before it, and return its result.

        Raises:
            Closed: the queue was closed.
            Misuse: called in a fork of a worker.
        """
        fork.check()
        with self._mutex:
            idle = self._unfinished == 0 and not self._closed
            if idle:
                self._unfinished += 1
                self._running.acquire()
        if not idle:
            return self.submit(call).result()
        try:
            return call()
        finally:
            self._running.release()
            self._finished()

    def submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run a call on the queue's thread.

        Raises:
            Closed: the queue was closed.
            Misuse: called in a fork of a worker.
        """
        fork.check()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._mutex:
            if self._closed:
                raise Closed(f"{self._name} was closed; nothing more can be done on it")
            self._unfinished += 1
            self._queue.append((future, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._perform, name=self._name, daemon=True)
                self._thread.start()
            self._mutex.notify_all()
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all submitted calls are done, at most `timeout_s` seconds; return True if they are."""
        with self._mutex:
            return self._mutex.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Accept no more calls, and wait at most `timeout_s` seconds for those that were submitted.

        Raises:
            Misuse: called in a fork of a worker.
        """
        fork.check()
        with self._mutex:
            self._closed = True
            self._mutex.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _perform(self) -> None:
        while True:
            with self._mutex:
                self._mutex.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                future, call = self._queue.popleft()
            try:
                with self._running:
                    result = call()
            except BaseException as error:
                self._finished()
                future.set_exception(error)
            else:
                self._finished()
                future.set_result(result)
                del result
            del future, call  # so that an idle thread keeps no result alive

    def _finished(self) -> None:
        with self._mutex:
            self._unfinished -= 1
            if not self._unfinished:
                self._mutex.notify_all()
