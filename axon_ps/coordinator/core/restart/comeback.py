"""Processes that have come back after the coordinator's restart, before anybody is let in. Pure.

Note: [Coming back together]
    A restarted coordinator does not know who lives, nor whether its state is the newest: see `knowledge`. It hears both
    from the shard servers that the state has as members. So all that come wait until these have come, or have had a
    lease for it; no step can be decided before, either. Then they are let in, in the order in which they came.
    Announced before, a generation could have a number that there was, and an abort be of a step that has committed.
"""

from __future__ import annotations

from collections.abc import Callable

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.roster import Roster
from axon_ps.errors import AxonError
from axon_ps.types import Member, Role
from axon_ps.wire.events import JoinRequest


class Comeback:
    """The processes that wait to be let in.

    Args:
        roster: the members of the state.
        until: when their leases are over.
        let_in: lets a process in: its session, its role, how it asks and the time.
        out: the actions.
    """

    def __init__(
        self, roster: Roster, until: float, let_in: Callable[[int, Role, JoinRequest, float], None], out: Outbox
    ) -> None:
        self._roster = roster
        self._let_in = let_in
        self._out = out
        self._waiting: dict[int, tuple[Role, JoinRequest]] = {}
        self._until = until if roster.awaited(Role.SHARD) else _OVER

    def away(self) -> list[Member]:
        """The members of the state that have not come since the restart."""
        here = {request.incarnation for _, request in self._waiting.values()}
        return [member for role in Role for member in self._roster.awaited(role) if member.incarnation not in here]

    def join(self, session: int, role: Role, request: JoinRequest, now: float) -> None:
        """A process has come.

        Raises:
            AxonError: it may not join; of one that waits first, the session ends with that later.
        """
        if self._until == _OVER:
            self._let_in(session, role, request, now)
        else:
            self._waiting[session] = role, request
            self.tick(now)

    def forget(self, session: int) -> None:
        """Its stream is over."""
        self._waiting.pop(session, None)

    def extend(self, seconds: float) -> None:
        """The coordinator itself was paused."""
        self._until += seconds

    def next_deadline(self) -> float:
        """The time at which `tick` has something to do; inf when everybody was let in."""
        return -self._until if self._until == _OVER else self._until

    def tick(self, now: float) -> None:
        """Let those in that have waited, in the order in which they came, if no member is missing or time is over."""
        taken = {request.address for _, request in self._waiting.values()}  # who had it is dead
        missing = (member for member in self.away() if member.role is Role.SHARD and member.address not in taken)
        if now < self._until and any(missing):
            return
        waiting, self._waiting, self._until = self._waiting, {}, _OVER
        for session, (role, request) in waiting.items():
            try:
                self._let_in(session, role, request, now)
            except AxonError as error:
                self._out.close(session, error)


_OVER = float("-inf")
