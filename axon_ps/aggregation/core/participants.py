"""A rank's part in one operation on this server, and the memory that operations use. Pure data, no I/O.

A *participant* is one rank in one operation. At most one of its messages is `pending`: it has arrived and cannot be
used yet. The messages to it are `outgoing`, at most `MAX_QUEUED_SEGMENTS` segments. All other data is in the
connection's flow-control window, or has not left its sender.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from axon_ps.aggregation.core.stripes import StripeSegment
from axon_ps.errors import AxonError, InvalidRequest
from axon_ps.types import Array, DType
from axon_ps.wire.frames import elements
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

MAX_QUEUED_SEGMENTS = 16
"""The most segments queued for one rank. Segments of a result are the same bytes for all ranks."""


class MemoryAccounting:
    """The bytes of memory that operations use, by purpose, and their peak.

    Attributes:
        bytes: bytes in use now. "pending": messages that cannot be used yet; "sums": partial results; "queued":
            messages to send, counted for every recipient although they are the same bytes; "mailbox": messages between
            two ranks that were not received yet.
        peak_bytes: the most bytes in use at once.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.peak_bytes = 0
        self._total = 0

    def add(self, what: str, nbytes: int) -> None:
        """Count bytes that are allocated; a negative number for bytes that are freed."""
        self.bytes[what] += nbytes
        self._total += nbytes
        self.peak_bytes = max(self.peak_bytes, self._total)


class PendingMessage:
    """A message that cannot be used yet: its encoding, its header, and its payload as an array."""

    __slots__ = ("data", "encoded", "header")

    def __init__(self, encoded: bytes, header: CollectiveChunk, data: Array) -> None:
        self.encoded = encoded
        self.header = header
        self.data = data


class Participant:
    """One rank in one operation.

    Args:
        rank: its position in the group.
        deadline_s: the time at which it gives up, on the engine's clock.
        memory: counts the memory it uses.
        dtype: element type of the operation.
        uploads: the segments that it sends, in order.
        remaining_numel: elements that the server has to send it.

    Attributes:
        consumed: number of its segments used so far.
        pending: the next segment, if it has arrived and cannot be used yet.
        outgoing: encoded messages for the rank.
        agreed: whether the operation has begun: every rank has joined, and all ask for the same.
        error: the error that ended the operation.
        left: whether the stream has left the operation.
        on_message: called when a segment has arrived.
        on_capacity: called when `outgoing` got shorter.
    """

    def __init__(
        self,
        rank: int,
        deadline_s: float,
        memory: MemoryAccounting,
        dtype: DType,
        uploads: Sequence[StripeSegment],
        remaining_numel: int,
    ) -> None:
        self.rank = rank
        self.deadline_s = deadline_s
        self.uploads = uploads
        self.consumed = 0
        self.pending: PendingMessage | None = None
        self.outgoing: deque[bytes] = deque()
        self.agreed = False
        self.error: AxonError | None = None
        self.left = False
        self.on_message: Callable[[Participant], None] = _nothing
        self.on_capacity: Callable[[Participant], None] = _nothing
        self._dtype = dtype
        self._remaining_numel = remaining_numel
        self._memory = memory

    @property
    def expects(self) -> bool:
        """True if another message is expected from the rank."""
        return self.consumed + (self.pending is not None) < len(self.uploads) and self.error is None

    @property
    def done(self) -> bool:
        """True if all its data is used, and all data for it is sent."""
        return self.agreed and self.consumed == len(self.uploads) and self._remaining_numel == 0 and not self.outgoing

    @property
    def contributed(self) -> bool:
        """True if all its data has arrived."""
        return self.consumed + (self.pending is not None) == len(self.uploads)

    @property
    def full(self) -> bool:
        """True if no more messages may be queued for it."""
        return len(self.outgoing) >= MAX_QUEUED_SEGMENTS

    def receive(self, message: bytes, header: CollectiveChunk, payload: memoryview) -> None:
        """Take the next message of its stream.

        Raises:
            InvalidRequest: it is not the next segment.
        """
        if not self.expects:
            raise InvalidRequest("a collective's stream has more segments than the call says")
        assert self.pending is None
        segment = self.uploads[self.consumed]
        data = elements(payload, self._dtype)
        if (header.source, header.partition, header.offset, data.size) != (
            self.rank,
            segment.partition,
            segment.begin,
            segment.end - segment.begin,
        ):
            raise InvalidRequest(
                f"a segment of {data.size} elements at {header.offset} of partition {header.partition} came from "
                f"{header.source}; the next of position {self.rank} is {segment.end - segment.begin} at "
                f"{segment.begin} of partition {segment.partition}"
            )
        self.pending = PendingMessage(message, header, data)
        self._memory.add("pending", data.nbytes)

    def consume(self) -> PendingMessage:
        """Remove and return the pending message."""
        self.consumed += 1
        return self._take()

    def enqueue(self, message: bytes, numel: int) -> None:
        """Queue a message for the rank, with `numel` of its remaining elements."""
        self.outgoing.append(message)
        self._remaining_numel -= numel
        self._memory.add("queued", len(message))

    def dequeue(self) -> bytes:
        """Remove the next message to send from the queue."""
        message = self.outgoing.popleft()
        self._memory.add("queued", -len(message))
        return message

    def clear(self) -> None:
        """Drop the pending message, which does not count as used, and the queue."""
        while self.outgoing:
            self.dequeue()
        if self.pending is not None:
            self._take()
        self.on_message = self.on_capacity = _nothing

    def _take(self) -> PendingMessage:
        pending, self.pending = self.pending, None
        assert pending is not None
        self._memory.add("pending", -pending.data.nbytes)
        return pending


def _nothing(_: Participant) -> None:
    """Do nothing: the operation of the participant has not begun, or is over."""
