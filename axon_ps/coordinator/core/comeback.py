"""Who has come back after the coordinator's restart, before anybody is let in. Pure.

Note: [Coming back together]
    A restarted coordinator does not know who lives, nor whether its state is the newest: see `knowledge`. It hears both
    from the shard servers that the state has as members. So all that come wait until these have come, or have had a
    lease for it; no step can be decided before, either. Then they are let in, in the order in which they came.
    Announced before, a generation could have a number that there was, and an abort be of a step that has committed.
"""

from __future__ import annotations

from collections.abc import Collection

from axon_ps.coordinator.core.events import JoinRequest
from axon_ps.coordinator.core.roster import Roster
from axon_ps.types import Role


class Comeback:
    """Who waits to be let in.

    Args:
        roster: the members of the state.
        until: when their leases are over.

    Attributes:
        until: likewise; -inf once everybody was let in.
    """

    def __init__(self, roster: Roster, until: float) -> None:
        self._roster = roster
        self._waiting: dict[int, tuple[Role, JoinRequest]] = {}
        self.until = until if roster.awaited(Role.SHARD) else float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether who comes is let in at once."""
        return self.until == float("-inf")

    @property
    def here(self) -> Collection[str]:
        """The incarnations of those that wait."""
        return {request.incarnation for _, request in self._waiting.values()}

    def wait(self, session: int, role: Role, request: JoinRequest) -> None:
        """A process has come."""
        self._waiting[session] = role, request

    def forget(self, session: int) -> None:
        """Its stream is over."""
        self._waiting.pop(session, None)

    def extend(self, seconds: float) -> None:
        """The coordinator itself was paused."""
        self.until += seconds

    def take(self, now: float) -> list[tuple[int, Role, JoinRequest]]:
        """Those that are let in now, in the order in which they came."""
        here, taken = self.here, {request.address for _, request in self._waiting.values()}
        missing = (m for m in self._roster.awaited(Role.SHARD) if m.incarnation not in here)
        if now < self.until and any(m.address not in taken for m in missing):  # else it is dead: another is there
            return []
        waiting, self._waiting, self.until = self._waiting, {}, float("-inf")
        return [(session, role, request) for session, (role, request) in waiting.items()]
