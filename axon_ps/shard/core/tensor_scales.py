"""The scales of the tensors in a slice while its values change, if parameters travel as float8. Pure.

A chunk can be encoded once all values of its tensors are known, since their largest magnitude is in the scale. A tensor
lies on one server, and in any number of chunks.

Invariant: between `begin` and the last `add`, each chunk is added once and returned once. Threads share lists for this,
whose `append` and `pop` are atomic: the last thread that pops gets True.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.float8 import Float8Tensors, scale_of
from axon_ps.shard.core.chunks import Chunks
from axon_ps.types import Array


class TensorScales:
    """The scales of the tensors in one slice.

    Args:
        chunks: of the slice.
        compressor: of its unit, bound to the tensors.
    """

    def __init__(self, chunks: Chunks, compressor: Compressor) -> None:
        assert isinstance(compressor, Float8Tensors)
        self._chunks = chunks
        self._compressors = [compressor.within(begin, end) for begin, end in chunks.bounds]
        self._tensors = [[r.tensor for r in one.ranges if r.float8] for one in self._compressors]
        self._in_chunks = defaultdict[int, list[int]](list)  # by tensor
        for index, tensors in enumerate(self._tensors):
            for tensor in tensors:
                self._in_chunks[tensor].append(index)
        self.begin()

    def begin(self) -> None:
        """Forget all values, which will change."""
        self._largest: dict[int, list[int]] = {tensor: [] for tensor in self._in_chunks}  # of chunks, as bits of an f32
        self._chunks_left = {tensor: _countdown(len(chunks)) for tensor, chunks in self._in_chunks.items()}
        self._tensors_left = [_countdown(len(tensors)) for tensors in self._tensors]  # by chunk

    def add(self, first: int, last: int, values: Array) -> list[int]:
        """Record that chunks [first, last) have their new values; return the chunks that can be encoded from now on.

        Any thread may call it.

        Args:
            first: number of the first chunk.
            last: one past the last.
            values: f32[n] of the slice.
        """
        from axon_ps.kernels import float8

        ready = [index for index in range(first, last) if not self._tensors[index]]
        for index in range(first, last):
            chunk = values[self._chunks.ranges[index]]
            for r in self._compressors[index].ranges:
                if not r.float8:
                    continue
                self._largest[r.tensor].append(int(float8.largest(chunk[r.elements])))
                if self._chunks_left[r.tensor].pop():
                    ready += [other for other in self._in_chunks[r.tensor] if self._tensors_left[other].pop()]
        return ready

    def pack(self, index: int, values: Array) -> Array:
        """Compress chunk `index`, f32[c], all of whose tensors are known."""
        compressor = self._compressors[index]
        out = np.empty(compressor.compressed_bytes(values.size), np.uint8)
        compressor.pack(values, [scale_of(max(self._largest[tensor])) for tensor in self._tensors[index]], out)
        return out


def _countdown(count: int) -> list[bool]:
    """Return a list that can be popped `count` times, and gives True the last time."""
    return [True, *[False] * (count - 1)][:count]
