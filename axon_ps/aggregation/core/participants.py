"""A rank's place in one operation on this server, and the memory that operations hold. Pure data, no I/O.

A *seat* is what the engine knows of one operation of a stream. What came and could not be used yet is `held`, at most
one message; what the rank is to be sent is `outgoing`, at most `QUEUE_PIECES` pieces. Everything else that a stream has
sent or is owed lies in gRPC's flow-control window, or has not left its sender.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from axon_ps.aggregation.core.stripes import Piece
from axon_ps.errors import AxonError, InvalidRequest
from axon_ps.types import Array, DType
from axon_ps.wire.frames import elements
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

QUEUE_PIECES = 16
"""How many pieces may wait to be sent to one rank: of results, all ranks share them."""


class Ledger:
    """Bytes of memory that operations hold, by what for; and the most there were.

    Attributes:
        bytes: now. "held": messages that cannot be used yet; "sums": results under way; "queued": messages to send,
            counted for every rank that gets them though they are the same bytes; "mail": messages nobody asked for yet.
        peak_bytes: the most of all of them together.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.peak_bytes = 0
        self._total = 0

    def add(self, what: str, nbytes: int) -> None:
        """Count bytes that are held from now on; a negative number for those that are freed."""
        self.bytes[what] += nbytes
        self._total += nbytes
        self.peak_bytes = max(self.peak_bytes, self._total)


class Held:
    """A message that waits for its turn: its encoding, its header, and its payload as an array."""

    __slots__ = ("data", "header", "message")

    def __init__(self, message: bytes, header: CollectiveChunk, data: Array) -> None:
        self.message = message
        self.header = header
        self.data = data


class Seat:
    """One rank in one operation.

    Args:
        rank: its position in the group.
        deadline_s: when it gives up, on the engine's clock.
        ledger: counts what it holds.
        dtype: of the operation.
        uploads: the pieces it is to send, in order.
        owed_numel: elements it is to be sent.

    Attributes:
        sent: pieces used so far.
        held: the next piece, if it has come and cannot be used yet.
        outgoing: encoded messages for the rank.
        agreed: whether the operation goes on: every rank has come, and all ask for the same.
        error: what ended it.
        left: whether the stream has left the operation.
        arrived: called when a piece has come.
        has_room: called when `outgoing` got shorter.
    """

    def __init__(
        self, rank: int, deadline_s: float, ledger: Ledger, dtype: DType, uploads: Sequence[Piece], owed_numel: int
    ) -> None:
        self.rank = rank
        self.deadline_s = deadline_s
        self.uploads = uploads
        self.sent = 0
        self.held: Held | None = None
        self.outgoing: deque[bytes] = deque()
        self.agreed = False
        self.error: AxonError | None = None
        self.left = False
        self.arrived: Callable[[Seat], None] = _nothing
        self.has_room: Callable[[Seat], None] = _nothing
        self._dtype = dtype
        self._owed_numel = owed_numel
        self._ledger = ledger

    @property
    def expects(self) -> bool:
        """Whether another message is to come from the rank."""
        return self.sent + (self.held is not None) < len(self.uploads) and self.error is None

    @property
    def done(self) -> bool:
        """Whether the rank's part is done: everything of it is used, and nothing is left to send."""
        return self.agreed and self.sent == len(self.uploads) and self._owed_numel == 0 and not self.outgoing

    @property
    def contributed(self) -> bool:
        """Whether everything that the rank is to send has come."""
        return self.sent + (self.held is not None) == len(self.uploads)

    @property
    def full(self) -> bool:
        """Whether nothing more may be queued for it."""
        return len(self.outgoing) >= QUEUE_PIECES

    def hold(self, message: bytes, header: CollectiveChunk, payload: memoryview) -> None:
        """Take the next message of the stream.

        Raises:
            InvalidRequest: it is not the piece whose turn it is.
        """
        if not self.expects:
            raise InvalidRequest("a collective's stream has more pieces than the call says")
        assert self.held is None
        piece = self.uploads[self.sent]
        data = elements(payload, self._dtype)
        if (header.source, header.part, header.offset, data.size) != (
            self.rank,
            piece.part,
            piece.begin,
            piece.end - piece.begin,
        ):
            raise InvalidRequest(
                f"a piece of {data.size} elements at {header.offset} of part {header.part} came from {header.source}; "
                f"the next of position {self.rank} is {piece.end - piece.begin} at {piece.begin} of part {piece.part}"
            )
        self.held = Held(message, header, data)
        self._ledger.add("held", data.nbytes)

    def use(self) -> Held:
        """The held message, which is not held any more."""
        held = self.held
        assert held is not None
        self.held = None
        self.sent += 1
        self._ledger.add("held", -held.data.nbytes)
        return held

    def queue(self, message: bytes, numel: int) -> None:
        """Send `message` to the rank, which has `numel` of the elements it is owed."""
        self.outgoing.append(message)
        self._owed_numel -= numel
        self._ledger.add("queued", len(message))

    def take(self) -> bytes:
        """The next message to send."""
        message = self.outgoing.popleft()
        self._ledger.add("queued", -len(message))
        return message

    def clear(self) -> None:
        """Let go of what is held and queued."""
        while self.outgoing:
            self.take()
        if self.held is not None:
            self.use()
        self.arrived = self.has_room = _nothing


def _nothing(_: Seat) -> None:
    """What happens to a seat of an operation that has not begun or is over."""
