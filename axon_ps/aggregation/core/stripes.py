"""The cut of a collective into stripes over shard servers, and their segments. Pure. Both ends compute it.

    shape legend: n = ranks of the group, k = shard servers of the job, m = stripes of the operation, m <= k

An operation has m stripes. Stripe j runs on server (home + j) mod k. `home` depends only on the group's name and the
number of the call, so ranks that disagree about anything else still meet there, and its server decides.

The array of an all-reduce, reduce or broadcast is one partition. Elsewhere partition r belongs to rank r. Stripe j has
the j-th of m nearly equal ranges of every partition. So every rank exchanges data with all m servers from beginning to
end, in both directions, and no network card is idle while another is busy. If every rank has a server on its own host,
one stripe has all of an all-gather's partition (`owners_of`). The partition then reaches that server without a network
card, and goes from there to all ranks. A rank's *uploads* on a stripe are cut into segments. The first and last
segments are smaller, because downloads start when the first segment is complete, and end one segment after the uploads.
A rank that sends several partitions alternates between them, so that no receiver gets all of its data at the end.

Invariants:
- Reductions: all ranks upload the same segments in the same order.
- No segment crosses the border of a partition.
- An all-to-all has a stripe on every server, since a rank does not know its size for the others.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from axon_ps.reduction.call import Call, Operation

TSO_BYTES = 127 << 9
"""Payload bytes that the kernel hands to a network card at once (TCP segmentation offload).

On ordinary Ethernet that is 45 packets of 1,448 bytes, less the overhead of a message. Slightly more bytes take one
packet more. *Measured*, the bytes that an all-reduce of 64 MiB sends through a card beyond those of gloo:

    segments of 128 KiB                     75 KB
    segments of three times `TSO_BYTES`     15 KB
"""

SEGMENT_BYTES = 6 * TSO_BYTES
"""Size of a segment in the middle of a long all-reduce, where it is combined with those of the other ranks.

A message costs processor time, independent of its length. *Measured*, 64 MiB on four hosts at 500 Mbit/s:

    segment         seconds    CPU seconds a GB
    half of this    1.15       1.2 to 1.6
    this            1.15       0.9 to 1.3
    twice this      1.18
"""

LARGE_SEGMENT_BYTES = 8 * TSO_BYTES
"""Size of a segment in the middle of any other long operation, whose results do not come back to all waiting ranks."""

MIN_SEGMENTS = 24
"""Combined segments are longer than half of `SEGMENT_BYTES` only if a rank still sends this many on a stripe.

