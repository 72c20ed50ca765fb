"""Messages between two ranks of a group: senders and receivers find each other here, in order.

A *letter* waits for its receiver. A small one (`EAGER_BYTES`) comes whole, and its sender need not wait as long as the
receiver's mail is less than `MAIL_BYTES`; of a large one only the description waits, with its sender, whose data flows
from rank to rank once both are there.

Invariants:
- Letters of one sender, receiver and tag are received in the order they were posted; "of whoever" is the longest
  waiting of all.
- What does not fit its receiver is dropped, and both sides (if both are still there) are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from axon_ps.aggregation.core.dataflow import Passage, Wake
from axon_ps.aggregation.core.operations import GRACE_S
from axon_ps.aggregation.core.participants import Ledger, Seat
from axon_ps.aggregation.core.stripes import pieces_of
from axon_ps.errors import AxonError, Broken, Disagreement, InvalidRequest, Timeout
from axon_ps.types import Array, DType
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

EAGER_BYTES = 1 << 16
"""Longest message that travels with its description."""

MAIL_BYTES = 1 << 22
"""How much a rank's mail may hold before senders wait."""


@dataclass(frozen=True, kw_only=True)
class Letter:
    """What one side says about a message between two ranks.

    Attributes:
        receive: whether this is the receiver's side.
        rank: the caller's position.
        peer: the other's; a receiver's -1 = whoever.
        tag: tells streams of messages apart.
        dtype: element type.
        numel: elements.
        closes: of a receiver that closes its group: it asks for nothing any more, and its mail is dropped.
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


class _Post:
    """A letter that waits: whose it is, and its data if that came along."""

    def __init__(self, letter: Letter, seat: Seat, data: Array | None = None) -> None:
        self.letter = letter
        self.seat = seat
        self.data = data
        self.stored = False


class Mailbox:
    """The mail of one group on this server.

    Args:
        group: the group's name.
        ranks: the members' world ranks, by position.
        ledger: counts memory.
        wake: tells that something of a seat changed.
    """

    def __init__(self, group: str, ranks: Sequence[int], ledger: Ledger, wake: Wake) -> None:
        self._group = group
        self._ranks = ranks
        self._ledger = ledger
        self._wake = wake
        self._letters: list[_Post] = []
        self._receivers: list[_Post] = []
        self._seats: dict[Seat, Letter] = {}
        self._partners: dict[Seat, Seat] = {}
        self._suspects: dict[Seat, tuple[float, int]] = {}  # whose partner broke off: when to say so, and who it was
        self._stored_bytes: Counter[int] = Counter()

    @property
    def over(self) -> bool:
        """Whether there is neither mail nor anybody who waits for it."""
        return not self._letters and not self._seats and not self._suspects

    def post(self, letter: Letter, data: Array | None, timeout_s: float, now_s: float) -> Seat:
        """A sender or receiver comes.

        Args:
            letter: what it says.
            data: T[numel], when it came along with a sender's.
            timeout_s: seconds until it gives up.
            now_s: the present.
        """
        dtype, numel = letter.dtype, letter.numel
        uploads = pieces_of(numel, dtype.itemsize) if not letter.receive and data is None else []
        seat = Seat(letter.rank, now_s + timeout_s, self._ledger, dtype, uploads, numel if letter.receive else 0)
        self._seats[seat] = letter
        if letter.closes:
            self._discard(letter.rank)
            seat.agreed = True
            return seat
        post = _Post(letter, seat, data)
        others, own = (self._letters, self._receivers) if letter.receive else (self._receivers, self._letters)
        for other in others:
            if _fits(*((other, post) if letter.receive else (post, other))):
                others.remove(other)
                self._match(*((other, post) if letter.receive else (post, other)))
                return seat
        own.append(post)
        if data is not None:
            self._store(post, data)
        return seat

    def leave(self, seat: Seat, now_s: float) -> None:
        """A stream is over."""
        del self._seats[seat]
        self._receivers = [p for p in self._receivers if p.seat is not seat]
        self._letters = [p for p in self._letters if p.seat is not seat or p.stored]
        self._suspects.pop(seat, None)
        partner = self._partners.pop(seat, None)
        if partner is not None and not seat.done and not partner.left:
            self._suspects[partner] = (
                now_s + GRACE_S,
                self._ranks[seat.rank],
            )  # see `aggregation.core.operations`, Note: [Broken off, or lost]
        seat.clear()

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        for seat, letter in list(self._seats.items()):
            if seat.error is not None or seat.left or seat.done:
                continue
            who = "any rank" if letter.peer < 0 else f"rank {self._ranks[letter.peer]}"
            suspicion_s, partner = self._suspects.get(seat, (now_s + 1.0, 0))
            if now_s >= suspicion_s:
                self._end(seat, Broken(f"rank {partner} broke off a message of {letter}, or lost its connection"))
            elif now_s >= seat.deadline_s:
                verb = "received nothing from" if letter.receive else "was not received by"
                begun = " in full" if seat in self._partners else ""
                self._end(seat, Timeout(f"a message of {letter} {verb} {who}{begun} before the deadline"))

    def next_s(self) -> list[float]:
        """When `tick` has something to do."""
        return [
            *(moment_s for moment_s, _ in self._suspects.values()),
            *(s.deadline_s for s in self._seats if not s.left),
        ]

    def finish(self, positions: Collection[int], error: AxonError) -> None:
        """Members have finished: what they sent stays for its receivers; who waits for one of them gets `error`."""
        others = set(range(len(self._ranks))) - set(positions)
        for rank in positions:
            self._discard(rank)
        for post in [*self._receivers, *self._letters]:
            letter = post.letter
            waits = letter.peer in positions or (letter.peer < 0 and others == {letter.rank})
            if waits and not post.stored and not post.seat.done:
                self._end(post.seat, error)

    def fail(self, error: AxonError) -> None:
        """End everything."""
        for seat in self._seats:
            if not seat.done:
                self._end(seat, error)
        for post in self._letters:
            self._unstore(post)
        self._letters.clear()
        self._receivers.clear()

    # ------------------------------------------------------------------ inside

    def _match(self, sent: _Post, wanted: _Post) -> None:
        letter, sender, receiver = sent.letter, sent.seat, wanted.seat
        self._unstore(sent)
        if (letter.dtype, letter.numel) != (wanted.letter.dtype, wanted.letter.numel):
            error = Disagreement(
                f"rank {self._ranks[letter.rank]} sends {letter} to rank {self._ranks[wanted.letter.rank]} of group "
                f"{self._group!r}, which expects {wanted.letter}; the message is dropped"
            )
            for seat in (sender, receiver):
                if not seat.left and not seat.done:
                    self._end(seat, error)
            return
        header = CollectiveChunk(matched=True, source=letter.rank)
        receiver.agreed = sender.agreed = True
        if sent.data is not None:
            receiver.queue(encode_chunk(header, sent.data), letter.numel)
        else:
            message = encode_chunk(header, None)
            receiver.queue(message, 0)
            sender.queue(message, 0)
            self._partners[sender], self._partners[receiver] = receiver, sender
            Passage(sender, receiver, self._wake)
        self._wake(sender)
        self._wake(receiver)

    def _discard(self, rank: int) -> None:
        for post in [p for p in self._letters if p.letter.peer == rank and p.stored]:
            self._letters.remove(post)
            self._unstore(post)

    def _store(self, post: _Post, data: Array) -> None:
        receiver = post.letter.peer
        if self._stored_bytes[receiver] + data.nbytes > MAIL_BYTES:
            return  # it waits with its sender
        post.data = data.copy()  # the message it came in may be larger
        post.stored = post.seat.agreed = True
        self._stored_bytes[receiver] += data.nbytes
        self._ledger.add("mail", data.nbytes)

    def _unstore(self, post: _Post) -> None:
        if post.stored:
            assert post.data is not None
            self._stored_bytes[post.letter.peer] -= post.data.nbytes
            self._ledger.add("mail", -post.data.nbytes)
            post.stored = False

    def _end(self, seat: Seat, error: AxonError) -> None:
        if seat.error is None:
            seat.error = error
            seat.clear()
            self._wake(seat)


def _fits(sent: _Post, wanted: _Post) -> bool:
    a, b = sent.letter, wanted.letter
    return a.peer == b.rank and b.peer in (-1, a.rank) and a.tag == b.tag


def check_letter(letter: Letter, world_size: int) -> None:
    """See that a letter names members.

    Raises:
        InvalidRequest: it does not.
    """
    lowest = -1 if letter.receive else 0
    if not lowest <= letter.peer < world_size:
        raise InvalidRequest(f"a message names position {letter.peer}; the group has {world_size} ranks")
