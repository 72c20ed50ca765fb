"""Read leases: bytes of a segment that another process of this host may read. Pure.

A lease names a segment that was passed to the reader (`host.host_peer`), and where in it the bytes lie; the reader
checks that against what it has mapped. A reader that copies the bytes some time later may find others: so the first
8 bytes of a segment whose contents change are its tag, and a lease names the tag under which it holds. The owner
changes the tag *before* it changes the bytes, and a reader that finds another tag after copying throws the copy away. A
lease without a tag holds until the call that it came with is over.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from axon_ps.types import Array

TAG_BYTES = 8


def address_of(array: Array) -> int:
    """The address of an array in our memory."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # in a third of the other's time
    except (BufferError, TypeError, ValueError):  # read-only, empty, or of an element type that buffers do not know
        return int(array.__array_interface__["data"][0])


def tag_of(memory: Array) -> Array:
    """u64[1]: the tag at the beginning of a segment's memory, u8[...]."""
    return memory[:TAG_BYTES].view(np.uint64)


@dataclass(slots=True)
class ReadLease:
    """Permission to read bytes of a segment.

    Never changed once it is made; not frozen, because that takes three times as long to make.

    Attributes:
        segment: its number.
        offset: where in it they begin.
        size_bytes: how many.
        tag: what the segment's tag is as long as this holds; 0 = it holds until the call is over.
    """

    segment: int
    offset: int
    size_bytes: int
    tag: int = 0
