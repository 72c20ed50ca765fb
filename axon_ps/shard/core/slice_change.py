"""A change of a slice's values that is under way: a step's update, or a copy of another model's values. Pure.

Invariant: while it is under way, only it touches the values and the accumulator that is applied, each chunk from one
thread. Other accumulators may be added to meanwhile.
"""

from __future__ import annotations

from typing import Protocol

from axon_ps.shard.core.accumulator import Accumulator
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.digests import PARAM, Corruption
from axon_ps.shard.core.master import Master, Update
from axon_ps.shard.core.wire_copy import WireCopy
from axon_ps.types import Array


class CopySource(Protocol):
    """A slice of another model that is copied. `shard.core.slices.OwnedSlice` is one.

    Attributes:
        master: its values.
        corrupt: whether they are lost.
    """

    master: Master
    corrupt: bool


class SliceChange:
    """One change: `apply` or `copy` of every chunk, in any order, and `end`.

    Args:
        chunks: of the slice.
        master: its values and moments.
        wire: its wire copy; None if none is made of the new values.
        sums: the accumulator of the step. An update has frozen it.
        update: the optimizer's work; None = the values of another model are copied.
        version: the version that this leads to.

    Attributes:
        sums, update, version: as given.
        corruptions: corrupt blocks that were found. Any thread adds to it.
    """

    def __init__(
        self,
        chunks: Chunks,
        master: Master,
        wire: WireCopy | None,
        sums: Accumulator,
        update: Update | None,
        version: int,
    ) -> None:
        self.sums, self.update, self.version = sums, update, version
        self.corruptions: list[Corruption] = []
        self._chunks = chunks
        self._master = master
        self._wire = wire
        if update is not None:
            master.begin_update(update)

    def apply(self, first: int, last: int, scratch: Array) -> None:
        """Update chunks [first, last) in one pass, and make their frames. Any thread may call it, once for each chunk.

        Args:
            first: number of the first chunk.
            last: one past the last.
            scratch: from `WireCopy.scratch(last - first)`, of the calling thread.
        """
        assert self.update is not None
        out, sums = self._cast_target(first, last, scratch), self.sums
        sums.fill_absent(first, last)
        _, found = self._master.update(first, last, sums.array, sums.digests, self.update, out)
        self.corruptions += found
        self._encode(first, last, scratch)

    def copy(self, first: int, last: int, source: CopySource, weight: float, scratch: Array) -> None:
        """Set chunks [first, last) to (1 - weight) * their values + weight * those of `source`. As `apply` otherwise.

        Args:
            first: number of the first chunk.
            last: one past the last.
            source: the same elements of another model, which do not change meanwhile.
            weight: above 0, at most 1.
            scratch: from `WireCopy.scratch(last - first)`, of the calling thread.
        """
        out = self._cast_target(first, last, scratch)
        self.corruptions += self._master.average(first, last, source.master, weight, out)
        if source.corrupt:
            begin, end = self._chunks.bounds[first][0], self._chunks.bounds[last - 1][1]
            self.corruptions.append(Corruption(PARAM, self._chunks.unit, begin, end))
        self._encode(first, last, scratch)

    def end(self) -> None:
        """Count the update, after every chunk has been changed."""
        if self.update is not None:
            self._master.end_update(self.update)

    def _cast_target(self, first: int, last: int, scratch: Array) -> Array | None:
        return None if self._wire is None else self._wire.cast_target(first, last, scratch)

    def _encode(self, first: int, last: int, scratch: Array) -> None:
        if self._wire is not None:
            self._wire.encode_updated(first, last, self.version, self._master.values, scratch)
