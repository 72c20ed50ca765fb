"""Work that nobody waits for gives way to work that somebody waits for: by priority, and by resting."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

_LOW: Final = 10
"""As `nice -n 10`: about a tenth of a core when others want it, all of it when nobody does."""

_LONGEST_REST_S: Final = 1.0


def lower() -> None:
    """From now on the calling thread gives way to all others; it cannot be raised again. Harmless where forbidden."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)


@dataclass(frozen=True)
class Pace:
    """How much of the time something works; the rest it leaves cores, memory and storage to others.

    A low priority is not enough: the scheduler weighs it against the threads of the same session only.

    Attributes:
        share: above 0, at most 1.
    """

    share: float = 1.0

    def rest(self, worked_s: float) -> None:
        """Sleep after having worked so long."""
        if self.share < 1.0:
            time.sleep(min(worked_s * (1.0 / self.share - 1.0), _LONGEST_REST_S))


AT_ONCE: Final = Pace()
"""Somebody waits for it."""

GENTLY: Final = Pace(share=0.2)
"""Nobody does."""
