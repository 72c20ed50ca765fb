"""Who sends first: gathers of the job's workers before what subscribers pull. One event loop.

Note: [Subscribers give way]
    A chunk for a subscriber waits until no gather is being answered (but not for ever: `GIVE_WAY_S` each), and what all
    subscribers together get takes at most half of the time that it would take by itself, and no more than the rate that
    was set. So a gather that comes finds at most one chunk of each subscriber before it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axon_ps.errors import Timeout

DUTY_CYCLE = 0.5
"""How much of the time chunks for subscribers are being written."""

GIVE_WAY_S = 0.05
"""How long a chunk waits for gathers."""

_LOOK_S = 0.002


@dataclass(frozen=True, kw_only=True)
class SubscriberLimits:
    """What subscribers get of a shard server.

    Attributes:
        rate_bytes_s: bytes per second that all of them get together.
        max_bytes: of memory for versions that are retained for them, for each model.
        retain_s: for how long a version is retained for one that does not get it; and how long a write may take.
    """

    rate_bytes_s: float = math.inf
    max_bytes: float = 1 << 30
    retain_s: float = 60.0


class Pacer:
    """Decides when a chunk for a subscriber is written.

    Args:
        limits: the rate, and how long a write may take.

    Attributes:
        gathers: how many are being answered.
    """

    def __init__(self, limits: SubscriberLimits) -> None:
        self._limits = limits
        self.gathers = 0
        self._free_s = 0.0

    async def write(self, write: Callable[[bytes], Any], frame: bytes) -> None:
        """Write a frame when it is its turn. See Note: [Subscribers give way].

        Raises:
            Timeout: the subscriber does not read.
        """
        until_s = time.monotonic() + GIVE_WAY_S
        while (left_s := max(self._free_s, self.gathers and until_s) - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _LOOK_S) if self.gathers else left_s)
        began_s = time.monotonic()
        self._free_s = began_s + len(frame) / self._limits.rate_bytes_s
        try:
            async with asyncio.timeout(self._limits.retain_s):
                await write(frame)
        except TimeoutError:
            raise Timeout(f"a subscriber did not read for {self._limits.retain_s:g} s") from None
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s + (now_s - began_s) * (1 / DUTY_CYCLE - 1))
