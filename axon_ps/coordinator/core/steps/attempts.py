"""The step attempts in progress in a generation: one of all replicas, or an asynchronous one of each. Pure.

An attempt has an index: 0 where replicas step together, else the number of its replica.

Note: [Clocks]
    With asynchronous replicas (`sharding.policy`), a replica's *clock* counts its decided steps in this generation,
    with any outcome. A new generation starts all clocks at 0. A replica's next attempt is named by its clock. An
    attempt is *admitted* when the slowest clock is at most `most_behind` behind it (Ho et al. 2013). The votes of
    any other attempt are held until it is admitted. Workers do not even begin such an attempt, since each decision has
    the slowest clock. So the parameters that they read are not staler than the bound, either. Here the bound is
    enforced.

    Of several complete attempts, that of the lowest clock is decided first, among equals that of the lowest replica.
    So decisions are a function of the order of events, and the slowest replica never waits.

Bound: between the moment a replica at clock c begins and the moment its step is decided, another replica's clock goes
from c - s at least to c + s + 1 at most. So at most (n - 1)(2s + 1) steps of others come between computing a gradient
from a version and applying it. Here n is the number of replicas and s is `most_behind`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from axon_ps.coordinator.core.steps.decision import Difference, Tally
from axon_ps.sharding.policy import Policy, Synchronous
from axon_ps.types import Decision, Membership, ReplicaClock
from axon_ps.wire.events import Arrived, Ready, Vote


class Attempts:
    """The votes and reports of each attempt.

    Attributes:
        asynchronous: whether each replica's gradient is a step of its own.
        clocks: per replica, its decided steps in this generation; empty if all step together.
        slowest: the lowest clock.
        per_replica: workers of a replica that each vote with the weight of the replica; see `Tally.decide`.
    """

    def __init__(self) -> None:
        self.asynchronous = False
        self.clocks: list[int] = []
        self.slowest = 0
        self.per_replica = 1
        self._fastest = 0
        self._most_behind: int | None = None
        self._workers: list[tuple[int, ...]] = [()]
        self._replica_of: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._tallies = [Tally()]

    def begin(self, policy: Policy | None, membership: Membership) -> None:
        """Begin the attempts of a new generation, or of a job whose policy has just become known."""
        policy = policy or Synchronous()
        self.asynchronous = policy.asynchronous
        self._most_behind = policy.most_behind
        count = membership.num_replicas if self.asynchronous else 1
        replicas = {m.rank: m.replica for m in membership.workers if m.replica >= 0}
        self._replica_of = {rank: replica if self.asynchronous else 0 for rank, replica in replicas.items()}
        rows = membership.grouping.rows
        self._rows, self.per_replica = (replicas, len(rows[0])) if rows else ({}, 1)
        self._workers = [tuple(rank for rank, r in self._replica_of.items() if r == a) for a in range(count)]
        self._tallies = [Tally() for _ in range(count)]
        self.clocks = [0] * count if self.asynchronous else []
        self._clocks_moved()

    def resume(self, decisions: Sequence[Decision], generation: int) -> None:
        """Set the clocks as they were before the coordinator's restart."""
        for decision in decisions:
            of = decision.replica_clock
            if of is not None and decision.generation == generation and of.replica < len(self.clocks):
                self.clocks[of.replica] = max(self.clocks[of.replica], of.clock + 1)
        self._clocks_moved()

    @property
    def has_waiters(self) -> bool:
        """True if a worker waits for others in the step."""
        if not self.asynchronous:
            return bool(self._tallies[0].votes or self._tallies[0].arrived)
        return self._most_behind is not None and self._fastest - self.slowest > self._most_behind

    def missing(self) -> tuple[int, ...]:
        """Return the workers that the others wait for: those that take no part, or the slowest."""
        slowest = [a for a in range(len(self._tallies)) if not self.asynchronous or self.clocks[a] == self.slowest]
        return tuple(rank for a in slowest for rank in self._tallies[a].missing(self._workers[a]))

    @property
    def participants(self) -> Collection[int]:
        """The workers of all attempts: those that are in a replica."""
        return self._replica_of.keys()

    def left_without(self, ranks: Collection[int]) -> int:
        """Return the number of workers that still take part without these, and without their replicas if by rows."""
        gone = {self._rows[rank] for rank in ranks if rank in self._rows}
        return sum(rank not in ranks and self._rows.get(rank) not in gone for rank in self._replica_of)

    def workers(self, attempt: int) -> Sequence[int]:
        """Return the workers that take part in an attempt."""
        return self._workers[attempt]

    def blocked(self) -> Collection[int]:
        """Return the workers that wait for others in the current step and do nothing else meanwhile; see `stepping`.

        There are none if all workers have come, so that only shard servers are missing, or with asynchronous replicas.
        """
        tally = self._tallies[0]
        if self.asynchronous or all(map(tally.has_come, self._workers[0])):
            return ()
        return set(tally.blocked)

    def arrived(self, rank: int, arrived: Arrived, step: int) -> None:
        """Note that a worker waits in an attempt for the servers; see `coordinator.core.steps.stragglers`."""
        attempt = self._replica_of.get(rank)
        if attempt is not None and arrived.step == self._name(attempt, step):
            self._tallies[attempt].arrived[rank] = arrived.addend
            if arrived.blocked:
                self._tallies[attempt].blocked.add(rank)

    def vote(self, rank: int, vote: Vote, step: int) -> bool:
        """Count a worker's vote; return False for a vote of another attempt, or a second one.

        Args:
            rank: the worker.
            vote: its vote.
            step: the current step.
        """
        attempt = self._replica_of.get(rank)
        return (
            attempt is not None and vote.step == self._name(attempt, step) and self._tallies[attempt].vote(rank, vote)
        )

    def voted(self) -> Collection[int]:
        """Return the workers that have voted and wait for the others; none with asynchronous replicas."""
        return () if self.asynchronous else self._tallies[0].votes

    def ready(self, rank: int, ready: Ready, step: int) -> bool:
        """Count a shard server's sum; return False for a sum of another attempt, or a second one."""
        attempt = ready.replica if self.asynchronous else 0
        there = 0 <= attempt < len(self._tallies)
        return there and ready.step == self._name(attempt, step) and self._tallies[attempt].ready(rank, ready)

    def next_complete(self, owners: Sequence[int]) -> int | None:
        """Return the index of the attempt to decide next; None if none is complete and admitted. See Note: [Clocks]."""
        complete = [
            attempt
            for attempt, tally in enumerate(self._tallies)
            if self._admitted(attempt) and tally.is_complete(self._workers[attempt], owners)
        ]
        return min(complete, key=lambda attempt: (self._clock(attempt), attempt), default=None)

    def tally(self, attempt: int) -> Tally:
        """Return the votes and reports of an attempt."""
        return self._tallies[attempt]

    def end(self, attempt: int) -> ReplicaClock | None:
        """End a decided attempt; return its replica and clock, None if all replicas step together."""
        self._tallies[attempt].clear()
        if not self.asynchronous:
            return None
        clock = self.clocks[attempt]
        self.clocks[attempt] += 1
        self._clocks_moved()
        return ReplicaClock(replica=attempt, clock=clock, slowest_clock=self.slowest)

    def forget_reports(self) -> None:
        """Drop the reports of shard servers: they report anew."""
        for tally in self._tallies:
            tally.forget_reports()

    def difference(self, owners: Iterable[int]) -> Difference | None:
        """Return the first difference between copies of a slice, after the reports of all owners; None = none."""
        owners = tuple(owners)
        complete = (tally for tally in self._tallies if all(o in tally.sums for o in owners))
        return next((found for tally in complete if (found := tally.difference) is not None), None)

    def clear(self) -> None:
        """Drop all votes and reports."""
        for tally in self._tallies:
            tally.clear()

    @property
    def come(self) -> int:
        """The number of workers that have voted or arrived, if all replicas step together."""
        tally = self._tallies[0]
        return len(tally.votes) + sum(rank not in tally.votes for rank in tally.arrived)

    def has_come(self, rank: int) -> bool:
        """Return True if a worker has voted or arrived, if all replicas step together."""
        return self._tallies[0].has_come(rank)

    def pending(self, owners: Iterable[int]) -> list[str]:
        """Return the reasons why the attempts are not decided, as text; none before the first vote or report."""
        owners = tuple(owners)
        if not self.asynchronous:
            return self._tallies[0].pending(self._workers[0], owners)
        return list(self._pending_asynchronous(owners))

    def _pending_asynchronous(self, owners: Sequence[int]) -> Iterator[str]:
        for attempt, tally in enumerate(self._tallies):
            for text in tally.pending(self._workers[attempt], owners):
                yield f"replica {attempt} at clock {self.clocks[attempt]}: {text}"
            if not self._admitted(attempt):
                slowest = self.clocks.index(self.slowest)
                yield f"replica {attempt} at clock {self.clocks[attempt]} waits for replica {slowest} at {self.slowest}"

    def _clocks_moved(self) -> None:
        self.slowest, self._fastest = min(self.clocks, default=0), max(self.clocks, default=0)

    def _admitted(self, attempt: int) -> bool:
        return self._most_behind is None or self._clock(attempt) - self.slowest <= self._most_behind

    def _clock(self, attempt: int) -> int:
        return self.clocks[attempt] if self.asynchronous else 0

    def _name(self, attempt: int, step: int) -> int:
        return self.clocks[attempt] if self.asynchronous else step
