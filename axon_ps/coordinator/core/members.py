"""Who comes and goes, and what that means for everything that waits: barriers, checkpoints, the step under way. Pure.

Note: [Finished]
    A worker that says that it has *finished* is not one that died. Nobody waits for another in its place: the workers
    that the job needs are fewer by it (see `Assembly.needed_workers`). Barriers of all workers go on without it. Later
    memberships name it, so that what it sent before is still delivered. A synchronous step that the others are in does
    abort, since its average would be of other replicas than those that pushed.

Note: [Stragglers]
    A member may live and yet take no part in a step that the others are in. It is *set aside* when that has gone on for
    `step_timeout_s` while as many others as the job needs wait for it: its membership ends with a reason that it is
    told, and it does not come back by itself. See `stragglers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.admission import find_place
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.barriers import Barriers
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.events import Hello
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.roster import Seat, name_of
from axon_ps.coordinator.core.steps.stragglers import Stragglers
from axon_ps.errors import Broken, InvalidRequest, MemberLost, Timeout
from axon_ps.types import Member, Role


class Members:
    """The comings and goings of one job.

    Args:
        config: how it is run.
        assembly: generations and steps.
        models: the models of the job.
        barriers: who waits at them.
        snapshots: the checkpoint being written.
        out: gets what is to be said.
        now: the time.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        assembly: Assembly,
        models: Models,
        barriers: Barriers,
        snapshots: Snapshots,
        out: Outbox,
        now: float,
    ) -> None:
        self._config = config
        self._assembly = assembly
        self._models = models
        self._barriers = barriers
        self._snapshots = snapshots
        self._out = out
        self._incomplete_since = now
        self.stragglers = Stragglers(assembly, models, config.step_timeout_s)

    def of_session(self, session: int, now: float) -> Seat | None:
        """Whose session this is; that it speaks renews its lease."""
        seat = self._assembly.roster.of_session(session)
        if seat is not None:
            self._assembly.roster.renew(seat, now + self._config.lease_s)
        return seat

    def join(self, session: int, role: Role, hello: Hello, now: float) -> None:
        """A process has opened a stream; see `CoordinatorState.join`."""
        a = self._assembly
        seat = a.roster.get(hello.incarnation)
        if seat is None:
            self._admit(session, role, hello, now)
        elif seat.member.role is not role:
            raise InvalidRequest(f"incarnation {hello.incarnation} is a member already, {seat.name}, of another role")
        else:
            replaced = Broken("a newer stream of the same process has taken the place of this one")
            self._out.close(a.roster.attach(seat, session), replaced)
            a.roster.renew(seat, now + self._config.lease_s)
            if role is Role.SHARD:  # an order may have gone with the old stream
                self._snapshots.lost([seat.member.rank], f"the stream of {seat.name} was replaced")
            a.greet(seat)
            self._out.push([session], a.membership)
            a.stepping.look_again()

    def leave(self, seat: Seat, reason: str, now: float, *, finished: bool) -> None:
        """A member says goodbye; see Note: [Finished]."""
        a = self._assembly
        self._out.close(seat.session)
        a.counters["leaves"] += 1
        if finished and a.was_complete and seat.member.role is Role.WORKER:
            self.change(f"{seat.name} has finished", lost=[seat], finished=True, now=now)
        else:
            self.lose([seat], f"{seat.name} left" + (f": {reason}" if reason else ""), now)

    def lose(self, seats: Sequence[Seat], reason: str, now: float) -> None:
        """Members are gone."""
        self.change(reason, lost=seats, now=now)
        self._snapshots.lost([s.member.rank for s in seats if s.member.role is Role.SHARD], reason)

    def change(
        self,
        reason: str,
        *,
        lost: Sequence[Seat] = (),
        finished: bool = False,
        joined: Member | None = None,
        session: int = -1,
        now: float = 0.0,
    ) -> None:
        """Make the next generation, and see to those who wait for somebody in it."""
        a = self._assembly
        before = a.membership
        a.change(reason, lost=lost, finished=finished, joined=joined, session=session, now=now)
        if before.complete or not before.workers:
            self._incomplete_since = now
        workers = [s.member.rank for s in lost if s.member.role is Role.WORKER]
        self._barriers.generation_changed(a.membership, workers, reason, finished=finished)
        self.watch_barriers(now)

    def watch_barriers(self, now: float) -> None:
        """Somebody has voted or come to a barrier, or a step was decided: which barriers can open no more?"""
        self._barriers.watch(self._assembly.stepping.voted(), self._assembly.membership, now)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Time has passed: leases, members to be replaced, stragglers."""
        a = self._assembly
        expired = a.roster.expired(now)
        if expired:
            reasons = []
            for seat in expired:
                reasons.append(self._silence(seat))
                self._out.close(seat.session, MemberLost(f"{reasons[-1]}; it is no member any more"))
            a.counters["losses"] += len(expired)
            self.lose(expired, "; ".join(reasons), now)
        if now >= self._join_deadline():
            self._give_up_joining(now)
        if late := self.stragglers.late(now):
            self._set_aside(late, now)

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return min(self._assembly.roster.next_deadline(), self._join_deadline(), self.stragglers.next_deadline())

    # ------------------------------------------------------------------ inside

    def _admit(self, session: int, role: Role, hello: Hello, now: float) -> None:
        """Seat a process that is new, or was given up."""
        a = self._assembly
        place = find_place(self._config, a, self._models, role, hello, now)
        if role is Role.WORKER and not a.world_size:
            a.set_world_size(hello.world_size)
        displaced = [] if place.displaced is None else [place.displaced]
        for seat in displaced:
            back = f"the shard server that holds the parameters of rank {place.member.rank} is back"
            self._out.close(seat.session, Broken(back))
        a.counters["joins"] += 1
        reason = f"{name_of(place.member)} joined"
        self.change(reason, lost=displaced, joined=place.member, session=session, now=now)

    def _silence(self, seat: Seat) -> str:
        if seat.session is None:
            return f"{seat.name} did not come back within {self._config.lease_s:g} s after the coordinator's restart"
        return f"{seat.name} was silent for {self._config.lease_s:g} s"

    def _join_deadline(self) -> float:
        a = self._assembly
        waiting = a.was_complete and not a.membership.complete and a.membership.workers
        return self._incomplete_since + self._config.join_timeout_s if waiting else math.inf

    def _give_up_joining(self, now: float) -> None:
        """Nobody came in the place of who was lost: tell the workers, which end with a clear error."""
        a = self._assembly
        reason = f"the job waited {self._config.join_timeout_s:g} s for {a.membership.waiting_for}"
        workers = a.roster.of_role(Role.WORKER)
        for seat in workers:
            self._out.close(seat.session, Timeout(reason))
        self.lose(workers, reason, now)

    def _set_aside(self, ranks: Sequence[int], now: float) -> None:
        """Go on without workers that take no part; see Note: [Stragglers]."""
        a = self._assembly
        what, others = self.stragglers.what(), len(a.membership.workers) - len(ranks)
        seats = [s for s in a.roster.of_role(Role.WORKER) if s.member.rank in ranks]
        reasons = []
        for seat in seats:
            reasons.append(
                f"{seat.name} was set aside: {what} waited {self._config.step_timeout_s:g} s for it (--step-timeout-s) "
                f"while {others} other workers took part"
            )
            self._out.close(seat.session, Timeout(f"{reasons[-1]}; start it again to take part"))
        a.counters["set_aside"] += len(seats)
        self.lose(seats, "; ".join(reasons), now)
