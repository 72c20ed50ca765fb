"""`Int8Hook`: gradients travel in blocks of int8, and are added up in f32 on the way.

Owns: the blocks of each bucket. Refuses: to make them (`compress.int8_block`) and to add them up (the backend).

    shape legend: N = elements of a bucket
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from axon_ps.collectives import ops
from axon_ps.compress.compressor import blocks_of
from axon_ps.parallel.buckets import GradientBucket
from axon_ps.parallel.comm_hooks import PackingHook
from axon_ps.parallel.host_values import HostValues
from axon_ps.parallel.residuals import Residuals
from axon_ps.types import INT8_BLOCK_NUMEL, Array, DType

_HOST = torch.device("cpu")


class Int8Hook(PackingHook):
    """An all-reduce of blocks of int8: a quarter of the bytes of f32.

    What a rank sends is rounded to the nearest, and what that loses is added to its next gradient. The average is
    rounded once more, at random, and is right on average; see Note: [Sums are rounded at random] of
    `compress.int8_block`. With one rank nothing is compressed.

    Args:
        error_feedback: see Note: [Error feedback] of `residuals`; off only to see what it is good for.
    """

    def __init__(self, *, error_feedback: bool = True) -> None:
        super().__init__("int8")
        self.feedback = Residuals() if error_feedback else None
        self._buffers: dict[int, tuple[HostValues, Array]] = {}

    def pack(self, bucket: GradientBucket) -> Array | None:
        """See `PackingHook`."""
        from axon_ps.compress import int8_block

        if self.group.size == 1:
            return None
        if bucket.index not in self._buffers:
            numel = blocks_of(bucket.numel, INT8_BLOCK_NUMEL)
            made = ops.empty_shared(numel, DType.INT8_BLOCK.numpy, group=self.group)
            self._buffers[bucket.index] = HostValues(bucket), made
        host, blocks = self._buffers[bucket.index]
        host.read()
        residual = self.feedback.of(bucket, _HOST).numpy() if self.feedback is not None else None
        int8_block.encode(host.values, blocks, residual)
        return blocks

    def unpack(self, bucket: GradientBucket, packed: Array) -> None:
        """See `PackingHook`."""
        from axon_ps.compress import int8_block

        host, _ = self._buffers[bucket.index]
        int8_block.decode(packed, host.values)
        host.write()

    def rebuild(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """See `CommunicationHook`."""
        self._buffers.clear()
        if self.feedback is not None:
            self.feedback.move(before, after)
