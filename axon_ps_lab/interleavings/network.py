"""A virtual network between the processes of a simulation, in place of the calls inside one process.

Messages of a stream come in order and after a random delay, those of different streams in any order. A link between two
processes can be slow, reset, or cut in one or both directions. On a cut link nothing arrives, and after a while of
silence its calls break, as by gRPC's keepalive. The calls of a process that was killed break, too.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final

import grpc

from axon_ps.rpc.calls.queue import MessageQueue
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers import in_process
from axon_ps.rpc.carriers.in_process import MAX_QUEUED_BYTES, InProcessServer
from axon_ps.shard.server.shell import ShardShell
from axon_ps_lab.interleavings.virtual_loop import BEGAN_S, VirtualLoop, process

DELAY_S: Final = 0.002
"""The most seconds that a message travels on a link without a fault."""

KEEPALIVE_S: Final = 15.0
"""Seconds that a link is silent before its calls break."""

CONNECT_S: Final = 20.0
"""Seconds that a call waits for a connection that cannot be made."""

LATE_S: Final = 0.5
"""The most seconds by which a server finds out later than its client that a connection is gone."""

Link = frozenset[str]
Way = tuple[str, str]
"""The roles of the sender and of the receiver."""


def role(name: str) -> str:
    """Return the role of a process, its name without the number of its life: "shard-1" of "shard-1#3"."""
    return name.partition("#")[0]


class Network:
    """See the module.

    Args:
        loop: the simulation's loop.

    Attributes:
        trace: the events, as text.
        faults: number of faults planned so far.
        ids: the ids that each process has made, as hex.
        shells: the shells of shard servers, by process.
        struck_s: time of the last fault of a process or a link; infinity while a link is cut.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.trace: list[str] = []
        self.faults = 0
        self.ids: dict[str, list[str]] = {}
        self.shells: dict[str, ShardShell] = {}
        self.struck_s = -math.inf
        self._cut: set[Way] = set()
        self._slow: dict[Link, float] = {}
        self._calls: dict[int, Any] = {}
        self._held: list[tuple[Way, Any]] = []
        self._number = 0
        self._awaited: list[tuple[int, str, Context, Callable[[], object]]] = []

    def note(self, what: str) -> None:
        """Add to the trace."""
        self.trace.append(f"{self.loop.time() - BEGAN_S:.6f} {what}")

    # ------------------------------------------------------------------ faults

    def cut(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Cut the link between two roles, both ways or only from `one` to `other`."""
        self.struck_s = math.inf  # until it is healed
        self._cut.add((one, other))
        if not one_way:
            self._cut.add((other, one))
        self.loop.call_later(KEEPALIVE_S, self._break, one, other)

    def heal(self, one: str, other: str) -> None:
        """Heal a link, and deliver held messages unless their calls broke meanwhile."""
        link = frozenset((one, other))
        self._cut -= {(one, other), (other, one)}
        self.struck_s = math.inf if self._cut else self.loop.time()
        held, self._held = self._held, []
        for at, deliver in held:
            if frozenset(at) == link:
                self.loop.later(DELAY_S, deliver)
            else:
                self._held.append((at, deliver))

    def slow(self, one: str, other: str, delay_s: float) -> None:
        """Let messages between two roles take up to `delay_s`."""
        self._slow[frozenset((one, other))] = delay_s

    def reset(self, one: str, other: str) -> None:
        """Break all calls between two roles."""
        self.struck()
        link = frozenset((one, other))
        for call in self._of(lambda c: c.link == link):
            call.broken(f"the connection of {one} and {other} was reset")

    def once_busy(self, messages: int, name: str, run: Callable[[], object]) -> None:
        """Run something after `messages` more messages to or from a role."""
        self._awaited.append((messages, name, copy_context(), run))

    def died(self, name: str) -> None:
        """Free the addresses of a process that was killed, and break its calls."""
        self.struck()
        for address, server in list(in_process._servers.items()):
            if getattr(server, "process", "") == name:
                in_process._servers.pop(address, None)
        for call in self._of(lambda c: name in (c.client, c.server)):
            self.loop.later(DELAY_S, partial(call.broken, f"{name} died"))

    def struck(self) -> None:
        """Record that something has happened to a process or a link."""
        self.struck_s = max(self.struck_s, self.loop.time())

    def _break(self, one: str, other: str) -> None:
        if (one, other) in self._cut or (other, one) in self._cut:  # neither direction has acknowledgements
            for call in self._of(lambda c: c.link == frozenset((one, other))):
                call.broken("the link is silent")

    def _of(self, wanted: Any) -> list[Any]:
        return [call for _, call in sorted(self._calls.items()) if call.ending.status is None and wanted(call)]

    # ------------------------------------------------------------------ for calls

    def delay_s(self, link: Link) -> float:
        """Return the delay of the next message."""
        return self.loop.rng.uniform(0.0, self._slow.get(link, DELAY_S))

    def deliver(self, way: Way, arrive: Any) -> None:
        """Let a message arrive, now or when its link is healed."""
        if way in self._cut:
            self._held.append((way, arrive))
            return
        arrive()
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            for messages, name, context, run in awaited:
                left = messages - (name in way)
                if left:
                    self._awaited.append((left, name, context, run))
                else:
                    self.loop.call_soon(run, context=context)

    def opened(self, call: Any) -> int:
        """Register a call that begins; return its number."""
        self._number += 1
        self._calls[self._number] = call
        return self._number

    def closed(self, number: int) -> None:
        """Remove a call that is over."""
        self._calls.pop(number, None)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let all calls in this process go through the network."""
        network, plain_call, plain_start = self, in_process.InProcessCall, InProcessServer.start

        class Call(_VirtualCall):
            pass

        Call.network = network

        async def start(server: InProcessServer, *, serving: bool = True) -> int:
            server.process = process.get()  # type: ignore[attr-defined]
            return await plain_start(server, serving=serving)

        in_process.InProcessCall = Call  # type: ignore[misc]
        InProcessServer.start = start  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            in_process.InProcessCall = plain_call  # type: ignore[misc]
            InProcessServer.start = plain_start  # type: ignore[method-assign]


class _DelayedQueue(MessageQueue[bytes]):
    """Messages that are under way before they can be read, in order."""

    def __init__(self, call: _VirtualCall, way: Way) -> None:
        super().__init__(MAX_QUEUED_BYTES, len)
        self._call, self._way = call, way
        self._flying: deque[bytes] = deque()
        self._arrival_s = 0.0
        self._closing = False

    async def add(self, message: bytes) -> bool:
        while self._queued_bytes >= self._max_bytes and not self.closed:
            await self._change()
        if self.closed or self._closing:
            return False
        self._queued_bytes += len(message)
        self._flying.append(message)
        self._plan(self._arrive)
        return True

    def close(self, *, drop: bool = False) -> None:
        """Close it; messages that were sent before still arrive, unless they are dropped."""
        self._closing = True
        if drop or not self._flying:
            self._flying.clear()
            super().close(drop=drop)

    def _plan(self, run: Any) -> None:
        network = self._call.network
        self._arrival_s = max(self._arrival_s, network.loop.time() + network.delay_s(self._call.link))
        network.loop.call_at(self._arrival_s, network.deliver, self._way, run)

    def _arrive(self) -> None:
        if self._flying:
            self._messages.append(self._flying.popleft())
        if self._closing and not self._flying:
            super().close()
        self._wake()


class _VirtualCall(in_process.InProcessCall):
    """A call over the virtual network."""

    network: Network

    def __init__(self, server: Any, address: str, path: str, timeout_s: float | None) -> None:
        super().__init__(server, address, path, timeout_s)
        self.client = process.get()
        self.server = getattr(server, "process", address.partition(".")[0])
        self.there, self.back = (role(self.client), role(self.server)), (role(self.server), role(self.client))
        self.link = frozenset(self.there)
        self.requests, self.replies = _DelayedQueue(self, self.there), _DelayedQueue(self, self.back)
        self._number = self.network.opened(self)

    def begin(self) -> None:
        loop = self.network.loop
        if not loop.lives(self.client):
            self.end(CallStatus(grpc.StatusCode.CANCELLED, "its process was killed", local=True))
            return
        if self._timeout_s is not None:
            self._timer = loop.call_later(self._timeout_s, self.end, CallStatus(grpc.StatusCode.DEADLINE_EXCEEDED))
        loop.call_later(CONNECT_S, self._give_up)
        loop.call_later(self.network.delay_s(self.link), self.network.deliver, self.there, self._connect)

    def _give_up(self) -> None:
        if self._task is None:
            self.broken("failed to connect: no answer")

    def _connect(self) -> None:
        """Begin the call at the server."""
        if self.ending.status is not None:
            return
        if (
            self._server is None
            or not self.network.loop.lives(self.server)
            or self._server.address not in in_process._servers
        ):
            self.broken("failed to connect: nobody listens")
            return
        method = self._server.method(self._path)
        if method is None:
            self.end(CallStatus(grpc.StatusCode.UNIMPLEMENTED, f"{self._path} is not served"))
            return
        context = copy_context()
        context.run(process.set, self.server)
        self._task = context.run(self._server.perform, self._perform(method))

    def broken(self, why: str) -> None:
        """Break the call: replies are lost, and the server may find out later and still get requests that arrived."""
        if self.ending.status is None:
            loop = self.network.loop
            self.replies.close(drop=True)
            late_s = loop.rng.choice((0.0, LATE_S)) * loop.rng.random()
            self._end(CallStatus(grpc.StatusCode.UNAVAILABLE, why), late_s, lambda end: end())

    def end(self, status: Any) -> None:
        """See `InProcessCall`; when the client ends it, the server finds out later."""
        late_s = self.network.delay_s(self.link) if status.local else 0.0
        self._end(status, late_s, lambda end: self.network.deliver(self.there, end))

    def _end(self, status: Any, late_s: float, deliver: Callable[[Any], object]) -> None:
        if self.ending.status is not None:
            return
        self.network.closed(self._number)
        task, loop = self._task, self.network.loop
        if not late_s or task is None:
            super().end(status)
            return
        self._task = None
        requests, self.requests = self.requests, _DelayedQueue(self, self.there)
        super().end(status)
        self._task, self.requests = task, requests

        def reset() -> None:
            requests.close(drop=True)
            task.cancel()

        loop.call_later(late_s, deliver, reset)
