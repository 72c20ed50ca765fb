"""`CompressedHook`: gradients are sent compressed (only the largest of them, say), and are summed in f32.

Owns: the exchange of compressed segments, and their buffers. Refuses: to compress; a `compress.Compressor` does that.

    shape legend: n = world size; N = elements of a bucket; N_p = elements of rank p's segment, as `numpy.array_split`

Invariants:
- Every rank ends with the same bits, in every run: sums are in rank order, and all ranks expand the same bytes.
- A rank's gradient is quantised once before it is sent, and the average once before it is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from axon_ps.collectives import cuda, functional
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.parallel.comm_hooks import device_codecs
from axon_ps.parallel.comm_hooks.hooks import CommunicationHook, on_this_stream, work_queue_of
from axon_ps.parallel.comm_hooks.host_values import HostValues
from axon_ps.parallel.comm_hooks.residuals import Residuals
from axon_ps.parallel.ddp.buckets import GradientBucket
from axon_ps.types import Array

if TYPE_CHECKING:
    from axon_ps.compress.compressor import Compressor


class CompressedHook(CommunicationHook):
    """A reduce-scatter and an all-gather of compressed segments, summed in f32 between them.

    Each rank compresses its gradient segment by segment, and sends segment p to rank p. Rank p adds the n segments that
    it received, in rank order, and divides by n. It compresses the average once, and gathers it to all. A NIC sends and
    receives 1 + (n-1)/n of a compressed bucket at most. With one rank nothing is compressed.

    While one bucket is averaged and gathered, the next is compressed and sent. Each of the two has a thread and a group
    of its own.

    Args:
        compressor: compresses segments.
        error_feedback: see Note: [Error feedback] of `residuals`; off only to measure its effect.
    """

    def __init__(self, compressor: Compressor, *, error_feedback: bool = True) -> None:
        self.compressor = compressor
        self.feedback = Residuals() if error_feedback else None
        self._segments: dict[int, _Segments] = {}
        self._sending, self._giving = work_queue_of(self, "send"), work_queue_of(self, "give")

    def attach(self, group: ProcessGroup) -> None:
        """See `CommunicationHook`."""
        super().attach(group)
        self._averages = group.named_group("averages", range(group.size))

    def start(self, bucket: GradientBucket) -> Work[Any]:
        """See `CommunicationHook`."""
        if self.group.size == 1:
            return Work(self._sending.submit(lambda: None), f"bucket {bucket.index}")
        sent = self._sending.submit(on_this_stream(bucket, lambda: self._send(bucket)))

        def give() -> None:
            sent.result()
            self._average_and_gather(bucket)

        return Work(
            self._giving.submit(on_this_stream(bucket, give)), f"bucket {bucket.index} as {self.compressor.name}"
        )

    def _send(self, bucket: GradientBucket) -> None:
        """Compress, and exchange segments."""
        segments = self._of(bucket)
        numbers = segments.numbers
        numbers.read()
        residual = self.feedback.of(bucket, numbers.where) if self.feedback is not None else None
        for at, out in zip(segments.spans, segments.split(segments.outgoing), strict=True):
            numbers.compress(at, out, None if residual is None else residual[at])
        mine = [segments.sizes[self.group.rank]] * self.group.size
        self.group.all_to_all(segments.outgoing, out=segments.incoming, output_counts=mine, input_counts=segments.sizes)

    def _average_and_gather(self, bucket: GradientBucket) -> None:
        """Average this rank's segment, and gather it to all."""
        segments, rank, n = self._of(bucket), self.group.rank, self.group.size
        total, size = segments.total, segments.sizes[rank]
        received = segments.incoming.reshape(n, size)
        self.compressor.decompress(received[0], total)
        for data in received[1:]:
            self.compressor.accumulate(data, total)
        total /= np.float32(n)
        out = segments.split(segments.gathered)
        residual = self.feedback.of_average(bucket, total.size) if self.feedback is not None else None
        self.compressor.compress(total, out[rank], None if residual is None else residual.numpy())
        self._averages.all_gather(out[rank], out=segments.gathered, counts=segments.sizes)
        for at, data in zip(segments.spans, out, strict=True):
            segments.numbers.decompress(at, data)
        segments.numbers.write()

    def _of(self, bucket: GradientBucket) -> _Segments:
        segments = self._segments.get(bucket.index)
        if segments is None:
            made = _Segments.of(bucket, self.group, self.compressor)
            segments = self._segments[bucket.index] = made
        return segments

    def rebuild(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """See `CommunicationHook`."""
        if self.feedback is not None:
            for bucket in before:
                if bucket.index in self._segments:
                    mine = self._segments[bucket.index].spans[self.group.rank]
                    self.feedback.fold_average(bucket, mine, self.group.size)
            self.feedback.move(before, after)
        self._segments.clear()


class _HostNumbers:
    """A bucket's numbers, compressed on the host.

    Attributes:
        where: the device of the residual.
    """

    where = torch.device("cpu")

    def __init__(self, bucket: GradientBucket, compressor: Compressor) -> None:
        self._host = HostValues(bucket)
        self._compressor = compressor

    def read(self) -> None:
        """Copy the numbers from the bucket, unless they are its memory."""
        self._host.read()

    def compress(self, at: slice, out: Array, residual: torch.Tensor | None) -> None:
        """Compress some of them to out: u8[compressed], in host memory."""
        self._compressor.compress(self._host.values[at], out, None if residual is None else residual.numpy())

    def decompress(self, at: slice, data: Array) -> None:
        """Decompress `data`, in host memory, into some of them."""
        self._compressor.decompress(data, self._host.values[at])

    def write(self) -> None:
        """Copy the numbers to the bucket, unless they are its memory."""
        self._host.write()


class _DeviceNumbers:
    """`_HostNumbers` on the device, for a top-k of a bucket there. Only compressed bytes are copied to the host."""

    def __init__(self, bucket: GradientBucket) -> None:
        self.where = bucket.flat.device
        self._flat = bucket.flat
        self._values = bucket.flat

    def read(self) -> None:
        """See `_HostNumbers`."""
        self._values = self._flat.to(torch.float32)

    def compress(self, at: slice, out: Array, residual: torch.Tensor | None) -> None:
        """See `_HostNumbers`."""
        made = torch.empty(out.size, dtype=torch.uint8, device=self.where)
        device_codecs.top_k(self._values[at], made, residual)
        torch.from_numpy(out).copy_(made)

    def decompress(self, at: slice, data: Array) -> None:
        """See `_HostNumbers`."""
        device_codecs.expand_top_k(torch.from_numpy(data).to(self.where), self._values[at], first=True)

    def write(self) -> None:
        """See `_HostNumbers`."""
        if self._values is not self._flat:
            self._flat.copy_(self._values)


@dataclass
class _Segments:
    """The buffers of one bucket.

    Attributes:
        spans: each rank's segment of the bucket.
        sizes: bytes of each segment, compressed.
        numbers: the numbers to compress, and the average afterwards.
        outgoing: u8[sum(sizes)]: this rank's gradient, compressed by segment.
        incoming: u8[n * sizes[rank]]: every rank's compressed gradient of this rank's segment.
        total: f32[N_rank]: the sum of those.
        gathered: u8[sum(sizes)]: the compressed average.
    """

    spans: list[slice]
    sizes: list[int]
    numbers: _HostNumbers | _DeviceNumbers
    outgoing: Array
    incoming: Array
    total: Array
    gathered: Array

    @classmethod
    def of(cls, bucket: GradientBucket, group: ProcessGroup, compressor: Compressor) -> _Segments:
        """Allocate the buffers of a bucket."""
        n = group.size
        numels = [bucket.numel // n + (p < bucket.numel % n) for p in range(n)]
        sizes = [compressor.compressed_bytes(numel) for numel in numels]
        on_device = compressor.name == "top_k" and cuda.memory().is_on_device(bucket.flat)
        return cls(
            spans=[slice(end - numel, end) for numel, end in zip(numels, accumulate(numels), strict=True)],
            sizes=sizes,
            numbers=_DeviceNumbers(bucket) if on_device else _HostNumbers(bucket, compressor),
            outgoing=functional.empty_shared(sum(sizes), np.uint8, group=group),
            incoming=functional.empty_shared(n * sizes[group.rank], np.uint8, group=group),
            total=np.empty(numels[group.rank], np.float32),
            gathered=functional.empty_shared(sum(sizes), np.uint8, group=group),
        )

    def split(self, data: Array) -> list[Array]:
        """Return the segments of `outgoing` or `gathered`."""
        ends = list(accumulate(self.sizes))
        return [data[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]
