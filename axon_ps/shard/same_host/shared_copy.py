"""The wire copy of a unit in memory that workers of the server's host map, so that gathering the unit copies nothing.

Owns: the layout of the segment, on both sides: `SharedCopy` in the server, `MappedCopy` in a worker. Refuses: to know
when the copy may change; that is Note: [When a mapped unit may change].

Note: [When a mapped unit may change]
    A server changes the copy when a step of its model commits, when parameters are replaced and at no other time. A
    step commits when every worker has voted, and a worker votes when its backward is over; from then on, until it
    gathers the unit again, it does not read it. So nobody reads what changes, without a lock. This does not hold where
    replicas step asynchronously, nor for workers that retain parameters between steps (SHARD_GRAD_OP): these gather
    copies. A worker that the coordinator has given up may read anything; nothing that it computes counts any more.

    The first 8 bytes are the version tag: 0 while the copy changes, else the version + 1. Of a frozen unit that is the
    version in which it last took another model's values, 0 if it never did: no other step changes it.
    A worker that finds the version it wants there need not ask. (Both see tag and values in order: the server takes a
    lock between its last value and the tag, a worker releases one between the tag and its first value.)

Note: [What a worker writes]
    The mapping is private to the worker: what it writes to a gathered parameter nobody else sees, and it is gone when
    the unit is resharded, as it would be in memory of its own.
"""

from __future__ import annotations

import numpy as np

from axon_ps.errors import Unreachable
from axon_ps.host.shared_memory import PAGE_BYTES, Segment, SegmentAddress
from axon_ps.types import Array, DType


class SharedCopy:
    """The server's side.

    Args:
        numel: elements of the unit.
        dtype: their wire dtype.

    Attributes:
        values: wire[numel].

    Raises:
        Busy: there is not that much memory.
    """

    def __init__(self, numel: int, dtype: DType) -> None:
        self._segment = Segment.create(PAGE_BYTES + numel * dtype.itemsize)
        self._tag, self.values = _layout(self._segment, numel, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self._segment.size_bytes

    @property
    def mapping(self) -> bytes:
        """Where workers find it: the packed address of its segment."""
        return self._segment.address.pack()

    def publish(self, version: int) -> None:
        """Mark `values` as those of a version."""
        self._tag[0] = version + 1

    def withdraw(self) -> None:
        """Mark `values` as about to change."""
        self._tag[0] = 0

    def close(self) -> None:
        """Release the segment; what workers have mapped stays."""
        self._segment.close()


class MappedCopy:
    """A worker's side.

    Args:
        mapping: where it is, as the server sent it.
        numel: elements of the unit.
        dtype: their wire dtype.

    Attributes:
        values: wire[numel]; see Note: [What a worker writes].

    Raises:
        Unreachable: it cannot be mapped here, and why.
    """

    def __init__(self, mapping: bytes, numel: int, dtype: DType) -> None:
        self._segment = Segment.open(SegmentAddress.unpack(mapping), private=True)
        if self._segment.size_bytes < PAGE_BYTES + numel * dtype.itemsize:
            raise Unreachable(f"{numel} {dtype.value} are not in a segment of {self._segment.size_bytes} bytes")
        self._tag, self.values = _layout(self._segment, numel, dtype)

    def is_at(self, version: int) -> bool:
        """Whether `values` are those of a version."""
        return int(self._tag[0]) == version + 1

    def discard_writes(self) -> None:
        """Undo whatever was written to `values` here."""
        self._segment.discard_writes()


def _layout(segment: Segment, numel: int, dtype: DType) -> tuple[Array, Array]:
    """The version tag u64[1] and the values wire[numel], which begin a page."""
    memory = segment.bytes()
    return memory[:8].view(np.uint64), memory[PAGE_BYTES : PAGE_BYTES + numel * dtype.itemsize].view(dtype.numpy)
