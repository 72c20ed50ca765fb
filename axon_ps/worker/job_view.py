"""A worker's view of its job's members: one per process, shared by all models.

Owns the condition variable that all models wait on, so that an event is seen by all or by none. Refuses: models,
steps, data.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import repeat
from typing import TypeVar

from axon_ps.errors import AxonError, MemberLost, Misuse, Timeout, again
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.rpc.deadlines import Deadline
from axon_ps.types import Member, Membership

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class JobView:
    """The members, waiting for changes of them, and the error that ended the session.

    Args:
        incarnation: ours, once the session knows it.
        timeout_s: default time-out of every wait, in seconds.

    Attributes:
        changed: notified after every event; locked while one is applied.
        known: the newest membership; None before the first.
        failure: the error that ended the session; None while it lasts.
        acknowledged: incarnations of the workers in the program's last step. Any other one has joined since.
        models: number of models of the job that this process has.
    """

    def __init__(self, incarnation: Callable[[], str], timeout_s: float) -> None:
        self.changed = threading.Condition()
        self.timeout_s = timeout_s
        self.known: Membership | None = None
        self.failure: AxonError | None = None
        self.acknowledged: frozenset[str] = frozenset()
        self.models = 0
        self._incarnation = incarnation
        self._voters: set[int] = set()

    @property
    def membership(self) -> Membership:
        """The current members.

        Raises:
            Misuse: the session has not received one yet.
        """
        if self.known is None:
            raise Misuse("the membership is not known before the session has joined; call World.init() first")
        return self.known

    def member_in(self, membership: Membership) -> Member | None:
        """Return this worker, if the coordinator counts it as a member."""
        mine = self._incarnation()
        return next((m for m in membership.workers if m.incarnation == mine), None)

    def me(self, membership: Membership | None = None) -> Member:
        """Return this worker in a membership; None = the current one.

        Raises:
            MemberLost: this worker is not a member any more.
        """
        membership = membership or self.membership
        me = self.member_in(membership)
        if me is None:
            raise MemberLost(
                f"this worker is not a member of generation {membership.generation}; the coordinator lost sight of it "
                "and it has not been able to join again"
            )
        return me

    def update(self, membership: Membership) -> None:
        """Set the current members, under `changed`."""
        before, self.known = self.known, membership
        if before is not None and before.complete and not membership.complete:
            # It is a warning if a shard server is lost, since its parameters may be lost. Workers leave every job.
            level = logging.WARNING if len(membership.shards) < len(before.shards) else logging.INFO
            _logger.log(level, "the job is waiting for %s", membership.waiting_for)

    def acknowledge(self) -> None:
        """Record that the program has made a step with all current workers, under `changed`."""
        if self.known is not None:
            self.acknowledged = frozenset(m.incarnation for m in self.known.workers)

    def newcomers(self) -> list[Member]:
        """Return the workers that joined since the program's last step, or since the last call of this method."""
        with self.changed:
            new = [m for m in self.membership.workers if m.incarnation not in self.acknowledged]
            self.acknowledge()
        return new

    def blocks(self) -> bool:
        """Record that this thread votes; return True if it is the only one, and there are several models.

        While such a thread waits in a step of one model, no step of another model is made.
        """
        self._voters.add(threading.get_ident())
        return self.models > 1 and len(self._voters) == 1

    def blocks_before_vote(self) -> bool:
        """As `blocks`, but without recording this thread: it has not voted yet, and may never vote."""
        return self.models > 1 and self._voters <= {threading.get_ident()}

    # ------------------------------------------------------------------ waiting

    def wait_until(
        self, ready: Callable[[], T | None], timeout_s: float, what: Callable[[], str], *, reminds: bool = False
    ) -> T:
        """Block until `ready` returns something, the session fails, or the time is over.

        With `reminds` it logs what it waits for, after a while and then less and less often.
        """
        pauses = reminder_pauses() if reminds else repeat(timeout_s)
        deadline, reminder = Deadline(timeout_s), Deadline(next(pauses))
        with self.changed:
            while True:
                if self.failure is not None:
                    raise again(self.failure)
                if (result := ready()) is not None:
                    return result
                if deadline.expired:
                    raise Timeout(f"{what()} after {timeout_s:g} s{self.waiting_for()}")
                if reminder.expired:
                    _logger.warning("%s after %.0f s%s", what(), timeout_s - deadline.remaining(), self.waiting_for())
                    reminder = Deadline(next(pauses))
                self.changed.wait(min(reminder.remaining(), deadline.remaining()))

    def waiting_for(self) -> str:
        """Return why the job waits, to be added to the message of a time-out; empty when it has all members."""
        if self.known is None or self.known.complete:
            return ""
        return f"; the job is waiting for {self.known.waiting_for}"

    def wait_complete(self, timeout_s: float | None = None) -> Membership:
        """Block until the job has the members it needs.

        Raises:
            Timeout: it has not. The message says what is missing.
            AxonError: the session failed.
        """
        return self.wait_until(
            lambda: self.known if self.known is not None and self.known.complete else None,
            self.timeout_s if timeout_s is None else timeout_s,
            lambda: "the job is not complete" if self.known else "the coordinator has not sent the members",
            reminds=True,
        )

    def wait_members(self, ready: Callable[[Membership], bool], timeout_s: float, what: str) -> None:
        """Block until the membership is as wanted.

        Args:
            ready: the condition; called with locks held.
            timeout_s: most seconds to wait.
            what: the condition in words, for the error.

        Raises:
            Timeout: it is not.
            AxonError: the session failed.
        """
        self.wait_until(
            lambda: True if self.known is not None and ready(self.known) else None,
            timeout_s,
            lambda: f"it was waited in vain that {what},",
        )

    def wait_generation(self, generation: int, timeout_s: float) -> None:
        """Block until this worker has received a generation.

        Raises:
            Timeout: it has not.
            AxonError: the session failed.
        """
        self.wait_until(
            lambda: True if self.known is not None and self.known.generation >= generation else None,
            timeout_s,
            lambda: f"generation {generation} has not been announced to this worker",
        )


__all__ = ["JobView"]
