"""A worker that cannot join says why in one line: where a token, an address or a variable is wrong, the script is not.

Python prints an uncaught error with a traceback of wherever it came from. For those that whoever starts the script has
to put right, the hook for uncaught errors prints the message alone, as the command line does. Who catches the error
notices nothing.
"""

from __future__ import annotations

import sys
from types import TracebackType

from axon_ps.errors import AxonError, ConfigurationError, PermissionDenied, Unreachable

_OF_THE_STARTER = (ConfigurationError, PermissionDenied, Unreachable)

_last: AxonError | None = None
_hooked = False


def explain(error: BaseException) -> None:
    """Have `error`, should nobody catch it, printed as one line, if it is nothing of the script's."""
    global _last, _hooked
    if not isinstance(error, _OF_THE_STARTER):
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
