"""The step attempts under way in a generation: one of all replicas, or one of each replica alone. Pure.

Note: [Clocks]
    Where replicas step alone (`sharding.policy`), a replica's *clock* counts its decided steps in this generation,
    whatever came of them; a new generation starts all clocks at 0. Its next attempt is named by its clock. An attempt
    is *admitted* when the slowest clock is at most `most_behind` behind it (Ho et al. 2013); votes of one that is not
    wait. Workers do not begin such an attempt in the first place, since each decision tells them the slowest clock, so
    that also what they read is no staler than the bound; here it is made certain, whatever a worker does.

    Which of several complete attempts is decided first: that of the lowest clock, among equals that of the lowest
    replica. So decisions are a function of the order of events, and the slowest is never held up.

Bound: between the moment a replica at clock c begins and the moment its step is decided, another replica's clock goes
from c - s at least to c + s + 1 at most. So at most (n - 1)(2s + 1) steps of others are between what a gradient was
computed from and what it is applied to, n being the number of replicas and s `most_behind`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from axon_ps.coordinator.core.events import Ready, Vote
from axon_ps.coordinator.core.steps.decision import Tally
from axon_ps.sharding.policy import Policy, Synchronous
from axon_ps.types import Decision, Membership, Turn


class Attempts:
    """Who has spoken in which attempt.

    Attributes:
        alone: whether each replica's gradient is a step of its own.
        clocks: per replica, its decided steps in this generation; not kept where all step together.
        slowest: the lowest clock.
    """

    def __init__(self) -> None:
        self.alone = False
        self.clocks: list[int] = []
        self.slowest = 0
        self._fastest = 0
        self._most_behind: int | None = None
        self._workers: list[tuple[int, ...]] = [()]
        self._replica_of: dict[int, int] = {}
        self._tallies = [Tally()]

    def begin(self, policy: Policy | None, membership: Membership) -> None:
        """The attempts of a new generation, or of a job whose policy has just become known."""
        policy = policy or Synchronous()
        self.alone = policy.asynchronous
        self._most_behind = policy.most_behind
        count = membership.num_replicas if self.alone else 1
        self._replica_of = {m.rank: m.replica if self.alone else 0 for m in membership.workers}
        self._workers = [tuple(rank for rank, r in self._replica_of.items() if r == lane) for lane in range(count)]
        self._tallies = [Tally() for _ in range(count)]
        self.clocks = [0] * count if self.alone else []
        self._clocks_moved()

    def resume(self, decisions: Sequence[Decision], generation: int) -> None:
        """Set the clocks as they were before the coordinator's restart."""
        for decision in decisions:
            turn = decision.turn
            if turn is not None and decision.generation == generation and turn.replica < len(self.clocks):
                self.clocks[turn.replica] = max(self.clocks[turn.replica], turn.clock + 1)
        self._clocks_moved()

    @property
    def somebody_waits(self) -> bool:
        """Whether a worker has done its part and waits for others."""
        if not self.alone:
            return bool(self._tallies[0].votes or self._tallies[0].arrived)
        return self._most_behind is not None and self._fastest - self.slowest > self._most_behind

    def missing(self) -> tuple[int, ...]:
        """The workers that it would wait for: those that take no part, or the slowest."""
        lanes = [lane for lane in range(len(self._tallies)) if not self.alone or self.clocks[lane] == self.slowest]
        return tuple(rank for lane in lanes for rank in self._tallies[lane].missing(self._workers[lane]))

    def workers(self, lane: int) -> Sequence[int]:
        """Who takes part in an attempt."""
        return self._workers[lane]

    def blocked(self) -> Collection[int]:
        """The workers that wait for others in the step under way and go on with nothing else; see `stepping`.

        Nobody where the attempt is complete, so that it waits for shard servers alone, or where replicas step alone.
        """
        tally = self._tallies[0]
        if self.alone or all(w in tally.votes or w in tally.arrived for w in self._workers[0]):
            return ()
        return set(tally.blocked)

    def arrived(self, rank: int, name: int, step: int, *, blocked: bool = False) -> None:
        """A worker has computed everything of an attempt; see `coordinator.core.steps.stragglers`."""
        lane = self._replica_of.get(rank)
        if lane is not None and name == self._name(lane, step):
            self._tallies[lane].arrived.add(rank)
            if blocked:
                self._tallies[lane].blocked.add(rank)

    def vote(self, rank: int, vote: Vote, step: int) -> bool:
        """Count a worker's vote; False for one of another attempt, or a second.

        Args:
            rank: the worker.
            vote: what it said.
            step: the step under way.
        """
        lane = self._replica_of.get(rank)
        return lane is not None and vote.step == self._name(lane, step) and self._tallies[lane].vote(rank, vote)

    def voted(self) -> Collection[int]:
        """Who has voted and waits for the other workers; nobody where replicas step alone."""
        return () if self.alone else self._tallies[0].votes

    def ready(self, rank: int, ready: Ready, step: int) -> bool:
        """Count a shard server's sum; False for one of another attempt, or a second."""
        lane = ready.replica if self.alone else 0
        there = 0 <= lane < len(self._tallies)
        return there and ready.step == self._name(lane, step) and self._tallies[lane].ready(rank, ready)

    def next_full(self, owners: Sequence[int]) -> int | None:
        """Number of the attempt to decide next; None when none is complete and admitted. See Note: [Clocks]."""
        full = [
            lane
            for lane, tally in enumerate(self._tallies)
            if self._admitted(lane) and tally.is_full(self._workers[lane], owners)
        ]
        return min(full, key=lambda lane: (self._clock(lane), lane), default=None)

    def tally(self, lane: int) -> Tally:
        """Who has said what in an attempt."""
        return self._tallies[lane]

    def end(self, lane: int) -> Turn | None:
        """An attempt is decided: whose turn it was; None where all replicas step together."""
        self._tallies[lane].clear()
        if not self.alone:
            return None
        clock = self.clocks[lane]
        self.clocks[lane] += 1
        self._clocks_moved()
        return Turn(replica=lane, clock=clock, slowest_clock=self.slowest)

    def clear(self) -> None:
        """Forget what was said."""
        for tally in self._tallies:
            tally.clear()

    def pending(self, owners: Iterable[int]) -> list[str]:
        """What is waited for, in words; nothing while nobody has spoken."""
        owners = tuple(owners)
        if not self.alone:
            return self._tallies[0].pending(self._workers[0], owners)
        return list(self._pending_alone(owners))

    def _pending_alone(self, owners: Sequence[int]) -> Iterator[str]:
        for lane, tally in enumerate(self._tallies):
            for words in tally.pending(self._workers[lane], owners):
                yield f"replica {lane} at clock {self.clocks[lane]}: {words}"
            if not self._admitted(lane):
                slowest = self.clocks.index(self.slowest)
                yield f"replica {lane} at clock {self.clocks[lane]} waits for replica {slowest} at {self.slowest}"

    def _clocks_moved(self) -> None:
        self.slowest, self._fastest = min(self.clocks, default=0), max(self.clocks, default=0)

    def _admitted(self, lane: int) -> bool:
        return self._most_behind is None or self._clock(lane) - self.slowest <= self._most_behind

    def _clock(self, lane: int) -> int:
        return self.clocks[lane] if self.alone else 0

    def _name(self, lane: int, step: int) -> int:
        return self.clocks[lane] if self.alone else step
