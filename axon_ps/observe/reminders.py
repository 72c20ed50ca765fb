"""Reminders that a process is waiting: the first after 2 s, then ever more rarely."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

FIRST_REMINDER_S: Final = 2.0
MAX_REMINDER_S: Final = 60.0
"""The first pause before a reminder, and the longest; each pause is twice the previous one."""


def reminder_pauses() -> Iterator[float]:
    """Yield the pause before each reminder, in seconds, without end."""
    pause_s = FIRST_REMINDER_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_REMINDER_S)


@contextlib.contextmanager
def reminding(logger: logging.Logger, what: Callable[[], str]) -> Iterator[None]:
    """Log warnings with the cause and duration of a wait in the context; for code that cannot log it while it waits.

    Args:
        logger: gets the warnings.
        what: returns the cause of the wait ("waiting for rank 1"); called on another thread.
    """
    over = threading.Event()
    began_s = time.monotonic()

    def remind() -> None:
        for pause_s in reminder_pauses():
            if over.wait(pause_s):
                return
            logger.warning("%s, for %.0f s now", what(), time.monotonic() - began_s)

    thread = threading.Thread(target=remind, name="axon-ps reminder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
