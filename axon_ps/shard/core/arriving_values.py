"""Values of a slice that arrive chunk by chunk: first values, or others that replace them. Pure."""

from __future__ import annotations

from axon_ps.errors import InvalidRequest
from axon_ps.shard.core.chunks import Chunks
from axon_ps.types import Array


class ArrivingValues:
    """The arrival of a slice's values.

    Args:
        chunks: of the slice.

    Attributes:
        lacking: chunks that lack values; not 0 before `end`, so that none is served before all of them are prepared.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.begin()

    def begin(self) -> None:
        """Expect all values: there are none, or they are being replaced."""
        self.lacking = len(self._chunks.bounds)
        self._stored = bytearray(self.lacking)

    @property
    def complete(self) -> bool:
        """True once `store` has had every chunk."""
        return all(self._stored)

    def store(self, index: int, values: Array, out: Array) -> None:
        """Take the values of chunk `index`: f32[c].

        Args:
            index: number of the chunk.
            values: f32[c].
            out: f32[slice_numel], gets them.

        Raises:
            InvalidRequest: they have the wrong length.
        """
        chunk = out[self._chunks.ranges[index]]
        if values.size != chunk.size:
            raise InvalidRequest(
                f"first values at element {self._chunks.bounds[index][0]} of unit {self._chunks.unit} have "
                f"{values.size} elements; they must have {chunk.size}"
            )
        chunk[:] = values
        if not self._stored[index]:
            self._stored[index] = 1
            self.lacking = max(1, self.lacking - 1)

    def end(self) -> None:
        """Serve the values."""
        self.lacking = 0
