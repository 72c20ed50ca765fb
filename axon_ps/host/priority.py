"""The scheduling priority of threads: work that nobody waits for gives way to work that somebody waits for."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

_LOW: Final = 10
"""As `nice -n 10`: about a tenth of a core when others want it, all of it when nobody does."""


def lower() -> None:
    """From now on the calling thread gives way to all others; it cannot be raised again. Harmless where forbidden."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)
