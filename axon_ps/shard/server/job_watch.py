"""A shard server's knowledge of the job: copies that slices lack, and workers that train.

A rolling update of shard servers needs both. The next server may leave when no slice lacks a copy. A leaving server
hands over its slices between steps, so it needs workers that train.
"""

from __future__ import annotations

from collections.abc import Callable

from axon_ps.shard.server.waiters import Waiters
from axon_ps.sharding.placement import Placement
from axon_ps.types import Membership
from axon_ps.wire.events import Event, JobState, SessionLost, SessionRestored


class JobWatch:
    """The job as seen through the events of a server's session. One event loop.

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
        """True if the job has workers; slices are handed over between their steps."""
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
