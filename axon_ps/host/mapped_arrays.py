"""Shared arrays of another process of this host that are mapped here.

Owns: which of its segments are mapped. Refuses: to know what is in them. A mapping lives as long as a view of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from axon_ps.errors import InvalidRequest
from axon_ps.host.shared_memory import Segment, SegmentAddress
from axon_ps.types import Array


class MappedArrays:
    """The segments of one process that are mapped here. One thread at a time.

    Args:
        pid: the process.
        limit: how many segments stay mapped; the one that was used least recently is dropped.
    """

    def __init__(self, pid: int, limit: float = math.inf) -> None:
        self._pid = pid
        self._limit = limit
        self._mapped: OrderedDict[bytes, tuple[SegmentAddress, Array]] = OrderedDict()  # by packed address

    def __len__(self) -> int:
        return len(self._mapped)

    def view(self, segment: bytes, offset: int, size_bytes: int) -> Array:
        """u8[size_bytes]: bytes of a segment where they lie.

        Args:
            segment: its packed address.
            offset: where in it they begin.
            size_bytes: how many.

        Raises:
            InvalidRequest: they are not inside the segment, or it is another process's.
            Unreachable: it cannot be mapped here, and why.
        """
        known = self._mapped.get(segment)
        address = SegmentAddress.unpack(segment) if known is None else known[0]
        if address.pid != self._pid or offset + size_bytes > address.size_bytes:
            raise InvalidRequest(
                f"bytes {offset} to {offset + size_bytes} of a buffer of {address.size_bytes} in process {address.pid} "
                f"were leased by process {self._pid}"
            )
        if known is None:
            known = self._mapped[segment] = address, Segment.open(address).bytes()
            if len(self._mapped) > self._limit:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(segment)
        return known[1][offset : offset + size_bytes]

    def drop(self, inode: int) -> None:
        """Drop what is mapped of an inode."""
        for segment in [segment for segment, (address, _) in self._mapped.items() if address.inode == inode]:
            del self._mapped[segment]

    def clear(self) -> None:
        """Drop all."""
        self._mapped.clear()
