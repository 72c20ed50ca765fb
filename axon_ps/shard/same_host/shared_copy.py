"""The wire copy of a unit in memory that workers of the server's host map, so that gathering the unit copies nothing.

Owns: the layout of the segment, on both sides: `SharedCopy` in the server, `MappedCopy` in a worker. Refuses: to know
when the copy may change; that is Note: [When a mapped unit may change].

Note: [When a mapped unit may change]
    A server changes the copy when a step of its model commits, when parameters are replaced and at no other time. A
    step commits when every worker has voted, and a worker votes when its backward is over; from then on, until it
    gathers the unit again, it does not read it. So nobody reads what changes, without a lock. This does not hold where
    replicas step asynchronously, nor for workers that retain parameters between steps (SHARD_GRAD_OP): these gather
    copies. A worker that the coordinator has given up may read anything; nothing that it computes counts any more.

    The first 8 bytes are the tag. Its lower 48 bits are 0 while the copy changes, else the version + 1; of a frozen
    unit that is the version in which it last took another model's values, 0 if it never did: no other step changes it.
    The upper 16 bits count the changes, so that after another one the tag is another, also at the same version (after a
    restore). A worker that finds the version it wants there need not ask. (Both see tag and values in order: the server
    takes a lock between its last value and the tag, a worker releases one between the tag and its first value.)

    A worker that copies the values instead may do so at any time: it reads the tag again afterwards, and if that is
    another, has copied something between two versions, and asks again.

Note: [What a worker writes]
    The segment is sealed: no other process can write it, whatever it does. A worker maps it privately: what it writes
    to a gathered parameter nobody else sees, and it is gone when the unit is resharded, as it would be in memory of its
    own.
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
    """The server's side.

    Args:
        numel: elements of the unit.
        dtype: their wire dtype.

    Attributes:
        values: wire[numel].
        segment: where they lie, to be passed to others.

    Raises:
        Busy: there is not that much memory.
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
        """A lease on elements [begin, end), which holds until they change."""
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
        """Pass the segment to nobody any more; what workers have mapped stays."""
        self.segment.close()


class MappedCopy:
    """A worker's side.

    Args:
        memory: u8[...], the segment that the server has passed.
        numel: elements of the unit.
        dtype: their wire dtype.

    Attributes:
        values: wire[numel]; see Note: [What a worker writes].

    Raises:
        InvalidRequest: they are not in it.
    """

    def __init__(self, memory: Array, numel: int, dtype: DType) -> None:
        if memory.nbytes < PAGE_BYTES + numel * dtype.itemsize:
            raise InvalidRequest(f"{numel} {dtype.value} are not in a segment of {memory.nbytes} bytes")
        self._memory = memory
        self._tag, self.values = _layout(memory, numel, dtype)

    def is_at(self, version: int) -> bool:
        """Whether `values` are those of a version."""
        return int(self._tag[0]) & _VERSION_MASK == version + 1

    def discard_writes(self) -> None:
        """Undo whatever was written to `values` here."""
        shared_memory.discard_writes(self._memory)


def _layout(memory: Array, numel: int, dtype: DType) -> tuple[Array, Array]:
    """The tag u64[1] and the values wire[numel], which begin a page."""
    return tag_of(memory), memory[PAGE_BYTES : PAGE_BYTES + numel * dtype.itemsize].view(dtype.numpy)
