"""Messages between two ranks of a group: sends and receives are matched here, in order.

An *envelope* describes a message. A message that has not been received is in its receiver's mailbox. A small message
(`EAGER_BYTES`) comes with its data, and its sender need not wait if it fits into the receiver's mailbox
(`MAX_MAILBOX_BYTES`). Of a large message only the envelope is stored, and its sender waits. The data goes from rank to
rank once both sides have joined.

Invariants:
- Messages of one sender, receiver and tag are received in the order they were sent. A receive from any rank takes the
  oldest message.
- A message is dropped if its receiver expects another size or dtype. Each side whose call is still under way then gets
  an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from axon_ps.aggregation.core.dataflow import PointToPoint, Wake
from axon_ps.aggregation.core.operations import GRACE_S
from axon_ps.aggregation.core.participants import MemoryAccounting, Participant
from axon_ps.aggregation.core.stripes import segments_of
from axon_ps.errors import AxonError, Broken, Disagreement, InvalidRequest, Timeout, again
from axon_ps.types import Array, DType
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

EAGER_BYTES = 1 << 16
"""The longest message, in bytes, whose data comes with its envelope."""

MAX_MAILBOX_BYTES = 1 << 22
"""The most bytes that a rank's mailbox holds before senders wait."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A message between two ranks, as its sender or its receiver describes it.

    Attributes:
        receive: whether this is the receiver's side.
        rank: the caller's position.
        peer: the other side's position; a receiver's -1 = any rank.
        tag: distinguishes sequences of messages.
        dtype: element type.
        numel: elements.
        closes: whether a receiver closes its group: it receives no more, and its mailbox is emptied.
    """

    receive: bool
    rank: int
    peer: int
    tag: int
    dtype: DType
    numel: int
    closes: bool = False

    def __str__(self) -> str:
        return f"{self.numel} {self.dtype.value} with tag {self.tag}"


class _Unmatched:
    """A send or a receive without its other side so far. A send has its data if this came with the envelope."""

    def __init__(self, envelope: Envelope, participant: Participant, data: Array | None = None) -> None:
        self.envelope = envelope
        self.participant = participant
        self.data = data
        self.stored = False


class Mailbox:
    """The messages between ranks of one group on this server.

    Args:
        group: the group's name.
        ranks: the members' world ranks, by position.
        memory: counts the memory of stored messages.
        wake: called with a participant whose state changed.
    """

    def __init__(self, group: str, ranks: Sequence[int], memory: MemoryAccounting, wake: Wake) -> None:
        self._group = group
        self._ranks = ranks
        self._memory = memory
        self._wake = wake
        self._sends: list[_Unmatched] = []
        self._receives: list[_Unmatched] = []
        self._participants: dict[Participant, Envelope] = {}
        self._partners: dict[Participant, Participant] = {}
        # participants whose partner broke off: the time when that is an error, and the partner's rank
        self._suspects: dict[Participant, tuple[float, int]] = {}
        self._stored_bytes: Counter[int] = Counter()

    @property
    def over(self) -> bool:
        """True if no message is stored, and no send or receive is under way."""
        return not self._sends and not self._participants and not self._suspects

    def enqueue(self, envelope: Envelope, data: Array | None, timeout_s: float, now_s: float) -> Participant:
        """Queue a send or a receive, or match it with its other side if that is waiting.

        Args:
            envelope: the message.
            data: T[numel] of a send whose data came with its envelope.
            timeout_s: seconds until the caller gives up.
            now_s: the present time.
        """
        dtype, numel = envelope.dtype, envelope.numel
        uploads = segments_of(numel, dtype.itemsize) if not envelope.receive and data is None else []
        downloads = numel if envelope.receive else 0
        participant = Participant(envelope.rank, now_s + timeout_s, self._memory, dtype, uploads, downloads)
        self._participants[participant] = envelope
        if envelope.closes:
            self._discard(envelope.rank)
            participant.agreed = True
            return participant
        new = _Unmatched(envelope, participant, data)
        others, own = (self._sends, self._receives) if envelope.receive else (self._receives, self._sends)
        for other in others:
            if _matches(*((other, new) if envelope.receive else (new, other))):
                others.remove(other)
                self._match(*((other, new) if envelope.receive else (new, other)))
                return participant
        own.append(new)
        if data is not None:
            self._store(new, data)
        return participant

    def leave(self, participant: Participant, now_s: float) -> None:
        """Record that a stream has left its operation."""
        del self._participants[participant]
        self._receives = [r for r in self._receives if r.participant is not participant]
        self._sends = [s for s in self._sends if s.participant is not participant or s.stored]
        self._suspects.pop(participant, None)
        partner = self._partners.pop(participant, None)
        if partner is not None and not participant.done and not partner.left:
            self._suspects[partner] = (
                now_s + GRACE_S,
                self._ranks[participant.rank],
            )  # see `aggregation.core.operations`, Note: [Broken off, or lost]
        participant.clear()

    def tick(self, now_s: float) -> None:
        """End sends and receives whose time is up."""
        for participant in self._awaited():
            envelope = self._participants[participant]
            who = "any rank" if envelope.peer < 0 else f"rank {self._ranks[envelope.peer]}"
            suspicion_s, partner = self._suspects.get(participant, (now_s + 1.0, 0))
            if now_s >= suspicion_s:
                error = Broken(f"rank {partner} broke off a message of {envelope}, or lost its connection")
                self._end(participant, error)
            elif now_s >= participant.deadline_s:
                verb = "received nothing from" if envelope.receive else "was not received by"
                begun = " in full" if participant in self._partners else ""
                self._end(participant, Timeout(f"a message of {envelope} {verb} {who}{begun} before the deadline"))

    def next_s(self) -> list[float]:
        """Return the times at which `tick` is needed."""
        return [
            min(p.deadline_s, self._suspects[p][0]) if p in self._suspects else p.deadline_s for p in self._awaited()
        ]

    def _awaited(self) -> list[Participant]:
        """Return the participants whose time can run out."""
        return [p for p in self._participants if not (p.error is not None or p.left or p.done)]

    def finish(self, positions: Collection[int], error: AxonError) -> None:
        """End the waits for finished members with `error`. The stored messages of these can still be received."""
        others = set(range(len(self._ranks))) - set(positions)
        for rank in positions:
            self._discard(rank)
        for waiting in [*self._receives, *self._sends]:
            envelope = waiting.envelope
            lost = envelope.peer in positions or (envelope.peer < 0 and others == {envelope.rank})
            if lost and not waiting.stored and not waiting.participant.done:
                self._end(waiting.participant, error)

    def fail(self, error: AxonError) -> None:
        """End all sends and receives."""
        for participant in self._participants:
            if not participant.done:
                self._end(participant, error)
        for send in self._sends:
            self._unstore(send)
        self._sends.clear()
        self._receives.clear()

    # ------------------------------------------------------------------ inside

    def _match(self, send: _Unmatched, receive: _Unmatched) -> None:
        envelope, sender, receiver = send.envelope, send.participant, receive.participant
        expected = receive.envelope
        self._unstore(send)
        if (envelope.dtype, envelope.numel) != (expected.dtype, expected.numel):
            error = Disagreement(
                f"rank {self._ranks[envelope.rank]} sends {envelope} to rank {self._ranks[expected.rank]} of group "
                f"{self._group!r}, which expects {expected}; the message is dropped"
            )
            for participant in (sender, receiver):
                if not participant.left and not participant.done:
                    self._end(participant, error)
            return
        header = CollectiveChunk(matched=True, source=envelope.rank)
        receiver.agreed = sender.agreed = True
        if send.data is not None:
            receiver.enqueue(encode_chunk(header, send.data), envelope.numel)
        else:
            message = encode_chunk(header, None)
            receiver.enqueue(message, 0)
            sender.enqueue(message, 0)
            self._partners[sender], self._partners[receiver] = receiver, sender
            PointToPoint(sender, receiver, self._wake)
        self._wake(sender)
        self._wake(receiver)

    def _discard(self, rank: int) -> None:
        """Drop the stored messages to a rank."""
        for send in [s for s in self._sends if s.envelope.peer == rank and s.stored]:
            self._sends.remove(send)
            self._unstore(send)

    def _store(self, send: _Unmatched, data: Array) -> None:
        receiver = send.envelope.peer
        if self._stored_bytes[receiver] + data.nbytes > MAX_MAILBOX_BYTES:
            return  # its sender waits
        send.data = data.copy()  # the message that it is part of may be larger
        send.stored = send.participant.agreed = True
        self._stored_bytes[receiver] += data.nbytes
        self._memory.add("mailbox", data.nbytes)

    def _unstore(self, send: _Unmatched) -> None:
        if send.stored:
            assert send.data is not None
            self._stored_bytes[send.envelope.peer] -= send.data.nbytes
            self._memory.add("mailbox", -send.data.nbytes)
            send.stored = False

    def _end(self, participant: Participant, error: AxonError) -> None:
        if participant.error is None:
            participant.error = again(error)
            participant.clear()
            self._wake(participant)


def _matches(send: _Unmatched, receive: _Unmatched) -> bool:
    a, b = send.envelope, receive.envelope
    return a.peer == b.rank and b.peer in (-1, a.rank) and a.tag == b.tag


def check_envelope(envelope: Envelope, world_size: int) -> None:
    """Check that an envelope names members.

    Raises:
        InvalidRequest: it does not.
    """
    lowest = -1 if envelope.receive else 0
    if not lowest <= envelope.peer < world_size:
        raise InvalidRequest(f"a message names position {envelope.peer}; the group has {world_size} ranks")
