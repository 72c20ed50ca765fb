"""Observation of a job: a thread follows the coordinator's feed, and the job's status can be requested."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import AxonError, Timeout
from axon_ps.rpc.security import Security
from axon_ps_lab.chaos.figures import Commit, Sign

if TYPE_CHECKING:
    from axon_ps.wire.events import Status
    from axon_ps.wire.v1 import watch_pb2

T = TypeVar("T")

_CALL_S: Final = 8.0
_AGAIN_S: Final = 0.05
_END_S: Final = 5.0


class Observer:
    """Follows a job, as a context manager.

    Args:
        address: returns the present address of the coordinator; a successor may have another.
        security: the security of its client's connections.
        job: the job's name.

    Attributes:
        signs: events of the job's history, by time.
        commits: committed steps by the feed, which sends them up to half a second late.
    """

    def __init__(self, address: Callable[[], str], security: Security, job: str) -> None:
        self._address, self._security, self._job = address, security, job
        self.signs: list[Sign] = []
        self.commits: list[Commit] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="axon-ps-observer", daemon=True)
        self._following: asyncio.Task[None] | None = None
        self._asking: OperatorClient | None = None
        self._asked = ""
        self._closed = False
        self._history, self._number, self._began, self._decided = "", 0.0, 0.0, 0.0

    def __enter__(self) -> Observer:
        self._thread.start()
        self._call(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        with contextlib.suppress(AxonError, TimeoutError):
            self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def corruptions(self) -> list[str]:
        """The texts of the corruptions that the coordinator has reported."""
        return [sign.text for sign in list(self.signs) if sign.kind == "corrupt"]

    def status(self, timeout_s: float = 1.0) -> Status | None:
        """Return the job's status; None = the coordinator does not answer."""

        async def ask() -> Status:
            address = self._address()
            if self._asking is None or address != self._asked:
                await self._close()
                self._asking, self._asked = self._client(address), address
            return await self._asking.status(timeout_s=timeout_s)

        try:
            return self._call(ask())
        except (AxonError, TimeoutError):
            return None

    def restore(self, uri: str, timeout_s: float) -> str:
        """Make the job load a checkpoint; returns the reason for a refusal, or ""."""

        async def ask() -> None:
            async with self._client(self._address()) as operator:
                await operator.restore_checkpoint(uri, timeout_s=timeout_s)

        try:
            asyncio.run_coroutine_threadsafe(ask(), self._loop).result(timeout_s + _CALL_S)
        except (AxonError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    # ------------------------------------------------------------------ on the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_S)

    def _client(self, address: str) -> OperatorClient:
        return OperatorClient(address, security=self._security, job=self._job)

    async def _close(self) -> None:
        if self._asking is not None:
            await self._asking.close()
            self._asking = None

    async def _begin(self) -> None:
        self._following = asyncio.ensure_future(self._follow())

    async def _end(self) -> None:
        """End the tasks of the loop."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following], timeout=_END_S)
        await self._close()

    async def _follow(self) -> None:
        while not self._closed:
            async with self._client(self._address()) as operator:
                with contextlib.suppress(AxonError):
                    await self._read(operator)
            await asyncio.sleep(_AGAIN_S)

    async def _read(self, operator: OperatorClient) -> None:
        """Read the feed until it breaks."""
        read = False
        async with contextlib.aclosing(operator.watch()) as feed:
            async for event in feed:
                if isinstance(event, AxonError):
                    if read and not isinstance(event, Timeout):
                        self.signs.append(Sign(at=time.monotonic(), kind="silent", text=str(event)[:200]))
                    return
                read = True
                self._take(event, time.monotonic() - event.at_s)

    def _take(self, event: watch_pb2.WatchEvent, began: float) -> None:
        """Process an event of the feed, whose history began at `began` at the latest, by the event's arrival."""
        if event.history != self._history:
            self._history, self._began, self._number = event.history, began, 0.0
        self._began = min(self._began, began)
        for found in event.events:
            if found.number > self._number:
                self._number = found.number
                self.signs.append(Sign(at=self._began + found.at_s, kind=found.kind, text=found.text))
        for step in event.steps:
            at = self._began + step.at_s
            if step.outcome == "commit" and not step.model and at > self._decided:
                self._decided = at
                self.commits.append(Commit(version=int(step.version) - 1, generation=0, at=at))
