"""The values of a slice after an undecided step, if it commits as expected. Pure.

Note: [Speculative update]
    A worker may ask for the result of a step before the step is decided, naming the hyperparameters it expects. Each
    chunk that has every replica's gradient is then updated in a copy and encoded. Once all chunks are prepared, the
    frames of the current version are dropped, so that there is still one wire copy. They are encoded again on request.
    Compressed frames are small and stay. If the step commits as expected, the prepared frames become the new ones.
    Otherwise they are discarded.
"""

from __future__ import annotations

from axon_ps.shard.core.accumulator import Accumulator
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.digests import GRADIENT, Corruption
from axon_ps.shard.core.master import Master, Update
from axon_ps.shard.core.wire_copy import WireCopy
from axon_ps.types import Array


class SpeculativeUpdate:
    """The prepared frames of a slice.

    Args:
        chunks: of the slice.
        master: its values and moments, which stay as they are.
        wire: its wire copy.

    Attributes:
        frames: per chunk, its frame if the undecided step commits as expected; b"" if not made, empty if none is.
    """

    def __init__(self, chunks: Chunks, master: Master, wire: WireCopy) -> None:
        self.frames: list[bytes] = []
        self._chunks = chunks
        self._master = master
        self._wire = wire

    def has(self, index: int) -> bool:
        """Return True if chunk `index` is prepared."""
        return bool(self.frames) and bool(self.frames[index])

    def prepare(
        self, index: int, sums: Accumulator, update: Update, version: int, scratch: Array
    ) -> tuple[bytes, list[Corruption]]:
        """Return the frame of chunk `index` after the update; made once. Every replica must be in the chunk already.

        Args:
            index: number of the chunk.
            sums: the accumulator with the summed gradient.
            update: the expected update.
            version: the version after the update.
            scratch: from `WireCopy.scratch`.

        Returns:
            The frame; or an empty one, and the corrupt blocks.
        """
        if not self.has(index):
            elements, wire = self._chunks.ranges[index], self._wire
            as_cast = scratch[: elements.stop - elements.start] if wire.is_cast else None
            values, found = self._master.update(
                index, index + 1, sums.array, sums.digests, update, as_cast, in_place=False
            )
            if found:
                sums.spoiled = sums.spoiled or any(c.array == GRADIENT for c in found)
                return b"", found
            self.frames = self.frames or [b""] * len(self._chunks.bounds)
            self.frames[index] = wire.speculative(index, version, values, scratch, as_cast)
            if all(self.frames) and not wire.compressed and wire.frames:
                wire.drop_frames()
        return self.frames[index], []

    def discard(self) -> None:
        """Discard the frames: the step ended in another way, or its gradient is gone."""
        self.frames = []
