"""The sum of a gradient for one slice: its memory, and the replicas added to each chunk. Pure.

A slice has one accumulator if all replicas step together, and one per replica if they step asynchronously. The order of
additions is the engine's.

Invariant: `summed[i]` is the number of gradients added to chunk i. They are added in order: those of all replicas for
addend 0, then those for addend 1, and so on (asynchronous: those of one replica). See `shard.core.gradients`,
Note: [Addends].

A chunk that arrives out of order may be `queued`; see `shard.core.queued`.

Each chunk's digest is kept from one gradient to the next, and until the sum is applied; see `shard.core.digests`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import Broken, InvalidRequest
from axon_ps.shard.core.chunks import BLOCK_NUMEL, Chunks
from axon_ps.shard.core.digests import GRADIENT, ArrayDigests, Corruption
from axon_ps.shard.core.queued import QueuedChunks, QueueLimit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType

Allocate = Callable[[int], Array]
"""Returns f32[numel] of zeros."""


def _allocate(numel: int) -> Array:
    return np.zeros(numel, np.float32)


class Accumulator:
    """Counters and memory of one accumulator.

    Args:
        chunks: of the slice.
        precision: element type and compression of gradient chunks.
        trainable: whether there are gradients at all.
        allocate: makes the memory of the sum, f32[numel] zeros; None = ordinary memory.

    Attributes:
        summed: per chunk, gradients added so far.
        present: per chunk, whether any of these was there, and not absent.
        squares: per chunk, the sum of squares; known with the last replica of each addend.
        queued: chunks that arrived out of order.
        digests: of the sums.
        spoiled: whether corrupt data was found. If so, this attempt cannot be committed.
        rounds: whether the sum of the first addend is rounded to the dtype in which gradients travel; see
            `shard.core.slices`, Note: [Primary and backup].
    """

    def __init__(
        self, chunks: Chunks, precision: WirePrecision, *, trainable: bool, allocate: Allocate | None = None
    ) -> None:
        self._chunks = chunks
        self._allocate = allocate or _allocate
        self._count = len(chunks.bounds) if trainable else 0
        self._dtype = precision.grad
        self._compressor = precision.grad_compression
        self._array: Array | None = None
        self._frozen = bytearray()
        self.rounds = False
        self.queued = QueuedChunks()
        self.digests = ArrayDigests(chunks, GRADIENT)
        self.restart()

    @property
    def array(self) -> Array:
        """f32[slice_numel], the sum; allocated when it is first needed, and then reused."""
        if self._array is None:
            self._array = self._allocate(self._chunks.numel)
        return self._array

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._array is None else self._array.nbytes

    def restart(self) -> None:
        """Discard the sum. The memory stays allocated."""
        self.summed = [0] * self._count
        self.present = bytearray(self._count)
        self.squares = [0.0] * self._count
        self.spoiled = False
        self.queued.clear()

    def freeze(self) -> None:
        """Restart the counters once every replica was added. `array` is the sum after `fill_absent`."""
        self._frozen = self.present
        self.restart()

    def fill_absent(self, first: int, last: int) -> None:
        """Set the frozen sum to 0 in those of chunks [first, last) that had no gradient. Any thread may call it."""
        for index in range(first, last):
            if not self._frozen[index]:
                self.array[self._chunks.ranges[index]] = 0
                self.digests.record_constant(0.0, self._chunks.blocks_of(index, index + 1))

    def add(self, index: int, grad: Array | None, replicas: int) -> list[Corruption]:
        """Add the next gradient to chunk `index`.

        Args:
            index: number of the chunk.
            grad: wire[c], or u8[compressed_bytes(c)]; None when this replica has no gradient for the unit.
            replicas: number of replicas, each of which contributes to an addend.

        Returns:
            The blocks that did not hold the previous sum. If there are any, this is `spoiled` and nothing counts as
            added: the chunk stays incomplete, so its content is never used.

        Raises:
            InvalidRequest: `grad` has the wrong length, or was not written by the compressor.
        """
        if grad is not None:
            self._check_length(index, grad)
        last = (self.summed[index] + 1) % replicas == 0
        rounds = self.rounds and self.summed[index] < replicas
        if grad is None or self._compressor is not None:
            found = self.check((index,))
            if not found:
                self._add_apart(index, grad, last=last, rounds=rounds)
        else:  # the previous sum is checked in the pass that adds to it
            total, blocks = self.array[self._chunks.ranges[index]], self._chunks.blocks_of(index, index + 1)
            first, digests, how = not self.present[index], np.zeros((2, len(blocks)), np.uint64), self._dtype
            if last:
                squares = cast.accumulate_last(total, grad, how, first, digests, BLOCK_NUMEL, rounds=rounds)
                self.squares[index] = squares
            else:
                cast.accumulate(total, grad, how, first, digests, BLOCK_NUMEL)
            read, written = digests.tolist()
            found = [] if first else list(self.digests.check_digests(blocks, read))
            if not found:
                self.digests.record_digests(blocks, written)
        if found:
            self.spoiled = True
            return found
        if grad is not None:
            self.present[index] = 1
        self.summed[index] += 1
        return []

    def queue(self, index: int, order: int, grad: Array | None, limit: QueueLimit, *, borrowed: bool) -> bool:
        """Keep a gradient of chunk `index` until `add_queued`; returns False if memory for it is lacking.

        Args:
            index: number of the chunk.
            order: number of gradients to be added before this one.
            grad: as for `add`.
            limit: the server's limit.
            borrowed: `grad` is in the sender's memory.

        Raises:
            InvalidRequest: as for `add`.
        """
        if grad is not None:
            self._check_length(index, grad)
            if self._compressor is not None:
                begin, end = self._chunks.bounds[index]
                self._compressor.check(grad, end - begin)
        return self.queued.put(index, order, grad, limit, borrowed=borrowed)

    def add_queued(self, index: int, replicas: int) -> list[Corruption]:
        """Add the queued gradients of chunk `index` that are next, of `replicas` replicas; returns what `add` does."""
        while (index, order := self.summed[index]) in self.queued:
            grad, intact = self.queued.take(index, order)
            if not intact:
                self.spoiled = True
                return [Corruption(GRADIENT, self._chunks.unit, *self._chunks.bounds[index])]
            if found := self.add(index, grad, replicas):
                return found
        return []

    def _check_length(self, index: int, grad: Array) -> None:
        begin, end = self._chunks.bounds[index]
        needed = end - begin if self._compressor is None else self._compressor.compressed_bytes(end - begin)
        if grad.size != needed:
            raise InvalidRequest(
                f"a gradient chunk at element {begin} of unit {self._chunks.unit} has {grad.size} "
                f"{'elements' if self._compressor is None else 'bytes'}; it must have {needed}"
            )

    def is_rounded(self, index: int, replicas: int) -> bool:
        """Return True if a complete sum was rounded to the dtype in which gradients travel, if that is not f32."""
        return self.rounds and self.summed[index] == replicas and self._dtype is not DType.F32

    def _add_apart(self, index: int, grad: Array | None, *, last: bool, rounds: bool) -> None:
        """Add compressed data, or nothing, to memory that has been checked."""
        first, elements = not self.present[index], self._chunks.ranges[index]
        if first and grad is None:
            return
        total = self.array[elements]
        if grad is not None:
            assert self._compressor is not None
            (self._compressor.decompress if first else self._compressor.accumulate)(grad, total)
        if last:
            self.squares[index] = cast.sum_of_squares(total)
            if rounds:
                cast.round_in_place(total, self._dtype)
        if grad is not None or (last and rounds):
            self._record(index)

    def check(self, indexes: Iterable[int]) -> list[Corruption]:
        """Return the blocks of chunks that do not hold the sum. If there are any, this is `spoiled`."""
        if self._array is None:
            return []
        bits = self._array.view(np.uint32)
        with_sum = [index for index in indexes if self.present[index]]
        found = [c for i in with_sum for c in self.digests.check(bits, self._chunks.blocks_of(i, i + 1))]
        self.spoiled = self.spoiled or bool(found)
        return found

    def digest(self, index: int) -> int:
        """Return the digest of the sum of chunk `index`, if it has one."""
        return self.digests.sum_of(self._chunks.blocks_of(index, index + 1))

    def _record(self, index: int) -> None:
        self.digests.record(self.array.view(np.uint32), self._chunks.blocks_of(index, index + 1))

    def is_complete(self, index: int, count: int) -> bool:
        """Return True if chunk `index` has all `count` gradients."""
        return self.summed[index] == count > 0

    def missing(self, count: int) -> int:
        """Return the number of chunks that lack one of `count` gradients; all of them while there are no replicas."""
        return sum(summed < max(count, 1) for summed in self.summed)

    def set(self, index: int, total: Array | None, count: int, digest: int | None = None) -> None:
        """Take the sum of all gradients for chunk `index` from the primary; None = there was none.

        Args:
            index: number of the chunk.
            total: f32[c].
            count: number of gradients in the sum.
            digest: the primary's digest of it; None = not known.

        Raises:
            InvalidRequest: it has the wrong length.
            Broken: it has another digest. It does not count as taken.
        """
        elements = self._chunks.ranges[index]
        if total is not None:
            if total.size != elements.stop - elements.start:
                raise InvalidRequest(
                    f"the sum of a chunk at element {self._chunks.bounds[index][0]} of unit {self._chunks.unit} has "
                    f"{total.size} elements; it must have {elements.stop - elements.start}"
                )
            self.array[elements] = total
            self._record(index)
            if digest is not None and digest != self.digest(index):
                raise Broken(
                    f"the sum of a chunk at element {self._chunks.bounds[index][0]} of unit {self._chunks.unit} is not "
                    "what its primary has sent"
                )
            self.present[index] = 1
        self.summed[index] = count


class Accumulators(list[Accumulator]):
    """The accumulators of one slice: one, or one per replica if replicas step asynchronously. Arguments as for one.

    Only the first one has memory from `allocate`.
    """

    def __init__(
        self, chunks: Chunks, precision: WirePrecision, *, trainable: bool, allocate: Allocate | None = None
    ) -> None:
        super().__init__([Accumulator(chunks, precision, trainable=trainable, allocate=allocate)])
        self._make = partial(Accumulator, chunks, precision, trainable=trainable)
        self._rounds = False

    def set_rounds(self, *, rounds: bool) -> None:
        """Set `rounds` of each, also of those to be made."""
        self._rounds = rounds
        for each in self:
            each.rounds = rounds

    def set_count(self, count: int) -> None:
        """Hold `count` empty ones. The memory of surplus ones is freed."""
        for each in self:
            each.restart()
        del self[count:]
        self += [self._make() for _ in range(count - len(self))]
        self.set_rounds(rounds=self._rounds)

    def clear_queued(self) -> None:
        """Drop the chunks that arrived out of order."""
        for each in self:
            each.queued.clear()
