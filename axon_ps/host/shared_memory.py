"""Memory that processes of one host share.

Owns: segments, from the check that there is memory to the mapping in another process. Refuses: to know their contents.

Invariants:
- A segment never has a name: it is an anonymous file that lives as long as a process has it open or mapped, so nothing
  remains in /dev/shm when processes are killed, however many at once.
- All of its pages are allocated when `Segment.create` returns, so touching them never ends in SIGBUS.
- Another process opens it as /proc/PID/fd/FD, which needs the same host, process namespace and user. Whoever opens one
  checks that it is the segment that was meant; in another container it would be somebody else's file, or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from axon_ps.errors import Busy, InvalidRequest, Unreachable
from axon_ps.types import Array

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
_MAP_FIXED = 0x10
_PUNCH_HOLE_KEEP_SIZE = 3
_HUGE_BYTES = 2 << 20
_OF_FILE, _THERE = np.uint64(1 << 61), np.uint64(3 << 62)  # of a page, in /proc/PID/pagemap; in memory or swapped
PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class SegmentAddress:
    """Where another process finds a segment.

    Attributes:
        boot: random id of the life of the host's kernel.
        pid: a process that has it open.
        fd: its file descriptor there.
        inode: of the file: distinguishes it from a later file with the same descriptor.
        size_bytes: its size.
    """

    boot: str
    pid: int
    fd: int
    inode: int
    size_bytes: int

    def pack(self) -> bytes:
        """As bytes of a message: ADDRESS_BYTES."""
        return _ADDRESS.pack(self.boot.encode(), self.pid, self.fd, self.inode, self.size_bytes)

    @classmethod
    def unpack(cls, message: bytes) -> SegmentAddress:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: it is something else.
        """
        try:
            boot, pid, fd, inode, size_bytes = _ADDRESS.unpack(message)
        except struct.error as error:
            raise InvalidRequest(f"{message!r} is not the address of a segment: {error}") from error
        boot = boot.rstrip(b"\0").decode(errors="replace")
        return cls(boot=boot, pid=pid, fd=fd, inode=inode, size_bytes=size_bytes)


_ADDRESS = struct.Struct("<36sIIQQ")
ADDRESS_BYTES = _ADDRESS.size


