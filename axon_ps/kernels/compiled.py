"""How every loop here is compiled: for one thread, releasing the GIL, and to the same bits on every machine.

There is no contraction and no reordering of floating-point operations. The compiled code is cached on disk, for each
combination of argument types. numba compiles it again when the file of the loop has changed, but does not look at the
files of what the loop calls. So the name under which a loop is cached has a hash of all files of this package, and a
loop must call nothing outside of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

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
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # no directory for the cache (read-only installation, no home): compile once per process
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy")(function))
