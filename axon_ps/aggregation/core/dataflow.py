"""The flow of data between the participants of an operation that all ranks agreed on.

`Reduction` combines the ranks' data. `Forwarding` and `PointToPoint` send it on unchanged. All use a rank's message as
soon as they can. Until then it is pending, and the rank's stream is not read further. Memory is bounded: one pending
message for each rank, `MAX_PARTIAL_SUMS` unfinished results, and `MAX_QUEUED_SEGMENTS` queued for each rank.

Invariants:
- Contributions to a segment are combined in rank order, whatever the order of arrival.
- A result is encoded once and sent to all ranks as the same bytes. A message with `begin` is encoded again without it.
- A slow reader blocks the ranks that send to it, and no stream is read further than its window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from axon_ps.aggregation.core.participants import MemoryAccounting, Participant, PendingMessage
from axon_ps.aggregation.core.stripes import StripePlan, StripeSegment
from axon_ps.reduction import ops
from axon_ps.reduction.call import Call
from axon_ps.types import Array
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

MAX_PARTIAL_SUMS = 8
"""The most unfinished results of one operation: rank 0 may be this many segments ahead of the last rank."""

Wake = Callable[[Participant], None]


class Reduction:
    """The reduction of all ranks' data, segment by segment.

    Args:
        call: the collective.
        plan: of any rank: segments and their recipients are the same for all.
        participants: all ranks, in order.
        memory: counts the partial sums.
        wake: called with a participant whose state changed.
    """

    def __init__(
        self,
        call: Call,
        plan: StripePlan,
        participants: Sequence[Participant],
        memory: MemoryAccounting,
        wake: Wake,
    ) -> None:
        assert call.op is not None
        self._op, self._dtype = call.op, call.dtype
        self._accumulator = ops.accumulator_dtype(call.dtype)
        self._plan = plan
        self._participants = participants
        self._memory = memory
        self._wake = wake
        self._partial_sums: dict[int, Array] = {}  # by index of the segment
        for participant in participants:
            participant.on_message, participant.on_capacity = self._on_message, self._on_capacity
        for participant in participants:
            self._advance(participant.rank)

    def _on_message(self, participant: Participant) -> None:
        self._advance(participant.rank)

    def _on_capacity(self, _: Participant) -> None:
        self._advance(len(self._participants) - 1)

    def _advance(self, rank: int) -> None:
        """Use the pending message of `rank` if it is next in order, and then the messages that waited for it."""
        last = len(self._participants) - 1
        while rank <= last:
            participant = self._participants[rank]
            if participant.pending is None or not self._may_use(rank, last):
                return
            index = participant.consumed
            self._add(index, participant.consume(), rank)
            self._wake(participant)
            if rank == last:
                self._complete(index, participant.uploads[index])
                self._advance(0)
            rank += 1

    def _may_use(self, rank: int, last: int) -> bool:
        index = self._participants[rank].consumed
        if rank == 0:
            if len(self._partial_sums) >= MAX_PARTIAL_SUMS:
                return False
        elif self._participants[rank - 1].consumed <= index:
            return False
        if rank == last:
            segment = self._participants[rank].uploads[index]
            return not any(self._participants[r].full for r in self._plan.recipients(segment))
        return True

    def _add(self, index: int, pending: PendingMessage, rank: int) -> None:
        if rank == 0:
            total = self._partial_sums[index] = np.empty(pending.data.size, self._accumulator)
            self._memory.add("sums", total.nbytes)
            ops.start(total, pending.data, self._dtype)
        else:
            ops.accumulate(self._partial_sums[index], pending.data, self._op, self._dtype)

    def _complete(self, index: int, segment: StripeSegment) -> None:
        total = self._partial_sums.pop(index)
        self._memory.add("sums", -total.nbytes)
        out = total if total.dtype == self._dtype.numpy else np.empty(len(total), self._dtype.numpy)
        ops.finish(out, total, self._op, self._dtype, len(self._participants))
        message = encode_chunk(CollectiveChunk(partition=segment.partition, offset=segment.begin), out)
        for rank in self._plan.recipients(segment):
            self._participants[rank].enqueue(message, out.size)
            self._wake(self._participants[rank])

    def clear(self) -> None:
        """Drop the partial sums."""
        for total in self._partial_sums.values():
            self._memory.add("sums", -total.nbytes)
        self._partial_sums.clear()


class Forwarding:
    """The forwarding of ranks' data, segment by segment.

    Args:
        plans: by position. They name the recipients.
        participants: all ranks, by position.
        wake: called with a participant whose state changed.
    """

    def __init__(self, plans: Sequence[StripePlan], participants: Sequence[Participant], wake: Wake) -> None:
        self._plans = plans
        self._participants = participants
        self._wake = wake
        self._blocked: dict[int, None] = {}  # ranks whose message is held because of a full queue, in order
        for participant in participants:
            participant.on_message, participant.on_capacity = self._forward, self._on_capacity
        for participant in participants:
            self._forward(participant)

    def _forward(self, participant: Participant) -> None:
        if participant.pending is None:
            return
        segment = participant.uploads[participant.consumed]
        recipients = [self._participants[r] for r in self._plans[participant.rank].recipients(segment)]
        if any(recipient.full for recipient in recipients):
            self._blocked[participant.rank] = None
            return
        self._blocked.pop(participant.rank, None)
        message, numel = forwarded(participant.consume())
        self._wake(participant)
        for recipient in recipients:
            recipient.enqueue(message, numel)
            self._wake(recipient)

    def _on_capacity(self, _: Participant) -> None:
        for rank in list(self._blocked):
            self._forward(self._participants[rank])

    def clear(self) -> None:
        """Do nothing: there are no partial sums."""


class PointToPoint:
    """The forwarding of one rank's data to another.

    Args:
        sender: the rank that sends.
        receiver: the rank that receives.
        wake: called with a participant whose state changed.
    """

    def __init__(self, sender: Participant, receiver: Participant, wake: Wake) -> None:
        self._sender = sender
        self._receiver = receiver
        self._wake = wake
        sender.on_message = receiver.on_capacity = self._forward
        self._forward(sender)

    def _forward(self, _: Participant) -> None:
        if self._sender.pending is None or self._receiver.full:
            return
        self._receiver.enqueue(*forwarded(self._sender.consume()))
        self._wake(self._sender)
        self._wake(self._receiver)


def forwarded(pending: PendingMessage) -> tuple[bytes, int]:
    """Return a received message for other ranks, unchanged but for `begin`, and its number of elements."""
    header = pending.header
    if not header.HasField("begin"):
        return pending.encoded, pending.data.size
    header = CollectiveChunk(source=header.source, partition=header.partition, offset=header.offset)
    return encode_chunk(header, pending.data), pending.data.size
