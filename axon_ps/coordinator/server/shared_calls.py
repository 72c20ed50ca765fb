"""Runs overlapping equal calls as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Callers with the same key share one task; it is cancelled when none of them waits any more."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[T]] = {}
        self._callers: dict[asyncio.Task[T], int] = {}

    async def run(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the task of `key`, or raise its error; `begin` starts it if none is running."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(begin())
            task.add_done_callback(lambda _: self._running.pop(key))
        self._callers[task] = self._callers.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._callers[task] -= 1
            if not self._callers[task]:
                del self._callers[task]
                task.cancel()
