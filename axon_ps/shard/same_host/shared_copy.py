"""The wire copy of a unit in memory that workers of the server's host map, so that a gather does not copy.

Owns: the layout of the segment, on both sides: `SharedCopy` in the server, `MappedCopy` in a worker. Refuses: the times
at which the copy may change; see Note: [When a mapped unit may change].

Note: [When a mapped unit may change]
    A server changes the copy only when a step of its model commits, or when parameters are replaced. A step commits
    when every worker has voted, and a worker votes when its backward is over. From then on, until it gathers the unit
    again, it does not read it. So values are not read while they change, and no lock is needed. This does not hold if
    replicas step asynchronously, nor for workers that retain parameters between steps (SHARD_GRAD_OP): these gather
    copies. A worker that the coordinator has given up may read any values, since its results do not count any more.

    The first 8 bytes are the tag. Its lower 48 bits are 0 while the copy changes, else the version + 1. For a frozen
    unit the version is the one in which it last took another model's values, 0 if it never did, since no other step
    changes it. The upper 16 bits count the changes, so that the tag differs after every change, also at the same
    version (after a restore). A worker that finds the wanted version there need not ask. (Both see tag and values in
    order: the server takes a lock between its last value and the tag, a worker releases one between the tag and its
    first value.)

    A worker that copies the values instead may do so at any time. It reads the tag again afterwards. If the tag has
    changed, the copy is a mixture of two versions, and the worker asks again.

Note: [What a worker writes]
    The segment is sealed: no other process can write it. A worker maps it privately. Its writes to a gathered parameter
    are invisible to other processes, and are lost when the unit is resharded, as they would be in its own memory.
"""

from __future__ import annotations

from axon_ps.errors import InvalidRequest
from axon_ps.host import shared_memory
from axon_ps.host.leases import ReadLease, tag_of
from axon_ps.host.shared_memory import PAGE_BYTES
from axon_ps.types import Array, DType

_VERSION_BITS = 48
_VERSION_MASK = (1 << _VERSION_BITS) - 1
_MAX_CHANGES = 1 << 16


class SharedCopy:
    """The server's side of a mapped unit.

    Args:
        numel: elements of the unit.
        dtype: their wire dtype.

    Attributes:
        values: wire[numel].
        segment: the segment that holds them, to be passed to workers.

    Raises:
        Busy: there is not enough memory.
    """

    def __init__(self, numel: int, dtype: DType) -> None:
        self.segment, memory = shared_memory.create(PAGE_BYTES + numel * dtype.itemsize, read_only=True)
        self._tag, self.values = _layout(memory, numel, dtype)
        self._changes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self.segment.size_bytes

    def lease(self, begin: int, end: int) -> ReadLease:
        """Return a lease on elements [begin, end), which holds until they change."""
        itemsize = self.values.itemsize
        offset, size_bytes = PAGE_BYTES + begin * itemsize, (end - begin) * itemsize
        return ReadLease(self.segment.number, offset, size_bytes, int(self._tag[0]))

    def publish(self, version: int) -> None:
        """Mark `values` as those of a version."""
        self._tag[0] = self._changes << _VERSION_BITS | version + 1

    def withdraw(self) -> None:
        """Mark `values` as about to change."""
        self._changes = (self._changes + 1) % _MAX_CHANGES
        self._tag[0] = self._changes << _VERSION_BITS

    def close(self) -> None:
        """Stop passing the segment to workers. Existing mappings stay."""
        self.segment.close()


class MappedCopy:
    """A worker's side of a mapped unit.

    Args:
        memory: u8[...], the segment that the server has passed.
        numel: elements of the unit.
        dtype: their wire dtype.

    Attributes:
        values: wire[numel]; see Note: [What a worker writes].

    Raises:
        InvalidRequest: the segment is too small for them.
    """

    def __init__(self, memory: Array, numel: int, dtype: DType) -> None:
        if memory.nbytes < PAGE_BYTES + numel * dtype.itemsize:
            raise InvalidRequest(f"{numel} {dtype.value} are not in a segment of {memory.nbytes} bytes")
        self._memory = memory
        self._tag, self.values = _layout(memory, numel, dtype)

    def is_at(self, version: int) -> bool:
        """Return True if `values` are those of a version."""
        return int(self._tag[0]) & _VERSION_MASK == version + 1

    def discard_writes(self) -> None:
        """Undo this worker's writes to `values`."""
        shared_memory.discard_writes(self._memory)


def _layout(memory: Array, numel: int, dtype: DType) -> tuple[Array, Array]:
    """Return the tag u64[1] and the values wire[numel], which begin a page."""
    return tag_of(memory), memory[PAGE_BYTES : PAGE_BYTES + numel * dtype.itemsize].view(dtype.numpy)
