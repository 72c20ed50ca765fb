"""How data flows between the seats of an agreed operation: `Reduction` combines it, `Relay` and `Passage` pass it on.

All use a rank's message as soon as it may be used, and leave it held until then; who sends it sends no further. What
may wait is bounded: one message of each rank, `LIVE_SUMS` results under way, `QUEUE_PIECES` for each rank to get.

Invariants:
- Contributions to a piece are combined in rank order, whatever the order of arrival.
- A result is encoded once and sent to everybody as the same bytes; what is only passed on is never encoded here at all.
- A reader that is slow stops those that send to it, and nobody else's stream is read further than its window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from axon_ps.aggregation.core.participants import Held, Ledger, Seat
from axon_ps.aggregation.core.stripes import Exchange, Piece
from axon_ps.reduction import ops
from axon_ps.reduction.call import Call
from axon_ps.types import Array
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

LIVE_SUMS = 8
"""Results of one operation that may be under way at once: how far rank 0 may be ahead of the last rank."""

Wake = Callable[[Seat], None]


class Reduction:
    """Combine what all ranks send, piece by piece.

    Args:
        call: says how.
        exchange: of any rank: pieces are the same for all, and so is who gets them.
        seats: of all ranks, in order.
        ledger: counts the sums.
        wake: tells that something of a seat changed.
    """

    def __init__(self, call: Call, exchange: Exchange, seats: Sequence[Seat], ledger: Ledger, wake: Wake) -> None:
        assert call.op is not None
        self._op, self._dtype = call.op, call.dtype
        self._accumulator = ops.accumulator_dtype(call.dtype)
        self._exchange = exchange
        self._seats = seats
        self._ledger = ledger
        self._wake = wake
        self._sums: dict[int, Array] = {}  # by index of the piece
        for seat in seats:
            seat.arrived, seat.has_room = self._advance_seat, self._room
        for seat in seats:
            self._advance(seat.rank)

    def _advance_seat(self, seat: Seat) -> None:
        self._advance(seat.rank)

    def _room(self, _: Seat) -> None:
        self._advance(len(self._seats) - 1)

    def _advance(self, rank: int) -> None:
        """Use the held message of `rank` if it may be, and what that makes usable."""
        last = len(self._seats) - 1
        while rank <= last:
            seat = self._seats[rank]
            if seat.held is None or not self._may(rank, last):
                return
            index = seat.sent
            self._add(index, seat.use(), rank)
            self._wake(seat)
            if rank == last:
                self._complete(index, seat.uploads[index])
                self._advance(0)
            rank += 1

    def _may(self, rank: int, last: int) -> bool:
        index = self._seats[rank].sent
        if rank == 0:
            if len(self._sums) >= LIVE_SUMS:
                return False
        elif self._seats[rank - 1].sent <= index:
            return False
        if rank == last:
            piece = self._seats[rank].uploads[index]
            return not any(self._seats[r].full for r in self._exchange.recipients(piece))
        return True

    def _add(self, index: int, held: Held, rank: int) -> None:
        if rank == 0:
            total = self._sums[index] = np.empty(held.data.size, self._accumulator)
            self._ledger.add("sums", total.nbytes)
            ops.start(total, held.data, self._dtype)
        else:
            ops.accumulate(self._sums[index], held.data, self._op, self._dtype)

    def _complete(self, index: int, piece: Piece) -> None:
        total = self._sums.pop(index)
        self._ledger.add("sums", -total.nbytes)
        out = total if total.dtype == self._dtype.numpy else np.empty(len(total), self._dtype.numpy)
        ops.finish(out, total, self._op, self._dtype, len(self._seats))
        message = encode_chunk(CollectiveChunk(part=piece.part, offset=piece.begin), out)
        for rank in self._exchange.recipients(piece):
            self._seats[rank].queue(message, out.size)
            self._wake(self._seats[rank])

    def clear(self) -> None:
        """Let go of the sums."""
        for total in self._sums.values():
            self._ledger.add("sums", -total.nbytes)
        self._sums.clear()


class Relay:
    """Pass on what ranks send, piece by piece.

    Args:
        exchanges: of all ranks, by position; they say who gets what.
        seats: of all ranks, by position.
        wake: tells that something of a seat changed.
    """

    def __init__(self, exchanges: Sequence[Exchange], seats: Sequence[Seat], wake: Wake) -> None:
        self._exchanges = exchanges
        self._seats = seats
        self._wake = wake
        self._blocked: dict[int, None] = {}  # ranks whose message waits for room, the longest waiting first
        for seat in seats:
            seat.arrived, seat.has_room = self._pass, self._room
        for seat in seats:
            self._pass(seat)

    def _pass(self, seat: Seat) -> None:
        if seat.held is None:
            return
        piece = seat.uploads[seat.sent]
        recipients = [self._seats[r] for r in self._exchanges[seat.rank].recipients(piece)]
        if any(recipient.full for recipient in recipients):
            self._blocked[seat.rank] = None
            return
        self._blocked.pop(seat.rank, None)
        message, numel = passed_on(seat.use())
        self._wake(seat)
        for recipient in recipients:
            recipient.queue(message, numel)
            self._wake(recipient)

    def _room(self, _: Seat) -> None:
        for rank in list(self._blocked):
            self._pass(self._seats[rank])

    def clear(self) -> None:
        """Nothing is kept here."""


class Passage:
    """Pass on what one rank sends to one other.

    Args:
        sender: from whom.
        receiver: to whom.
        wake: tells that something of a seat changed.
    """

    def __init__(self, sender: Seat, receiver: Seat, wake: Wake) -> None:
        self._sender = sender
        self._receiver = receiver
        self._wake = wake
        sender.arrived = receiver.has_room = self._pass
        self._pass(sender)

    def _pass(self, _: Seat) -> None:
        if self._sender.held is None or self._receiver.full:
            return
        self._receiver.queue(*passed_on(self._sender.use()))
        self._wake(self._sender)
        self._wake(self._receiver)


def passed_on(held: Held) -> tuple[bytes, int]:
    """A received message as it goes on to others, and its elements: as it is, but without a first message's begin."""
    header = held.header
    if not header.HasField("begin"):
        return held.message, held.data.size
    header = CollectiveChunk(source=header.source, part=header.part, offset=header.offset)
    return encode_chunk(header, held.data), held.data.size
