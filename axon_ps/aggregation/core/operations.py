"""One stripe of one collective on this server: its participants, their agreement, and its outcome.

Owns: agreement, and the end of an operation when a rank is late, breaks off or is lost. Refuses: the flow of data
(`aggregation.core.dataflow`).

Note: [Stripe 0 decides]
    Every rank joins stripe 0 of every collective, on a server chosen independently of anything they could disagree
    about. The server of stripe 0 detects ranks that have not joined, ask for another operation, or broke off before all
    agreed. Ranks that disagree may never all meet at another stripe. So no error is sent on another stripe before all
    ranks have joined and agree: a rank that waits there gets the error from stripe 0. A rank gives the same call to all
    of its stripes. So a stripe may begin as soon as all ranks agree on it, on any server.

    But a rank whose connection broke may never join stripe 0. It reports this on every stripe (`give_up`), and each
    stripe then ends with `Broken`. Ranks that disagree may get that error instead.

Note: [Broken off, or lost]
    When a rank dies, its streams break, and a moment later the coordinator announces the loss. The announcement is more
    precise, so an operation with a broken stream fails with `Broken` only `GRACE_S` later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from axon_ps.aggregation.core.dataflow import Forwarding, Reduction, Wake
from axon_ps.aggregation.core.participants import MemoryAccounting, Participant
from axon_ps.aggregation.core.stripes import REDUCING, StripePlan
from axon_ps.errors import AxonError, Broken, Disagreement, InvalidRequest, Timeout, again
from axon_ps.reduction.call import Operation, disagreement

GRACE_S = 0.5
"""Seconds from a broken stream to the failure of its operation, in which the loss of the rank may be announced."""

TOMBSTONE_S = 300.0
"""Seconds that a failed operation is remembered, for ranks that have not joined yet."""


class PendingOperation:
    """See the module's docstring.

    Args:
        group: the group's name.
        ranks: the members' world ranks, by position.
        sequence: number of the call in the group.
        memory: counts the memory it uses.
        wake: called with a participant whose state changed.
    """

    def __init__(self, group: str, ranks: Sequence[int], sequence: int, memory: MemoryAccounting, wake: Wake) -> None:
        self.sequence = sequence
        self._what = f"call {sequence} of group {group!r}"
        self._ranks = ranks
        self._memory = memory
        self._wake = wake
        self._participants: dict[int, Participant] = {}
        self._plans: dict[int, StripePlan] = {}
        self._left: set[int] = set()  # ranks that do not need it any more
        self._suspects: dict[int, float] = {}  # ranks whose stream broke, and the time when that is an error
        self._dataflow: Reduction | Forwarding | None = None
        self._error: AxonError | None = None
        self._expires_s = math.inf

    @property
    def over(self) -> bool:
        """True if it is not needed any more."""
        if self._dataflow is None and self._error is None:
            return not self._participants and not self._suspects
        return len(self._left) == len(self._ranks)

    @property
    def failed(self) -> bool:
        """True if it ended with an error."""
        return self._error is not None

    def join(self, plan: StripePlan, timeout_s: float, now_s: float) -> Participant:
        """Let a rank join.

        Raises:
            AxonError: the operation has ended with this error.
            InvalidRequest: the rank has joined already.
        """
        rank = plan.rank
        if self._error is not None:
            self._left.add(rank)
            raise again(self._error)
        if rank in self._participants:
            raise InvalidRequest(f"rank {self._ranks[rank]} is in {self._what} already; a call has its own number")
        call = plan.call
        deadline_s = now_s + timeout_s
        participant = Participant(rank, deadline_s, self._memory, call.dtype, plan.uploads(), plan.download_numel())
        self._participants[rank], self._plans[rank] = participant, plan
        if len(self._participants) == len(self._ranks):
            self._all_joined()
        return participant

    def give_up(self, plan: StripePlan, now_s: float) -> Participant:
        """Record that a rank broke off, before or after it joined here, unless it is done here.

        Returns:
            A participant that sends and receives nothing.

        Raises:
            AxonError: the operation has ended with this error.
        """
        rank = plan.rank
        if self._error is not None:
            self._left.add(rank)
            raise again(self._error)
        joined = self._participants.get(rank)
        if joined is None or not (joined.done or joined.left):
            self._plans[rank] = plan
            self._suspects.setdefault(rank, now_s + GRACE_S)
        nobody = Participant(rank, math.inf, self._memory, plan.call.dtype, (), 0)
        nobody.agreed = True
        return nobody

    def leave(self, participant: Participant, now_s: float) -> None:
        """Record that a stream has left: its rank is done or got the error, or the stream broke."""
        rank = participant.rank
        if self._participants.get(rank) is not participant:
            return  # the stream that reported `give_up`
        if self._error is not None or participant.done:
            self._left.add(rank)
        elif self._dataflow is not None or self._decides(rank):
            self._suspects[rank] = now_s + GRACE_S
        elif rank in self._suspects:
            del self._participants[rank]
        else:  # see Note: [Stripe 0 decides]
            del self._participants[rank], self._plans[rank]
        participant.clear()

    def tick(self, now_s: float) -> None:
        """Fail the operation if its time is up."""
        if self._error is not None:
            if now_s >= self._expires_s:
                self._left.update(range(len(self._ranks)))
            return
        for rank, moment_s in self._suspects.items():
            if now_s >= moment_s:
                self.fail(
                    Broken(f"rank {self._ranks[rank]} broke off {self._describe(rank)}, or lost its connection"), now_s
                )
                return
        for participant in self._awaited():
            if now_s >= participant.deadline_s:
                self.fail(Timeout(self._timeout_message(participant.rank)), now_s)
                return

    def next_s(self) -> float:
        """Return the time at which `tick` is needed."""
        if self._error is not None:
            return self._expires_s
        return min([*self._suspects.values(), *(p.deadline_s for p in self._awaited())], default=math.inf)

    def lose_members(self, positions: Sequence[int], error: AxonError) -> None:
        """Fail after members are lost, unless all of them had left already. Then the others finish."""
        if not self._left.issuperset(positions):
            self.fail(error)

    def fail(self, error: AxonError, now_s: float = 0.0) -> None:
        """End it with `error` for all ranks that are not done, including those that have not joined."""
        if self._error is not None:
            return
        self._error = again(error)
        self._expires_s = now_s + TOMBSTONE_S
        self._left.update(self._suspects)
        self._suspects.clear()
        for rank, participant in self._participants.items():
            if participant.left or participant.done:
                self._left.add(rank)
                continue
            participant.error = again(error)
            participant.clear()
            self._wake(participant)
        if self._dataflow is not None:
            self._dataflow.clear()

    def _awaited(self) -> Iterator[Participant]:
        """Yield the participants whose deadlines end it: all once it has begun, before that only those of stripe 0."""
        for rank, participant in self._participants.items():
            if not participant.left and (self._dataflow is not None or self._decides(rank)):
                yield participant

    # ------------------------------------------------------------------ agreement

    def _all_joined(self) -> None:
        plans = [self._plans[rank] for rank in range(len(self._ranks))]
        first = plans[0]
        spread = first.stripe, first.stripes, first.owners
        if any(p.call != first.call for p in plans):
            if self._decides(0):
                calls = {world: str(p.call) for world, p in zip(self._ranks, plans, strict=True)}
                self.fail(disagreement(calls, self._what))
            return
        if any((p.stripe, p.stripes, p.owners) != spread for p in plans):
            if self._decides(0):
                self.fail(Broken(f"the ranks made {self._what} ({first.call}) while shard servers came or went"))
            return
        if first.call.operation is Operation.ALL_TO_ALL and (error := self._count_mismatch(plans)) is not None:
            if first.stripe == 0:
                self.fail(error)
            return
        participants = [self._participants[rank] for rank in range(len(self._ranks))]
        for participant in participants:
            participant.agreed = True
            self._wake(participant)
        if first.call.operation in REDUCING:
            self._dataflow = Reduction(first.call, first, participants, self._memory, self._wake)
        else:
            self._dataflow = Forwarding(plans, participants, self._wake)

    def _count_mismatch(self, plans: Sequence[StripePlan]) -> Disagreement | None:
        for sender in plans:
            for receiver in plans:
                sent, expected = sender.input_counts[receiver.rank], receiver.output_counts[sender.rank]
                if sent != expected:
                    a, b = self._ranks[sender.rank], self._ranks[receiver.rank]
                    return Disagreement(
                        f"the ranks disagree on {self._what}, {sender.call}: rank {a} sends {sent} elements to rank "
                        f"{b}, which expects {expected}"
                    )
        return None

    def _decides(self, rank: int) -> bool:
        """Return True if this is stripe 0 according to `rank`. See Note: [Stripe 0 decides]."""
        return self._plans[rank].stripe == 0

    # ------------------------------------------------------------------ descriptions

    def _describe(self, rank: int) -> str:
        return f"{self._what} ({self._plans[rank].call})"

    def _timeout_message(self, rank: int) -> str:
        participant = self._participants[rank]
        begun = f"rank {self._ranks[rank]} gave up {self._describe(rank)} at its deadline"
        if self._dataflow is None:
            missing = [r for position, r in enumerate(self._ranks) if position not in self._participants]
            return f"{begun}: {_ranks(missing)} did not come"
        others = {r: other for r, other in self._participants.items() if other is not participant}
        slow = [self._ranks[r] for r, other in others.items() if not other.left and not other.contributed]
        if slow:
            return f"{begun}: {_ranks(slow)} came, but did not send all data in time"
        slow = [self._ranks[r] for r, other in others.items() if other.outgoing]
        return f"{begun}: " + (f"{_ranks(slow)} did not take all data in time" if slow else "it was too slow")


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
