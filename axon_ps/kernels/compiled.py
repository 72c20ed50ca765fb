"""The compilation of every loop here: for one thread, releasing the GIL, and with bit-identical results everywhere.

Floating-point operations are neither contracted nor reordered. The compiled code is cached on disk, for each
combination of argument types. numba compiles it again when the file of the loop has changed, but does not look at the
files of the functions that the loop calls. So the name under which a loop is cached has a hash of all files of this
package. A loop must call nothing outside of it.

Note: [Two processes that compile one loop]
    numba's cache gives an entry the next free number of an index, writes the index and then the entry, and takes no
    lock. If two processes do this at once, one index is lost. Worse, the index can make a third process load code that
    was compiled for other types. That ends in a segmentation fault (github.com/numba/numba/issues/10128 and 4807). The
    services of a host start at once. So a process has the lock of a loop while it looks it up, compiles and saves it,
    and the others find it in the cache. It is a POSIX lock and not a BSD lock: a process that is forked meanwhile, for
    example by a data loader, does not keep it.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
from numba.core.compiler_lock import global_compiler_lock

LOCK_WAIT_S: Final = 60.0
"""Seconds to wait for another process that compiles a loop, and may be suspended. Then it is compiled without lock."""
POLL_S: Final = 0.01

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def sources_hash(package: Path) -> str:
    """Return a hash of the Python files of a folder."""
    contents = (path.read_bytes() for path in sorted(package.glob("*.py")))
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12]


_SOURCES = sources_hash(Path(__file__).parent)


def compiled(function: _Loop) -> _Loop:
    """Compile a loop at its first call for each combination of argument types; see the module's docstring."""
    function.__qualname__ += f".{_SOURCES}"
    try:
        loop: Any = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no directory for the cache (read-only installation, no home): compile once per process
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy")(function))
    lock, compile_or_load = Path(loop.stats.cache_path, f"{function.__qualname__}.lock"), loop.compile

    def compile_locked(signature: Any) -> Any:
        with global_compiler_lock, locked(lock):  # the threads of a process share its POSIX locks
            return compile_or_load(signature)

    loop.compile = compile_locked
    return cast(_Loop, loop)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, which is made for it; see Note: [Two processes that compile one loop].

    It is not locked after `LOCK_WAIT_S`, or if a file cannot be made or locked, as in a read-only cache.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        until = time.monotonic() + LOCK_WAIT_S
        while not _lock(file.fileno()) and time.monotonic() < until:
            time.sleep(POLL_S)
        yield


def _lock(fd: int) -> bool:
    """Try to lock; True also if locking is impossible here (a network file system without a lock manager)."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True
