"""`Int8Hook`: gradients are sent in blocks of int8, and are added up in f32 on the way.

Owns: the blocks of each bucket. Refuses: to make them (`compress.int8_block` does, or `device_codecs` for a bucket in
device memory) and to add them up (the backend does).

    shape legend: N = elements of a bucket, k = ceil(N / 256) blocks
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from axon_ps.collectives import cuda, functional
from axon_ps.compress.compressor import blocks_of
from axon_ps.parallel.comm_hooks import device_codecs
from axon_ps.parallel.comm_hooks.hooks import PackingHook
from axon_ps.parallel.comm_hooks.host_values import HostValues
from axon_ps.parallel.comm_hooks.residuals import Residuals
from axon_ps.parallel.ddp.buckets import GradientBucket
from axon_ps.types import INT8_BLOCK_NUMEL, Array, DType


class Int8Hook(PackingHook):
    """An all-reduce of blocks of int8: a quarter of the bytes of f32.

    A rank's gradient is rounded to the nearest, and the error is added to its next gradient. The average is rounded
    once more, at random, so it is right on average. See Note: [Sums are rounded at random] of `compress.int8_block`.
    With one rank nothing is compressed.

    Args:
        error_feedback: see Note: [Error feedback] of `residuals`; off only to measure its effect.
    """

    def __init__(self, *, error_feedback: bool = True) -> None:
        super().__init__("int8")
        self.feedback = Residuals() if error_feedback else None
        self._buffers: dict[int, _HostBlocks | _DeviceBlocks] = {}

    def pack(self, bucket: GradientBucket) -> Array | None:
        """See `PackingHook`."""
        if self.group.size == 1:
            return None
        if bucket.index not in self._buffers:
            numel = blocks_of(bucket.numel, INT8_BLOCK_NUMEL)
            made = functional.empty_shared(numel, DType.INT8_BLOCK.numpy, group=self.group)
            kind = _DeviceBlocks if cuda.memory().is_on_device(bucket.flat) else _HostBlocks
            self._buffers[bucket.index] = kind(bucket, made)
        buffers = self._buffers[bucket.index]
        buffers.encode(self.feedback.of(bucket, buffers.where) if self.feedback is not None else None)
        return buffers.blocks

    def unpack(self, bucket: GradientBucket, packed: Array) -> None:
        """See `PackingHook`."""
        self._buffers[bucket.index].decode()

    def rebuild(self, before: Sequence[GradientBucket], after: Sequence[GradientBucket]) -> None:
        """See `CommunicationHook`."""
        self._buffers.clear()
        if self.feedback is not None:
            self.feedback.move(before, after)


class _HostBlocks:
    """Blocks of a bucket's numbers, made on the host.

    Attributes:
        blocks: BLOCK[k] in host memory, which the ranks of a host may share.
        where: the device of the residual.
    """

    where = torch.device("cpu")

    def __init__(self, bucket: GradientBucket, blocks: Array) -> None:
        self.blocks = blocks
        self._host = HostValues(bucket)

    def encode(self, residual: torch.Tensor | None) -> None:
        """Make `blocks` of the bucket's numbers."""
        from axon_ps.compress import int8_block

        self._host.read()
        int8_block.encode(self._host.values, self.blocks, None if residual is None else residual.numpy())

    def decode(self) -> None:
        """Set the bucket's numbers from `blocks`."""
        from axon_ps.compress import int8_block

        int8_block.decode(self.blocks, self._host.values)
        self._host.write()


class _DeviceBlocks:
    """Blocks of a bucket's numbers, made in device memory: only blocks are copied to the host."""

    def __init__(self, bucket: GradientBucket, blocks: Array) -> None:
        self.blocks = blocks
        self.where = bucket.flat.device
        self._flat = bucket.flat
        self._on_host = torch.from_numpy(blocks.view(np.uint8).reshape(-1, device_codecs.BLOCK_BYTES))
        self._made = torch.empty(self._on_host.shape, dtype=torch.uint8, device=self.where)

    def encode(self, residual: torch.Tensor | None) -> None:
        """See `_HostBlocks`."""
        device_codecs.encode_blocks(self._flat.to(torch.float32), self._made, residual)
        self._on_host.copy_(self._made)

    def decode(self) -> None:
        """See `_HostBlocks`."""
        self._made.copy_(self._on_host)
        device_codecs.decode_blocks(self._made, self._flat)
