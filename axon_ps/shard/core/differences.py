"""Parameters as differences: the workers' state of a slice, and frames that bring it up to date. Pure.

    shape legend: n = slice_numel, c = numel of one chunk

Note: [Parameters as differences]
    Four bits are too few for a weight, and enough for what a step changes of it (SDP4Bit, Jia et al., 2024,
    https://arxiv.org/abs/2410.15526). So a frame of version v is compress(values of v - `sent`), where `sent` is what a
    worker that has the version before has. Both add what the frame decompresses to, in the same loops, so both have the
    same bits. What a frame loses is in the next difference: there is no other error feedback, and `sent` is within one
    error of the master whatever the number of steps. It is f32[n], what the residual of other compressions takes.

    A frame names the version that it is a difference against (`base`), and has a digest of what it leads to. Whoever
    has something else, or has another digest afterwards, is sent `sent` itself as f32: not the master, so that all
    workers have the same bits whatever way they got them. First values, those of a restore and those that are copied
    from another model are `sent` exactly, and frames of them are f32. A frozen slice has no `sent`: its master never
    changes otherwise.

    Memory that fails would be found by the workers, but four bits could not correct what is far off. So a digest of
    each chunk is compared before a difference is made against it, or it is sent; if it does not fit, `sent` becomes the
    master, and that chunk's frame is f32.

    A speculative frame does not move `sent`. If the step commits as expected, the frame becomes that of the commit,
    and `sent` is moved by it: the same bits as if it were made then.
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
"""What the array is called."""


class SentValues:
    """The state of a worker that has the newest version of a slice. See Note: [Parameters as differences].

    Args:
        chunks: of the slice.
        compressor: of the differences.

    Attributes:
        values: f32[n].
        version: of the values; while an update makes the next frames, of what they are differences against.
        base: the version that the newest frames are differences against; None = there are none.
        corruptions: what was found not to hold what was written, and was put right; any thread adds to it.
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
        """Other values, f32[n], have taken the place of those before."""
        for index, elements in enumerate(self._chunks.ranges):
            self.put(index, values[elements])
        self.begin(version, None)

    def put(self, index: int, values: Array) -> None:
        """Other values, f32[c], have taken the place of those of chunk `index`."""
        sent = self.values[self._chunks.ranges[index]]
        np.copyto(sent, values)
        self._digests[index] = _digest(sent)

    def record(self) -> None:
        """Take what the values hold as what was written. Any thread, while nothing else becomes of them."""
        self._digests = [_digest(self.values[elements]) for elements in self._chunks.ranges]

    def copied(self, version: int, frames: Sequence[bytes]) -> None:
        """The values have come from another holder, and were recorded; these are its newest frames."""
        headers = [decode_chunk(frame)[0] for frame in frames]
        self._digests = [h.digest for h in headers] or self._digests
        self.begin(version, next((h.base for h in headers if h.HasField("base")), None))

    def begin(self, version: int, base: int | None) -> None:
        """The values are those of a version, and the newest frames are differences against `base`."""
        self.version, self.base = version, base

    def frame(self, index: int, version: int, values: Array, scratch: Array) -> bytes:
        """The frame of chunk `index`, which `sent` is moved by. Any thread; each chunk once.

        Args:
            index: which chunk.
            version: the version it leads to.
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
        """The same frame as `frame`; `sent` stays as it is."""
        sent = self.values[self._chunks.ranges[index]]
        after, payload = self._compressed(values, sent, scratch)
        np.copyto(after, sent)
        self._compressor.accumulate(payload, after)
        return self._frame(index, version, _digest(after), payload)

    def commit(self, index: int, version: int, values: Array, frame: bytes) -> bytes:
        """Move `sent` by a frame that was made speculatively. Any thread; each chunk once.

        Args:
            index: which chunk.
            version: the version it leads to.
            values: f32[c], the master's.
            frame: that of `speculative_frame`.

        Returns:
            The frame to serve: that one, unless memory has failed.
        """
        if not self.check(index, values):
            return full_frame(self._chunks, index, index + 1, version, self.values, absent=False)
        header, payload = decode_chunk(frame)
        self._compressor.accumulate(np.frombuffer(payload, np.uint8), self.values[self._chunks.ranges[index]])
        self._digests[index] = header.digest
        return frame

    def check(self, index: int, values: Array) -> bool:
        """Whether chunk `index` holds what was written to it; if not, it becomes the master's values, f32[c]."""
        sent = self.values[self._chunks.ranges[index]]
        if _digest(sent) == self._digests[index]:
            return True
        self.put(index, values)
        self.corruptions.append(Corruption(SENT, self._chunks.unit, *self._chunks.bounds[index]))
        return False

    def _compressed(self, values: Array, sent: Array, scratch: Array) -> tuple[Array, Array]:
        """The difference f32[c] and what it is compressed to, both in `scratch`."""
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
    """u8[...]: room for the difference of a chunk and what it is compressed to."""
    return np.empty(4 * chunk_numel + compressor.compressed_bytes(chunk_numel), np.uint8)


def full_frame(chunks: Chunks, first: int, last: int, version: int, values: Array, *, absent: bool) -> bytes:
    """A message with the values of chunks [first, last) as f32, or one that says that the caller has them.

    Args:
        chunks: of the slice.
        first: number of the first chunk.
        last: one past the last.
        version: the version that last changed them.
        values: f32[n], of the slice.
        absent: whether the caller has them.
    """
    elements = chunks.run(first, last)
    header = chunks.header(first, last, version, DType.F32)
    header.absent, header.digest = absent, digest(values.view(np.uint32), elements.start, elements.stop)
    return encode_chunk(header, None if absent else values[elements])
