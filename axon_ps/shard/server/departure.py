"""The departure of a shard server: others take over its slices, step by step, and no step is aborted.

The server drains itself as `axon-ps drain` would: slices are handed over between steps, so workers have to train. If
that is impossible (it is the last server, the job has no workers, the coordinator does not answer, time is up), it
leaves with its slices. Other servers' copies, if any, remain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from axon_ps.errors import AxonError
from axon_ps.shard.server.waiters import Waiters
from axon_ps.sharding.placement import Placement
from axon_ps.types import Membership
from axon_ps.wire.events import Event, JobState, SessionLost, SessionRestored

_logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds that the coordinator may take to answer."""

AWAY_S: Final = 30.0
"""Seconds that the coordinator may be away while slices are handed over."""


class JobWatch:
    """The job as seen through the events of a server's session: copies that slices lack, and workers that train.

    In a rolling update, the next server may leave when no slice lacks a copy. It runs on one event loop.

    Attributes:
        connected: whether the session with the coordinator is up, as far as is known.
    """

    def __init__(self) -> None:
        self.connected = True
        self._membership: Membership | None = None
        self._placements: dict[int, Placement] = {}
        self._waiters = Waiters()

    def on_event(self, event: Event) -> None:
        """Take one event of the session, in order."""
        if isinstance(event, Membership):
            self._membership = event
        elif isinstance(event, JobState) and event.released:
            self._placements.pop(event.model, None)
        elif isinstance(event, JobState) and event.placement is not None:
            self._placements[event.model] = event.placement
        elif isinstance(event, (SessionLost, SessionRestored)):
            self.connected = isinstance(event, SessionRestored)
        self._waiters.wake_all()

    @property
    def trains(self) -> bool:
        """True if the job has workers. Slices are handed over between their steps."""
        return self._membership is not None and bool(self._membership.workers)

    @property
    def lacking(self) -> int:
        """The number of slices of all models with fewer copies than they should have, or than there are servers."""
        servers = () if self._membership is None else self._membership.shards
        live = {member.rank for member in servers}
        return sum(
            count
            for placement in self._placements.values()
            for h, count in placement.counts.items()
            if len(live.intersection(h.complete)) < min(placement.replication, len(live))
        )

    @property
    def safe(self) -> bool:
        """True if it is known that no slice lacks a copy."""
        return self.connected and self._membership is not None and not self.lacking

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until an event makes `condition` true, or return at once if it is."""
        while not condition():
            await self._waiters.wait()


class Drains(Protocol):
    """The part of the session with the coordinator that is needed here."""

    @property
    def rank(self) -> int:
        """The rank of this server."""

    async def drain(self, rank: int, timeout_s: float | None = ...) -> int:
        """Drain a server; see `coordinator.client.calls.Calls.drain`."""


async def hand_over(session: Drains, watch: JobWatch, failure: asyncio.Future[None], limit_s: float) -> None:
    """Hand over all slices to other servers; returns if that is impossible.

    Args:
        session: with the coordinator.
        watch: of the job.
        failure: ends with `Drained` when this server does not hold any slice.
        limit_s: time limit in seconds.

    Raises:
        Drained: it is done.
        AxonError: this server cannot go on.
    """
    if not watch.trains:
        return
    try:
        async with asyncio.timeout(limit_s):
            left = await session.drain(session.rank, min(limit_s, ANSWER_S))
            _logger.info("leaving: %d slices go to other shard servers first", left)
            why = await _handed_over(watch, failure)
    except TimeoutError:
        why = f"not everything was handed over in {limit_s:g} s"
    except AxonError as error:
        why = str(error)
    if failure.done():
        failure.result()
    _logger.warning("leaving with what this server holds: %s", why)


async def _handed_over(watch: JobWatch, failure: asyncio.Future[None]) -> str:
    """Wait until all slices are handed over, or waiting is useless; returns the reason, empty for success."""
    while not failure.done():
        await watch.until(lambda: failure.done() or not (watch.trains and watch.connected))
        if not watch.trains:
            return "no worker trains any more"
        if not failure.done() and not watch.connected:
            try:
                async with asyncio.timeout(AWAY_S):
                    await watch.until(lambda: failure.done() or watch.connected)
            except TimeoutError:
                return f"the coordinator is away for {AWAY_S:g} s"
    return ""
