"""Read leases: bytes of a segment that another process of this host may read. Pure.

A lease names a segment that was passed to the reader (`host.host_peer`), and the range of the bytes in it. The reader
checks that against its mappings. A reader that copies the bytes some time later may find others. So the first 8 bytes
of a segment whose contents change are its tag, and a lease names the tag under which it is valid. The segment's process
changes the tag *before* it changes the bytes. A reader that finds another tag after copying discards the copy. A lease
without a tag is valid until the end of the call that it came with.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from axon_ps.types import Array

TAG_BYTES = 8


def address_of(array: Array) -> int:
    """Return the address of an array in this process."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # takes a third of the time
    except (BufferError, TypeError, ValueError):  # read-only, empty, or of an element type that buffers do not support
        return int(array.__array_interface__["data"][0])


def tag_of(memory: Array) -> Array:
    """Return the tag at the beginning of a segment's memory u8[...], as u64[1]."""
    return memory[:TAG_BYTES].view(np.uint64)


@dataclass(slots=True)
class ReadLease:
    """Permission to read bytes of a segment.

    It is never changed once it is made. It is not frozen, because making it would take three times as long.

    Attributes:
        segment: the segment's number.
        offset: of the first byte in it.
        size_bytes: number of bytes.
        tag: the segment's tag as long as this is valid; 0 = it is valid until the call is over.
    """

    segment: int
    offset: int
    size_bytes: int
    tag: int = 0
