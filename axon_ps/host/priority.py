"""Background work gives way to work that is waited for: by priority, and by resting."""

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
class Throttle:
    """The share of the time in which something works; in the rest it leaves cores, memory and storage to others.

    A low priority is not enough: the scheduler weighs it against the threads of the same session only.

    Attributes:
        duty_cycle: the part of the time; above 0, at most 1.
    """

    duty_cycle: float = 1.0

    def rest(self, worked_s: float) -> None:
        """Sleep after having worked so long."""
        if self.duty_cycle < 1.0:
            time.sleep(min(worked_s * (1.0 / self.duty_cycle - 1.0), _LONGEST_REST_S))


UNTHROTTLED: Final = Throttle()
"""Somebody waits for it."""

BACKGROUND: Final = Throttle(duty_cycle=0.2)
"""Nobody does."""
