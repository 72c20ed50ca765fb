"""Where a gradient is summed for one slice: its memory, and which replicas each chunk has.

A slice has one accumulator where all replicas step together, and one per replica where they step asynchronously. The
engine decides who may add what and when; the arithmetic is the slice's.

Invariant: `summed[i]` is how many replicas have been added to chunk i, in replica order. It is bitmap and order in one:
replica r may be added exactly when `summed[i] == r` (asynchronous: when it is 0).
"""

from __future__ import annotations

import numpy as np

from axon_ps.types import Array


class Accumulator:
    """Counters and memory of one accumulator.

    Args:
        numel: elements of the slice.
        chunks: how many chunks the slice has; 0 when it is frozen.

    Attributes:
        summed: per chunk, replicas added so far.
        present: per chunk, whether any of them had a gradient.
        squares: per chunk, the sum of squares; known with the last replica.
        missing: chunks that lack a replica.
    """

    def __init__(self, numel: int, chunks: int) -> None:
        self._numel = numel
        self._chunks = chunks
        self._array: Array | None = None
        self.restart()

    @property
    def array(self) -> Array:
        """f32[n], the sum; allocated when it is first needed, and then reused."""
        if self._array is None:
            self._array = np.zeros(self._numel, np.float32)
        return self._array

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._array is None else self._array.nbytes

    def restart(self) -> None:
        """Forget what was added; the memory stays allocated."""
        self.summed = [0] * self._chunks
        self.present = bytearray(self._chunks)
        self.squares = [0.0] * self._chunks
        self.missing = self._chunks
