"""Whether this process ends because it has finished, or because of an error.

Owns: recording the argument of `sys.exit`. The exit code alone distinguishes a script that gave up from one that is
done, and Python does not show it to exit handlers.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_given: Any = None
_noticing = False


def notice_exit() -> None:
    """From now on record the argument of `sys.exit`; forget earlier ones."""
    global _given, _noticing
    _given = None
    if _noticing:
        return
    _noticing = True
    exit_ = sys.exit

    @functools.wraps(exit_)
    def remember(status: Any = None, /) -> Any:
        global _given
        _given = status
        exit_(status)

    sys.exit = remember


def going_well() -> bool:
    """Whether the caller is handling no error: then what ends has finished."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return _is_success(error.code)
    return error is None or isinstance(error, StopIteration)


def process_went_well() -> bool:
    """Whether, at the process's end, nothing shows that it failed: no uncaught error, no exit code but 0."""
    return getattr(sys, "last_value", None) is None and _is_success(_given) and going_well()


def _is_success(code: Any) -> bool:
    return code is None or code == 0
