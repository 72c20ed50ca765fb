"""How much memory a process needs: on `TRIM` it gives back what malloc has kept for later.

glibc keeps freed memory, ours by intent (`host.malloc`): up to 64 MiB at the end of each heap. What a burst of
messages once took would look like a leak of a process that is weighed from outside.
"""

from __future__ import annotations

import ctypes
import signal

TRIM = signal.SIGRTMIN


def install() -> None:
    """Listen to `TRIM`; call it on the main thread."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        signal.signal(TRIM, signal.SIG_IGN)
    else:
        signal.signal(TRIM, lambda number, frame: trim(0))
