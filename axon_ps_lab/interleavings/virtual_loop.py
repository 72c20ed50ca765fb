"""An event loop whose time is virtual: it passes only when nothing is left to do, and then at once.

Everything that runs on it is deterministic: there are no sockets, the work of threads runs on the loop a little
later, and every choice and delay comes from one seeded generator. If work in threads waits for other such work, the
threads are real; one of them or the loop runs at a time. Each task belongs to a *process*, the one in
which it was made; a process that is killed does nothing any more.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVarTuple

_Ts = TypeVarTuple("_Ts")

BEGAN_S: Final = 1000.0
"""The time at which a loop is made."""

MOST_ITERATIONS: Final = 100_000
"""The most iterations of the loop without time passing."""

THREAD_S: Final = 0.003
"""The most seconds of work in a thread."""

LONG_S: Final = 0.5
"""The most seconds of some of that work, as of a large model or on a busy machine."""

ONE_IN: Final = 16
"""One in so many pieces of a thread's work takes up to `LONG_S`."""

process: ContextVar[str] = ContextVar("process", default="")
"""The process that a task belongs to; "" = the simulation itself."""


class NothingHappensError(AssertionError):
    """All tasks wait, and nothing is planned: a wait does not end."""


class TimeStandsStillError(AssertionError):
    """A task is always busy: its loop does not end."""


class _Killed(BaseException):
    """The simulation is over."""


class _Thread:
    """Work in a thread while the loop stands still, until the work ends or waits for another thread."""

    current = threading.local()

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._permit, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = self._ended = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._main,), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let it run; returns when it has ended or waits."""
        self._permit.release()
        self._over.acquire()

    def wait(self) -> None:
        """Wait, in the thread itself, until it is resumed."""
        self._over.release()
        self._permit.acquire()
        if self._killed:
            raise _Killed

    def kill(self) -> None:
        """End it where it waits."""
        self._killed = True
        if not self._ended:  # the thread lives a little longer than its work
            self.resume()
        self._thread.join()

    def _main(self) -> None:
        self._permit.acquire()
        self.current.thread = self
        try:
            if not self._killed:
                self._run()
        except _Killed:
            pass
        finally:
            self._ended = True
            self._over.release()


class VirtualCondition:
    """A stand-in for `threading.Condition`, between threads of which one runs at a time.

    Args:
        loop: the loop that runs while they wait.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._waiting: list[_Thread] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """See `threading.Condition`."""
        end_s = math.inf if timeout is None else self._loop.time() + timeout
        while not predicate() and self._loop.time() < end_s:
            thread: _Thread = _Thread.current.thread
            self._waiting.append(thread)
            if end_s < math.inf:
                self._loop.call_at(end_s, self._resume, thread)
            thread.wait()
        return predicate()

    def notify_all(self) -> None:
        """See `threading.Condition`."""
        for thread in self._waiting:
            self._loop.later(THREAD_S, lambda thread=thread: self._resume(thread))  # type: ignore[misc]

    def _resume(self, thread: _Thread) -> None:
        if thread in self._waiting:
            self._waiting.remove(thread)
            thread.resume()


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task with its number in the order of making: sets of tasks have no order of their own."""

    number: int


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module.

    Args:
        rng: source of all random choices.

    Attributes:
        now_s: the time.
        threads: whether work in threads runs in real ones, since it waits for other such work.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now_s = BEGAN_S
        self.rng = rng
        self.threads = False
        self._began: list[_Thread] = []
        self._dead: set[str] = set()
        self._killed: list[asyncio.Task[Any]] = []
        self._count = 0
        self._iterations = 0
        self._busy_until: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tasks_of: dict[str, weakref.WeakSet[asyncio.Task[Any]]] = {}
        super().__init__()
        self._ready: deque[asyncio.Handle]
        self._stopping: bool
        self.set_task_factory(self._task)

    def time(self) -> float:
        """See `asyncio`."""
        return self.now_s

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is passed over at its time

    def _run_once(self) -> None:
        """Run the callbacks that are ready; if there are none, time passes until there is one."""
        timers, ready = self._timers, self._ready
        self._iterations += 1
        while not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise NothingHappensError("everybody waits, and nothing is planned")
            if timers[0][0] > self.now_s:
                self.now_s, self._iterations = timers[0][0], 0
            while timers and timers[0][0] <= self.now_s:
                ready.append(heapq.heappop(timers)[2])
        if self._iterations > MOST_ITERATIONS:
            self._iterations = 0
            raise TimeStandsStillError(f"the loop has turned {MOST_ITERATIONS} times, and no time passes")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        context = copy_context() if context is None else context
        task = _Task(coroutine, loop=loop, context=context)
        self._count += 1
        task.number = self._count
        self._tasks_of.setdefault(context.get(process, ""), weakref.WeakSet()).add(task)
        return task

    def start(self, name: str, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine as a process of its own."""
        context = copy_context()
        context.run(process.set, name)
        return self.create_task(coroutine, context=context)

    def lives(self, name: str) -> bool:
        """Return True if a process was not killed."""
        return name not in self._dead

    def kill(self, name: str) -> None:
        """End a process: its tasks are cancelled, and its work in threads is dropped."""
        self._dead.add(name)
        tasks = sorted(self._tasks_of.pop(name, ()), key=lambda t: t.number)
        self._killed += tasks  # tasks that wait for a thread of the process do not end
        for task in tasks:
            task.cancel()

    def later(self, most_s: float, run: Callable[[], object]) -> None:
        """Run something after a random time, unless its process is killed before."""
        name = process.get()
        self.call_later(self.rng.uniform(0.0, most_s), lambda: run() if self.lives(name) else None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the work of a thread later; see `in_thread`."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except _Killed:
                raise
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        name, took_s = process.get(), self.rng.uniform(0.0, LONG_S if self.rng.randrange(ONE_IN) == 0 else THREAD_S)
        busy_until_s = 0.0 if executor is None else self._busy_until.get(executor, 0.0)
        ends_s = max(self.now_s, busy_until_s) + took_s
        if executor is not None:  # of one thread, as those of a service
            self._busy_until[executor] = ends_s
        self.call_at(ends_s, lambda: self.in_thread(run) if self.lives(name) else None)
        return future

    def in_thread(self, run: Callable[[], object]) -> None:
        """Run the work of a thread, in a real one if `threads`."""
        if not self.threads:
            run()
            return
        thread = _Thread(run)
        self._began.append(thread)
        thread.resume()

    def close(self) -> None:
        """See `asyncio`; threads that wait end, too."""
        for thread in self._began:
            thread.kill()
        super().close()


class LoopExecutor:
    """A stand-in for a pool of threads."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, run: Callable[..., Any], *args: Any) -> None:
        """Run it on the loop, later."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.later(THREAD_S, lambda: loop.in_thread(lambda: run(*args)))

    def shutdown(self, **_: object) -> None:
        """Do nothing: there is nothing to end."""
