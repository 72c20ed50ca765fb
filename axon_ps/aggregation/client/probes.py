"""Probes of shard servers that a member waits for: the server is asked to send data back.

A wait may be long for good reasons: other members are slow, or a unit is large. A call itself does not show that the
network has failed, and small packets may still pass on a broken connection. So if a member has waited for a server for
`PATIENCE` of a lease, the server is sent `ECHO_BYTES`, more than a packet holds, over a new bulk connection if
possible. If they do not come back, the server is reported (`ConnectivityReport`), and asked again until it answers. A
refusal counts as an answer.
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
"""The bytes that a server is asked to send back."""

PATIENCE: Final = 1 / 6
"""The fraction of a lease that a member waits before the server is asked, and between two checks of its waits."""

AGAIN: Final = 1 / 3
"""The fraction of a lease after which a server is asked again, or reported if it has not answered."""

LEAST_S: Final = 1.0
"""Least seconds for an answer, however short leases are: it takes several iterations of two event loops."""

INTERVALS: Final = 4
"""The wait is cut into this many intervals, so that a resumed process reads arrived data before it reports."""


class Waits:
    """The waits in calls under way, each with its begin, by the rank of the shard server waited for."""

    def __init__(self) -> None:
        self._since: defaultdict[int, dict[Wait, float]] = defaultdict(dict)

    def begin(self) -> Wait:
        """Return the context of a call, in which there is no wait yet."""
        return Wait(self._since)

    def longest_s(self, rank: int) -> float:
        """Return the seconds of the longest present wait for a server; 0 = there is none."""
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
        """Record a wait for this server, from now on unless it has begun already."""
        if rank != self._rank:
            self.end()
            self._rank = rank
            self._since[rank][self] = time.monotonic()

    def end(self) -> None:
        """Record that the wait is over."""
        if self._rank >= 0:
            del self._since[self._rank][self]
            self._rank = -1


class Probes:
    """The probes of one member, and the reports of servers that do not answer. All run on one event loop.

    Args:
        report: receives the results.
        waits: the waits in calls, by server.
        echo: has the shard server with a rank send `ECHO_BYTES` back.
        me: this process's incarnation, which is not probed.
        everybody: whether every server is asked when it becomes a member, also if this member does not wait for it.
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
        """Set the shard servers. Results about former servers are dropped."""
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
        """End all probes."""
        tasks = [*self._asking.values(), *filter(None, [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ inside

    async def _watch(self) -> None:
        """Ask each server for which this member has waited too long. Runs until cancelled."""
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
        """Ask one server until it answers, and report it if that takes too long."""
        asked = asyncio.ensure_future(self._until_answered(rank))
        try:
            patience_s = max(AGAIN * self._report.lease_s(), LEAST_S)
            for _ in range(INTERVALS):
                await asyncio.wait([asked], timeout=patience_s / INTERVALS)
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
                await asyncio.sleep(PATIENCE * lease_s / INTERVALS)
            except AxonError:
                return  # it refuses, so it has answered
