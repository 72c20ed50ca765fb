"""Memory of ours that other processes of this host may read until we revoke that: the owner's side. Pure.

What is lent is read later, when its owner may have taken it back. So with each loan goes a number and where it lies;
the owner changes the number *before* it gives the memory to other uses, and a reader that finds another number after
reading throws away what it read.
"""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass

import numpy as np

from axon_ps.types import Array


def address_of(array: Array) -> int:
    """Where an array begins in our memory."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # in a third of the other's time
    except (BufferError, TypeError, ValueError):  # read-only, empty, or of an element type that buffers do not know
        return int(array.__array_interface__["data"][0])


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Bytes of a process, as long as `number` lies at `number_address` of it.

    Attributes:
        address: where they begin.
        size_bytes: how many.
        number_address: where the owner's number lies.
        number: what it was when they were lent.
    """

    address: int
    size_bytes: int
    number_address: int
    number: int


class Lender:
    """Lends memory of ours and takes it back, all of it at once."""

    def __init__(self) -> None:
        self._number = np.array([secrets.randbits(63)], np.uint64)

    def lend(self, address: int, size_bytes: int) -> Loan:
        """What another process needs to read `size_bytes` at `address`; the caller keeps them until `take_back`."""
        number_address = address_of(self._number)
        return Loan(address=address, size_bytes=size_bytes, number_address=number_address, number=int(self._number[0]))

    def take_back(self) -> None:
        """End every loan. Call it before the memory changes or is freed."""
        self._number[0] += np.uint64(1)
