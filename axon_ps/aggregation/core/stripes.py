"""How a collective is spread over shard servers, and in what pieces its data travels. Pure; both ends compute it alike.

    shape legend: n = ranks of the group, k = shard servers of the job, m = shares of the operation, m <= k

An operation has m shares. Share j is performed by server (home + j) mod k, where `home` depends on the group's name
and the number of the call only: ranks that disagree about anything else still meet there, and share 0 judges.

What is reduced or broadcast as a whole is one part; else part r belongs to rank r. Of every part, share j has the j-th
of m nearly equal ranges: so every rank talks to all m servers from the first moment to the last, in both directions,
and no card of theirs waits for another. Where every rank has a server on its own host, an all-gather's part is whole
on that one (`owners_of`): it goes up without touching a card, and from there to everybody. A rank's *uploads* on a
share are cut into pieces; the first and last of them are smaller, since the way back starts when the first piece is
complete and ends a piece after the way there. A rank that sends several parts sends pieces of them in turns, so that
nobody gets all of his at the end.

Invariants:
- Reductions: all ranks upload the same pieces in the same order.
- No piece crosses the border of a part.
- An all-to-all has a share on every server, since no rank knows how large it is for the others.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from axon_ps.reduction.call import Call, Operation

SEGMENT_BYTES = 127 << 9
"""What the kernel hands to a card at once, on ordinary Ethernet 45 packets of 1,448 bytes, less what a message adds.

What is a little longer takes a packet more. *Measured*, an all-reduce of 64 MiB with pieces of 128 KiB: 75 KB more
through a card of 96 MiB than gloo, which knows no messages; with three of these, 15 KB.
"""

PIECE_BYTES = 3 * SEGMENT_BYTES
"""A piece's size, in the middle of a stream, where it is combined with the other ranks'."""

RELAY_PIECE_BYTES = 8 * SEGMENT_BYTES
"""The same where it is passed on as it is: nobody waits for the others' then, and a message costs what it costs."""

SMALL_PIECE_BYTES = SEGMENT_BYTES
"""A piece's size at a stream's beginning and end. From there it doubles to the largest, and to the end it halves."""

SHARE_BYTES = 1 << 17
"""An operation gets another share for every so many bytes: a message on another stream costs as much as these."""

CUTS_KEPT = 32
"""Of how many uploads the pieces are remembered: those of a training step are the same every time."""

EVEN = 1.25
"""Parts are about equal when the largest is at most so many times the mean."""

REDUCING = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER))
"""Operations in which every rank contributes to every element."""

_WHOLE = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST))
_EVERYBODY = frozenset((Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.BROADCAST))


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [begin, end) of part `part`."""

    part: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One rank's part in one share of a collective.

    Attributes:
        call: what all ranks agree on.
        rank: whose.
        world_size: n.
        share: which share.
        shares: m.
        owners: by part, the share that has all of it; empty: every share has a range of every part.
        input_counts: ALL_TO_ALL: elements for each rank.
        output_counts: ALL_TO_ALL: elements from each rank.
    """

    call: Call
    rank: int
    world_size: int
    share: int
    shares: int
    owners: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()

    def uploads(self) -> Sequence[Piece]:
        """The pieces that the rank sends, in order. `part` is whom they are for, or of, as `segments` says."""
        largest = PIECE_BYTES if self.call.operation in REDUCING else RELAY_PIECE_BYTES
        return _pieces(tuple(self._segments()), self.call.dtype.itemsize, largest)

    def upload_numel(self) -> int:
        """Elements that the rank sends."""
        return sum(end - begin for _, begin, end in self._segments())

    def download_numel(self) -> int:
        """Elements that the rank gets back: never its own data, except reduced."""
        call, rank = self.call, self.rank
        match call.operation:
            case Operation.ALL_REDUCE:
                return self._numel(call.counts[0])
            case Operation.REDUCE:
                return self._numel(call.counts[0]) if rank == call.root else 0
            case Operation.BROADCAST:
                return self._numel(call.counts[0]) if rank != call.root else 0
            case Operation.REDUCE_SCATTER:
                return self._numel(call.counts[rank])
            case Operation.SCATTER:
                return self._numel(call.counts[rank]) if rank != call.root else 0
            case Operation.ALL_GATHER:
                return sum(self._numel(count, source) for source, count in enumerate(call.counts) if source != rank)
            case Operation.GATHER if rank == call.root:
                return sum(self._numel(count) for source, count in enumerate(call.counts) if source != rank)
            case Operation.ALL_TO_ALL:
                return sum(self._numel(count) for source, count in enumerate(self.output_counts) if source != rank)
        return 0

    def recipients(self, piece: Piece) -> Sequence[int]:
        """Who gets a piece that this rank uploads, or what becomes of it."""
        call = self.call
        match call.operation:
            case Operation.ALL_REDUCE:
                return range(self.world_size)
            case Operation.BROADCAST | Operation.ALL_GATHER:
                return [r for r in range(self.world_size) if r != self.rank]
            case Operation.REDUCE | Operation.GATHER:
                return (call.root,)
            case _:
                return (piece.part,)

    def _segments(self) -> Iterator[tuple[int, int, int]]:
        """Part, begin and end of what the rank sends, in order."""
        call, rank = self.call, self.rank
        match call.operation:
            case Operation.ALL_REDUCE | Operation.REDUCE:
                yield (0, *self._range(call.counts[0]))
            case Operation.BROADCAST if rank == call.root:
                yield (0, *self._range(call.counts[0]))
            case Operation.ALL_GATHER:
                yield (rank, *self._range(call.counts[rank], rank))
            case Operation.GATHER if rank != call.root:
                yield (rank, *self._range(call.counts[rank]))
            case Operation.REDUCE_SCATTER:
                for part, count in enumerate(call.counts):
                    yield (part, *self._range(count))
            case Operation.SCATTER if rank == call.root:
                for part, count in enumerate(call.counts):
                    if part != rank:
                        yield (part, *self._range(count))
            case Operation.ALL_TO_ALL:
                for distance in range(1, self.world_size):  # everybody begins with another one
                    part = (rank + distance) % self.world_size
                    yield (part, *self._range(self.input_counts[part]))

    def _range(self, count: int, part: int = 0) -> tuple[int, int]:
        """What this share has of `count` elements, which are those of a part."""
        if self.owners:
            return 0, count if self.owners[part] == self.share else 0
        return count * self.share // self.shares, count * (self.share + 1) // self.shares

    def _numel(self, count: int, part: int = 0) -> int:
        begin, end = self._range(count, part)
        return end - begin


