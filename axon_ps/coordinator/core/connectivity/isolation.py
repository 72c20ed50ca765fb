"""Whether the coordinator itself seems to be cut off from its members, rather than that they died. Pure.

Members that all go silent together are more likely to live behind a broken network than to have died at once. A leader
that finds so lets a standby lead, *before* it declares anybody lost: the members may reach the standby. If they have
died, the standby declares them lost one lease later.
"""

from __future__ import annotations

from axon_ps.coordinator.core.assembly import Assembly

OVERDUE: float = 0.5
"""A member that was silent for this fraction of its lease is overdue: heartbeats come three times in a lease."""


class Isolation:
    """Looks at the members of one leader, again and again.

    Args:
        assembly: the members, and how many were lost.
        lease_s: how long each may be silent.
        now: the time.
    """

    def __init__(self, assembly: Assembly, lease_s: float, now: float) -> None:
        self._assembly = assembly
        self._lease_s = lease_s
        self._there_s = now  # when a member was last there that was not overdue
        self._losses: float | None = None  # how many were lost until then; None = none was ever there

    def silent_s(self, now: float) -> float:
        """For how long no member was there."""
        attached = [entry for entry in self._assembly.roster if entry.session is not None]
        if any(now < entry.deadline - OVERDUE * self._lease_s for entry in attached):
            self._there_s, self._losses = now, self._losses_now
        return now - self._there_s

    def suspected(self, now: float) -> bool:
        """Whether all members that were there went silent, or were lost, together."""
        if not self.silent_s(now) or self._losses is None:
            return False
        if attached := [entry for entry in self._assembly.roster if entry.session is not None]:
            return any(entry.deadline <= now for entry in attached)
        return self._losses_now > self._losses and now - self._there_s >= OVERDUE * self._lease_s

    @property
    def _losses_now(self) -> float:
        return self._assembly.counters["losses"]
