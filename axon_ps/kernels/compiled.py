"""The compilation of every loop here: for one thread, releasing the GIL, and to the same bits on every machine.

There is no contraction and no reordering of floating-point operations. The compiled code is cached on disk, for each
combination of argument types. numba compiles it again when the file of the loop has changed, but does not look at the
files of what the loop calls. So the name under which a loop is cached has a hash of all files of this package, and a
loop must call nothing outside of it.

Note: [Two processes that compile one loop]
    numba's cache gives an entry the next free number of an index, writes the index and then the entry, and holds no
    lock. So of two processes that do this at once, one's index is lost or, worse, tells a third one to load code that
    was compiled for other types (github.com/numba/numba/issues/10128 and 4807, which end in a segmentation fault). The
    services of a host start at once. So a process holds a lock of the loop while it looks for it, compiles and saves
    it, and the others find it in the cache. The lock is POSIX's and not BSD's: a process that is forked meanwhile, of a
    data loader say, does not keep it.
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
"""Seconds until a loop is compiled in spite of another process that compiles it, or is stopped while it does."""
POLL_S: Final = 0.01

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def sources_hash(package: Path) -> str:
    """A hash of the Python files of a folder."""
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
        with global_compiler_lock, locked(lock):  # a process's threads have its POSIX locks in common
            return compile_or_load(signature)

    loop.compile = compile_locked
    return cast(_Loop, loop)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made for it; see Note: [Two processes that compile one loop].

    After `LOCK_WAIT_S`, and where a file cannot be made or locked, as in a read-only cache, it is done without.
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
    """Whether the lock was had, or cannot be had here (a network file system without a lock manager)."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True