In a short stream, ranks would wait for long segments at its ends (*measured*: 16 MiB take 5 % longer).
"""

SMALL_SEGMENT_BYTES = TSO_BYTES
"""Size of the first and last segments of a stream. Sizes double from the first on, and halve towards the last."""

STRIPE_BYTES = 1 << 17
"""An operation gets one more stripe per this many bytes, which cost as much as a message on another stream."""

CACHED_UPLOADS = 32
"""Number of uploads whose segments are cached, since those of a training step are the same every time."""

MAX_IMBALANCE = 1.25
"""Partitions count as equal if the largest is at most this many times the mean."""

REDUCING = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER))
"""Operations in which every rank contributes to every element."""


@dataclass(frozen=True, slots=True)
class StripeSegment:
    """Elements [begin, end) of a partition; for its number see the docstring of the module."""

    partition: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class StripePlan:
    """The elements that one rank sends and receives on one stripe of a collective.

    Attributes:
        call: the call that all ranks agree on.
        rank: the rank's position.
        world_size: n.
        stripe: number of the stripe.
        stripes: m.
        owners: by partition, the stripe that has all of it; empty = every stripe has a range of every partition.
        input_counts: ALL_TO_ALL: elements for each rank.
        output_counts: ALL_TO_ALL: elements from each rank.
    """

    call: Call
    rank: int
    world_size: int
    stripe: int
    stripes: int
    owners: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()

    def uploads(self) -> Sequence[StripeSegment]:
        """Return the segments that the rank sends, in order."""
        return _segments(tuple(self._ranges()), self.call.dtype.itemsize, self.segment_bytes())

    def segment_bytes(self) -> int:
        """Return the size of the segments in the middle of the rank's uploads."""
        operation = self.call.operation
        largest = SEGMENT_BYTES if operation is Operation.ALL_REDUCE else LARGE_SEGMENT_BYTES
        if operation not in REDUCING:
            return largest
        nbytes = self.upload_numel() * self.call.dtype.itemsize // MIN_SEGMENTS // TSO_BYTES * TSO_BYTES
        return min(largest, max(nbytes, SEGMENT_BYTES // 2))

    def upload_numel(self) -> int:
        """Return the number of elements that the rank sends."""
        return sum(end - begin for _, begin, end in self._ranges())

    def download_numel(self) -> int:
        """Return the number of elements that the rank receives. Its own data comes back only as part of a reduction."""
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

    def recipients(self, segment: StripeSegment) -> Sequence[int]:
        """Return the ranks that get a segment of this rank, or the result of combining it."""
        call = self.call
        match call.operation:
            case Operation.ALL_REDUCE:
                return range(self.world_size)
            case Operation.BROADCAST | Operation.ALL_GATHER:
                return [r for r in range(self.world_size) if r != self.rank]
            case Operation.REDUCE | Operation.GATHER:
                return (call.root,)
            case _:
                return (segment.partition,)

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield partition, begin and end of the ranges that the rank sends, in order."""
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
                for partition, count in enumerate(call.counts):
                    yield (partition, *self._range(count))
            case Operation.SCATTER if rank == call.root:
                for partition, count in enumerate(call.counts):
                    if partition != rank:
                        yield (partition, *self._range(count))
            case Operation.ALL_TO_ALL:
                for distance in range(1, self.world_size):  # each rank begins with another partition
                    partition = (rank + distance) % self.world_size
                    yield (partition, *self._range(self.input_counts[partition]))

    def _range(self, count: int, partition: int = 0) -> tuple[int, int]:
        """Return the elements of this stripe among the `count` of a partition."""
        if self.owners:
            return 0, count if self.owners[partition] == self.stripe else 0
        return count * self.stripe // self.stripes, count * (self.stripe + 1) // self.stripes

    def _numel(self, count: int, partition: int = 0) -> int:
        begin, end = self._range(count, partition)
        return end - begin


def stripes_of(call: Call, num_servers: int) -> int:
    """Return the number of servers, of `num_servers`, that a collective is spread over."""
    if call.operation is Operation.ALL_TO_ALL:
        return num_servers
    total_bytes = sum(call.counts) * call.dtype.itemsize
    return max(1, min(num_servers, total_bytes // STRIPE_BYTES))


def owners_of(call: Call, home: int, stripes: int, nodes: Sequence[str], servers: Sequence[str]) -> tuple[int, ...]:
    """Return the stripe for each partition of an all-gather: one whose server is on the host of the partition's rank.

    Args:
        call: the collective.
        home: the server of stripe 0.
        stripes: m.
        nodes: host of each rank; "" if it is not known.
        servers: host of each server.

    Returns:
        Empty if owners would not help: another operation, a rank without a server on its host, fewer stripes than
        servers, or partitions so unequal that all would wait for the network card of the largest.
    """
    even = sum(call.counts) * MAX_IMBALANCE >= max(call.counts, default=0) * len(call.counts)
    if call.operation is not Operation.ALL_GATHER or stripes < len(servers) or not even:
        return ()
    here: dict[str, list[int]] = {}
    for server, node in enumerate(servers):
        here.setdefault(node, []).append((server - home) % len(servers))
    if not all(node and node in here for node in nodes):
        return ()
    before: Counter[str] = Counter()
    owners = []
    for node in nodes:  # the servers of a host alternate
        owners.append(here[node][before[node] % len(here[node])])
        before[node] += 1
    return tuple(owners)


def home_of(group: str, number: int, num_servers: int) -> int:
    """Return the server that performs stripe 0 of call `number` of a group, or has the mailbox of its rank `number`."""
    return (zlib.crc32(group.encode()) + number) % num_servers


def segments_of(numel: int, itemsize: int) -> Sequence[StripeSegment]:
    """Return the segments of an array that is sent between two ranks."""
    return _segments(((0, 0, numel),), itemsize, LARGE_SEGMENT_BYTES)


@lru_cache(maxsize=CACHED_UPLOADS)
def _segments(ranges: tuple[tuple[int, int, int], ...], itemsize: int, largest_bytes: int) -> tuple[StripeSegment, ...]:
    return tuple(_cut(ranges, itemsize, largest_bytes))


def _cut(ranges: Iterable[tuple[int, int, int]], itemsize: int, largest_bytes: int) -> Iterator[StripeSegment]:
    """Yield segments that alternate between partitions, so that each is sent from beginning to end of the operation."""
    left = deque(s for s in ranges if s[1] < s[2])
    small, large = SMALL_SEGMENT_BYTES // itemsize, largest_bytes // itemsize
    total, done = sum(end - begin for _, begin, end in left), 0
    while left:
        partition, begin, end = left.popleft()
        size = min(large, max(small, min(done, (total - done) // 2)))
        stop = min(begin + size, end)
        yield StripeSegment(partition, begin, stop)
        done += stop - begin
        if stop < end:
            left.append((partition, stop, end))
