"""Processes that have come back after the coordinator's restart, before any is let in. Pure.

Note: [Coming back together]
    A restarted coordinator does not know the live members, nor if its state is the newest: see `knowledge`. It
    learns both from the shard servers that are members in its state, or from its workers if it has no server yet.
    So all processes that come wait until these have come, or until a lease is over; no step can be decided before.
    If a worker knows more than the state, a shard server that is not in the state may know as much: then all wait for
    the lease.
    Then they are let in, in the order in which they came. A generation announced earlier could repeat the number of
    another one, and abort a step that has committed.
"""

from __future__ import annotations

from collections.abc import Callable

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.restart.knowledge import behind
from axon_ps.errors import AxonError
from axon_ps.types import Member, Role
from axon_ps.wire.events import JoinRequest, Position


class Comeback:
    """The processes that wait to be let in.

    Args:
        assembly: the members of the state.
        models: its models.
        snapshots: its checkpoint orders.
        until: the time at which their leases are over.
        let_in: lets a process in: its session, its role, its request and the time.
        out: the actions.
    """

    def __init__(
        self,
        assembly: Assembly,
        models: Models,
        snapshots: Snapshots,
        until: float,
        let_in: Callable[[int, Role, JoinRequest, float], None],
        out: Outbox,
    ) -> None:
        self._assembly = assembly
        self._models = models
        self._snapshots = snapshots
        self._let_in = let_in
        self._out = out
        self._waiting: dict[int, tuple[Role, JoinRequest]] = {}
        self._awaited = Role.SHARD if assembly.roster.awaited(Role.SHARD) else Role.WORKER
        self._until = until if assembly.roster.awaited(self._awaited) else _OVER
        self._is_older = False  # a worker knows more than the state

    def away(self) -> list[Member]:
        """Return the members of the state that have not come since the restart."""
        here = {request.incarnation for _, request in self._waiting.values()}
        return [
            member for role in Role for member in self._assembly.roster.awaited(role) if member.incarnation not in here
        ]

    def behind(self, role: Role, request: JoinRequest) -> str:
        """Return a text about the knowledge that a process has and the state lacks; "" = none.

        A worker of an earlier generation has none: it begins the present one with the servers' values.
        """
        ours = Position(
            generation=self._assembly.membership.generation,
            models=tuple(model.position for model in self._models),
            released=frozenset(self._models.released),
            snapshot_id=self._snapshots.last_id,
        )
        is_earlier = role is Role.WORKER and request.position.generation < ours.generation
        if is_earlier or request.state_id != self._assembly.state_id:
            return ""
        why = behind(ours, request.position)
        self._is_older = self._is_older or bool(why)
        return why

    def join(self, session: int, role: Role, request: JoinRequest, now: float) -> None:
        """Let a process in, or have it wait.

        Raises:
            AxonError: it may not join. If it had to wait first, its session ends with the error later.
        """
        if self._until == _OVER:
            self._let_in(session, role, request, now)
        else:
            self._waiting[session] = role, request
            self.tick(now)

    def forget(self, session: int) -> None:
        """Forget a waiting process whose stream is over."""
        self._waiting.pop(session, None)

    def extend(self, seconds: float) -> None:
        """Extend the wait by a pause of the coordinator itself."""
        self._until += seconds

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`; inf when all were let in."""
        return -self._until if self._until == _OVER else self._until

    def tick(self, now: float) -> None:
        """Let the waiting processes in, in order of arrival, if no awaited member is missing or the wait is over."""
        # an earlier server at one of these is dead
        taken = {request.address for role, request in self._waiting.values() if role is Role.SHARD}
        missing = (member for member in self.away() if member.role is self._awaited and member.address not in taken)
        if now < self._until and (self._is_older or any(missing)):
            return
        waiting, self._waiting, self._until = self._waiting, {}, _OVER
        for session, (role, request) in waiting.items():
            try:
                self._let_in(session, role, request, now)
            except AxonError as error:
                self._out.close(session, error)


_OVER = float("-inf")
