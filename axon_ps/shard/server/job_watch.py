"""A shard server's knowledge of the whole job: copies that slices lack, and workers that train.

A rolling update of shard servers asks both: the next server may go when no slice lacks a copy, and one that is asked to
go hands over what it holds while there are steps between which that can happen.
"""

from __future__ import annotations

from collections.abc import Callable

from axon_ps.shard.server.waiters import Waiters
from axon_ps.sharding.placement import Placement
from axon_ps.types import Membership
from axon_ps.wire.events import Event, JobState, SessionLost, SessionRestored


class JobWatch:
    """Follows the events of a server's session; on its event loop.

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
        """Whether the job has workers, between whose steps slices can change hands."""
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
        """Whether it is known that no slice lacks a copy."""
        return self.connected and self._membership is not None and not self.lacking

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until an event makes `condition` true, or return at once if it is."""
        while not condition():
            await self._waiters.wait()
