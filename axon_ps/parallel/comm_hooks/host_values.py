"""`HostValues`: a bucket's numbers as f32 in host memory, where compressors read and write them.

Owns: the copy, if one is needed. Refuses: any use of the numbers.
"""

from __future__ import annotations

import torch

from axon_ps.collectives import cuda
from axon_ps.parallel.ddp.buckets import GradientBucket
from axon_ps.parallel.fsdp.memory import host_empty


class HostValues:
    """The numbers of one bucket.

    Args:
        bucket: the bucket; its memory must stay the same.

    Attributes:
        values: f32[N]: the bucket itself if that is f32 on the host, else a copy (pinned, for a bucket on a GPU).
    """

    def __init__(self, bucket: GradientBucket) -> None:
        flat = self._flat = bucket.flat
        device = cuda.memory().is_on_device(flat)
        direct = flat.dtype is torch.float32 and not device
        self._staged = None if direct else host_empty(flat.numel(), torch.float32, pinned=device)
        self.values = (flat if self._staged is None else self._staged).numpy()

    def read(self) -> None:
        """Copy the bucket to `values`, unless they are its memory."""
        if self._staged is not None:
            self._staged.copy_(self._flat)  # returns when the device has copied

    def write(self) -> None:
        """Copy `values` to the bucket, unless they are its memory."""
        if self._staged is not None:
            self._flat.copy_(self._staged)
