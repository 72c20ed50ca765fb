"""The end of a call, on one side of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from axon_ps.rpc.calls.status import CallStatus

C = TypeVar("C")


class Ending(Generic[C]):
    """The status of a call: a call ends once, with the status that comes first. For one event loop.

    Args:
        call: the call, for callbacks.

    Attributes:
        status: the status; None = the call has not ended.
    """

    __slots__ = ("_call", "_callbacks", "status")

    def __init__(self, call: C) -> None:
        self.status: CallStatus | None = None
        self._call = call
        self._callbacks: list[Callable[[C], object]] = []

    def set(self, status: CallStatus) -> bool:
        """Set the status, and call the callbacks; False if there was a status before."""
        if self.status is not None:
            return False
        self.status = status
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self._call)
        return True

    def add_callback(self, callback: Callable[[C], object]) -> None:
        """Have `callback` called with the call when it has ended."""
        if self.status is None:
            self._callbacks.append(callback)
        else:
            callback(self._call)

    async def wait(self) -> CallStatus:
        """Return the status, as soon as there is one."""
        if self.status is None:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake(_: C) -> None:
                if not ended.done():
                    ended.set_result(None)

            self.add_callback(wake)
            await ended
        assert self.status is not None, "the callback comes with it"
        return self.status
