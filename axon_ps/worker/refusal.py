"""Errors of a worker that cannot join, printed in one line without a traceback.

A wrong token, address or variable is not an error of the script, so a traceback into it would mislead. For such errors
the hook for uncaught exceptions prints the message only, like the command line. A script that catches the error is not
affected.
"""

from __future__ import annotations

import sys
from types import TracebackType

from axon_ps.errors import AxonError, ConfigurationError, PermissionDenied, Unreachable

_NOT_OF_THE_SCRIPT = (ConfigurationError, PermissionDenied, Unreachable)

_last: AxonError | None = None
_hooked = False


def explain(error: BaseException) -> None:
    """Let `error` be printed as one line if it stays uncaught and the script is not its cause."""
    global _last, _hooked
    if not isinstance(error, _NOT_OF_THE_SCRIPT):
        return
    _last = error
    if _hooked:
        return
    _hooked = True
    others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if error is not _last:
            others(kind, error, traceback)
            return
        notes = "; ".join(getattr(error, "__notes__", ()))
        text = f"{error}{'; ' + notes if notes else ''}".replace("\n", " ")
        sys.stderr.write(f"axon-ps: this worker could not join its job: {text}\n")

    sys.excepthook = hook
