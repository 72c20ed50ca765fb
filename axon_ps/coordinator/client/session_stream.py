"""The stream of a member's session: opened at the coordinator that leads, and again whenever it breaks.

Owns: the channel, the queue of the present stream, heartbeats, and the pauses between attempts. Refuses: the meaning of
events and messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from axon_ps.coordinator.client.addresses import Addresses, Endpoint
from axon_ps.coordinator.client.availability import Availability
from axon_ps.coordinator.client.heartbeat import Punctuality, interval_s
from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.client.succession import successor
from axon_ps.coordinator.messages import event_from_proto
from axon_ps.errors import AxonError, Broken, Busy, Closed, GenerationChanged, again
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.stream import Stream
from axon_ps.types import Membership, Role
from axon_ps.wire.events import ServerEvent
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, session_pb2

LEAVE_S: Final = 2.0
"""Most seconds that `leave` waits until the coordinator has received the Leave."""

RETIRE_S: Final = 1.0
"""Seconds that calls may stay on a channel that was replaced."""

FAILOVER_S: Final = 0.25
"""Most seconds between two rounds, if there are several coordinators: one of them leads soon."""

STANDBY_S: Final = 0.2
"""Most seconds between two requests of a standby to join, if there is one coordinator."""

RENEW_S: Final = 1.0
"""Seconds between two checks for newer credentials."""

_logger = logging.getLogger(__name__)
_TEMPORARY: Final = (Broken, Busy, GenerationChanged)
"""Errors of a session after which joining again may succeed. Every other one is final."""

Message = session_pb2.SessionRequest


class Owner(Protocol):
    """The member whose stream it is. `coordinator.client.session.CoordinatorClient` is one.

    Attributes:
        address: the coordinators' addresses, as they were given.
        job, role, incarnation: as of `CoordinatorClient`.
        rank: -1 before the first Welcome.
        lease_s: seconds for which the coordinator tolerates its silence.
    """

    address: str
    job: str
    role: Role
    incarnation: str
    rank: int
    lease_s: float

    def context(self) -> common_pb2.CallContext:
        """Return the context of a call."""


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """The functions that make and take the messages of a stream.

    Attributes:
        request: returns the request to join, anew for each stream.
        heartbeat: returns a heartbeat.
        receive: takes an event; returns an answer that is to be sent at once, or None.
        broke: called with the error when a stream broke that was up.
    """

    request: Callable[[], Message]
    heartbeat: Callable[[], Message]
    receive: Callable[[ServerEvent], Message | None]
    broke: Callable[[AxonError], None]


class SessionStream:
    """One member's stream, over all its reconnects. It is used on one event loop.

    Args:
        owner: the member.
        handlers: of the events on it. They call `attached` when the member may send.
        security: TLS and credentials.
        availability: of the session. It is down while there is no stream, or the member may not send yet.
        reconnect_timeout_s: seconds for which a broken stream may be opened again.
        standby: whether the member waits until the job has lost a worker.

    Attributes:
        addresses: those of the coordinators.
        last_error: the newest error after which it is tried again; None = there was none.
    """

    def __init__(
        self,
        owner: Owner,
        handlers: Handlers,
        security: Security,
        availability: Availability,
        *,
        reconnect_timeout_s: float,
        standby: bool,
    ) -> None:
        self._owner = owner
        self._handlers = handlers
        self._security = security
        self._availability = availability
        self._reconnect_timeout_s = reconnect_timeout_s
        self._standby = standby
        self._random = random.Random(owner.incarnation)
        self.addresses = Addresses(owner.address)
        self.last_error: AxonError | None = None
        self._channel: Any = None  # of `rpc.channels.connect`
        self._stub: Stub | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._reminder: asyncio.Task[None] | None = None
        self._leaving = False
        self._successor: Endpoint | None = None  # the address of another leader, if that ended our session

    @property
    def stub(self) -> Stub:
        """The calls of the coordinator, on the present channel."""
        assert self._stub is not None
        return self._stub

    async def open(self) -> None:
        """Look up the addresses, and open the first channel."""
        await self.addresses.look_up()
        self._connect()

    async def close(self) -> None:
        """Close the channels, after `run` has ended."""
        if self._channel is not None:
            await asyncio.gather(self._channel.close(), *self._retiring)

    def send(self, message: Message) -> None:
        """Queue a message for the present stream. Without one it is dropped."""
        if self._availability.is_up:
            self._outbox.put_nowait(message)

    def attached(self, resent: Iterable[Message]) -> None:
        """Note that the member may send: first these messages, which a broken stream may have lost."""
        self._availability.up()
        self.addresses.found()
        self._end_reminder()
        for message in resent:
            self._outbox.put_nowait(message)

    async def leave(self, running: asyncio.Task[None], *messages: Message) -> None:
        """Send the last messages, of which the last is a Leave, and end the task that runs the stream."""
        self._leaving = True
        if self._availability.is_up:
            for message in messages:
                self._outbox.put_nowait(message)
            await asyncio.wait([running], timeout=LEAVE_S)
        running.cancel()
        await asyncio.wait([running])

    async def run(self, first: Deadline) -> None:
        """Maintain a stream until the member has left.

        Args:
            first: limit of the first attempts. Later ones have `reconnect_timeout_s`.

        Raises:
            AxonError: the coordinator refuses the member, or there was no stream in time.
        """
        deadline, wait_s = first, 0.05
        self._remind()
        try:
            while not self._leaving:
                try:
                    await self._session()
                    return
                except _TEMPORARY as error:
                    self.last_error = again(error)
                    if was_up := self._availability.is_up:
                        self._broke(error)
                        deadline, wait_s = Deadline(self._reconnect_timeout_s), 0.05
                    if deadline.expired:
                        raise
                    if await self._go_on(error, was_up=was_up):
                        continue
                await asyncio.sleep(min(self._random.uniform(wait_s / 2, wait_s), deadline.remaining()))
                longest_s = FAILOVER_S if len(self.addresses) > 1 else STANDBY_S if self._standby else 2.0
                wait_s = min(wait_s * 2, longest_s, self._owner.lease_s / 4)
        finally:
            self._end_reminder()

    async def _go_on(self, error: AxonError, *, was_up: bool) -> bool:
        """Choose the address of the next attempt; return True if it is to be made at once."""
        before = self.addresses.present
        more = isinstance(error, Broken) and await self.addresses.next(self._successor)
        self._successor = None
        if self.addresses.present != before or not (was_up or isinstance(error, Busy)):
            self._reconnect()
        return more

    async def _session(self) -> None:
        """Run one stream from Join to its end; return only after a Leave of ours."""
        await self.addresses.until_connected(self._channel)
        stream = self.stub.open("Session")
        self._outbox = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        try:
            await stream.write(self._handlers.request())
            async for event in _events(stream):
                if (answer := self._handlers.receive(event)) is not None:
                    await stream.write(answer)
                elif not tasks:  # not before the Welcome, which has the lease
                    tasks.append(asyncio.create_task(self._write(stream, self._outbox)))
                    tasks.append(asyncio.create_task(_renew(self._owner, self.stub)))
                    if len(self.addresses) > 1:
                        tasks.append(asyncio.create_task(self._follow(stream)))
            if not self._leaving:
                raise Broken(f"the coordinator at {self._owner.address} ended the session")
        except Closed:
            if self._successor is None:
                raise
            raise Broken(f"another coordinator leads, at {self._successor.address}") from None
        finally:
            stream.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _follow(self, stream: Stream) -> None:
        """End the session when another coordinator leads."""
        self._successor = await successor(self.addresses, self._security, self._owner.job)
        stream.cancel()

    async def _write(self, stream: Stream, outbox: asyncio.Queue[Message]) -> None:
        """Send the queued messages, and regular heartbeats."""
        sent_s, punctuality = -math.inf, Punctuality()
        with contextlib.suppress(AxonError):  # the reader gets the error that ended the stream
            while True:
                pause_s = interval_s(self._owner.lease_s)
                try:
                    with punctuality.expected(pause_s):
                        async with asyncio.timeout(pause_s):
                            message = await outbox.get()
                    await stream.write(message)
                    if message.HasField("leave"):
                        await stream.done_writing()
                        return
                except TimeoutError:
                    sent_s = -math.inf
                if time.monotonic() - sent_s >= pause_s:
                    sent_s = time.monotonic()
                    await stream.write(self._handlers.heartbeat())
                    punctuality.sent()

    def _connect(self) -> None:
        self._channel = self.addresses.connect(self._security)
        self._stub = Stub(self._channel, SERVICE, self._security)

    def _reconnect(self) -> None:
        """Open a fresh channel, so that the next attempt connects at once instead of after gRPC's own back-off."""
        old = self._channel
        self._connect()
        retiring = asyncio.create_task(old.close(RETIRE_S))  # calls in progress on it fail by themselves
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def _broke(self, error: AxonError) -> None:
        self._availability.down()
        name = f"{self._owner.role.value} {self._owner.rank}"
        _logger.warning("%s lost its session with the coordinator: %s", name, error)
        self._remind()
        self._handlers.broke(error)

    def _remind(self) -> None:
        """Log at growing intervals that this member has no session, until it has one."""
        self._reminder = asyncio.create_task(self._log_waiting())

    def _end_reminder(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()

    async def _log_waiting(self) -> None:
        began_s = time.monotonic()
        for pause_s in reminder_pauses():
            await asyncio.sleep(pause_s)
            waited_s, why = time.monotonic() - began_s, self.last_error or "no answer"
            state = "" if self._owner.rank < 0 else "; what this process holds is kept"
            address = self._owner.address
            _logger.warning(
                "no session with coordinator %s for %.0f s, trying again: %s%s", address, waited_s, why, state
            )


async def _events(stream: Stream) -> AsyncIterator[ServerEvent]:
    """Yield the events of a stream, except for those of a newer protocol."""
    known: Membership | None = None
    async for message in stream:
        event = event_from_proto(message, known)
        if isinstance(event, Membership):
            known = event
        if event is not None:
            yield event


async def _renew(owner: Owner, stub: Stub) -> None:
    """Send the coordinator newer credentials when there are any: it ends a session whose credentials have expired."""
    known = stub.credentials()
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(AxonError):  # it is tried again
            if (newest := stub.credentials()) != known:
                any_key = coordinator_pb2.KVRequest(context=owner.context(), op=coordinator_pb2.KV_OP_GET, key="any")
                await stub.call("KV", any_key, timeout_s=owner.lease_s)
                known = newest
