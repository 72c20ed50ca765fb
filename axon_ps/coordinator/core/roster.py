"""The roster of members: ranks, sessions, leases. Pure.

A member has an *entry* from its first join until it is lost or leaves. An entry may be without a session for a while:
after the coordinator's restart, until the member has reconnected or its lease is over.

Invariants: incarnations are unique, ranks are unique within a role, a session belongs to at most one entry.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from axon_ps.coordinator.core.waiting import Deadlines
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.types import MAX_RANKS, Grouping, Member, Role, numbered
from axon_ps.wire.events import JoinRequest, KnownNames, ServerMemory

MAX_MEMBERS = MAX_RANKS
"""Most members of one role. Beyond it a joiner is refused."""


@dataclass
class RosterEntry:
    """One member.

    Attributes:
        member: the process. `local_rank` and `replica` are filled in by `Roster.members`.
        deadline: when its lease is over; moved by `Roster.renew`.
        session: its stream, if it has one.
        metrics: those of its newest heartbeat.
        known: the optimizers and compressors of a shard server, if it lists them.
        memory: of a shard server, as reported when it joined; None = not reported.
        participated: whether a step was decided by the votes of workers, this one among them.
        full: whether a shard server has reported that it has no memory for more.
        credentials: ids of the credentials with which it joined.
        makes_itself: whether it can make itself other credentials.
        asked_s: the time of another process's first recent request for its rank.
    """

    member: Member
    deadline: float
    session: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    known: KnownNames | None = None
    memory: ServerMemory | None = None
    full: bool = False
    participated: bool = False
    credentials: tuple[str, ...] = ()
    makes_itself: bool = False
    asked_s: float = -math.inf

    def joined_with(self, request: JoinRequest) -> None:
        """Note the contents of its request to join."""
        self.known, self.memory = request.known, request.memory
        self.credentials, self.makes_itself = request.credentials, request.makes_itself

    @property
    def name(self) -> str:
        """The name of this member in errors: "worker 3 (node a)"."""
        return name_of(self.member)

    @property
    def newest_memory(self) -> ServerMemory | None:
        """The memory of a shard server, from its newest heartbeat or from its join."""
        if self.memory is None or not {"available_bytes", "memory_bytes"} <= self.metrics.keys():
            return self.memory
        available, resident = (max(0.0, self.metrics[name]) for name in ("available_bytes", "memory_bytes"))
        if not math.isfinite(available + resident):
            return self.memory
        return ServerMemory(available_bytes=int(available), resident_bytes=int(resident), pool=self.memory.pool)


NOUN = {Role.WORKER: "worker", Role.SHARD: "shard server"}
"""The name of a role in errors."""

_MAX_NAMED: Final = 4


def name_of(member: Member) -> str:
    """Return the name of a member in errors: "worker 3 (node a)"."""
    return f"{NOUN[member.role]} {member.rank} (node {member.node})"


def names_of(members: Sequence[Member]) -> str:
    """Return the names of several members in errors. A long list is cut."""
    named = ", ".join(name_of(member) for member in members[:_MAX_NAMED])
    return named if len(members) <= _MAX_NAMED else f"{named} and {len(members) - _MAX_NAMED} more"


class Roster:
    """The entries of all members."""

    def __init__(self) -> None:
        self._entries: dict[str, RosterEntry] = {}
        self._by_session: dict[int, RosterEntry] = {}
        self._by_rank: dict[Role, dict[int, RosterEntry]] = {role: {} for role in Role}
        self._lowest_free = dict.fromkeys(Role, 0)  # no rank below it is free
        self._leases: Deadlines[str] = Deadlines()
        self._gone: deque[str] = deque(maxlen=MAX_MEMBERS)

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, incarnation: str) -> RosterEntry | None:
        """Return the entry of an incarnation."""
        return self._entries.get(incarnation)

    def of_session(self, session: int) -> RosterEntry | None:
        """Return the entry that a session belongs to."""
        return self._by_session.get(session)

    def by_session(self) -> dict[int, Member]:
        """Return the members that have a session, by session."""
        return {entry.session: entry.member for entry in self if entry.session is not None}

    def rank_of(self, session: int) -> int:
        """Return the rank of the member that a session belongs to; -1 = of none."""
        entry = self.of_session(session)
        return -1 if entry is None else entry.member.rank

    def is_worker(self, session: int) -> bool:
        """Return True if a session belongs to a worker, or to no member any more."""
        entry = self.of_session(session)
        return entry is None or entry.member.role is Role.WORKER

    def rank_held_by(self, incarnation: str) -> int | None:
        """Return the rank that a process has; None = it is not a member."""
        entry = self.get(incarnation)
        return None if entry is None else entry.member.rank

    def of_role(self, role: Role) -> list[RosterEntry]:
        """Return the entries of a role, sorted by rank."""
        return [entry for _, entry in sorted(self._by_rank[role].items())]

    def count(self, role: Role) -> int:
        """Return the number of members of a role."""
        return len(self._by_rank[role])

    def at(self, role: Role, rank: int) -> RosterEntry | None:
        """Return the entry of a rank, if any."""
        return self._by_rank[role].get(rank)

    def at_address(self, address: str) -> RosterEntry | None:
        """Return the shard server that others reach at an address, if any."""
        return next((s for s in self.of_role(Role.SHARD) if s.member.address == address), None)

    def awaited(self, role: Role) -> list[Member]:
        """Return the members of a role that have not come back after the coordinator's restart, by rank."""
        return [entry.member for entry in self.of_role(role) if entry.session is None]

    def metrics(self) -> dict[str, float]:
        """Return the newest measurements of all members, each as "role/rank/name"."""
        return {
            f"{entry.member.role.value}/{entry.member.rank}/{name}": value
            for entry in self
            for name, value in entry.metrics.items()
        }

    def sessions(self) -> list[int]:
        """Return all sessions: shard servers, then workers, each in rank order."""
        entries = [*self.of_role(Role.SHARD), *self.of_role(Role.WORKER)]
        return [s.session for s in entries if s.session is not None]

    def choose_rank(
        self,
        role: Role,
        request: JoinRequest,
        ranks: int,
        now: float,
        lease_s: float,
        displaced: RosterEntry | None = None,
    ) -> int:
        """Return the rank of a joiner: the requested one, or else the lowest free one below `ranks`.

        The rank of `displaced` counts as free.

        Raises:
            InvalidRequest: a live member has the requested rank, or there is no such rank.
            Busy: none is free, or the member that has the requested rank may be dead. The replacement of a killed
                process may join before the loss is noticed, and before a restarted coordinator has received the
                member's first message.
        """
        held, wanted = self._by_rank[role], request.requested_rank
        if wanted >= 0:
            if (holder := held.get(wanted)) is not None and holder is not displaced:
                text = f"rank {wanted} is held by {holder.name}, incarnation {holder.member.incarnation}"
                if holder.session is None:
                    raise Busy(f"rank {wanted} is kept for {holder.name} until its lease is over; try again then")
                if request.incarnation not in self._gone and not _lives(holder, now, lease_s):
                    raise Busy(f"{text}; if it is dead, that shows within {lease_s:g} s")
                raise InvalidRequest(f"{text}; give each process its own rank, or -1 for any free one")
            if wanted >= ranks:
                raise InvalidRequest(
                    f"rank {wanted} was asked for; the job has ranks 0 to {ranks - 1} of {NOUN[role]}s"
                )
            return wanted
        free = self._lowest_free[role]
        while free in held:
            free += 1
        self._lowest_free[role] = free
        if displaced is not None:
            free = min(free, displaced.member.rank)
        if free >= ranks:
            raise Busy(f"the job has all its {ranks} {NOUN[role]}s; it takes another when one of them leaves")
        return free

    def add(self, member: Member, session: int | None, deadline: float) -> RosterEntry:
        """Add a new member."""
        assert member.incarnation not in self._entries
        assert member.rank not in self._by_rank[member.role]
        entry = self._entries[member.incarnation] = self._by_rank[member.role][member.rank] = RosterEntry(
            member, deadline
        )
        self._leases.set(member.incarnation, deadline)
        if session is not None:
            self.attach(entry, session)
        return entry

    def attach(self, entry: RosterEntry, session: int) -> int | None:
        """Set the session of an entry; return its former one."""
        old = self.detach(entry)
        entry.session = session
        self._by_session[session] = entry
        return old

    def detach(self, entry: RosterEntry) -> int | None:
        """Remove the session of an entry; return it."""
        old, entry.session = entry.session, None
        if old is not None:
            del self._by_session[old]
        return old

    def remove(self, entry: RosterEntry) -> None:
        """Remove a member."""
        self.detach(entry)
        del self._entries[entry.member.incarnation]
        role, rank = entry.member.role, entry.member.rank
        del self._by_rank[role][rank]
        self._lowest_free[role] = min(self._lowest_free[role], rank)
        self._leases.remove(entry.member.incarnation)
        self._gone.append(entry.member.incarnation)

    def expired(self, now: float) -> list[RosterEntry]:
        """Return the entries whose lease is over."""
        if self._leases.next() > now:
            return []
        return [s for s in self._entries.values() if s.deadline <= now]

    def renew(self, entry: RosterEntry, deadline: float) -> None:
        """Extend the lease of a member that lives."""
        entry.deadline = deadline
        self._leases.set(entry.member.incarnation, deadline)

    def renewed(self, sessions: Sequence[int], deadline: float) -> list[RosterEntry]:
        """Extend the leases of the entries of sessions; return these entries."""
        entries = [entry for session in sessions if (entry := self._by_session.get(session)) is not None]
        for entry in entries:
            self.renew(entry, deadline)
        return entries

    def next_deadline(self) -> float:
        """Return the end of the next lease; inf without members."""
        return self._leases.next()

    def extend(self, seconds: float) -> None:
        """Extend all leases."""
        for entry in self._entries.values():
            self.renew(entry, entry.deadline + seconds)

    def members(self, grouping: Grouping) -> tuple[tuple[Member, ...], tuple[Member, ...], int]:
        """Return workers (with local ranks and replicas) and shard servers by rank, and the number of replicas."""
        workers, replicas = numbered((s.member for s in self.of_role(Role.WORKER)), grouping)
        return workers, tuple(s.member for s in self.of_role(Role.SHARD)), replicas


def _lives(holder: RosterEntry, now: float, lease_s: float) -> bool:
    """Return True if a member has sent a message since another process first requested its rank.

    The call counts as such a request.
    """
    if now - holder.asked_s > 2 * lease_s:
        holder.asked_s = now
    return holder.deadline - lease_s > holder.asked_s
