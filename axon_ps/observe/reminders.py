"""Saying what is waited for, on the terminal that waits: after 2 s, and then ever more rarely."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

FIRST_REMINDER_S: Final = 2.0
MOST_REMINDER_S: Final = 60.0
"""How often whoever waits says so: first after this, then twice as long, and never more rarely."""


def reminder_pauses() -> Iterator[float]:
    """How long to wait before each reminder, in seconds; without end."""
    pause_s = FIRST_REMINDER_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MOST_REMINDER_S)


@contextlib.contextmanager
def reminding(logger: logging.Logger, what: Callable[[], str]) -> Iterator[None]:
    """While in it, warnings say what is waited for and for how long; for waits that cannot say it themselves.

    Args:
        logger: gets them.
        what: "waiting for rank 1", say; called on another thread.
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
