"""Bytes of another process of this host, read where they lie instead of sent through a socket.

Two processes introduce themselves: each says its id and where in its memory a secret lies, and the other believes it
once it has read the secret there. So a process of another host or container that has the same id is never mistaken for
the one we talk to, and where the kernel forbids reading (another user, another security context) both find out before
anything depends on it.

What may be read, and until when, is a `host.leases.Loan`.

Owns: introductions and reading. Refuses: to write to another process (see `host.peer_process`).

Invariant: nothing here blocks on the other process; a process that is stopped or dead is read, or is not there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host.leases import Loan, address_of
from axon_ps.host.peer_process import MemoryReader
from axon_ps.types import Array

SECRET_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """How a process can be read, as it says itself.

    Attributes:
        pid: its id.
        address: where its secret lies.
        secret: what lies there.
    """

    pid: int
    address: int
    secret: bytes


class Borrower:
    """Reads the memory of one process. Belongs to one thread.

    Args:
        introduction: what that process said of itself.

    Attributes:
        pid: its id.

    Raises:
        Broken: it cannot be read, or is not the one that said so.
    """

    def __init__(self, introduction: Introduction) -> None:
        self._reader = MemoryReader()
        self.pid = introduction.pid
        self._number = np.zeros(1, np.uint64)
        found = np.zeros(SECRET_BYTES, np.uint8)
        self._reader.read(introduction.pid, introduction.address, address_of(found), SECRET_BYTES)
        if len(introduction.secret) != SECRET_BYTES or found.tobytes() != introduction.secret:
            raise Broken(f"process {introduction.pid} of this host is not the one that introduced itself so")

    def read(self, loans: Sequence[Loan], out: Array) -> None:
        """Copy what was lent, one after the other.

        Args:
            loans: what and where; at least one, all of one lender at one moment.
            out: any contiguous array of as many bytes.

        Raises:
            InvalidRequest: it is of another size, or they are of several lenders.
            Broken: it was taken back, or the process is gone.

        After an error: `out` holds anything.
        """
        size_bytes = sum(loan.size_bytes for loan in loans)
        if out.nbytes != size_bytes or not out.flags.c_contiguous:
            raise InvalidRequest(f"{size_bytes} bytes are lent; the array for them has {out.nbytes}")
        first = loans[0]
        if any((loan.number_address, loan.number) != (first.number_address, first.number) for loan in loans):
            raise InvalidRequest("what is read together must have been lent together")
        self._reader.read_pieces(self.pid, [(loan.address, loan.size_bytes) for loan in loans], address_of(out))
        self._reader.read(self.pid, first.number_address, address_of(self._number), self._number.nbytes)
        if int(self._number[0]) != first.number:
            raise Broken(f"process {self.pid} took back what it lent before it was read")


def introduction() -> Introduction:
    """Ours, the same at every call."""
    return Introduction(pid=os.getpid(), address=address_of(_secret), secret=_secret.tobytes())


_secret = np.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), np.uint8)
