"""Signs that the coordinator itself is cut off from its members, as opposed to their deaths. Pure.

Members that all go silent together are more likely to live behind a broken network than to have died at once. Then the
leader lets a standby lead, *before* it declares any member lost, since the members may reach the standby. If they have
died, the standby declares them lost one lease later.
"""

from __future__ import annotations

from axon_ps.coordinator.core.assembly import Assembly

OVERDUE: float = 0.5
"""A member that was silent for this fraction of its lease is overdue. At least three heartbeats come in a lease."""


class Isolation:
    """Watches the members of one leader.

    Args:
        assembly: the members, and the number of lost ones.
        lease_s: seconds for which each may be silent.
        now: the time.
    """

    def __init__(self, assembly: Assembly, lease_s: float, now: float) -> None:
        self._assembly = assembly
        self._lease_s = lease_s
        self._there_s = now  # the last time with a member that was not overdue
        self._losses: float | None = None  # members lost until then; None = there was never such a member

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last time with a member that was not overdue."""
        attached = [entry for entry in self._assembly.roster if entry.session is not None]
        if any(now < entry.deadline - OVERDUE * self._lease_s for entry in attached):
            self._there_s, self._losses = now, self._losses_now
        return now - self._there_s

    def suspected(self, now: float) -> bool:
        """Return True if all members went silent, or were lost, together."""
        if not self.silent_s(now) or self._losses is None:
            return False
        if attached := [entry for entry in self._assembly.roster if entry.session is not None]:
            return any(entry.deadline <= now for entry in attached)
        return self._losses_now > self._losses and now - self._there_s >= OVERDUE * self._lease_s

    @property
    def _losses_now(self) -> float:
        return self._assembly.counters["losses"]
