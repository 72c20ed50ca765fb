"""On the signal `TRIM` a process returns its free memory to the kernel, so that a test can measure the memory in use.

glibc retains freed memory, up to 64 MiB at the end of each heap with the configuration of `host.malloc`. After a burst
of messages that would look like a leak.
"""

from __future__ import annotations

import ctypes
import signal

TRIM = signal.SIGRTMIN


def install() -> None:
    """Handle `TRIM`; call it on the main thread."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        signal.signal(TRIM, signal.SIG_IGN)
    else:
        signal.signal(TRIM, lambda number, frame: trim(0))
