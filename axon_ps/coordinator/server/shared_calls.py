"""One piece of work for all who ask for the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Who asks for what is under way gets what comes of it; it is given up when nobody waits for it any more."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Task[T]] = {}
        self._callers: dict[asyncio.Task[T], int] = {}

    async def run(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of what `key` names, or its error; `begin` makes it if it is not under way."""
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(begin())
            task.add_done_callback(lambda _: self._under_way.pop(key))
        self._callers[task] = self._callers.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._callers[task] -= 1
            if not self._callers[task]:
                del self._callers[task]
                task.cancel()
