"""Parameters as differences: the workers' values of a slice, and frames that update them. Pure.

    shape legend: n = slice_numel, c = numel of one chunk

Note: [Parameters as differences]
    Four bits are too few for a weight, and enough for its change in a step (SDP4Bit, Jia et al., 2024,
    https://arxiv.org/abs/2410.15526). So a frame of version v is compress(values of v - `sent`), where `sent` are the
    values that a worker has at the previous version. Server and worker add the decompressed frame in the same loops, so
    both have the same bits. The error of a frame is in the next difference. No other error feedback is needed, and
    `sent` differs from the master by the error of the last frame only. It is f32[n], as large as the residual of other
    compressions.

    A frame names the version that it is a difference against (`base`), and has a digest of the resulting values. A
    worker with another base, or another digest afterwards, is sent `sent` itself as f32. The master is not sent, so
    that all workers have the same bits. First values, restored values and values copied from another model are `sent`
    exactly, and their frames are f32. A frozen slice has no `sent`, since its master changes in no other way.

    Workers would detect failing memory, but four bits could not correct a large error. So a digest of each chunk of
    `sent` is compared before the chunk is changed or sent. If it does not match, the chunk is set to the master's
    values, and its frame is f32.

    A speculative frame does not change `sent`. If the step commits as expected, the frame becomes that of the commit
    and is added to `sent`. The bits are the same as if it were made then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.kernels.digest import digest
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.digests import Corruption
from axon_ps.types import Array, DType
from axon_ps.wire.frames import decode_chunk, encode_chunk

SENT = "sent"
"""The name of the array."""


class SentValues:
    """The values of a worker that has the newest version of a slice. See Note: [Parameters as differences].

    Args:
        chunks: of the slice.
        compressor: of the differences.

    Attributes:
        values: f32[n].
        version: version of the values; during an update, the version that the next frames are differences against.
        base: the version that the newest frames are differences against; None = they are not differences.
        corruptions: the corrupt chunks that were found and repaired. Any thread adds to it.
    """

    def __init__(self, chunks: Chunks, compressor: Compressor) -> None:
        self.values: Array = np.zeros(chunks.numel, np.float32)
        self.version = 0
        self.base: int | None = None
        self._chunks = chunks
        self._compressor = compressor
        self._digests = [0] * len(chunks.bounds)
        self.corruptions: list[Corruption] = []

    def replace(self, version: int, values: Array) -> None:
        """Replace all values by others, f32[n]."""
        for index, elements in enumerate(self._chunks.ranges):
            self.put(index, values[elements])
        self.begin(version, None)

    def put(self, index: int, values: Array) -> None:
        """Replace the values of chunk `index` by others, f32[c]."""
        sent = self.values[self._chunks.ranges[index]]
        np.copyto(sent, values)
        self._digests[index] = _digest(sent)

    def record(self) -> None:
        """Compute the digests of the present values. Any thread may call it while nothing else changes them."""
        self._digests = [_digest(self.values[elements]) for elements in self._chunks.ranges]

    def copied(self, version: int, frames: Sequence[bytes]) -> None:
        """Take another holder's newest frames, once its values are here and recorded."""
        headers = [decode_chunk(frame)[0] for frame in frames]
        self._digests = [h.digest for h in headers] or self._digests
        self.begin(version, next((h.base for h in headers if h.HasField("base")), None))

    def begin(self, version: int, base: int | None) -> None:
        """Set the version of the values, and the base of the newest frames."""
        self.version, self.base = version, base

    def frame(self, index: int, version: int, values: Array, scratch: Array) -> bytes:
        """Make the frame of chunk `index` and add it to `sent`. Any thread may call it, once for each chunk.

        Args:
            index: number of the chunk.
            version: the version of the frame.
            values: f32[c], the master's.
            scratch: from `difference_scratch`.
        """
        sent = self.values[self._chunks.ranges[index]]
        if not self.check(index, values):
            return full_frame(self._chunks, index, index + 1, version, self.values, absent=False)
        _, payload = self._compressed(values, sent, scratch)
        self._compressor.accumulate(payload, sent)
        self._digests[index] = _digest(sent)
        return self._frame(index, version, self._digests[index], payload)

    def speculative_frame(self, index: int, version: int, values: Array, scratch: Array) -> bytes:
        """Make the same frame as `frame`. `sent` stays as it is."""
        sent = self.values[self._chunks.ranges[index]]
        after, payload = self._compressed(values, sent, scratch)
        np.copyto(after, sent)
        self._compressor.accumulate(payload, after)
        return self._frame(index, version, _digest(after), payload)

    def commit(self, index: int, version: int, values: Array, frame: bytes) -> bytes:
        """Add a frame that was made speculatively to `sent`. Any thread may call it, once for each chunk.

        Args:
            index: number of the chunk.
            version: the version of the frame.
            values: f32[c], the master's.
            frame: that of `speculative_frame`.

        Returns:
            The frame to serve: the given one, unless memory has failed.
        """
        if not self.check(index, values):
            return full_frame(self._chunks, index, index + 1, version, self.values, absent=False)
        header, payload = decode_chunk(frame)
        self._compressor.accumulate(np.frombuffer(payload, np.uint8), self.values[self._chunks.ranges[index]])
        self._digests[index] = header.digest
        return frame

    def check(self, index: int, values: Array) -> bool:
        """Return True if chunk `index` is intact; else set it to the master's values, f32[c]."""
        sent = self.values[self._chunks.ranges[index]]
        if _digest(sent) == self._digests[index]:
            return True
        self.put(index, values)
        self.corruptions.append(Corruption(SENT, self._chunks.unit, *self._chunks.bounds[index]))
        return False

    def _compressed(self, values: Array, sent: Array, scratch: Array) -> tuple[Array, Array]:
        """Return the difference f32[c] and its compressed form, both in `scratch`."""
        difference = scratch[: 4 * values.size].view(np.float32)
        begin = 4 * self._chunks.chunk_numel
        payload = scratch[begin : begin + self._compressor.compressed_bytes(values.size)]
        np.subtract(values, sent, out=difference)
        self._compressor.compress(difference, payload)
        return difference, payload

    def _frame(self, index: int, version: int, digest_after: int, payload: Array) -> bytes:
        header = self._chunks.header(index, index + 1, version, DType.F32)
        header.compressed, header.base, header.digest = True, self.version, digest_after
        return encode_chunk(header, payload)


def _digest(values: Array) -> int:
    return digest(values.view(np.uint32), 0, values.size)


def difference_scratch(chunk_numel: int, compressor: Compressor) -> Array:
    """Return a buffer, u8[...], for the difference of a chunk and its compressed form."""
    return np.empty(4 * chunk_numel + compressor.compressed_bytes(chunk_numel), np.uint8)


def full_frame(chunks: Chunks, first: int, last: int, version: int, values: Array, *, absent: bool) -> bytes:
    """Return a message with the values of chunks [first, last) as f32, or without values if the caller has them.

    Args:
        chunks: of the slice.
        first: number of the first chunk.
        last: one past the last.
        version: the version that last changed them.
        values: f32[n], of the slice.
        absent: whether the caller has the values already.
    """
    elements = chunks.run(first, last)
    header = chunks.header(first, last, version, DType.F32)
    header.absent, header.digest = absent, digest(values.view(np.uint32), elements.start, elements.stop)
    return encode_chunk(header, None if absent else values[elements])
