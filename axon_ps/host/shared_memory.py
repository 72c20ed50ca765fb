"""Memory that processes of one host share.

Owns: segments, from the check that there is memory to the mapping in another process. Refuses: their contents, and
passing them to the other process, which `host.peer_socket` does.

Invariants:
- A segment never has a name: it is an anonymous file (memfd) that lives as long as a process has it open or mapped. So
  nothing remains when processes are killed, however many at once. Only processes with its descriptor can map it.
- All of its pages are allocated when `create` returns, and it is sealed: no process can make it shorter. So access to
  it never ends in SIGBUS, in any process. A segment from another process is refused unless the same holds for it.
- A segment made with `read_only` is sealed against the writing of others, whatever they do with the descriptor.

Note: [Memory is freed elsewhere]
    The kernel takes 0.3 s to free a GiB, in the call that unmaps or closes it last. That call is in the thread in which
    the last reference to an array ends, which may be an event loop's. So large memory is unmapped and closed in a
    thread that is made for it. Allocating takes even longer (`create`), so no event loop calls that.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import itertools
import mmap
import os
import stat
import struct
import weakref
from _thread import start_new_thread  # `threading` has locks, which a garbage collection may find held
from collections.abc import Callable
from pathlib import Path

import numpy as np

from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host.memory import available_bytes
from axon_ps.types import Array

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; os has no name for it
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; fcntl has no name for it
_BLOCK_BYTES = 512  # of `st_blocks`
_HUGE_BYTES = 2 << 20
_LARGE_BYTES = 16 << 20
_OF_FILE, _THERE = np.uint64(1 << 61), np.uint64(3 << 62)  # of a page, in /proc/PID/pagemap; in memory or swapped
PAGE_BYTES = mmap.PAGESIZE


class Access(enum.Enum):
    """The access that a process has to a segment of another."""

    READ = enum.auto()
    """It can only read."""
    WRITE = enum.auto()
    """Its writes are seen by every process that has mapped the segment."""
    PRIVATE = enum.auto()
    """Its writes are visible in it alone, until `discard_writes`. Other pages show the segment's contents."""


