"""c10d's operations on several tensors at once. Small tensors are packed, and each larger one has its own call.

A call costs about as much as copying `PACKED_BYTES` twice. So tensors up to that size are packed into one staging
buffer per dtype and device. For larger tensors packing would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from axon_ps.errors import InvalidRequest

PACKED_BYTES = 256 << 10
"""Up to this size tensors are packed."""


def packed(shards: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each call, in the order of their first tensors.

    Small tensors of one dtype and device have one call together.

    Args:
        shards: one rank's shard of each tensor, whose size is compared with `PACKED_BYTES`.

    Raises:
        InvalidRequest: there are none.
    """
    if not shards:
        raise InvalidRequest("no tensors were given to a coalesced collective; give at least one")
    calls: dict[Any, list[int]] = {}
    for i, shard in enumerate(shards):
        small = shard.numel() * shard.element_size() <= PACKED_BYTES
        calls.setdefault((shard.dtype, shard.device) if small else i, []).append(i)
    return list(calls.values())
