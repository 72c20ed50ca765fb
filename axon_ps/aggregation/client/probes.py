"""Probes of shard servers that a member waits for: each is asked to send some data back.

A wait may last long for good reasons: others are slow, or a unit is large. Nothing about a call says whether the
network still carries it, and a connection on which small packets pass looks well. So a server that something has waited
for as long as `PATIENCE` of a lease is sent `ECHO_BYTES`, more than any packet holds, over a new connection of the kind
that carries bulk data. If they do not come back, it is reported (`ConnectivityReport`), and asked again until it
does. A server that refuses has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final

from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import AxonError, Broken, Closed
from axon_ps.types import Membership

ECHO_BYTES: Final = 64 << 10
"""Bytes that a server is asked to send back."""

PATIENCE: Final = 1 / 6
"""For so much of a lease a call is under way before its server is asked, and so often it is looked for such calls."""

AGAIN: Final = 1 / 3
"""A server that has answered is asked again after so much of a lease; one that has not for so long is reported."""

LEAST_S: Final = 1.0
"""However short leases are, a server has so long to answer: it takes several turns of two event loops."""

TURNS: Final = 4
"""In so many parts that time passes: a process that was stopped meanwhile reads what has come before it complains."""


class Waits:
    """The calls that are under way, by the rank of the shard server that they wait for, and since when."""

    def __init__(self) -> None:
        self._since: defaultdict[int, dict[Wait, float]] = defaultdict(dict)

    def begin(self) -> Wait:
        """A call, which does not wait for a server yet; use it as a context."""
        return Wait(self._since)

    def longest_s(self, rank: int) -> float:
        """For how long something has waited for a server; 0 = nothing does."""
        since = self._since.get(rank)
        return time.monotonic() - next(iter(since.values())) if since else 0.0


class Wait:
    """A call under way. See `Waits`."""

    __slots__ = ("_rank", "_since")

    def __init__(self, since: defaultdict[int, dict[Wait, float]]) -> None:
        self._since = since
        self._rank = -1

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def on(self, rank: int) -> None:
        """It waits for this server now. If it did before, it goes on to."""
        if rank != self._rank:
            self.end()
            self._rank = rank
            self._since[rank][self] = time.monotonic()

    def end(self) -> None:
        """It waits for no server."""
        if self._rank >= 0:
            del self._since[self._rank][self]
            self._rank = -1


class Probes:
    """Asks shard servers, and reports those that do not answer. One event loop.

    Args:
        report: gets what is found.
        waits: what waits for whom.
        echo: has the shard server of a rank send `ECHO_BYTES` back.
        me: our incarnation: we do not ask ourselves.
        everybody: whether every server is asked when it becomes a member, also if no call waits for it.
    """

    def __init__(
        self,
        report: ConnectivityReport,
        waits: Waits,
        echo: Callable[[int], Awaitable[None]],
        me: str,
        *,
        everybody: bool,
    ) -> None:
        self._report = report
        self._waits = waits
        self._echo = echo
        self._me = me
        self._everybody = everybody
        self._members: dict[int, str] = {}  # incarnations, by rank
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._answered_s: dict[int, float] = {}
        self._watching: asyncio.Task[None] | None = None

    def set_members(self, membership: Membership) -> None:
        """Set the shard servers. What was found of those that are none any more is forgotten."""
        before, self._members = self._members, {m.rank: m.incarnation for m in membership.shards}
        for rank, incarnation in before.items():
            if self._members.get(rank) != incarnation:
                self._answered_s.pop(rank, None)
                if (task := self._asking.pop(rank, None)) is not None:
                    task.cancel()
        self._report.retain(set(self._members.values()), self)
        for rank, incarnation in self._members.items() if self._everybody else ():
            if before.get(rank) != incarnation:
                self._ask(rank)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Ask no server any more."""
        tasks = [*self._asking.values(), *filter(None, [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ inside

    async def _watch(self) -> None:
        """Ask the servers that something has waited for for a while, until cancelled."""
        while True:
            lease_s = self._report.lease_s()
            await asyncio.sleep(PATIENCE * lease_s)
            for rank in self._members:
                asked_s = time.monotonic() - self._answered_s.get(rank, float("-inf"))
                if self._waits.longest_s(rank) >= PATIENCE * lease_s and asked_s >= AGAIN * lease_s:
                    self._ask(rank)

    def _ask(self, rank: int) -> None:
        if rank not in self._asking and self._members[rank] != self._me:
            self._asking[rank] = asyncio.get_running_loop().create_task(self._probe(rank, self._members[rank]))

    async def _probe(self, rank: int, incarnation: str) -> None:
        """Ask one server until it answers, and report it once it has not for long."""
        asked = asyncio.ensure_future(self._until_answered(rank))
        try:
            patience_s = max(AGAIN * self._report.lease_s(), LEAST_S)
            for _ in range(TURNS):
                await asyncio.wait([asked], timeout=patience_s / TURNS)
            if not asked.done():
                self._report.found(incarnation, self, reached=False)
            await asked
        finally:
            asked.cancel()
            if self._members.get(rank) == incarnation:
                self._asking.pop(rank, None)
        self._answered_s[rank] = time.monotonic()
        self._report.found(incarnation, self, reached=True)

    async def _until_answered(self, rank: int) -> None:
        lease_s = self._report.lease_s()
        while True:
            try:
                async with asyncio.timeout(lease_s):
                    return await self._echo(rank)
            except (Broken, Closed, TimeoutError):
                await asyncio.sleep(PATIENCE * lease_s / TURNS)
            except AxonError:
                return  # it refuses, so it has answered
