"""The SDK's event loop: one daemon thread that runs coroutines for blocking callers.

Note: [Nothing runs on after run]
    A coroutine may write into arrays of the caller (a gather into a parameter). When `run` returns or raises, the
    coroutine is over: on a time-out or Ctrl-C it is cancelled and awaited. So the caller may reuse its arrays. The only
    exceptions are a coroutine that ignores its cancellation for `CANCEL_WAIT_S`, which is logged, and a second Ctrl-C.

Note: [Locks and Ctrl-C]
    A Ctrl-C inside `threading.Event.wait`, between acquiring the event's inner lock and the `with` that releases it
    (both are Python code), leaves it locked. The thread that sets the event, here the loop's, then waits forever. So
    the two threads share a bare lock, for which waiting and acquiring are one step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Coroutine
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

import grpc

from axon_ps.errors import AxonError, Closed, Misuse, Timeout
from axon_ps.host import fork
from axon_ps.rpc.status import error_of

CANCEL_WAIT_S: Final = 5.0
"""Seconds to wait for a cancelled coroutine."""

SETTLE_S: Final = 0.02
"""Seconds for which a closing loop still processes gRPC's completions of cancelled calls.

gRPC has one queue of completions for all loops of a process. A completion for a closed loop is reported as an error by
another loop, if there is one; it is harmless.
"""

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_loops: WeakSet[BackgroundLoop] = WeakSet()


class BackgroundLoop:
    """An event loop in a daemon thread; its methods may be called from any other thread. Close it when done.

    Args:
        name: the thread's name.
        settle_s: see `SETTLE_S`; 0 if nothing on it uses gRPC.

    Raises:
        OSError: the loop cannot be created, for example because too many files are open.
        Misuse: made in a forked child.
    """

    def __init__(self, name: str = "axon_ps-loop", *, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._lock = threading.Lock()
        self._closed = False
        self._submitted: set[concurrent.futures.Future[Any]] = set()  # asyncio itself keeps no reference to a task
        fork.check()
        fork.opened()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_loop, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.result()
        fork.at_exit(self.close)
        _loops.add(self)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for its result.

        See Note: [Nothing runs on after run].

        Raises:
            Timeout: it was not done within `timeout_s`; it has been cancelled.
            Closed: the loop is closed, or was closed meanwhile, or the coroutine was cancelled by something else.
            Misuse: called on the loop's own thread, which would wait for itself, or in a forked child.
            KeyboardInterrupt: Ctrl-C; the coroutine has been cancelled.
            BaseException: any exception of the coroutine; gRPC's errors are converted to ours.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise Misuse("run() was called on the event loop's own thread, which would wait for itself; use await")
        self._check(coro)
        job = _Job(coro)
        try:
            self._schedule(job)
            in_time = job.wait(timeout_s)
        except Closed:  # it was not scheduled
            coro.close()
            raise
        except BaseException:  # Ctrl-C, perhaps before the coroutine has started
            self._abandon(job)
            raise
        if not in_time:
            self._abandon(job)
            if not job.is_over or job.was_cancelled:
                raise Timeout(f"{job.name} was not done within {timeout_s:g} s")
        return job.outcome()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine and return its future at once; cancelling the future cancels the coroutine.

        Raises:
            Closed: the loop is closed.
            Misuse: called in a forked child.
        """
        self._check(coro)
        with self._lock:
            self._check(coro)
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    def close(self) -> None:
        """Cancel all coroutines, wait for them (at most 2 * `CANCEL_WAIT_S`), end the thread. May be called again.

        Raises:
            Misuse: called on the loop's own thread, or in a forked child.
        """
        fork.check()
        if threading.current_thread() is self._thread:
            raise Misuse("a BackgroundLoop cannot be closed from its own thread")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            fork.not_at_exit(self.close)
            if self._loop.is_closed():  # by an error
                return
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(2 * CANCEL_WAIT_S)
        if self._thread.is_alive():
            _logger.warning("a coroutine ignores its cancellation; the thread %s is left behind", self._thread.name)

    def end(self) -> None:
        """Close without waiting and without locks: for finalizers, which run on any thread. It may be called once."""
        fork.not_at_exit(self.close)
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._stop.set)

    def __enter__(self) -> BackgroundLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_loop(self, started: concurrent.futures.Future[None]) -> None:
        main = self._main(started)
        try:
            asyncio.run(main)
        except BaseException as error:
            main.close()
            if started.done():
                raise
            started.set_exception(error)

    async def _main(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        started.set_result(None)
        await self._stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(self._settle_s)

    def _schedule(self, job: _Job[Any]) -> None:
        with self._lock:  # before close() stops the loop, or not at all
            if self._closed or self._loop.is_closed():
                raise Closed("the background loop is closed")
            self._loop.call_soon_threadsafe(job.start)

    def _check(self, coro: Coroutine[Any, Any, Any]) -> None:
        if fork.is_fork():
            coro.close()
            fork.check()
        if self._closed or self._loop.is_closed():
            coro.close()
            raise Closed("the background loop is closed")

    def _abandon(self, job: _Job[Any]) -> None:
        """Cancel a job and wait until it is over."""
        try:
            self._loop.call_soon_threadsafe(job.cancel)
        except RuntimeError:  # the loop was closed meanwhile, and with it the job
            return
        if not job.wait(CANCEL_WAIT_S):
            _logger.warning("%s ignores its cancellation and is left running", job.name)


@fork.in_child
def _tasks() -> object:
    """Return the tasks of all loops."""
    return [(loop, asyncio.all_tasks(loop._loop)) for loop in list(_loops)]


class _Job(Generic[T]):
    """One coroutine of `run`: started, cancelled and finished on the loop's thread, awaited on another."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self.name = getattr(coro, "__qualname__", repr(coro))
        self.is_over = False
        self._running = threading.Lock()  # See Note: [Locks and Ctrl-C]
        self._running.acquire()
        self._coro = coro
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._coro)
        self._task.add_done_callback(lambda _: self._finish())

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False if that takes longer than `timeout_s`."""
        if not self.is_over and self._running.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._running.release()
        return self.is_over

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # the loop's callbacks run in order: it has not been started
            self._coro.close()
            self._finish()

    def _finish(self) -> None:
        self.is_over = True
        self._running.release()

    @property
    def was_cancelled(self) -> bool:
        return self._task is not None and self._task.cancelled()

    def outcome(self) -> T:
        """Return the result, once it is over."""
        assert self._task is not None
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise Closed(f"{self.name} was cancelled before it was done") from None
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        except TimeoutError as error:
            if isinstance(error, AxonError):
                raise
            raise Timeout(f"{self.name} was not done in time: {error}") from error
