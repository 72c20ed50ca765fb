"""The messages of a call in one direction, between a writer and a reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class MessageQueue(Generic[M]):
    """Messages in order. `close` wakes every task that waits. For one event loop.

    Args:
        max_bytes: a task in `add` waits while so many bytes are queued.
        size: returns the bytes of a message.

    Attributes:
        closed: whether no more messages are accepted.
    """

    def __init__(self, max_bytes: int = 0, size: Callable[[M], int] = lambda _: 0) -> None:
        self.closed = False
        self._max_bytes = max_bytes
        self._size = size
        self._messages: deque[M] = deque()
        self._queued_bytes = 0
        self._input_ended = False
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._messages)

    async def add(self, message: M) -> bool:
        """Add a message once the queue is not full; False when it was closed."""
        while self._queued_bytes >= self._max_bytes and not self.closed:
            await self._change()
        if self.closed:
            return False
        self.put(message)
        return True

    def put(self, message: M) -> None:
        """Add a message at once."""
        self._queued_bytes += self._size(message)
        self._messages.append(message)
        self._wake()

    async def get(self) -> M | None:
        """Return the oldest message as soon as there is one; None when no more can come, or are wanted."""
        while not (self._messages or self.closed or self._input_ended):
            await self._change()
        if self._input_ended or not self._messages:
            return None
        message = self._messages.popleft()
        self._queued_bytes -= self._size(message)
        self._wake()
        return message

    def pop_all(self) -> list[M]:
        """Return all messages, and forget them."""
        messages = list(self._messages)
        self._messages.clear()
        self._queued_bytes = 0
        return messages

    def close(self, *, drop: bool = False) -> None:
        """Accept no more messages; with `drop`, discard those that were not read."""
        self.closed = True
        if drop:
            self._messages.clear()
        self._wake()

    def end_input(self) -> None:
        """Have `get` return None, now and from now on; messages are accepted as before."""
        self._input_ended = True
        self._wake()

    async def _change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)
