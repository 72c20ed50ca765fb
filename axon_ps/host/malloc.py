"""Settings of malloc and of the garbage collector: message buffers are reused, arenas are few, collections are rare.

By default glibc returns a large block to the kernel when it is freed, or as soon as it lies at the end of the heap. So
each chunk of 1 MiB that is sent or received costs a system call, and a page fault for each of its 256
pages. One stream of such chunks took 1.1 ms of CPU per MiB sent. Page faults were 0.6 ms of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
MMAP_THRESHOLD_BYTES = 16 << 20
"""Smaller blocks come from the heap and are reused: all messages, since chunks have at most 4 Mi elements."""
TRIM_THRESHOLD_BYTES = 64 << 20
"""Free memory that a heap retains at its end."""

RETURNED_BYTES = 64 << 10
"""After `return_message_memory`, freed blocks from this size on are returned at once: small messages are smaller."""
RETURNED_TRIM_BYTES = 8 << 20
"""Free memory that a heap then retains at its end."""

_logger = logging.getLogger(__name__)


@functools.cache
def retain_message_memory() -> bool:
    """Have malloc retain freed message buffers for the next messages; once per process.

    Returns:
        True if it does: other C libraries than glibc have no such settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    set_both = mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) == 1 == mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    if not set_both:
        _logger.info("malloc does not retain message buffers; chunks cost page faults")
    return bool(set_both)


def return_message_memory() -> None:
    """Have malloc return freed message buffers to the kernel: for a coordinator, whose messages are small or rare.

    By default, glibc retains blocks as large as the largest that was ever freed, 32 MiB at most. So the memory of a
    burst of large messages stays with the process. A coordinator of 73 MiB was measured after 1,537 refused puts. They
    had 1 MiB each, and came 64 at a time:

    | blocks returned at once | memory afterwards |
    |---|---|
    | from 64 KiB on | 95 MiB |
    | from 128 KiB on | 177 MiB |
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, RETURNED_TRIM_BYTES)


def limit_arenas() -> None:
    """Have a service's threads share one arena for each processor that it may use (at least 2), not glibc's eight.

    The free memory of an arena is for its own threads only. The memory of a call can also be pinned there, since gRPC
    never frees some of it if the client abandons the call. This was measured on a coordinator with 2 processors:

    | hostile connections | limited | 16 arenas |
    |---|---|---|
    | 1,200 | 131 MiB | 142 MiB |
    | 4,800 | 145 MiB | 171 MiB |
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max(2, len(os.sched_getaffinity(0))))


def collect_rarely() -> None:
    """Have Python look for garbage in cycles less often: a service of many members has many live objects.

    *Measured* on a coordinator of 10,000 members: one full collection takes 0.2 s, and came every third step before.
    """
    gc.set_threshold(50_000, 20, 100)
