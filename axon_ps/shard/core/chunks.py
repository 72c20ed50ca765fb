"""The chunks of one slice: where each begins in the unit and in the slice's arrays. Pure.

Each message with values carries one chunk. A chunk is cut into blocks, which are the ranges checked for changed bits.
"""

from __future__ import annotations

from itertools import accumulate

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.plan import Slice
from axon_ps.types import DType
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.v1 import common_pb2

BLOCK_NUMEL = 1 << 17
"""Most elements of a block, a multiple of `kernels.rounding.TILE_NUMEL`.

If an optimizer does not compute digests in its own pass, a block stays in a processor's cache between two passes.
"""


class Chunks:
    """A slice's range, cut into chunks.

    Args:
        s: the slice, from the plan.
        chunk_numel: elements of a chunk. The last may have fewer.

    Attributes:
        unit: the slice's unit.
        begin: its first element, counted from the unit's start.
        end: one past its last element.
        bounds: per chunk, its (begin, end) in the unit.
        ranges: per chunk, its range in arrays of the slice.
        blocks: per block, its range in arrays of the slice.
    """

    def __init__(self, s: Slice, chunk_numel: int) -> None:
        self.unit, self.begin, self.end, self.chunk_numel = s.unit, s.begin, s.end, chunk_numel
        self.bounds = tuple(s.chunks(chunk_numel))
        self.ranges = tuple(slice(begin - s.begin, end - s.begin) for begin, end in self.bounds)
        cuts = [range(r.start, r.stop, BLOCK_NUMEL) for r in self.ranges]
        self.blocks = tuple(
            slice(begin, min(begin + BLOCK_NUMEL, r.stop))
            for r, cut in zip(self.ranges, cuts, strict=True)
            for begin in cut
        )
        self._first_blocks = (0, *accumulate(map(len, cuts)))

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return self.end - self.begin

    def run(self, first: int, last: int) -> slice:
        """Return the range of chunks [first, last) in arrays of the slice."""
        return slice(self.ranges[first].start, self.ranges[last - 1].stop)

    def header(self, first: int, last: int, version: int, dtype: DType) -> common_pb2.Chunk:
        """Return the header of a message with chunks [first, last) at a version."""
        begin, end = self.bounds[first][0], self.bounds[last - 1][1]
        return common_pb2.Chunk(
            version=version, unit=self.unit, offset=begin, numel=end - begin, dtype=dtype_to_proto(dtype)
        )

    def blocks_of(self, first: int, last: int) -> range:
        """Return the numbers of the blocks of chunks [first, last)."""
        return range(self._first_blocks[first], self._first_blocks[last])

    def index_of(self, offset: int) -> int:
        """Return the number of the chunk that begins at `offset` of the unit.

        Raises:
            InvalidRequest: no chunk of this slice begins there.
        """
        index, rest = divmod(offset - self.begin, self.chunk_numel)
        if rest or not 0 <= index < len(self.bounds):
            raise InvalidRequest(
                f"no chunk of unit {self.unit} begins at element {offset} here: this server owns elements {self.begin} "
                f"to {self.end}, in chunks of {self.chunk_numel}"
            )
        return index

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return the numbers (first, one past the last) of the chunks that cover elements [begin, end) of the unit.

        Raises:
            InvalidRequest: the range is empty or does not begin and end where chunks do.
        """
        first = self.index_of(begin)
        last = len(self.bounds) if end == self.end else self.index_of(end)
        if last <= first:
            raise InvalidRequest(f"elements {begin} to {end} of unit {self.unit} are an empty range")
        return first, last