def shares_of(call: Call, num_servers: int) -> int:
    """On how many of `num_servers` servers a collective is spread."""
    if call.operation is Operation.ALL_TO_ALL:
        return num_servers
    total_bytes = sum(call.counts) * call.dtype.itemsize
    return max(1, min(num_servers, total_bytes // SHARE_BYTES))


def owners_of(call: Call, home: int, shares: int, nodes: Sequence[str], servers: Sequence[str]) -> tuple[int, ...]:
    """By part of an all-gather, the share on a server of its rank's own host.

    Args:
        call: the collective.
        home: the server of share 0.
        shares: m.
        nodes: by rank, its host; "" where it is not known.
        servers: by server, its host.

    Returns:
        Nothing where that is no gain: another operation, a rank without a server on its host, a share too few, or parts
        so unequal that the largest one's card would be waited for.
    """
    even = sum(call.counts) * EVEN >= max(call.counts, default=0) * len(call.counts)
    if call.operation is not Operation.ALL_GATHER or shares < len(servers) or not even:
        return ()
    here: dict[str, list[int]] = {}
    for server, node in enumerate(servers):
        here.setdefault(node, []).append((server - home) % len(servers))
    if not all(node and node in here for node in nodes):
        return ()
    before: Counter[str] = Counter()
    owners = []
    for node in nodes:  # the servers of a host take turns
        owners.append(here[node][before[node] % len(here[node])])
        before[node] += 1
    return tuple(owners)


def home_of(group: str, number: int, num_servers: int) -> int:
    """The server that performs share 0 of call `number` of a group, or keeps the mail of its rank `number`."""
    return (zlib.crc32(group.encode()) + number) % num_servers


def pieces_of(numel: int, itemsize: int) -> Sequence[Piece]:
    """A whole array in pieces, as it travels between two ranks."""
    return _pieces(((0, 0, numel),), itemsize, RELAY_PIECE_BYTES)


@lru_cache(maxsize=CUTS_KEPT)
def _pieces(segments: tuple[tuple[int, int, int], ...], itemsize: int, largest_bytes: int) -> tuple[Piece, ...]:
    return tuple(_cut(segments, itemsize, largest_bytes))


def _cut(segments: Iterable[tuple[int, int, int]], itemsize: int, largest_bytes: int) -> Iterator[Piece]:
    """Pieces of parts in turns: whoever gets a part gets it from the beginning to the end of the operation."""
    left = deque(s for s in segments if s[1] < s[2])
    small, large = SMALL_PIECE_BYTES // itemsize, largest_bytes // itemsize
    total, done = sum(end - begin for _, begin, end in left), 0
    while left:
        part, begin, end = left.popleft()
        size = min(large, max(small, min(done, (total - done) // 2)))
        stop = min(begin + size, end)
        yield Piece(part, begin, stop)
        done += stop - begin
        if stop < end:
            left.append((part, stop, end))