class Segment:
    """The file of a segment of this process, passed to others that map it.

    Attributes:
        number: its number, which no other segment of this process ever has.
        size_bytes: its size.
        fd: its descriptor; -1 once closed. Memory that is mapped stays.
    """

    closed = 0
    """Number of segments of this process that were closed. A caller that holds segments checks them when it changes."""

    open = 0
    """Number of segments that are not closed. Each takes a descriptor."""

    _numbers = itertools.count(1)

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.number = next(Segment._numbers)
        self.size_bytes = size_bytes
        self.fd = fd
        Segment.open += 1

    def close(self) -> None:
        """Close its descriptor, so that it can be passed to no process any more. A repeated call is harmless."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            _free(self.size_bytes, os.close, fd)
            Segment.closed += 1
            Segment.open -= 1


def create(size_bytes: int, *, read_only: bool = False) -> tuple[Segment, Array]:
    """Make a segment of zeros.

    Args:
        size_bytes: its size, which is rounded up to full pages.
        read_only: only the returned memory can be written, by this process. It cannot be moved by `move_mapping`.

    Returns:
        Its file, and its memory u8[size_bytes], which is unmapped with the last array or view of it.

    Raises:
        Busy: there is not that much memory, or this process may open no more files. The message has the numbers.
    """
    size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    available = available_bytes()
    if size_bytes > available:
        raise _out_of_memory(size_bytes, available)
    try:
        fd = _memfd()
    except OSError as error:
        raise Busy(f"no shared memory can be made in this process: {error.strerror}") from error
    try:
        os.ftruncate(fd, size_bytes)
        memory = _map(fd, size_bytes, Access.WRITE)
        _populate(fd, memory)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | (_SEAL_FUTURE_WRITE if read_only else 0))
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EINVAL:
            raise Busy("this kernel cannot seal shared memory against writing, which needs Linux 5.1") from error
        raise _out_of_memory(size_bytes, available_bytes()) from error
    return Segment(fd, size_bytes), memory


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("axon_ps", flags | _MFD_NOEXEC_SEAL)  # machines may refuse any other
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("axon_ps", flags)


def receive(fd: int, access: Access) -> Array:
    """Map a segment of another process: u8[size_bytes], unmapped with the last array or view of it.

    Args:
        fd: its descriptor, which is closed here in any case: a mapping needs none.
        access: the access that this process has to it.

    Raises:
        InvalidRequest: it is not memory, or not sealed against being made shorter, or has holes.
        Busy: the kernel refuses to map it with this access, or at all.
    """
    try:
        return _map(fd, _checked_size(fd), access)
    except OSError as error:
        raise Busy(f"shared memory of another process cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)


def _checked_size(fd: int) -> int:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # involves no file system, which could be slow
    except OSError as error:
        raise InvalidRequest(
            "what was passed as shared memory is no memory (memfd) but another kind of file"
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidRequest(
            "the shared memory that was passed is not sealed against shrinking (F_SEAL_SHRINK), so its owner "
            "could end this process; seal it before it is passed"
        )
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not found.st_size or found.st_blocks * _BLOCK_BYTES < found.st_size:
        raise InvalidRequest(
            f"the shared memory that was passed has {found.st_size} bytes, and memory for "
            f"{found.st_blocks * _BLOCK_BYTES} of them; allocate all of it before it is passed"
        )
    return found.st_size


class _Mapping:
    """Memory that is mapped until nothing refers to this. `mmap.mmap` would keep a descriptor open as long."""

    def __init__(self, address: int, size_bytes: int, *, read_only: bool) -> None:
        self.__array_interface__ = {
            "data": (address, read_only),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        weakref.finalize(self, _free, size_bytes, _libc.munmap, address, size_bytes).atexit = False


def _free(size_bytes: int, call: Callable[..., object], *args: int) -> None:
    """Call a function that frees memory; see Note: [Memory is freed elsewhere]."""
    if size_bytes >= _LARGE_BYTES:
        try:
            start_new_thread(call, args)
        except RuntimeError:  # no more threads can be started
            pass
        else:
            return
    call(*args)


def _map(fd: int, size_bytes: int, access: Access) -> Array:
    """Map a file: u8[size_bytes]."""
    how = mmap.MAP_PRIVATE if access is Access.PRIVATE else mmap.MAP_SHARED
    protection = mmap.PROT_READ | (0 if access is Access.READ else mmap.PROT_WRITE)
    address = _libc.mmap(None, size_bytes, protection, how, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return np.asarray(_Mapping(address, size_bytes, read_only=access is Access.READ))


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


_libc = _load_libc()


def owner_of(memory: Array) -> object:
    """Return the object that lives exactly as long as memory from `create` or `receive` is mapped."""
    owner: object = memory.base
    assert isinstance(owner, _Mapping), "all the memory of a segment"
    return owner


def base_of(memory: Array) -> int:
    """Return the address where an array begins in this process."""
    return int(memory.__array_interface__["data"][0])


def discard_writes(memory: Array) -> None:
    """Undo this process's writes to a private mapping: it shows the segment's contents again."""
    if _has_own_pages(base_of(memory), memory.nbytes):
        _libc.madvise(base_of(memory), memory.nbytes, mmap.MADV_DONTNEED)


def move_mapping(base: int, old: Segment) -> Segment:
    """Replace the segment behind the memory at `base` by a new one. The contents are copied.

    A process that still writes to the old segment changes nothing here. No other thread may write at `base` meanwhile.

    Args:
        base: the address of the old segment in this process.
        old: the old segment, which is closed.

    Returns:
        The new segment.

    Raises:
        Busy: there is no memory for it, or the kernel refuses. Nothing has changed.
    """
    new, memory = create(old.size_bytes)
    ctypes.memmove(base_of(memory), base, new.size_bytes)
    try:
        _map_at(base, new, mmap.MAP_SHARED)
    except Busy:
        new.close()
        raise
    old.close()
    return new


def make_private(base: int, segment: Segment) -> None:
    """Make a segment's memory private: writes at `base` do not reach the mappings of others any more.

    Args:
        base: the address of the segment in this process.
        segment: its file, which is closed.

    Raises:
        Busy: the kernel refuses. Nothing has changed.
    """
    _map_at(base, segment, mmap.MAP_PRIVATE)
    segment.close()


def _map_at(base: int, segment: Segment, how: int) -> None:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(base, segment.size_bytes, protection, how | _MAP_FIXED, segment.fd, 0) != base:
        raise Busy(f"the segment at {base:#x} cannot be mapped anew: {os.strerror(ctypes.get_errno())}")


def boot_id() -> str:
    """Return the random id of this boot of the kernel: equal in all processes of a host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def total_bytes() -> int:
    """Return the memory of this machine, including swap."""
    return sum(_meminfo(name) for name in ("MemTotal:", "SwapTotal:"))


def _meminfo(name: str) -> int:
    """Return a row of /proc/meminfo in bytes; 2**62 if it is not there."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 1 << 62


def _populate(fd: int, memory: Array) -> None:
    """Allocate all pages, huge ones where the kernel agrees; raises OSError when there is not enough memory."""
    if memory.nbytes >= _HUGE_BYTES:
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            if _libc.madvise(base_of(memory), memory.nbytes, advice):
                code = ctypes.get_errno()
                if code in (errno.EINVAL, errno.ENOSYS, errno.EFAULT):  # old kernels; EFAULT: no space left
                    break
                raise OSError(code, os.strerror(code))
    os.posix_fallocate(fd, 0, memory.nbytes)


def _has_own_pages(base: int, size_bytes: int) -> bool:
    """Return True if a page of a private mapping was written to, and so is a copy, or if that is unknown.

    The check takes a tenth of the time that it takes to fault in every page of the mapping again.
    """
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            entries = np.fromfile(file, np.uint64, size_bytes // PAGE_BYTES, offset=base // PAGE_BYTES * 8)
    except OSError:
        return True
    return entries.size * PAGE_BYTES != size_bytes or bool(np.any((entries & _OF_FILE == 0) & (entries & _THERE != 0)))


def _out_of_memory(size_bytes: int, available: int) -> Busy:
    return Busy(
        f"a shared-memory segment needs {size_bytes} bytes ({size_bytes >> 20} MiB) of memory, "
        f"and {available} bytes ({available >> 20} MiB) are available; use fewer or smaller buffers"
    )


def pack_text(text: str, size_bytes: int) -> bytes:
    """Return a text in at most `size_bytes` bytes, its length first."""
    raw = text.encode()[: size_bytes - 2]
    return struct.pack("<H", len(raw)) + raw


def unpack_text(memory: memoryview) -> str:
    """Return the text that `pack_text` packed."""
    (length,) = struct.unpack_from("<H", memory)
    return bytes(memory[2 : 2 + length]).decode(errors="replace")
