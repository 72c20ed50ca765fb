"""Another process of this host: whether it lives, and its memory.

Owns: the handle on a process, and reading from its memory without a copy in between. Refuses: to write there. A late
write, after the other side has freed its array, would overwrite whatever lies there by then; a late read only reads
garbage, which the reader detects and drops.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon_ps.errors import Broken


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


_MAX_RANGES = 1024  # IOV_MAX

_readv = _function("process_vm_readv")


class PeerProcess:
    """One process of this host.

    Attributes:
        pid: its id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _started(pid)
        self._pidfd = -1
        with contextlib.suppress(OSError):  # an old kernel, or a sandbox without it; then /proc has to do
            self._pidfd = os.pidfd_open(pid)

    def alive(self) -> bool:
        """Whether it runs. A process that ended and was not reaped does not."""
        if self._pidfd >= 0:
            return not self._ended(0)
        return bool(self._started) and _started(self.pid) == self._started

    def ends(self, within_s: float) -> bool:
        """Whether it ends within that time. A process loses its memory a little before it counts as ended."""
        deadline = time.monotonic() + within_s
        while self.alive():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._pidfd >= 0:
                self._ended(left)
            else:
                time.sleep(min(left, 0.01))
        return True

    def _ended(self, within_s: float) -> bool:
        poll = select.poll()  # a new one, because one of them serves one thread only
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1000 * within_s))

    def close(self) -> None:
        """Release the handle. Harmless when repeated."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class MemoryReader:
    """Copies from the memory of other processes. Belongs to one thread."""

    def __init__(self) -> None:
        self._local = _Iovec()
        self._remote = _Iovec()
        self._local_address = ctypes.addressof(self._local)
        self._remote_address = ctypes.addressof(self._remote)

    def read(self, pid: int, remote: int, local: int, size_bytes: int) -> None:
        """Copy `size_bytes` from address `remote` of a process to our address `local`.

        Raises:
            Broken: the process has gone, the memory is not there, or the kernel refuses.
        """
        while size_bytes:
            self._local.base, self._local.size = local, size_bytes
            self._remote.base, self._remote.size = remote, size_bytes
            got = -1
            if _readv is not None:
                got = _readv(pid, self._local_address, 1, self._remote_address, 1, 0)
            if got <= 0:
                code = ctypes.get_errno() if got < 0 and _readv is not None else errno.ENOSYS
                if code == errno.EINTR:
                    continue
                raise Broken(f"the memory of process {pid} cannot be read: {os.strerror(code)}")
            local, remote, size_bytes = local + got, remote + got, size_bytes - got

    def read_ranges(self, pid: int, remotes: Sequence[tuple[int, int]], local: int) -> None:
        """Copy ranges (address, bytes) of a process, one after the other, to our address `local`.

        Raises:
            Broken: the process has gone, the memory is not there, or the kernel refuses.
        """
        for first in range(0, len(remotes), _MAX_RANGES):
            some = remotes[first : first + _MAX_RANGES]
            total = sum(size for _, size in some)
            vectors = (_Iovec * len(some))(*(_Iovec(*each) for each in some))
            self._local.base, self._local.size = local, total
            got = -1
            if _readv is not None:
                got = _readv(pid, self._local_address, 1, ctypes.addressof(vectors), len(some), 0)
            if got != total:  # interrupted, or an error that reading them one by one raises
                at = local
                for remote, size in some:
                    self.read(pid, remote, at, size)
                    at += size
            local += total

    def readable(self, pid: int, remote: int, size_bytes: int) -> bool:
        """Whether the first and the last byte of a range can be read."""
        scratch = ctypes.c_char()
        try:
            for address in {remote, remote + max(0, size_bytes - 1)}:
                self.read(pid, address, ctypes.addressof(scratch), 1)
        except Broken:
            return False
        return True


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" when it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
