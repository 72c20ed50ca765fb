"""Waiting streams of a shard server, and queued events about a model. It runs on one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar

E = TypeVar("E")


class Waiters:
    """The futures of waiting streams, by unit, and optionally by chunk and the order of a gradient there.

    Waking is only a hint: the woken caller checks its condition again.
    """

    def __init__(self) -> None:
        self._units: dict[int, dict[tuple[int, int], list[asyncio.Future[None]]]] = {}

    async def wait(self, unit: int = -1, offset: int = -1, order: int = -1) -> None:
        """Wait until `unit` may have changed, or the gradient of this order may be next at chunk `offset`.

        Without arguments, it waits until `wake_all`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._units.setdefault(unit, {}).setdefault((offset, order), [])
        waiting.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._forget(unit, (offset, order), future)

    def wake_next(self, unit: int, offset: int, order: int) -> None:
        """Wake the stream whose gradient is next in order at chunk `offset` of `unit`."""
        if unit in self._units:
            _wake(self._units[unit].pop((offset, order), ()))
            if not self._units[unit]:
                del self._units[unit]

    def wake_unit(self, unit: int) -> None:
        """Wake the streams that wait for `unit`."""
        for waiting in self._units.pop(unit, {}).values():
            _wake(waiting)

    def wake_all(self) -> None:
        """Wake all streams."""
        units, self._units = self._units, {}
        for unit in units.values():
            for waiting in unit.values():
                _wake(waiting)

    def _forget(self, unit: int, key: tuple[int, int], future: asyncio.Future[None]) -> None:
        waiting = self._units.get(unit, {})
        if future in waiting.get(key, ()):
            waiting[key].remove(future)
            if not waiting[key]:
                del waiting[key]
            if not waiting:
                del self._units[unit]


def _wake(waiting: list[asyncio.Future[None]] | tuple[()]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


class EventOrder(Generic[E]):
    """The queue of events about one model, which are taken in order.

    Args:
        take: takes one event.
        must_wait: returns whether an event must be queued behind the step that is being applied. Calls never are.

    Attributes:
        idle: set while no step is applied to the model, no copy is made from it, and no long work is under way.
    """

    def __init__(self, take: Callable[[E], None], must_wait: Callable[[E], bool]) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._take = take
        self._must_wait = must_wait
        self._waiting: deque[E | Callable[[], None]] = deque()
        self._under_way = 0
        self._long = 0  # of these, long works
        self._working = asyncio.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Drop all waiting events and take no more: the server ends."""
        self._stopped = True
        self._waiting.clear()

    def on_event(self, event: E) -> None:
        """Take an event once all earlier ones have been taken and nothing holds it back."""
        if self._stopped:
            return
        if self._waiting or self._is_held_back(event):
            self._waiting.append(event)
        else:
            self._take(event)

    def call(self, call: Callable[[], None]) -> None:
        """Call a function once all earlier events have been taken."""
        if self._stopped:
            return
        if self._waiting or self._is_held_back(call):
            self._waiting.append(call)
        else:
            call()

    def _is_held_back(self, event: E | Callable[[], None]) -> bool:
        """Return True if the first event or call of the queue is held back."""
        return self._long > 0 or (not callable(event) and self._must_wait(event))

    def begin(self) -> None:
        """Record that a step or a copy begins. `end` must follow."""
        self._under_way += 1
        self.idle.clear()

    def end(self) -> None:
        """Record that a step or a copy has ended, and take the events that were queued behind it."""
        while self._waiting and not self._is_held_back(self._waiting[0]):
            event = self._waiting.popleft()
            if callable(event):
                event()
            else:
                self._take(event)
        self._under_way -= 1
        if not self._under_way:
            self.idle.set()

    @property
    def is_busy(self) -> bool:
        """True while long work on the model is under way."""
        return self._long > 0

    def begin_work(self) -> AbstractAsyncContextManager[None]:
        """Hold events back until the end of the context, in which long work runs. Works run one after the other."""
        self._long += 1
        self.begin()
        return self._work()

    @asynccontextmanager
    async def _work(self) -> AsyncIterator[None]:
        try:
            async with self._working:
                yield
        except GeneratorExit:  # the loop has ended, so no event can be taken
            self.stop()
            raise
        finally:
            self._long -= 1
            self.end()
