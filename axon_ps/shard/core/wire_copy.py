"""The values of one slice in their form on the wire: encoded frames, or memory that workers of this host map. Pure.

Owns: encoding and compression, and the residual of compression. Differences are in `shard.core.differences`. Shared
memory is created by the shell and passed in.

    shape legend: n = slice_numel, c = numel of one chunk

Invariant: the tuple `frames` is replaced, never changed, so its reader sees one version only.

Note: [Compressed parameters]
    The error of compressing a trainable slice for version v goes into `residual`. It is added to the values before
    those of v+1 are compressed (`compress.compressor`, Note: [Error feedback]). So each frame is within one quantum of
    the master, and a worker needs nothing but the frame. Averaged over versions, the workers' values equal the masters,
    even if a step changes a parameter by less than a quantum. The residual belongs to the frames that are served: it
    starts at zero with first values and after a restore, changes only with a commit, and is not saved. A frozen slice
    has no residual. Its frames are made once. Frames stay as long as the values, since making them again would need the
    previous residual.

    A compressor `by_tensor` has no residual. A frame is made once all values of its tensors are updated.

    For a compressor of differences (`Compressor.differences`), `sent` replaces the residual, and its frames update only
    workers that have the previous version: `shard.core.differences`, Note: [Parameters as differences].

Note: [Mapped slices]
    If workers of this host map the slice (`same_host.shared_copy`), its wire copy is the mapped memory, and an update
    makes no frames. Frames are made from it when another process asks for them. They are a second wire copy then. If
    parameters are f32 on the wire, workers map the master's own memory, and there is no wire copy at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from axon_ps.compress import cast
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.differences import SENT, SentValues, difference_scratch, full_frame
from axon_ps.shard.core.tensor_scales import TensorScales
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType
from axon_ps.wire.frames import encode_chunk


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
        """Release it. The mappings of workers stay."""


class WireCopy:
    """The one wire copy of a slice.

    Args:
        chunks: of the slice.
        precision: element type and compression of the unit's frames.
        trainable: whether optimizer steps change the values.

    Attributes:
        frames: per chunk, its encoded message; empty if they have to be encoded first.
        mapped: the wire copy that workers of this host map; None if they do not map it.
        residual: f32[n], the compression error of `frames`; None if parameters are not compressed, or frozen, or sent
            as differences, or compressed by tensor.
        sent: the values of a worker with the newest frames; None unless parameters are sent as differences and
            trainable.
        differs: whether parameters are sent as differences. Then there may be no frames, and `full_frame` makes some.
        is_cast: whether the values are cast for the wire, that is, neither sent as f32 nor compressed.
        compressed: whether frames are compressed.
    """

    def __init__(self, chunks: Chunks, precision: WirePrecision, *, trainable: bool) -> None:
        compression = precision.param_compression
        self.frames: tuple[bytes, ...] = ()
        self.mapped: MappedMemory | None = None
        self.residual: Array | None = None
        self.sent: SentValues | None = None
        self.compressed = compression is not None
        self.differs = compression is not None and compression.differences
        self._scales: TensorScales | None = None
        if compression is not None and compression.by_tensor:
            self._scales = TensorScales(chunks, compression)
        elif compression is not None and trainable:
            if self.differs:
                self.sent = SentValues(chunks, compression)
            else:
                self.residual = np.zeros(chunks.numel, np.float32)
        self.is_cast = compression is None and precision.param is not DType.F32
        self._chunks = chunks
        self._dtype = precision.param
        self._compressor = compression
        self._next: list[bytes] = []
        self._replacing = False

    @property
    def feedback(self) -> dict[str, Array]:
        """The state of compression from one version to the next, f32[n], by name: at most one array."""
        if self.sent is not None:
            return {SENT: self.sent.values}
        return {} if self.residual is None else {"residual": self.residual}

    # ------------------------------------------------------------------ frames

    def scratch(self, chunks: int = 1) -> Array:
        """Return a buffer in which a thread makes the frames of `chunks` chunks: wire[chunks · chunk_numel].

        Compressed frames are made one by one, in u8[compressed_bytes(chunk_numel)]. Differences need more.
        """
        if self._compressor is not None and self.differs:
            return difference_scratch(self._chunks.chunk_numel, self._compressor)
        if self._scales is not None:
            return np.empty(0, np.uint8)
        if self._compressor is not None:
            return np.empty(self._compressor.compressed_bytes(self._chunks.chunk_numel), np.uint8)
        return np.empty(chunks * self._chunks.chunk_numel, self._dtype.numpy)

    def encode(
        self, index: int, version: int, values: Array, scratch: Array, residual: Array | None, as_cast: Array | None
    ) -> bytes:
        """Return the frame of chunk `index`.

        Args:
            index: number of the chunk.
            version: version of the frame.
            values: f32[c].
            scratch: from `scratch()`; the buffer for compressed data.
            residual: f32[c], becomes the compression error; None if there is none.
            as_cast: wire[c], the values cast; None if they are not cast.
        """
        if self._compressor is None:
            return self._frame(index, version, self._dtype, values if as_cast is None else as_cast)
        if self._scales is not None:
            return self._frame(index, version, DType.F32, self._scales.pack(index, values), compressed=True)
        payload = scratch[: self._compressor.compressed_bytes(values.size)]
        self._compressor.compress(values, payload, residual)
        return self._frame(index, version, DType.F32, payload, compressed=True)

    def speculative(self, index: int, version: int, values: Array, scratch: Array, as_cast: Array | None) -> bytes:
        """Encode chunk `index` as `encode` does, without changing the state of the compression."""
        if self.sent is not None:
            return self.sent.speculative_frame(index, version, values, scratch)
        residual = None if self.residual is None else self.residual[self._chunks.ranges[index]].copy()
        return self.encode(index, version, values, scratch, residual, as_cast)

    def frames_since(self, version: int | None, first: int, last: int) -> tuple[bytes, ...]:
        """Return the frames of chunks [first, last) if they are differences against `version`; else empty."""
        sent = self.sent
        return self.frames[first:last] if sent is not None and version is not None and sent.base == version else ()

    def full_frame(self, first: int, last: int, version: int, values: Array, *, absent: bool = False) -> bytes:
        """Return a message with all values of chunks [first, last), if parameters are sent as differences.

        Args:
            first: number of the first chunk.
            last: one past the last.
            version: the version that last changed the values.
            values: f32[n], the master's. The message has `sent` instead if there is one.
            absent: whether the caller has the values.
        """
        if self.sent is not None:
            for index in range(first, last):
                self.sent.check(index, values[self._chunks.ranges[index]])
            values = self.sent.values
        return full_frame(self._chunks, first, last, version, values, absent=absent)

    def encode_as(self, dtype: DType, index: int, version: int, values: Array) -> bytes:
        """Encode chunk `index`, f32[c], in a dtype that is not the job's."""
        return self._frame(index, version, dtype, cast.encoded(values, dtype))

    def encode_all(self, version: int, values: Array) -> int:
        """Make all frames, of f32[n] at a version; returns their number. Compressed frames change the residual."""
        if self._scales is not None:
            self._scales.begin()
            self._scales.add(0, len(self._chunks.bounds), values)
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
        """Free the frames. They are encoded again on request."""
        self.frames = ()

    def _residual_of(self, elements: slice) -> Array | None:
        return None if self.residual is None else self.residual[elements]

    def _frame(self, index: int, version: int, dtype: DType, values: Array, *, compressed: bool = False) -> bytes:
        header = self._chunks.header(index, index + 1, version, dtype)
        header.compressed = compressed
        return encode_chunk(header, values)

    # ------------------------------------------------------------------ values change

    def replace(self, version: int, values: Array) -> int:
        """Replace all values by others, f32[n]; returns the number of frames made."""
        if self.sent is not None:
            self.sent.replace(version, values)
        if self.differs:
            self.drop_frames()
            return 0
        if self.residual is not None:
            self.residual.fill(0.0)
        if self.mapped is None:
            return self.encode_all(version, values)
        if self.is_cast:
            cast.encode(values, self.mapped.values, self._dtype)
        return 0

    def withdraw(self) -> None:
        """Withdraw the values, which are being replaced."""
        self.drop_frames()
        if self.mapped is not None:
            self.mapped.withdraw()

    def copied(self, version: int, frames: Sequence[bytes]) -> None:
        """Take the frames of another holder at a version. Its `feedback` was copied before."""
        self.frames = tuple(frames)
        if self.sent is not None:
            self.sent.copied(version, frames)

    def begin_update(self, prepared: list[bytes], *, replacing: bool) -> int:
        """Prepare a change of the values; returns the number of frames to be made.

        Args:
            prepared: per chunk, its next frame if it was made already; may be empty.
            replacing: whether the new values are unrelated to the old ones, so that they are not sent as differences.
        """
        self._replacing = replacing and self.differs
        if self._replacing:
            return 0
        if self.mapped is not None:
            self.mapped.withdraw()
            self._next = prepared
            return 0
        if self._scales is not None:
            self._scales.begin()
        self._next = prepared or [b""] * len(self._chunks.bounds)
        return self._next.count(b"")

    def cast_target(self, first: int, last: int, scratch: Array) -> Array | None:
        """Return the array, wire[m], for the cast values of an update of chunks [first, last); None if it makes none.

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
        """Make the next frames of chunks [first, last), or of those whose tensors are complete with them.

        Any thread may call it, once for each chunk.

        Args:
            first: number of the first chunk.
            last: one past the last.
            version: version of the frames.
            values: f32[n], the new values.
            scratch: the buffer that `cast_target` was called with.
        """
        if self.differs:
            self._add_differences(first, last, version, values, scratch)
            return
        if self.mapped is not None or (self.residual is None and all(self._next[first:last])):
            return
        if self._scales is not None:
            for index in self._scales.add(first, last, values):
                self._next[index] = self.encode(index, version, values[self._chunks.ranges[index]], scratch, None, None)
            return
        begin = self._chunks.ranges[first].start
        for index in range(first, last):
            elements = self._chunks.ranges[index]
            as_cast = scratch[elements.start - begin : elements.stop - begin] if self.is_cast else None
            residual = self._residual_of(elements)
            frame = self.encode(index, version, values[elements], scratch, residual, as_cast)
            self._next[index] = self._next[index] or frame

    def _add_differences(self, first: int, last: int, version: int, values: Array, scratch: Array) -> None:
        """Do as `encode_updated` for parameters sent as differences."""
        if self.sent is None:
            return
        for index in range(first, last):
            chunk = values[self._chunks.ranges[index]]
            if self._replacing:
                self.sent.put(index, chunk)
            elif prepared := self._next[index]:
                self._next[index] = self.sent.commit(index, version, chunk, prepared)
            else:
                self._next[index] = self.sent.frame(index, version, chunk, scratch)

    def end_update(self, version: int) -> None:
        """Serve the next frames, which are of `version`."""
        self.frames, self._next = tuple(self._next), []
        if self.sent is not None:
            self.sent.begin(version, None if self._replacing else self.sent.version)
