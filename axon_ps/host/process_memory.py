"""Reading the memory of another process of this host, instead of getting the bytes through a socket.

A handshake comes first: each process sends its id and the address of a secret in its memory, and the other trusts it
once it has read the secret there. So a process of another host or container that has the same id is never mistaken for
the one we talk to, and where the kernel forbids reading (another user, another security context) both find out before
anything depends on it.

What may be read, and until when, is a `host.leases.ReadLease`.

Owns: the handshake and reading. Refuses: to write to another process (see `host.peer_process`).

Invariant: nothing here blocks on the other process; a process that is stopped or dead is read, or is not there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host.leases import ReadLease, address_of
from axon_ps.host.peer_process import MemoryReader
from axon_ps.types import Array

SECRET_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """What a process tells others so that they can read its memory.

    Attributes:
        pid: its id.
        address: where its secret lies.
        secret: what lies there.
    """

    pid: int
    address: int
    secret: bytes


class LeaseReader:
    """Reads the memory of one process. Belongs to one thread.

    Args:
        handshake: what that process sent of itself.

    Attributes:
        pid: its id.

    Raises:
        Broken: it cannot be read, or is not the process that sent the handshake.
    """

    def __init__(self, handshake: Handshake) -> None:
        self._reader = MemoryReader()
        self.pid = handshake.pid
        self._number = np.zeros(1, np.uint64)
        found = np.zeros(SECRET_BYTES, np.uint8)
        self._reader.read(handshake.pid, handshake.address, address_of(found), SECRET_BYTES)
        if len(handshake.secret) != SECRET_BYTES or found.tobytes() != handshake.secret:
            raise Broken(f"process {handshake.pid} of this host is not the one that sent the handshake")

    def read(self, leases: Sequence[ReadLease], out: Array) -> None:
        """Copy leased bytes, one lease after the other.

        Args:
            leases: what and where; at least one, all granted by one owner and not revoked in between.
            out: any contiguous array of as many bytes.

        Raises:
            InvalidRequest: `out` is of another size, or the leases do not belong together.
            Broken: the leases were revoked, or the process is gone.

        After an error: `out` holds anything.
        """
        size_bytes = sum(lease.size_bytes for lease in leases)
        if out.nbytes != size_bytes or not out.flags.c_contiguous:
            raise InvalidRequest(f"{size_bytes} bytes are leased; the array for them has {out.nbytes}")
        first = leases[0]
        if any((lease.number_address, lease.number) != (first.number_address, first.number) for lease in leases):
            raise InvalidRequest("leases that are read together must have been granted together")
        self._reader.read_ranges(self.pid, [(lease.address, lease.size_bytes) for lease in leases], address_of(out))
        self._reader.read(self.pid, first.number_address, address_of(self._number), self._number.nbytes)
        if int(self._number[0]) != first.number:
            raise Broken(f"process {self.pid} revoked the lease before it was read")


def own_handshake() -> Handshake:
    """That of this process, the same at every call."""
    return Handshake(pid=os.getpid(), address=address_of(_secret), secret=_secret.tobytes())


_secret = np.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), np.uint8)
