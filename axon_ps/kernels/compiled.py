"""How every loop here is compiled: for one thread, releasing the GIL, and to the same bits on every machine.

There is no contraction and no reordering of floating-point operations. The compiled code is cached on disk, for each
combination of argument types. numba drops it when the file of the loop has changed, but does not look at other files,
so a loop must not call a compiled function of another file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(function: _Loop) -> _Loop:
    """Compile a loop at its first call for each combination of argument types; see the module's docstring."""
    try:
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # no directory for the cache (read-only installation, no home): compile once per process
        return cast(_Loop, numba.njit(nogil=True, error_model="numpy")(function))
