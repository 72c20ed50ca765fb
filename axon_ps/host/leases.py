"""Read leases: memory of ours that other processes of this host may read until we revoke it. The owner's side. Pure.

A reader copies the bytes some time later, when the owner may have revoked the lease. So a lease names a number and
where it lies: the owner changes the number *before* it uses the memory for something else, and a reader that finds
another number after copying throws the copy away.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

_LEASE = struct.Struct("<QQQQQ")


def address_of(array: Array) -> int:
    """Where an array begins in our memory."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # in a third of the other's time
    except (BufferError, TypeError, ValueError):  # read-only, empty, or of an element type that buffers do not know
        return int(array.__array_interface__["data"][0])


@dataclass(slots=True)
class ReadLease:
    """Permission to read bytes of a process; valid while `number` lies at `number_address` there.

    Never changed once it is made; not frozen, because that takes three times as long to make.

    Attributes:
        address: where the bytes begin.
        size_bytes: how many.
        number_address: where the owner's number lies.
        number: its value when the lease was granted.
        offset: where in the segment they begin.
        segment: the packed address of a segment that the bytes lie in, if they do; then they may be mapped, and do not
            change before the call that sent the lease is over.
    """

    address: int
    size_bytes: int
    number_address: int
    number: int
    offset: int = 0
    segment: bytes = b""

    def pack(self) -> bytes:
        """As bytes of a message."""
        numbers = self.address, self.size_bytes, self.number_address, self.number, self.offset
        return _LEASE.pack(*numbers) + self.segment

    @classmethod
    def unpack(cls, message: bytes) -> ReadLease:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: it is something else.
        """
        try:
            address, size_bytes, number_address, number, offset = _LEASE.unpack_from(message)
        except struct.error as error:
            raise InvalidRequest(f"{message!r} is not a read lease: {error}") from error
        return cls(address, size_bytes, number_address, number, offset, message[_LEASE.size :])


class ReadLeases:
    """Grants leases on memory of ours, and revokes all of them at once."""

    def __init__(self) -> None:
        self._number = np.array([secrets.randbits(63)], np.uint64)

    def grant(self, address: int, size_bytes: int, offset: int = 0, segment: bytes = b"") -> ReadLease:
        """What another process needs to read `size_bytes` at `address`; they must not change before `revoke`."""
        return ReadLease(address, size_bytes, address_of(self._number), int(self._number[0]), offset, segment)

    def revoke(self) -> None:
        """End every lease. Call it before the memory changes or is freed."""
        self._number[0] += np.uint64(1)
