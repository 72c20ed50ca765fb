"""Digests of the arrays of a slice, one per block, to find corrupt blocks. Pure.

Note: [Memory that fails]
    A bit of a server's memory may change by itself. So each block's digest is stored when the block is written, and
    compared when it is read again. That covers values and moments from one update to the next, and a summed gradient
    from one replica to the next and until it is applied. Another copy is not needed: a mismatch identifies the server,
    array and block. Corrupt data is never served, applied to another copy, copied, or written to a checkpoint. The
    server reports it (`Corrupted`), and gets the slice again from another holder. Copies are also compared with each
    other (`Ready.digests`), which finds differences in arithmetic.
    A loop that updates or adds computes the digests of what it reads and writes itself (`kernels.digest`), so that a
    bit cannot change between the digest and the use. A corrupt block is then found after its use: the result is not
    served, and a sum that contains it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from axon_ps.kernels.digest import digest
from axon_ps.shard.core.chunks import Chunks
from axon_ps.types import Array

PARAM, GRADIENT = "param", "gradient"
"""The names of the values and of the summed gradient, beside the moments' names."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Corruption:
    """A block does not hold what was written to it.

    Attributes:
        array: "param", "gradient", "sent" or the name of a moment.
        unit: the unit.
        begin: its first element, counted from the unit's start.
        end: one past its last element.
    """

    array: str
    unit: int
    begin: int
    end: int


class ArrayDigests:
    """The digests of one array.

    Args:
        chunks: of its slice.
        array: its name.
    """

    def __init__(self, chunks: Chunks, array: str) -> None:
        self._chunks = chunks
        self._array = array
        self._recorded = np.zeros(len(chunks.blocks), np.uint64)

    def record(self, bits: Array, blocks: Iterable[int]) -> None:
        """Compute and store the digests of blocks. Any thread may call it, each with other blocks.

        Args:
            bits: u32[slice_numel], the array as integers.
            blocks: by number.
        """
        for block in blocks:
            self.record_digests((block,), (self._digest(bits, block),))

    def record_digests(self, blocks: Iterable[int], written: Iterable[int]) -> None:
        """Store given digests, one for each block. Any thread may call it, as `record`."""
        for block, each in zip(blocks, written, strict=True):
            self._recorded[block] = each

    def record_constant(self, value: float, blocks: Iterable[int]) -> None:
        """Store the digests of blocks that were filled with one f32."""
        one = int(np.float32(value).view(np.uint32))
        for block in blocks:
            at = self._chunks.blocks[block]
            self.record_digests((block,), (one * (at.stop - at.start),))

    def check(self, bits: Array, blocks: Iterable[int]) -> Iterator[Corruption]:
        """Yield the blocks that do not hold what was written. Its arguments are those of `record`."""
        for block in blocks:
            yield from self.check_digests((block,), (self._digest(bits, block),))

    def check_digests(self, blocks: Iterable[int], read: Iterable[int]) -> Iterator[Corruption]:
        """Yield the blocks whose digest in `read`, one for each block, is not the stored one."""
        for block, each in zip(blocks, read, strict=True):
            if each != int(self._recorded[block]):
                at, begin = self._chunks.blocks[block], self._chunks.begin
                yield Corruption(self._array, self._chunks.unit, begin + at.start, begin + at.stop)

    def _digest(self, bits: Array, block: int) -> int:
        at = self._chunks.blocks[block]
        return digest(bits, at.start, at.stop)

    def sum_of(self, blocks: range) -> int:
        """Return the digest of neighbouring blocks."""
        return int(self._recorded[blocks.start : blocks.stop].sum(dtype=np.uint64))

    @property
    def total(self) -> int:
        """The digest of the full array."""
        return self.sum_of(range(len(self._recorded)))


class SliceDigests:
    """The digests of a slice's values and moments.

    Args:
        chunks: of the slice.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._of: dict[str, ArrayDigests] = {}

    def __getitem__(self, name: str) -> ArrayDigests:
        return self._of[name]

    def forget(self, names: Iterable[str]) -> None:
        """Drop the digests of some arrays."""
        for name in list(names):
            self._of.pop(name, None)

    def record(self, arrays: Mapping[str, Array]) -> None:
        """Compute and store the digests of full arrays, f32[slice_numel] each, by name."""
        for name, array in arrays.items():
            self._of[name] = ArrayDigests(self._chunks, name)
            self._of[name].record(array.view(np.uint32), range(len(self._chunks.blocks)))

    def record_constant(self, name: str, value: float) -> None:
        """Store the digests of an array that was filled with `value`."""
        self._of[name] = ArrayDigests(self._chunks, name)
        self._of[name].record_constant(value, range(len(self._chunks.blocks)))

    def check(self, arrays: Mapping[str, Array], blocks: Iterable[int] | None = None) -> list[Corruption]:
        """Return the blocks, of arrays f32[slice_numel], that do not hold what was written; None = check all blocks."""
        blocks = range(len(self._chunks.blocks)) if blocks is None else blocks
        known = [(self._of[name], array) for name, array in arrays.items() if name in self._of]
        return [c for of, array in known for c in of.check(array.view(np.uint32), blocks)]

    @property
    def total(self) -> int | None:
        """One digest of all arrays, equal for equal values and moments; None while there are no digests."""
        if not self._of:
            return None
        return sum((2 * i + 1) * of.total for i, (_, of) in enumerate(sorted(self._of.items()))) & _MASK
