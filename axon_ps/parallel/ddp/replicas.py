"""The same module on every rank: the same parameters by name, and the same values.

Owns: comparing the modules of the ranks, and giving all ranks the tensors of one. Refuses: gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from axon_ps.collectives.arrays import check_memory
from axon_ps.collectives.objects import broadcast_object_list
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import LayoutMismatch

PACKED_BYTES = 25 << 20
"""Tensors are packed up to this size. A larger tensor is sent without a copy, if it is contiguous."""


def check_same(group: ProcessGroup, lines: Sequence[str]) -> None:
    """Check that every rank has the same lines. Every rank calls it.

    Args:
        group: the ranks.
        lines: a description, one parameter or buffer a line.

    Raises:
        LayoutMismatch: some ranks differ from rank 0; raised on every rank. The message names those ranks, or on one of
            them the line that differs.
    """
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8)
    digests = group.all_gather(digest).reshape(group.size, -1)
    if not (different := [r for r in range(group.size) if not np.array_equal(digests[r], digests[0])]):
        return
    (expected,) = broadcast_object_list([list(lines)], 0, group)
    if list(lines) == expected:
        raise LayoutMismatch(f"the ranks {different} of {group.name!r} wrap another module than rank 0 and this rank")
    at = next((i for i, (a, b) in enumerate(zip(lines, expected, strict=False)) if a != b), None)
    if at is None:
        raise LayoutMismatch(f"this rank wraps {len(lines)} parameters and buffers, rank 0 {len(expected)}")
    raise LayoutMismatch(f"this rank wraps {lines[at]!r} where rank 0 has {expected[at]!r}; build the same module")


@torch.no_grad()
def broadcast(group: ProcessGroup, tensors: Sequence[Tensor], root: int = 0) -> int:
    """Replace every rank's tensors by the root's. Every rank calls it. Small tensors travel packed.

    Args:
        group: the ranks.
        tensors: dense ones of any dtype, the same in number, shape and dtype on every rank.
        root: the rank that has the values.

    Returns:
        The bytes of all tensors.

    Raises:
        InvalidRequest: a tensor is sparse, quantised, on the meta device, or of a class that holds others.
        AxonError: a collective failed.
    """
    # not detach(): autograd counts its changes, and a forward may have saved a buffer for a later backward
    plain = [tensor.data for tensor in tensors if tensor.numel()]
    for tensor in plain:
        check_memory(tensor, "a parameter or buffer")
    if group.size > 1:
        for pack in _packs(plain):
            _send(group, pack, root)
    return sum(tensor.nbytes for tensor in plain)


def _packs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours on one device, up to `PACKED_BYTES`."""
    pack: list[Tensor] = []
    for tensor in tensors:
        if pack and (tensor.device != pack[0].device or sum(t.nbytes for t in pack) + tensor.nbytes > PACKED_BYTES):
            yield pack
            pack = []
        pack.append(tensor)
    if pack:
        yield pack


def _send(group: ProcessGroup, pack: Sequence[Tensor], root: int) -> None:
    if len(pack) == 1 and pack[0].is_contiguous():
        group.broadcast(_bytes(pack[0]), root)
        return
    flat = torch.cat([_bytes(tensor.contiguous()) for tensor in pack])
    group.broadcast(flat, root)
    if group.rank != root:
        for tensor, data in zip(pack, torch.split(flat, [t.nbytes for t in pack]), strict=True):
            tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    """Return u8[nbytes]: the same memory."""
    return tensor.view(-1).view(torch.uint8)
