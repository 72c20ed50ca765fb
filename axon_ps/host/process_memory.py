"""Reading the memory of another process of this host, instead of getting the bytes through a socket.

A handshake comes first: each process sends its id and the address of a secret in its memory, and the other trusts it
once it has read the secret there. So a process of another host or container that has the same id is never mistaken for
the one we talk to, and where the kernel forbids reading (another user, another security context) both find out before
anything depends on it. Handshakes, leases (`host.leases`) and addresses of segments travel as bytes that only `host`
understands.

Owns: the handshake, granting leases, and reading; what is leased and can be mapped is mapped (`host.shared_arrays`).
Refuses: to write to another process. A late write, after the other side has freed its array, would overwrite whatever
lies there by then; a late read only reads garbage, which the reader detects and drops.

Invariant: nothing here blocks on the other process; a process that is stopped or dead is read, or is not there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axon_ps.errors import Broken, InvalidRequest, Unreachable
from axon_ps.host.leases import ReadLease, ReadLeases, address_of
from axon_ps.host.shared_arrays import MappedArrays, shared_arrays
from axon_ps.types import Array

SECRET_BYTES = 16

MAX_MAPPED = 32
"""How many segments of one process a reader maps; a worker has a few, and makes others when units differ in size."""

_HANDSHAKE = struct.Struct(f"<QQ{SECRET_BYTES}s")
HANDSHAKE_BYTES = _HANDSHAKE.size

_MAX_RANGES = 1024  # IOV_MAX


# --- the handshake


@dataclass(frozen=True)
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

    def pack(self) -> bytes:
        """As bytes of a message: HANDSHAKE_BYTES."""
        return _HANDSHAKE.pack(self.pid, self.address, self.secret)

    @classmethod
    def unpack(cls, message: bytes) -> Handshake:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: it is something else.
        """
        try:
            return cls(*_HANDSHAKE.unpack(message))
        except struct.error as error:
            raise InvalidRequest(f"{message!r} is not a handshake: {error}") from error

    def verify(self) -> None:
        """Return if we can read the process that sent it.

        Raises:
            Broken: it cannot be read, or is not the process that sent the handshake.
        """
        found = np.zeros(SECRET_BYTES, np.uint8)
        read(self.pid, self.address, address_of(found), SECRET_BYTES)
        if found.tobytes() != self.secret:
            raise Broken(f"process {self.pid} of this host is not the one that sent the handshake")


def own_handshake() -> Handshake:
    """That of this process, the same at every call."""
    return Handshake(pid=os.getpid(), address=address_of(_secret), secret=_secret.tobytes())


_secret = np.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), np.uint8)


# --- leases


def grant(leases: ReadLeases, address: int, size_bytes: int) -> bytes:
    """Grant a lease on memory of ours, packed, with the segment that the bytes lie in if they lie in a shared array."""
    shared = shared_arrays.find(address, size_bytes)
    if shared is None:
        return leases.grant(address, size_bytes).pack()
    return leases.grant(address, size_bytes, address - shared.base, shared.segment).pack()


class LeaseReader:
    """Reads leased memory of one process. Belongs to one thread.

    Args:
        handshake: what that process sent of itself.

    Attributes:
        pid: its id.

    Raises:
        Broken: it cannot be read, or is not the process that sent the handshake.
    """

    def __init__(self, handshake: Handshake) -> None:
        handshake.verify()
        self.pid = handshake.pid
        self._mapped = MappedArrays(handshake.pid, MAX_MAPPED)

    def view(self, lease: ReadLease) -> Array | None:
        """u8[size_bytes]: leased bytes, mapped and not copied; they do not change. None: they must be read.

        Raises:
            InvalidRequest: they do not lie in the segment that the lease names, or it is another process's.
        """
        if not lease.segment:
            return None
        try:
            return self._mapped.view(lease.segment, lease.offset, lease.size_bytes)
        except Unreachable:
            return None

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
        read_ranges(self.pid, [(lease.address, lease.size_bytes) for lease in leases], address_of(out))
        number = ctypes.c_uint64()
        read(self.pid, first.number_address, ctypes.addressof(number), ctypes.sizeof(number))
        if number.value != first.number:
            raise Broken(f"process {self.pid} revoked the lease before it was read")


# --- reading


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _function(name: str) -> Any:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        function.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
        )  # fmt: skip
    return function


_readv = _function("process_vm_readv")


def read(pid: int, remote: int, local: int, size_bytes: int) -> None:
    """Copy `size_bytes` from address `remote` of a process to our address `local`.

    Raises:
        Broken: the process has gone, the memory is not there, or the kernel refuses.
    """
    while size_bytes:
        ours, theirs, got = _Iovec(local, size_bytes), _Iovec(remote, size_bytes), -1
        if _readv is not None:
            got = _readv(pid, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)
        if got <= 0:
            code = ctypes.get_errno() if got < 0 and _readv is not None else errno.ENOSYS
            if code == errno.EINTR:
                continue
            raise Broken(f"the memory of process {pid} cannot be read: {os.strerror(code)}")
        local, remote, size_bytes = local + got, remote + got, size_bytes - got


def read_ranges(pid: int, remotes: Sequence[tuple[int, int]], local: int) -> None:
    """Copy ranges (address, bytes) of a process, one after the other, to our address `local`.

    Raises:
        Broken: the process has gone, the memory is not there, or the kernel refuses.
    """
    for first in range(0, len(remotes), _MAX_RANGES):
        some = remotes[first : first + _MAX_RANGES]
        total = sum(size for _, size in some)
        ours, theirs, got = _Iovec(local, total), (_Iovec * len(some))(*(_Iovec(*each) for each in some)), -1
        if _readv is not None:
            got = _readv(pid, ctypes.addressof(ours), 1, ctypes.addressof(theirs), len(some), 0)
        if got != total:  # interrupted, or an error that reading them one by one raises
            at = local
            for remote, size in some:
                read(pid, remote, at, size)
                at += size
        local += total


def readable(remote: int, size_bytes: int) -> bool:
    """Whether the first and the last byte of a range of our own memory can be read: not those of a device's memory."""
    scratch = ctypes.create_string_buffer(2)
    try:
        ends = (remote, 1), (remote + max(0, size_bytes - 1), 1)
        read_ranges(os.getpid(), ends, ctypes.addressof(scratch))
    except Broken:
        return False
    return True
