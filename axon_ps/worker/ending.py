"""The reason for which this process ends: its script has finished, or failed.

Owns: recording the argument of `sys.exit`. Only the exit code distinguishes a failed script from a finished one, and
Python does not show it to exit handlers.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

_exit_code: Any = None
_recording = False


def record_exit() -> None:
    """Record the argument of `sys.exit` from now on; discard earlier ones."""
    global _exit_code, _recording
    _exit_code = None
    if _recording:
        return
    _recording = True
    exit_ = sys.exit

    @functools.wraps(exit_)
    def recording_exit(status: Any = None, /) -> Any:
        global _exit_code
        if threading.current_thread() is threading.main_thread():  # in another thread only that thread ends
            _exit_code = status
        exit_(status)

    sys.exit = recording_exit


def no_error_handled() -> bool:
    """Return True if the caller is not handling an error, so that the block it leaves has finished."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return _is_success(error.code)
    return error is None or isinstance(error, StopIteration)


def present_error() -> Exception | None:
    """Return the error that the caller handles, or that ended the main module; None for Ctrl-C and `sys.exit`."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error if isinstance(error, Exception) else None


def process_succeeded() -> bool:
    """Return True if nothing shows that the ending process failed: no uncaught error, no exit code but 0."""
    return getattr(sys, "last_value", None) is None and _is_success(_exit_code) and no_error_handled()


def _is_success(code: Any) -> bool:
    return code is None or code == 0
