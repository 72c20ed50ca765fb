"""Evictions: members that the coordinator removes, for their silence, a cut connection or a late step. Pure.

A member is evicted when it was silent for a lease, when another member cannot reach it (`reachability`), or when the
others wait for it in a step (`steps.stragglers`). All workers are evicted when no replacement has joined in time. Each
eviction ends a session with an error that names the reason.

Note: [Stragglers]
    A member may live and yet take no part in a step that the others are in. It is *set aside* when as many others as
    the job needs have waited for it for `step_timeout_s`. It does not come back by itself.

Note: [Isolation]
    Members that all go silent together are more likely to live behind a broken network than to have died at once. Then
    the leader lets a standby lead, *before* it declares any member lost, since the members may reach the standby. If
    they have died, the standby declares them lost one lease later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.steps.stragglers import Stragglers
from axon_ps.errors import MemberLost, Timeout
from axon_ps.types import Role

OVERDUE: float = 0.5
"""A member that was silent for this fraction of its lease is overdue. At least three heartbeats come in a lease."""


class Evictions:
    """Evicts the members of one job.

    Args:
        config: its configuration.
        assembly: generations, leases and steps.
        models: the models of the job.
        members: removes members.
        out: gets the ends of sessions.

    Attributes:
        stragglers: the workers that the others wait for in a step.
    """

    def __init__(
        self, config: CoordinatorConfig, assembly: Assembly, models: Models, members: Members, out: Outbox
    ) -> None:
        self._config = config
        self._assembly = assembly
        self._members = members
        self._out = out
        self.stragglers = Stragglers(assembly, models, config.step_timeout_s)

    def tick(self, now: float) -> None:
        """Handle all deadlines of members that have passed: first leases, last stragglers."""
        if expired := self._assembly.roster.expired(now):
            self._end_leases(expired, now)
        while (found := self._members.reachability.to_go(now)) is not None:
            self._cut_off(*found, now)
        self._members.tick(now)
        if now >= self._join_deadline():
            self._give_up_joining(now)
        if late := self.stragglers.late(now):
            self._set_aside(late, now)

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`."""
        waiting = (self._assembly.roster, self._members.reachability, self._members, self.stragglers)
        return min(self._join_deadline(), *(each.next_deadline() for each in waiting))

    def _end_leases(self, expired: Sequence[RosterEntry], now: float) -> None:
        """Continue without members that were silent for a lease."""
        reasons = []
        for entry in expired:
            reasons.append(self._silence(entry))
            self._out.close(entry.session, MemberLost(f"{reasons[-1]}; it is no member any more"))
        self._assembly.counters["losses"] += len(expired)
        self._members.lose(expired, "; ".join(reasons), now, silent=True)

    def _silence(self, entry: RosterEntry) -> str:
        if entry.session is None:
            return f"{entry.name} did not come back within {self._config.lease_s:g} s after the coordinator's restart"
        return f"{entry.name} was silent for {self._config.lease_s:g} s"

    def _cut_off(self, entry: RosterEntry, why: str, now: float) -> None:
        """Continue without a member that another one cannot reach; see `reachability`."""
        self._assembly.counters["cut_off"] += 1
        self._members.reachability.gone(entry, why, now)
        self._out.close(
            entry.session, MemberLost(f"{why}; this one is no member any more, and joins again when it can")
        )
        self._members.lose([entry], f"{why}: the job goes on without {entry.name}", now, kind="cut")

    def _join_deadline(self) -> float:
        a = self._assembly
        waiting = a.was_complete and not a.membership.complete and a.membership.workers
        return self._members.incomplete_since + self._config.join_timeout_s if waiting else math.inf

    def _give_up_joining(self, now: float) -> None:
        """End the workers' sessions with an error, since no replacement joined in time."""
        a = self._assembly
        reason = f"the job waited {self._config.join_timeout_s:g} s for {a.membership.waiting_for}"
        workers = a.roster.of_role(Role.WORKER)
        for entry in workers:
            self._out.close(entry.session, Timeout(reason))
        self._members.lose(workers, reason, now)

    def _set_aside(self, ranks: Sequence[int], now: float) -> None:
        """Continue without workers that take no part; see Note: [Stragglers]."""
        a = self._assembly
        what, others = self.stragglers.what(), len(a.membership.workers) - len(ranks)
        entries = [s for s in a.roster.of_role(Role.WORKER) if s.member.rank in ranks]
        reasons = []
        for entry in entries:
            reasons.append(
                f"{entry.name} was set aside: {what} waited {self._config.step_timeout_s:g} s for it "
                f"(--step-timeout-s) while {others} other workers took part"
            )
            self._out.close(entry.session, Timeout(f"{reasons[-1]}; start it again to take part"))
        a.counters["set_aside"] += len(entries)
        self._members.lose(entries, "; ".join(reasons), now)


class Isolation:
    """Watches for signs that the coordinator is cut off from its members. See Note: [Isolation].

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
