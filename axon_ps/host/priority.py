"""Background work at a lower priority and with rests, so that urgent work goes first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

_LOW: Final = 10
"""As `nice -n 10`: about a tenth of a core under contention, all of it otherwise."""

_LONGEST_REST_S: Final = 1.0


def lower() -> None:
    """Lower the calling thread's priority to `nice` 10, for good, if that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)


@dataclass(frozen=True)
class Throttle:
    """A limit on the time that work takes. In the rest of the time, cores, memory and storage are left to others.

    A low priority is not enough: the scheduler weighs it against the threads of the same session only.

    Attributes:
        duty_cycle: the fraction of the time that is worked; above 0, at most 1.
    """

    duty_cycle: float = 1.0

    def rest(self, worked_s: float) -> None:
        """Sleep after `worked_s` seconds of work, for at most 1 s."""
        if self.duty_cycle < 1.0:
            time.sleep(min(worked_s * (1.0 / self.duty_cycle - 1.0), _LONGEST_REST_S))


UNTHROTTLED: Final = Throttle()
"""For work that is waited for."""

BACKGROUND: Final = Throttle(duty_cycle=0.2)
"""For work that is not waited for."""
