"""Barriers: workers that wait for each other under a name. Pure.

A barrier is identified by its name and its ranks. A barrier with ranks opens when all of them have arrived, and fails
when one of them is lost. A barrier without ranks is for all workers of a complete generation: it does not open before
the job is complete. It fails with `GenerationChanged` when that generation is over, unless workers have only finished.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.coordinator.core.waiting import Waiting
from axon_ps.errors import Busy, Disagreement, GenerationChanged, InvalidRequest, MemberLost, Timeout
from axon_ps.types import Membership

MAX_BARRIERS = 1 << 12
MAX_WAITERS = 1 << 14
MAX_NAME_CHARS = 512
DEADLOCK_TIMEOUT_S = 10.0
"""Seconds for which a barrier may be deadlocked: its missing workers wait in a step for workers that wait at it."""

Key = tuple[str, tuple[int, ...]]


@dataclass
class _Barrier:
    generation: int = 0
    """Without ranks: the complete generation whose workers wait; 0 while the job assembles."""
    calls: dict[int, int] = field(default_factory=dict)
    """Call by rank."""
    fails_s: float = math.inf
    """The time at which it fails if it is still deadlocked."""
    late: list[int] = field(default_factory=list)
    """The ranks that wait here and have not voted in the current step."""


class Barriers:
    """All barriers at which workers wait.

    Args:
        out: gets the answers.
    """

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._barriers: dict[Key, _Barrier] = {}
        self._key_of: dict[int, tuple[Key, int]] = {}
        self._waiting = Waiting("barriers", MAX_WAITERS)

    def arrive(
        self,
        call: int,
        rank: int,
        name: str,
        ranks: Sequence[int],
        membership: Membership,
        now: float,
        timeout_s: float,
    ) -> None:
        """Have a worker arrive and wait. Its own earlier call at the same barrier fails."""
        if not 1 <= len(name) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"a barrier's name has 1 to {MAX_NAME_CHARS} characters; {len(name)} given")
        if ranks and rank not in ranks:
            raise InvalidRequest(f"rank {rank} arrived at barrier {name!r}, which is for rank {format_ranks(ranks)}")
        key = (name, tuple(sorted(set(ranks))))
        if key not in self._barriers and len(self._barriers) >= MAX_BARRIERS:
            raise Busy(f"workers wait at {MAX_BARRIERS} barriers already")
        self._waiting.add(call, str(rank), now, timeout_s)
        barrier = self._barriers.setdefault(key, _Barrier())
        if (earlier := barrier.calls.get(rank)) is not None:
            self._remove(earlier)
            self._out.reply(earlier, MemberLost(f"rank {rank} arrived at barrier {name!r} again with another call"))
            self._barriers[key] = barrier
        barrier.calls[rank] = call
        self._key_of[call] = (key, rank)
        self._open_if_complete(key, membership)

    def __bool__(self) -> bool:
        return bool(self._barriers)

    def watch(self, voted: Collection[int], membership: Membership, now: float) -> None:
        """Find the deadlocked barriers: all missing workers wait in a step, for workers that wait at the barrier.

        `tick` fails those that stay deadlocked: until then a program with several threads may still vote.
        """
        for key, barrier in self._barriers.items():
            if not voted:
                barrier.fails_s = math.inf
                continue
            ranks = key[1] or tuple(m.rank for m in membership.workers)
            missing = [r for r in ranks if r not in barrier.calls]
            barrier.late = [r for r in barrier.calls if r not in voted]
            deadlocked = missing and barrier.late and all(r in voted for r in missing)
            barrier.fails_s = min(barrier.fails_s, now + DEADLOCK_TIMEOUT_S) if deadlocked else math.inf

    def cancel(self, call: int) -> None:
        """Undo the arrival of a caller that does not wait any more."""
        self._remove(call)

    def generation_changed(
        self, membership: Membership, lost: Sequence[int], reason: str, *, finished: bool = False
    ) -> None:
        """Apply a change of membership. `lost` are the ranks of the workers that left, or have `finished`.

        A barrier of all workers opens without those that have finished.
        """
        for key, barrier in list(self._barriers.items()):
            name, ranks = key
            gone = [r for r in lost if r in ranks]
            if gone:
                self._fail(key, MemberLost(f"barrier {name!r} needs rank {format_ranks(gone)}: {reason}"))
            elif not ranks and barrier.generation and not finished:
                message = f"barrier {name!r} was for all workers of generation {barrier.generation}: {reason}"
                self._fail(key, GenerationChanged(message, membership.generation))
            else:
                for rank in set(lost) & set(barrier.calls):
                    self._remove(barrier.calls[rank])
                self._open_if_complete(key, membership)

    def tick(self, now: float, membership: Membership) -> None:
        """Answer the calls that have timed out, with the ranks of the missing workers."""
        for key, barrier in [(k, b) for k, b in self._barriers.items() if b.fails_s <= now]:
            message = f"{_waiting(key[0], self._missing(key, barrier, membership))}, which waits in a step for rank "
            message += f"{format_ranks(barrier.late)}, which waits here; a worker that joins a running job must come "
            message += (
                "to its first step without waiting for others (World.agree and the key-value store wait for none)"
            )
            self._fail(key, Disagreement(message))
        late = [(call, *self._key_of[call]) for call in self._waiting.late(now)]
        missing = {key: self._missing(key, self._barriers[key], membership) for _, key, _ in late}
        for call, key, _ in late:
            waited_s = self._waiting.timeout_s(call)
            self._remove(call)
            self._out.reply(call, Timeout(f"{_waiting(key[0], missing[key])} after {waited_s:g} s"))

    def next_deadline(self) -> float:
        """Return the time at which the next call times out, or the next deadlocked barrier fails."""
        return min((self._waiting.next_deadline(), *(b.fails_s for b in self._barriers.values())))

    def pending(self, membership: Membership) -> list[str]:
        """Return the reasons why barriers have not opened, as text."""
        return [_waiting(key[0], self._missing(key, b, membership)) for key, b in list(self._barriers.items())[:16]]

    def _missing(self, key: Key, barrier: _Barrier, membership: Membership) -> str:
        ranks = key[1] or tuple(m.rank for m in membership.workers)
        reasons = []
        if missing := [r for r in ranks if r not in barrier.calls]:
            reasons.append(f"rank {format_ranks(missing)}")
        if not key[1] and not membership.complete:
            reasons.append(membership.waiting_for)
        return " and ".join(reasons)

    def _open_if_complete(self, key: Key, membership: Membership) -> None:
        barrier = self._barriers.get(key)
        if barrier is None:
            return
        if not key[1]:
            if not membership.complete:
                return
            barrier.generation = membership.generation
        if len(barrier.calls) < len(key[1] or membership.workers):
            return
        ranks = key[1] or tuple(m.rank for m in membership.workers)
        if all(r in barrier.calls for r in ranks):
            for call in list(barrier.calls.values()):
                self._remove(call)
                self._out.reply(call, membership.generation)

    def _fail(self, key: Key, error: Exception) -> None:
        for call in list(self._barriers[key].calls.values()):
            self._remove(call)
            self._out.reply(call, error)

    def _remove(self, call: int) -> None:
        if call not in self._key_of:
            return
        key, rank = self._key_of.pop(call)
        self._waiting.remove(call)
        barrier = self._barriers[key]
        del barrier.calls[rank]
        if not barrier.calls:
            del self._barriers[key]


def _waiting(name: str, missing: str) -> str:
    return f"barrier {name!r} still waits for {missing}"
