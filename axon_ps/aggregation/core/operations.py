"""One share of one collective on this server: who has come, whether all ask for the same, how it ended.

Owns: agreement, and what becomes of an operation when a rank is late, breaks off or is lost. Refuses: to know how data
flows; that is `aggregation.core.dataflow`.

Note: [Share 0 judges]
    Every rank takes part in share 0 of every collective, at a server that depends on nothing they could disagree about.
    There it is found out who has not come, who asks for something else, and who broke off before all agreed. At another
    share ranks that disagree may never all meet, so it stays silent until all are there and agree: whoever waits there
    is told by share 0. Since all ranks give the same call to all of its shares, one share that sees all ranks agree is
    proof enough to begin, on any server.

Note: [Broken off, or lost]
    A rank that dies breaks its streams, and a moment later the coordinator announces that it is gone. The announcement
    says more, so an operation that was broken off waits for it `GRACE_S` before it fails with `Broken`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.aggregation.core.dataflow import Reduction, Relay, Wake
from axon_ps.aggregation.core.participants import Ledger, Seat
from axon_ps.aggregation.core.stripes import REDUCING, Exchange
from axon_ps.errors import AxonError, Broken, Disagreement, InvalidRequest, Timeout
from axon_ps.reduction.call import Operation, disagreement

GRACE_S = 0.5
"""How long a broken stream waits for the news that its rank is lost."""

TOMBSTONE_S = 300.0
"""How long a failed operation is remembered for ranks that have not come yet."""


class Meeting:
    """See the module's docstring.

    Args:
        group: the group's name.
        ranks: the members' world ranks, by position.
        sequence: which call of the group.
        ledger: counts memory.
        wake: tells that something of a seat changed.
    """

    def __init__(self, group: str, ranks: Sequence[int], sequence: int, ledger: Ledger, wake: Wake) -> None:
        self.sequence = sequence
        self._what = f"call {sequence} of group {group!r}"
        self._ranks = ranks
        self._ledger = ledger
        self._wake = wake
        self._seats: dict[int, Seat] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._gone: set[int] = set()
        self._suspects: dict[int, float] = {}
        self._flow: Reduction | Relay | None = None
        self._error: AxonError | None = None
        self._forget_s = math.inf

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more."""
        if self._flow is None and self._error is None:
            return not self._seats and not self._suspects
        return len(self._gone) == len(self._ranks)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def join(self, exchange: Exchange, timeout_s: float, now_s: float) -> Seat:
        """A rank comes.

        Raises:
            AxonError: what ended the operation before.
            InvalidRequest: it is here already.
        """
        rank = exchange.rank
        if self._error is not None:
            self._gone.add(rank)
            raise self._error
        if rank in self._seats:
            raise InvalidRequest(f"rank {self._ranks[rank]} is in {self._what} already; a call has its own number")
        call = exchange.call
        seat = Seat(rank, now_s + timeout_s, self._ledger, call.dtype, exchange.uploads(), exchange.download_numel())
        self._seats[rank], self._exchanges[rank] = seat, exchange
        if len(self._seats) == len(self._ranks):
            self._everybody_is_here()
        return seat

    def leave(self, seat: Seat, now_s: float) -> None:
        """A stream has left: its rank is done, was told of the failure, or broke."""
        rank = seat.rank
        if self._error is not None or seat.done:
            self._gone.add(rank)
        elif self._flow is not None or self._judges(rank):
            self._suspects[rank] = now_s + GRACE_S
        else:  # see Note: [Share 0 judges]
            del self._seats[rank], self._exchanges[rank]
        seat.clear()

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if self._error is not None:
            if now_s >= self._forget_s:
                self._gone.update(range(len(self._ranks)))
            return
        for rank, moment_s in self._suspects.items():
            if now_s >= moment_s:
                self.fail(
                    Broken(f"rank {self._ranks[rank]} broke off {self._words(rank)}, or lost its connection"), now_s
                )
                return
        for rank, seat in self._seats.items():
            if now_s >= seat.deadline_s and not seat.left and (self._flow is not None or self._judges(rank)):
                self.fail(Timeout(self._lateness(rank)), now_s)
                return

    def next_s(self) -> float:
        """When `tick` has something to do."""
        if self._error is not None:
            return self._forget_s
        moments_s = [*self._suspects.values(), *(s.deadline_s for s in self._seats.values() if not s.left)]
        return min(moments_s, default=math.inf)

    def lose(self, positions: Sequence[int], error: AxonError) -> None:
        """Members are lost: it ends, unless all of them had done their part and gone; then the others finish it."""
        if not self._gone.issuperset(positions):
            self.fail(error)

    def fail(self, error: AxonError, now_s: float = 0.0) -> None:
        """End it for everybody who has not got all yet, and who has not come yet."""
        if self._error is not None:
            return
        self._error = error
        self._forget_s = now_s + TOMBSTONE_S
        self._gone.update(self._suspects)
        self._suspects.clear()
        for rank, seat in self._seats.items():
            if seat.left or seat.done:
                self._gone.add(rank)
                continue
            seat.error = error
            seat.clear()
            self._wake(seat)
        if self._flow is not None:
            self._flow.clear()

    # ------------------------------------------------------------------ agreement

    def _everybody_is_here(self) -> None:
        exchanges = [self._exchanges[rank] for rank in range(len(self._ranks))]
        first = exchanges[0]
        spread = first.share, first.shares, first.owners
        if any(e.call != first.call or (e.share, e.shares, e.owners) != spread for e in exchanges):
            if self._judges(0):
                said = {world: str(e.call) for world, e in zip(self._ranks, exchanges, strict=True)}
                self.fail(disagreement(said, self._what))
            return
        if first.call.operation is Operation.ALL_TO_ALL and (error := self._unequal(exchanges)) is not None:
            if first.share == 0:
                self.fail(error)
            return
        seats = [self._seats[rank] for rank in range(len(self._ranks))]
        for seat in seats:
            seat.agreed = True
            self._wake(seat)
        if first.call.operation in REDUCING:
            self._flow = Reduction(first.call, first, seats, self._ledger, self._wake)
        else:
            self._flow = Relay(exchanges, seats, self._wake)

    def _unequal(self, exchanges: Sequence[Exchange]) -> Disagreement | None:
        for sender in exchanges:
            for receiver in exchanges:
                sent, expected = sender.input_counts[receiver.rank], receiver.output_counts[sender.rank]
                if sent != expected:
                    a, b = self._ranks[sender.rank], self._ranks[receiver.rank]
                    return Disagreement(
                        f"the ranks disagree on {self._what}, {sender.call}: rank {a} sends {sent} elements to rank "
                        f"{b}, which expects {expected}"
                    )
        return None

    def _judges(self, rank: int) -> bool:
        return self._exchanges[rank].share == 0

    # ------------------------------------------------------------------ words

    def _words(self, rank: int) -> str:
        return f"{self._what} ({self._exchanges[rank].call})"

    def _lateness(self, rank: int) -> str:
        seat = self._seats[rank]
        begun = f"rank {self._ranks[rank]} gave up {self._words(rank)} at its deadline"
        if self._flow is None:
            missing = [r for position, r in enumerate(self._ranks) if position not in self._seats]
            return f"{begun}: {_ranks(missing)} did not come"
        slow = [self._ranks[r] for r, s in self._seats.items() if s is not seat and not s.left and not s.contributed]
        if slow:
            return f"{begun}: {_ranks(slow)} came, but did not send all data in time"
        slow = [self._ranks[r] for r, s in self._seats.items() if s is not seat and s.outgoing]
        return f"{begun}: " + (f"{_ranks(slow)} did not take all data in time" if slow else "it was too slow")


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
