"""The feed of a job's history, for up to `MAX_READERS` readers: the news about twice a second, encoded once.

While there are readers, a *tick* is made every `TICK_S`, with the news since the previous tick. A new reader, or a slow
reader that has missed a tick, gets the whole history instead. Nothing is queued for readers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from google.protobuf.message import Message

from axon_ps.coordinator.messages import status_to_proto
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import Broken, Busy
from axon_ps.wire.v1 import watch_pb2

TICK_S: Final = 0.5
TICK_FAILED_S: Final = 30.0
"""Seconds without a tick after which the feed has failed."""

MAX_READERS: Final = 256


def as_json(message: Message) -> str:
    """Return a message as JSON, with the names of the schema. Fields with default values are left out."""
    from google.protobuf.json_format import MessageToJson  # for the page only

    return MessageToJson(message, preserving_proto_field_name=True, indent=None)


class FeedMessage:
    """An event of the feed. Each encoding of it is made once, at its first use."""

    def __init__(self, event: watch_pb2.WatchEvent) -> None:
        self._event = event

    @cached_property
    def encoded(self) -> bytes:
        """The event as protobuf."""
        return self._event.SerializeToString()

    @cached_property
    def json(self) -> str:
        """The event as JSON; see `as_json`."""
        return as_json(self._event)

    @cached_property
    def sse(self) -> bytes:
        """The event as a server-sent event with that JSON."""
        return f"data: {self.json}\n\n".encode()


@dataclass(frozen=True)
class Tick:
    """The news since the previous tick, and the whole history, if a reader wants it."""

    number: int
    increment: FeedMessage
    everything: FeedMessage | None


class Feed:
    """The feed of one leadership. Everything happens on the shell's event loop.

    Args:
        shell: has the history.

    Attributes:
        history: id of the history.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.history = uuid.uuid4().hex[:12]
        self._began_s = time.time() - (shell.now() - shell.started_s)
        self._readers = 0
        self._number = 0
        self._wanted = False
        self._generation = -1
        self._next: asyncio.Future[Tick] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def read(self) -> AsyncGenerator[FeedMessage, None]:
        """Yield everything, then increments, until closed.

        Raises:
            Busy: there are too many readers.
            Broken: the coordinator stops, or leads no more.
        """
        if self._readers >= MAX_READERS:
            raise Busy(f"{MAX_READERS} readers follow the job already; try again later")
        self._readers += 1
        seen = -1
        try:
            while True:
                tick = await self._following(everything=seen < 0)
                message = tick.increment if tick.number == seen + 1 else tick.everything
                seen = -1 if message is None else tick.number
                if message is not None:
                    yield message
        finally:
            self._readers -= 1

    def close(self) -> None:
        """End the feed: readers get the last news, such as the end of the job, then an error."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self._readers and not self._next.done():
            self._next.set_result(self._tick())
        self._next.cancel()

    async def _following(self, *, everything: bool) -> Tick:
        """Return the next tick; with `everything` if requested."""
        self._wanted = self._wanted or everything
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._make_ticks())
        if not self._closed:
            await asyncio.wait([following := self._next], timeout=TICK_FAILED_S)
            if following.done() and not following.cancelled():
                return following.result()
        raise Broken("the coordinator is stopping, or leads no more; its history ends")

    async def _make_ticks(self) -> None:
        try:
            while self._readers:
                self._next.set_result(self._tick())
                self._next = asyncio.get_running_loop().create_future()
                await asyncio.sleep(TICK_S)
        finally:
            self._task = None

    def _tick(self) -> Tick:
        now, history, wanted = self._shell.now(), self._shell.state.history, self._wanted
        self._number, self._wanted = self._number + 1, False
        increment = self._message(history.take_new(now), unless=self._generation)
        return Tick(self._number, increment, self._message(history.everything(now)) if wanted else None)

    def _message(self, event: watch_pb2.WatchEvent, unless: int = -1) -> FeedMessage:
        """Complete an event, but leave out the membership of generation `unless`."""
        event.history, event.began_s = self.history, self._began_s
        status = self._shell.status(measures=False)  # these are in `members`
        self._generation = status.membership.generation
        event.status.CopyFrom(status_to_proto(status, membership=self._generation != unless))
        return FeedMessage(event)
