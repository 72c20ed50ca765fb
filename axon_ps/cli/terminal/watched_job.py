"""The known state of a job, out of its feed: for `axon-ps top` and `status --watch`; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from axon_ps.coordinator.messages import status_from_proto
from axon_ps.types import Role
from axon_ps.wire.events import Status
from axon_ps.wire.v1 import common_pb2, membership_pb2, status_pb2, watch_pb2

POINTS: Final = 240
EVENTS: Final = 200

SORTS: Final = ("rank", "cost", "sent", "memory")
"""The orders of members, which the key s goes through."""

Key = tuple[Role, int]
Row = tuple[Role, membership_pb2.Member, watch_pb2.MemberLoad]
_ROLES: Final = {common_pb2.ROLE_WORKER: Role.WORKER, common_pb2.ROLE_SHARD: Role.SHARD}


class WatchedJob:
    """The newest state of a job; `apply` takes the feed's events in order.

    Attributes:
        status: the job; None before the first event.
        membership: its members.
        at_s: the time of the newest event, in seconds since the history began.
        steps: decided steps, oldest first.
        events: the job's events, oldest first.
        loads: the load of each member, by role and rank.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.status: status_pb2.StatusReply | None = None
        self.membership = membership_pb2.MembershipEvent()
        self.at_s = 0.0
        self.steps: deque[watch_pb2.StepRecord] = deque(maxlen=POINTS)
        self.events: deque[watch_pb2.EventRecord] = deque(maxlen=EVENTS)
        self.loads: dict[Key, watch_pb2.MemberLoad] = {}
        self._curves: dict[str, deque[float]] = {}

    def apply(self, event: watch_pb2.WatchEvent) -> None:
        """Take an event of the feed."""
        if event.begins:
            self._begin()
        self.at_s = event.at_s
        if event.HasField("status"):
            self.status = event.status
            if event.status.HasField("membership"):
                self.membership = event.status.membership
        self.steps.extend(event.steps)
        for happened in event.events:
            self._happened(happened)
        for curve in event.curves:
            self._curves.setdefault(curve.name, deque(maxlen=POINTS)).extend(curve.value)
        for load in event.members:
            before = self.loads.get(key := (_ROLES[load.role], load.rank))
            if before is not None and not load.metrics:
                load.metrics.update(before.metrics)
            self.loads[key] = load

    def _happened(self, event: watch_pb2.EventRecord) -> None:
        """Append an event; an event that has happened again has its old number, and moves to the end."""
        numbers = [known.number for known in self.events]
        if event.number in numbers:
            del self.events[numbers.index(event.number)]
        self.events.append(event)

    @property
    def finished(self) -> bool:
        """True if the job is over: its workers have finished and left."""
        return self.status is not None and self.as_status().membership.is_over

    @property
    def at_the_end(self) -> bool:
        """True if the job is complete, even if it is not there any more."""
        report = None if self.status is None else self.as_status().progress
        return self.finished or (report is not None and report.steps is not None and report.step >= report.steps)

    def as_status(self) -> Status:
        """Return a status as the coordinator gives it, with the members' measures. The job must be known."""
        assert self.status is not None
        reply = status_pb2.StatusReply()
        reply.CopyFrom(self.status)
        reply.membership.CopyFrom(self.membership)
        for (role, rank), load in self.loads.items():
            reply.counters.update({f"{role.value}/{rank}/{name}": value for name, value in load.metrics.items()})
        return status_from_proto(reply)

    def curve(self, name: str) -> Sequence[float]:
        """Return the newest points of a curve, oldest first; none if there is no such curve."""
        return tuple(self._curves.get(name, ()))

    def members(self, sort: str = "rank") -> list[Row]:
        """Return all members with role and load: shard servers, then workers; or in another order of `SORTS`."""
        found = [
            (role, member, self.loads.get((role, member.rank), watch_pb2.MemberLoad()))
            for role, some in ((Role.SHARD, self.membership.shards), (Role.WORKER, self.membership.workers))
            for member in some
        ]
        weight = {
            "cost": lambda load: load.cost_s,
            "sent": lambda load: load.sent_bytes_per_s + load.received_bytes_per_s,
            "memory": lambda load: load.memory_bytes,
        }.get(sort)
        return found if weight is None else sorted(found, key=lambda row: -weight(row[2]))