class Segment:
    """A segment, mapped into this process.

    Attributes:
        memory: the mapping. It ends with the last array or view of it.
        size_bytes: its size.
        fd: the file descriptor that others open it by; -1 in processes that opened it.
    """

    def __init__(self, memory: mmap.mmap, fd: int, inode: int) -> None:
        self.memory = memory
        self.size_bytes = len(memory)
        self.fd = fd
        self._inode = inode

    @classmethod
    def create(cls, size_bytes: int, *, directory: str = "") -> Segment:
        """Make a segment of zeros.

        Args:
            size_bytes: how many; rounded up to whole pages.
            directory: a tmpfs to take the memory from, /dev/shm for example; "" = the kernel's own, which has no
                limit but memory itself.

        Raises:
            Busy: there is not that much memory; the message has the bytes needed and available.
        """
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        available = available_bytes(directory)
        if size_bytes > available:
            raise _no_room(size_bytes, available, directory)
        try:
            if directory:
                fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            else:
                fd = os.memfd_create("axon_ps", os.MFD_CLOEXEC)
        except OSError as error:
            raise Busy(f"no shared memory can be made in {directory or 'this process'}: {error.strerror}") from error
        try:
            os.ftruncate(fd, size_bytes)
            memory = mmap.mmap(fd, size_bytes)
            _populate(memory, fd, size_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise _no_room(size_bytes, available_bytes(directory), directory) from error
        return cls(memory, fd, os.fstat(fd).st_ino)

    @classmethod
    def open(cls, address: SegmentAddress, *, private: bool = False) -> Segment:
        """Map a segment of another process.

        Args:
            address: where it is.
            private: what is written here is seen by this process only, until `discard_writes`; what its owner writes is
                seen here, except in pages that were written to.

        Raises:
            Unreachable: it cannot be reached from here, and why.
        """
        if address.boot != boot_id():
            raise Unreachable("its owner runs on another machine, so they share no memory")
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unreachable(
                f"{path} cannot be opened: {error.strerror}; both processes need the same user and process namespace"
            ) from error
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (address.inode, address.size_bytes):
                raise Unreachable(f"{path} is another file here: its owner is in another process namespace, or gone")
            memory = mmap.mmap(fd, address.size_bytes, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            if isinstance(error, Unreachable):
                raise
            raise Unreachable(f"{path} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return cls(memory, -1, address.inode)

    @property
    def address(self) -> SegmentAddress:
        """Where others find it; for the process that made it."""
        return SegmentAddress(
            boot=boot_id(), pid=os.getpid(), fd=self.fd, inode=self._inode, size_bytes=self.size_bytes
        )

    def discard_writes(self) -> None:
        """Undo what was written to a private mapping here: it is again what its owner has written."""
        if _has_own_pages(self.base(), self.size_bytes):
            self.memory.madvise(mmap.MADV_DONTNEED)

    def bytes(self) -> Array:
        """u8[size_bytes]: the whole segment."""
        return np.frombuffer(self.memory, np.uint8)

    def base(self) -> int:
        """The address of its first byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Release it; the mapping stays until the last array or view of it is gone. Harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):  # somebody has a view of it; it is unmapped with the last one
            self.memory.close()


def move_mapping(base: int, old_fd: int, new: Segment) -> None:
    """Replace the segment behind the memory at `base` by a new one; the contents are copied.

    Whoever still writes to the old segment changes nothing here. Nobody else may write at `base` meanwhile.

    Args:
        base: where the old segment begins in this process.
        old_fd: its file descriptor; its memory is returned to the system.
        new: of the same size; its own mapping ends.

    Raises:
        Busy: the kernel refuses; all is as it was.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    size = new.size_bytes
    ctypes.memmove(new.base(), base, size)
    _map_at(base, size, new.fd, mmap.MAP_SHARED)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    libc.fallocate(old_fd, _PUNCH_HOLE_KEEP_SIZE, 0, size)
    new.memory.close()


def make_private(base: int, fd: int, size_bytes: int) -> None:
    """From now on, what is written at `base` is seen by this process only; what others have mapped changes no more.

    Args:
        base: where a segment begins in this process.
        fd: its file descriptor, which may be closed afterwards.
        size_bytes: its size.

    Raises:
        Busy: the kernel refuses; all is as it was.
    """
    _map_at(base, size_bytes, fd, mmap.MAP_PRIVATE)


def _map_at(base: int, size_bytes: int, fd: int, how: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    if libc.mmap(base, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, how | _MAP_FIXED, fd, 0) != base:
        raise Busy(f"the segment at {base:#x} cannot be mapped anew: {os.strerror(ctypes.get_errno())}")


def boot_id() -> str:
    """Random id of this life of the kernel: equal on processes of one host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def available_bytes(directory: str = "") -> int:
    """How much memory a new segment may take: what the tmpfs, the control group and the machine have left."""
    limits = []
    if directory:
        try:
            space = os.statvfs(directory)
            limits.append(space.f_bavail * space.f_frsize)
        except OSError:
            limits.append(0)
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) << 10)
    except (OSError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            limits.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(limits, default=1 << 62)


def _populate(memory: mmap.mmap, fd: int, size_bytes: int) -> None:
    """Allocate all pages, huge ones where the kernel agrees; raises OSError when there is not enough memory."""
    if size_bytes >= _HUGE_BYTES:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EFAULT):  # old kernels; EFAULT: no space left
                raise
    os.posix_fallocate(fd, 0, size_bytes)


def _has_own_pages(base: int, size_bytes: int) -> bool:
    """Whether a page of a private mapping was written to, and so is a copy; true where that is unknown.

    Asking takes a tenth of what it costs to have every page of the mapping found again.
    """
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            entries = np.fromfile(file, np.uint64, size_bytes // PAGE_BYTES, offset=base // PAGE_BYTES * 8)
    except OSError:
        return True
    return entries.size * PAGE_BYTES != size_bytes or bool(np.any((entries & _OF_FILE == 0) & (entries & _THERE != 0)))


def _no_room(size_bytes: int, available: int, directory: str) -> Busy:
    where = directory or "memory"
    hint = f"enlarge {directory} or make the segment smaller" if directory else "use fewer or smaller buffers"
    return Busy(
        f"a shared-memory segment needs {size_bytes} bytes ({size_bytes >> 20} MiB) of {where}, "
        f"and {available} bytes ({available >> 20} MiB) are available; {hint}"
    )


def pack_text(text: str, size_bytes: int) -> bytes:
    """A text in at most `size_bytes` bytes, its length first."""
    raw = text.encode()[: size_bytes - 2]
    return struct.pack("<H", len(raw)) + raw


def unpack_text(memory: memoryview) -> str:
    """The inverse of `pack_text`."""
    (length,) = struct.unpack_from("<H", memory)
    return bytes(memory[2 : 2 + length]).decode(errors="replace")
