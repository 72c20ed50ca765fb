"""Members that cannot reach each other although both reach the coordinator: one of the two is removed. Pure.

A member that has waited for another one asks it for an answer of the size of real data. If none comes, it reports that
in its heartbeats (`aggregation.client.probes`). Every step needs both, so no step commits while both are members.

Note: [Who goes]
    A report counts when it is `WINDOW` of a lease old, so that all others have had time to report, too. The
    member that it names must also have been heard since: a silent member is removed by its lease. Of two members, that
    with more unreachable others goes; of equals, a worker before a shard server, and then the newest. A worker
    goes only if as many others remain as the job needs, a shard server only if each of its slices has another complete
    copy. If one of two equals may not go, the other one goes. If neither may go, both stay, and the status has the
    reasons.

Note: [Who comes back]
    A removed member asks to join again at once. It is refused while it reports itself that it does not reach one of the
    members. It is also refused for a pause that doubles each time, since perhaps only the others do not reach it.

Note: [Shown to work]
    A shard server that joins gets no slices at first, so that no step depends on it. It gets some when it and each
    server that holds slices have reached each other. Servers of older builds report nothing, and no report of theirs is
    needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import NOUN, RosterEntry
from axon_ps.errors import Busy
from axon_ps.types import Role
from axon_ps.wire.events import Connectivity, JoinRequest

WINDOW: Final = 1 / 3
"""Age of a report at which a member is removed, as a fraction of a lease."""

LEAST_WINDOW_S: Final = 0.5
"""Least seconds of that age, also with short leases."""

RECHECK_S: Final = 1.0
"""Seconds between two checks of the members that may go."""

MOST_PAUSE_S: Final = 120.0
"""Most seconds for which a member that was removed several times is refused."""

MAX_REFUSED: Final = 1 << 10
"""Most processes that are remembered as gone. The oldest are forgotten."""

_MAX_NAMED: Final = 4


@dataclass
class _Report:
    """A report that a member cannot reach another one: since when, and when that one was first heard afterwards."""

    since: float
    seen: float = math.inf


@dataclass(frozen=True)
class Cut:
    """Two members that cannot reach each other: since when, and when one of them may go at the earliest."""

    one: RosterEntry
    other: RosterEntry
    since: float
    deadline: float

    def __str__(self) -> str:
        return f"{self.one.name} and {self.other.name} cannot reach each other, though both reach the coordinator"


@dataclass
class _Refused:
    """A removed process: the end of its refusal, the length of that pause, and the reason for its removal."""

    until: float
    pause_s: float
    why: str


class Reachability:
    """The reports of one job's members.

    Args:
        assembly: the members.
        models: the placements of slices.
        lease_s: seconds for which a silent member stays one.
        out: gets the events for the history.
    """

    def __init__(self, assembly: Assembly, models: Models, lease_s: float, out: Outbox) -> None:
        self._assembly = assembly
        self._models = models
        self._lease_s = lease_s
        self._out = out
        self._reports: dict[tuple[str, str], _Report] = {}  # by incarnations: the reporter, and the unreachable member
        self._reached: dict[str, set[str]] = {}  # by reporter
        self._reporting: set[str] = set()  # members that report at all
        self._works: set[str] = set()  # servers that have been shown to work
        self._seen: object = None  # the members and placements that `_unshown` was computed from
        self._unshown: frozenset[int] = frozenset()
        self._announced: set[frozenset[str]] = set()
        self._refused: dict[str, _Refused] = {}
        self._recheck = -math.inf

    # ------------------------------------------------------------------ events

    def joined(self, entry: RosterEntry, connectivity: Connectivity | None, now: float) -> None:
        """Take the first report on a member's stream."""
        if connectivity is not None:
            self._reporting.add(entry.member.incarnation)
            self.reported(entry, connectivity, now)
        self.unshown()  # forgets former members

    def reported(self, entry: RosterEntry, connectivity: Connectivity, now: float) -> None:
        """Take a report: all members that a member cannot reach now, and those that it has reached."""
        me, roster = entry.member.incarnation, self._assembly.roster
        there = {other for other in connectivity.unreachable if other != me and roster.get(other) is not None}
        for reporter, other in list(self._reports):
            if reporter == me and other not in there:
                del self._reports[me, other]
                self._healed(me, other)
        for other in there:
            self._reports.setdefault((me, other), _Report(now))
        if new := {other for other in connectivity.reached if roster.get(other) is not None}:
            self._reached.setdefault(me, set()).update(new)
            self._seen = None

    def gone(self, entry: RosterEntry, why: str, now: float) -> None:
        """Note that a member is removed because of reports. See Note: [Who comes back]."""
        me = entry.member.incarnation
        known = self._refused.pop(me, None)
        pause_s = self._lease_s if known is None else min(2 * known.pause_s, MOST_PAUSE_S)
        self._refused[me] = _Refused(now + pause_s, pause_s, why)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def check(self, role: Role, request: JoinRequest, now: float) -> None:
        """Refuse a joiner that does not reach a member, or was removed a moment ago since a member did not reach it.

        A shard server is not refused while the membership is incomplete.
        """
        roster = self._assembly.roster
        theirs = request.connectivity
        named = frozenset[str]() if theirs is None else theirs.unreachable
        if role is Role.SHARD and not self._assembly.membership.complete:
            return  # the job may wait for its slices
        for other in named:
            if (entry := roster.get(other)) is not None and other != request.incarnation:
                raise Busy(
                    f"this {NOUN[role]} (node {request.node}) reaches the coordinator, not {entry.name}; it may join "
                    "once it does"
                )
        refused = self._refused.get(request.incarnation)
        if refused is not None and now < refused.until:
            raise Busy(f"{refused.why}; it may join again in {refused.until - now:.0f} s")

    # ------------------------------------------------------------------ removal

    def to_go(self, now: float) -> tuple[RosterEntry, str] | None:
        """Return the member that goes now, and the reason; None = no member does. See Note: [Who goes]."""
        cuts = list(self._cuts())
        late = [cut for cut in cuts if cut.deadline <= now]
        for cut in late:
            self._announce(cut)
        if not late or now < self._recheck:
            return None
        named = {entry.member.incarnation: entry for cut in late for entry in (cut.one, cut.other)}

        def order(entry: RosterEntry) -> tuple[bool, int, int]:
            return entry.member.role is Role.SHARD, -entry.member.joined, -entry.member.rank

        for entry in sorted(named.values(), key=order):
            if not self._why_not(entry, cuts):
                whom = " and ".join(other.name for other in _ends(cuts, entry)[:_MAX_NAMED])
                return entry, f"{entry.name} and {whom} cannot reach each other, though all reach the coordinator"
        self._recheck = now + RECHECK_S
        return None

    def next_deadline(self) -> float:
        """Return the time of the next call of `to_go`."""
        return min((max(cut.deadline, self._recheck) for cut in self._cuts()), default=math.inf)

    def pending(self, now: float) -> list[str]:
        """Return the pairs that cannot reach each other, and the servers not yet shown to work, as text."""
        cuts = list(self._cuts())
        found = []
        for cut in cuts:
            why = [self._why_not(entry, cuts) for entry in (cut.one, cut.other)]
            stay = f"; neither may go: {' and '.join(why)}" if all(why) else ""
            found.append(f"{cut}, since {now - cut.since:.0f} s{stay}")
        for entry in self._servers():
            if entry.member.rank in self.unshown():
                missing = " and ".join(other.name for other in self._to_show(entry)[:_MAX_NAMED])
                found.append(f"{entry.name} gets no slices before it and {missing} have reached each other")
        return found

    # ------------------------------------------------------------------ working servers

    def unshown(self) -> frozenset[int]:
        """Return the ranks of the shard servers that get no slices yet. See Note: [Shown to work]."""
        registered = self._models.registered
        seen = self._assembly.generation, tuple(m.holders.placement_number for m in registered)
        if seen != self._seen:
            self._seen = seen
            present = {entry.member.incarnation for entry in self._assembly.roster}
            self._works &= present
            self._reporting &= present
            self._reached = {me: others & present for me, others in self._reached.items() if me in present}
            self._reports = {pair: report for pair, report in self._reports.items() if present.issuperset(pair)}
            self._announced = {pair for pair in self._announced if present.issuperset(pair)}
            servers = self._servers()
            holding = {rank for m in registered for h in m.holders.placement.counts for rank in h.complete}
            self._works.update(e.member.incarnation for e in servers if e.member.rank in holding)
            self._works.update([e.member.incarnation for e in servers if not self._to_show(e)])
            self._unshown = frozenset(e.member.rank for e in servers if e.member.incarnation not in self._works)
        return self._unshown

    def _to_show(self, entry: RosterEntry) -> list[RosterEntry]:
        """Return the working servers that have not reached this one, or that it has not reached."""
        me = entry.member.incarnation
        if me in self._works:
            return []
        return [
            other
            for other in self._servers()
            if (theirs := other.member.incarnation) in self._works
            and not (self._has_reached(me, theirs) and self._has_reached(theirs, me))
        ]

    def _has_reached(self, me: str, other: str) -> bool:
        return me not in self._reporting or other in self._reached.get(me, ())

    # ------------------------------------------------------------------ inside

    def _servers(self) -> list[RosterEntry]:
        return self._assembly.roster.of_role(Role.SHARD)

    def _cuts(self) -> Iterator[Cut]:
        """Yield the pairs that are reported now, in either direction."""
        roster, seen = self._assembly.roster, set[frozenset[str]]()
        for (me, other), report in self._reports.items():
            one, named, back = roster.get(me), roster.get(other), self._reports.get((other, me))
            pair = frozenset((me, other))
            if one is None or named is None or pair in seen:
                continue
            seen.add(pair)
            deadlines = [self._deadline(report, named)] + ([] if back is None else [self._deadline(back, one)])
            since = report.since if back is None else min(report.since, back.since)
            yield Cut(one, named, since, min(deadlines))

    def _deadline(self, report: _Report, named: RosterEntry) -> float:
        """Return the time from which a report may have consequences; inf while the member that it names is silent."""
        seen = named.deadline - self._lease_s
        if math.isinf(report.seen) and seen > report.since and named.session is not None:
            report.seen = seen
        window_s = max(WINDOW * self._lease_s, LEAST_WINDOW_S)
        return max(report.since + window_s, report.seen + window_s / 2)

    def _why_not(self, entry: RosterEntry, cuts: Collection[Cut]) -> str:
        """Return the reason why a member may not go; empty if it may."""
        ends = _ends(cuts, entry)
        if any(len(_ends(cuts, other)) > len(ends) for other in ends):
            return f"{entry.name} reaches more of the others"
        if entry.member.role is Role.WORKER:
            needed = max(1, self._assembly.needed_workers)
            few = self._assembly.roster.count(Role.WORKER) <= needed
            return f"the job needs {needed} workers" if few else ""
        registered = self._models.registered
        if not registered or not all(m.holders.parameters.initialized for m in registered):
            return f"the job waits for what {entry.name} is to hold"
        only_copies = 0
        for model in registered:
            there = {s.member.rank for s in self._servers() if s is not entry and model.holders.is_loaded(s.member)}
            only_copies += sum(
                count
                for h, count in model.holders.placement.counts.items()
                if entry.member.rank in h.complete and there.isdisjoint(h.complete)
            )
        return f"{only_copies} slices of {entry.name} have no other copy" if only_copies else ""

    def _announce(self, cut: Cut) -> None:
        """Record once in the history that two members cannot reach each other."""
        pair = frozenset((cut.one.member.incarnation, cut.other.member.incarnation))
        if pair not in self._announced:
            self._announced.add(pair)
            self._out.happened("cut", str(cut))

    def _healed(self, me: str, other: str) -> None:
        """Record in the history that they reach each other again."""
        one, named = self._assembly.roster.get(me), self._assembly.roster.get(other)
        if (other, me) in self._reports or (pair := frozenset((me, other))) not in self._announced:
            return
        self._announced.discard(pair)
        if one is not None and named is not None:
            self._out.happened("healed", f"{one.name} and {named.name} reach each other again")


def _ends(cuts: Collection[Cut], entry: RosterEntry) -> list[RosterEntry]:
    """Return the members that a member cannot reach, or that cannot reach it."""
    return [cut.other if cut.one is entry else cut.one for cut in cuts if entry in (cut.one, cut.other)]
