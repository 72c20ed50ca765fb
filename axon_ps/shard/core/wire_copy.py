"""The values of one slice as they travel: encoded frames, or memory that workers of this host map. Pure.

Owns: encoding and compression, and the residual of compression. Creates no shared memory: the shell hands it in.

    shape legend: n = slice_numel, c = numel of one chunk

Invariant: the tuple `frames` is replaced, never changed, so whoever has it reads one version to its end.

Note: [Compressed parameters]
    The error of compressing a trainable slice for version v goes into `residual` and is added to the values before
    those of v+1 are compressed (`compress.compressor`, Note: [Error feedback]). So each frame is within one quantum of
    the master, a worker needs nothing but the frame, and the average over versions of what workers compute with is that
    of the masters, also where a step moves a parameter by less than a quantum. The residual belongs to the frames that
    are served: it starts at zero with first values and after a restore, moves only with a commit, and is not saved. A
    frozen slice has none; its frames are made once. Frames are never dropped, since making them again would need the
    residual of before.

Note: [Mapped slices]
    Where workers of this host map the slice (`same_host.shared_copy`), its wire copy is the mapped one, and an update
    makes no frames; when somebody else asks they are made of it, and are another wire copy then. What travels as f32 is
    the master itself: the memory that workers map is the master's, and there is no copy at all.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from axon_ps.compress import cast
from axon_ps.shard.core.chunks import Chunks
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2


class MappedMemory(Protocol):
    """Memory that workers of this host map; see `same_host.shared_copy.SharedCopy`.

    Attributes:
        values: wire[n].
    """

    values: Array

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""

    def publish(self, version: int) -> None:
        """Mark `values` as those of a version."""

    def withdraw(self) -> None:
        """Mark `values` as about to change."""

    def close(self) -> None:
        """Release it; what workers have mapped stays."""


class WireCopy:
    """The one wire copy of a slice.

    Args:
        chunks: of the slice.
        precision: what frames hold.
        trainable: whether optimizer steps change the values.

    Attributes:
        frames: per chunk, its encoded message; empty when they have to be encoded first.
        mapped: the wire copy that workers of this host map; None while nobody does.
        residual: f32[n], the compression error of `frames`; None when parameters are not compressed, or frozen.
        is_cast: whether the values are cast for the wire: they travel neither as f32 nor compressed.
        compressed: whether frames are compressed.
    """

    def __init__(self, chunks: Chunks, precision: WirePrecision, *, trainable: bool) -> None:
        compression = precision.param_compression
        self.frames: tuple[bytes, ...] = ()
        self.mapped: MappedMemory | None = None
        self.residual: Array | None = None
        if compression is not None and trainable:
            self.residual = np.zeros(chunks.numel, np.float32)
        self.compressed = compression is not None
        self.is_cast = compression is None and precision.param is not DType.F32
        self._chunks = chunks
        self._dtype = precision.param
        self._compressor = compression
        self._next: list[bytes] = []

    # ------------------------------------------------------------------ frames

    def scratch(self, chunks: int = 1) -> Array:
        """A buffer in which a thread makes the frames of so many chunks: wire[chunks · chunk_numel].

        Compressed frames are made one by one, in u8[compressed_bytes(chunk_numel)].
        """
        if self._compressor is not None:
            return np.empty(self._compressor.compressed_bytes(self._chunks.chunk_numel), np.uint8)
        return np.empty(chunks * self._chunks.chunk_numel, self._dtype.numpy)

    def encode(
        self, index: int, version: int, values: Array, scratch: Array, residual: Array | None, as_cast: Array | None
    ) -> bytes:
        """The frame of chunk `index`.

        Args:
            index: which chunk.
            version: the version it is of.
            values: f32[c].
            scratch: from `scratch()`; what is compressed is compressed there.
            residual: f32[c], becomes the compression error; None where there is none.
            as_cast: wire[c], the values cast; None where they are not.
        """
        if self._compressor is None:
            return self._frame(index, version, self._dtype, values if as_cast is None else as_cast)
        payload = scratch[: self._compressor.compressed_bytes(values.size)]
        self._compressor.compress(values, payload, residual)
        return self._frame(index, version, DType.F32, payload, compressed=True)

    def encode_as(self, dtype: DType, index: int, version: int, values: Array) -> bytes:
        """The frame of chunk `index`, f32[c], in a dtype that the job does not send by itself."""
        return self._frame(index, version, dtype, cast.encoded(values, dtype))

    def encode_all(self, version: int, values: Array) -> int:
        """Make all frames, of f32[n] at a version; returns how many. Compressed ones move the residual."""
        scratch = self.scratch()
        frames: list[bytes] = []
        for index, elements in enumerate(self._chunks.ranges):
            chunk, as_cast = values[elements], None
            if self.is_cast and self.mapped is not None:
                as_cast = self.mapped.values[elements]
            elif self.is_cast:
                as_cast = scratch[: chunk.size]
                cast.encode(chunk, as_cast, self._dtype)
            frames.append(self.encode(index, version, chunk, scratch, self._residual_of(elements), as_cast))
        self.frames = tuple(frames)
        return len(frames)

    def drop_frames(self) -> None:
        """Free the frames; they are encoded again if anybody asks."""
        self.frames = ()

    def _residual_of(self, elements: slice) -> Array | None:
        return None if self.residual is None else self.residual[elements]

    def _frame(self, index: int, version: int, dtype: DType, values: Array, *, compressed: bool = False) -> bytes:
        begin, end = self._chunks.bounds[index]
        header = common_pb2.Chunk(
            version=version,
            unit=self._chunks.unit,
            offset=begin,
            numel=end - begin,
            dtype=dtype_to_proto(dtype),
            compressed=compressed,
        )
        return encode_chunk(header, values)

    # ------------------------------------------------------------------ values change

    def replace(self, version: int, values: Array) -> int:
        """Other values, f32[n], have taken the place of those before; returns how many frames were made."""
        if self.residual is not None:
            self.residual.fill(0.0)
        if self.mapped is None:
            return self.encode_all(version, values)
        if self.is_cast:
            cast.encode(values, self.mapped.values, self._dtype)
        return 0

    def withdraw(self) -> None:
        """There are no values any more: they are being replaced."""
        self.drop_frames()
        if self.mapped is not None:
            self.mapped.withdraw()

    def begin_update(self, prepared: list[bytes]) -> int:
        """The values are about to change; returns how many frames are to be made.

        Args:
            prepared: per chunk, its next frame if it was made already; may be empty.
        """
        if self.mapped is not None:
            self.mapped.withdraw()
            self._next = prepared
            return 0
        self._next = prepared or [b""] * len(self._chunks.bounds)
        return self._next.count(b"")

    def cast_target(self, first: int, last: int, scratch: Array) -> Array | None:
        """Where an update of chunks [first, last) casts the new values to, wire[m]; None where it casts none.

        Args:
            first: number of the first chunk.
            last: one past the last.
            scratch: from `scratch(last - first)`.
        """
        elements = self._chunks.run(first, last)
        if not self.is_cast or (self.mapped is None and all(self._next[first:last])):
            return None
        return scratch[: elements.stop - elements.start] if self.mapped is None else self.mapped.values[elements]

    def encode_updated(self, first: int, last: int, version: int, values: Array, scratch: Array) -> None:
        """Make the next frames of chunks [first, last). Any thread; each chunk once.

        Args:
            first: number of the first chunk.
            last: one past the last.
            version: the version they are of.
            values: f32[n], the new values.
            scratch: what `cast_target` was called with.
        """
        if self.mapped is not None or (self.residual is None and all(self._next[first:last])):
            return
        begin = self._chunks.ranges[first].start
        for index in range(first, last):
            elements = self._chunks.ranges[index]
            as_cast = scratch[elements.start - begin : elements.stop - begin] if self.is_cast else None
            residual = self._residual_of(elements)
            frame = self.encode(index, version, values[elements], scratch, residual, as_cast)
            self._next[index] = self._next[index] or frame

    def end_update(self) -> None:
        """Serve the next frames."""
        self.frames, self._next = tuple(self._next), []
