"""Who is a member: ranks, sessions, leases. Pure.

A member sits on a *seat* from its first join to its death or goodbye. A seat may be without a session for a while:
after the coordinator's restart, until the member's stream is back or its lease is over.

Invariants: incarnations are unique, ranks are unique within a role, a session belongs to at most one seat.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from axon_ps.coordinator.core.events import Hello
from axon_ps.coordinator.core.waiting import Deadlines
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.types import Member, Role

MAX_MEMBERS = 4096
"""Most members of one role; beyond it a joiner is refused."""


@dataclass
class Seat:
    """One member.

    Attributes:
        member: who; `local_rank` and `replica` are filled in by `Roster.members`.
        deadline: when its lease is over; moved by `Roster.renew`.
        session: its stream, if it has one.
        metrics: what it said of itself in its newest heartbeat.
        asked_s: when another process first asked for its rank, of late.
    """

    member: Member
    deadline: float
    session: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    asked_s: float = -math.inf

    @property
    def name(self) -> str:
        """What errors call this member: "worker 3 (node a)"."""
        return name_of(self.member)


NOUN = {Role.WORKER: "worker", Role.SHARD: "shard server"}
"""What errors call a member of a role."""


def name_of(member: Member) -> str:
    """What errors call a member: "worker 3 (node a)"."""
    return f"{NOUN[member.role]} {member.rank} (node {member.node})"


class Roster:
    """All seats."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._by_session: dict[int, Seat] = {}
        self._leases: Deadlines[str] = Deadlines()
        self._gone: deque[str] = deque(maxlen=MAX_MEMBERS)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def get(self, incarnation: str) -> Seat | None:
        """The seat of an incarnation."""
        return self._seats.get(incarnation)

    def of_session(self, session: int) -> Seat | None:
        """The seat that a session belongs to."""
        return self._by_session.get(session)

    def of_role(self, role: Role) -> list[Seat]:
        """The seats of a role, sorted by rank."""
        return sorted((s for s in self._seats.values() if s.member.role is role), key=lambda s: s.member.rank)

    def at(self, role: Role, rank: int) -> Seat | None:
        """Who holds a rank."""
        return next((s for s in self._seats.values() if s.member.role is role and s.member.rank == rank), None)

    def sessions(self) -> list[int]:
        """Every session, workers and shard servers in rank order."""
        seats = [*self.of_role(Role.SHARD), *self.of_role(Role.WORKER)]
        return [s.session for s in seats if s.session is not None]

    def choose_rank(self, role: Role, hello: Hello, ranks: int, now: float, lease_s: float) -> int:
        """The rank a joiner gets: the one it wants, or the lowest free one below `ranks`.

        Raises:
            InvalidRequest: somebody who lives holds the one it wants, or there is no such rank.
            Busy: none is free, or who holds the one it wants may be dead: whoever replaces a process that was killed
                may be here before the news of its death, and before a coordinator that was restarted hears from it.
        """
        held = {s.member.rank: s for s in self.of_role(role)}
        wanted = hello.requested_rank
        if wanted >= 0:
            if (holder := held.get(wanted)) is not None:
                words = f"rank {wanted} is held by {holder.name}, incarnation {holder.member.incarnation}"
                if holder.session is None:
                    raise Busy(f"rank {wanted} is kept for {holder.name} until its lease is over; try again then")
                if hello.incarnation not in self._gone and not _lives(holder, now, lease_s):
                    raise Busy(f"{words}; if it is dead, that shows within {lease_s:g} s")
                raise InvalidRequest(f"{words}; give each process its own rank, or -1 for any free one")
            if wanted >= ranks:
                raise InvalidRequest(
                    f"rank {wanted} was asked for; the job has ranks 0 to {ranks - 1} of {NOUN[role]}s"
                )
            return wanted
        free = next((rank for rank in range(ranks) if rank not in held), None)
        if free is None:
            raise Busy(f"the job has all its {ranks} {NOUN[role]}s; it takes another when one of them leaves")
        return free

    def add(self, member: Member, session: int | None, deadline: float) -> Seat:
        """Give a new member its seat."""
        assert member.incarnation not in self._seats
        seat = self._seats[member.incarnation] = Seat(member, deadline)
        self._leases.set(member.incarnation, deadline)
        if session is not None:
            self.attach(seat, session)
        return seat

    def attach(self, seat: Seat, session: int) -> int | None:
        """Give a seat its stream; returns the one it had."""
        old = self.detach(seat)
        seat.session = session
        self._by_session[session] = seat
        return old

    def detach(self, seat: Seat) -> int | None:
        """Take a seat's stream away; returns it."""
        old, seat.session = seat.session, None
        if old is not None:
            del self._by_session[old]
        return old

    def remove(self, seat: Seat) -> None:
        """Take a seat away."""
        self.detach(seat)
        del self._seats[seat.member.incarnation]
        self._leases.remove(seat.member.incarnation)
        self._gone.append(seat.member.incarnation)

    def expired(self, now: float) -> list[Seat]:
        """Seats whose lease is over."""
        if self._leases.next() > now:
            return []
        return [s for s in self._seats.values() if s.deadline <= now]

    def renew(self, seat: Seat, deadline: float) -> None:
        """A member lives: its lease is over later."""
        seat.deadline = deadline
        self._leases.set(seat.member.incarnation, deadline)

    def next_deadline(self) -> float:
        """When the next lease is over; inf without members."""
        return self._leases.next()

    def extend(self, seconds: float) -> None:
        """Give everybody more time."""
        for seat in self._seats.values():
            self.renew(seat, seat.deadline + seconds)

    def records(self) -> list[Member]:
        """What must outlive the coordinator."""
        return [s.member for role in Role for s in self.of_role(role)]

    def members(self, *, replica_is_node: bool) -> tuple[tuple[Member, ...], tuple[Member, ...], int]:
        """Workers and shard servers by rank, with local ranks and replicas, and the number of replicas.

        Replicas are numbered densely by rank; under `replica_is_node` by the lowest rank of each node.
        """
        workers: list[Member] = []
        on_node: dict[str, int] = {}
        replica_of: dict[str, int] = {}
        for seat in self.of_role(Role.WORKER):
            node = seat.member.node
            key = node if replica_is_node else seat.member.incarnation
            replica = replica_of.setdefault(key, len(replica_of))
            local_rank = on_node[node] = on_node.get(node, -1) + 1
            workers.append(dataclasses.replace(seat.member, local_rank=local_rank, replica=replica))
        return tuple(workers), tuple(s.member for s in self.of_role(Role.SHARD)), len(replica_of)


def _lives(holder: Seat, now: float, lease_s: float) -> bool:
    """Whether a member was heard from after another process had asked for its rank, as that one does now."""
    if now - holder.asked_s > 2 * lease_s:
        holder.asked_s = now
    return holder.deadline - lease_s > holder.asked_s
