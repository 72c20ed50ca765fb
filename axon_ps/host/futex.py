"""Waiting for a change of a counter that lies in memory shared by several processes.

Owns: `wait` and `wake` (Linux futexes, without the PRIVATE flag) and `fence`. Refuses: the meaning of counters.

Note: [Memory order]
    Counters in shared memory are aligned integers of 4 or 8 bytes with one writer each, read and written through
    memoryviews, which compile to single loads and stores. Two more things are needed:

    - *Publish*: data written before a counter is visible to every process that sees the counter. x86 orders stores, and
      loads, so nothing is needed there. Elsewhere the writer calls `fence()` before it stores the counter, and the
      reader calls `fence()` after it has loaded it (`settle()` is that: nothing on x86).
    - *Sleep*: when two processes each store their own counter and then load the other's, at least one sees the other's
      store. That needs a full fence between the store and the load on every machine.

    On x86 `fence()` takes and releases a Python lock: both are locked instructions, which are full fences. On other
    machines it is the membarrier system call, which the kernel begins and ends with a full fence.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable

_MACHINE = platform.machine()
_TOTAL_STORE_ORDER = _MACHINE in ("x86_64", "AMD64", "i686")
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(_MACHINE, -1)
_MEMBARRIER_CALL = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365}.get(_MACHINE, -1)
_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
_MEMBARRIER_CMD_GLOBAL_EXPEDITED = 2

AVAILABLE = sys.platform == "linux" and sys.byteorder == "little" and _FUTEX_CALL > 0
"""True if this module works on this machine."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Each call has a function of its own, which declares its argument types: a variadic call would pass ints as 32 bits.
# ctypes releases the GIL during the call.
def _syscall(*arguments: type) -> Callable[..., int]:
    function = ctypes.CDLL(None)["syscall"] if sys.platform == "linux" else ctypes.CFUNCTYPE(ctypes.c_long)(lambda: -1)
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long, *arguments)
    return function


_futex = _syscall(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
_membarrier = _syscall(ctypes.c_int, ctypes.c_uint, ctypes.c_int)


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until another process wakes the counter, unless its value is not `expected`; may also return without cause.

    Args:
        address: of an aligned u32 in shared memory.
        expected: the value that the caller saw before it decided to sleep.
        timeout_s: sleep no longer.
    """
    seconds = int(timeout_s)
    until = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _futex(_FUTEX_CALL, address, _WAIT, expected, ctypes.addressof(until), None, 0)


def wake(address: int) -> None:
    """Wake every thread that sleeps on the counter, in any process. This is a full fence, too."""
    _futex(_FUTEX_CALL, address, _WAKE, _EVERYBODY, None, None, 0)


_lock = threading.Lock()


def _fence_by_lock() -> None:
    with _lock:
        pass


def _fence_by_kernel() -> None:
    _membarrier(_MEMBARRIER_CALL, _MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0)


def _nothing() -> None:
    pass


fence: Callable[[], None] = _fence_by_lock if _TOTAL_STORE_ORDER else _fence_by_kernel
"""A full memory fence. See Note: [Memory order]."""

settle: Callable[[], None] = _nothing if _TOTAL_STORE_ORDER else _fence_by_kernel
"""Orders loads among themselves and stores among themselves. See Note: [Memory order]."""
