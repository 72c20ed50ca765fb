"""The window of a rank: its uploads may be so far ahead of its downloads. Pure arithmetic; the client does the waiting.

Note: [Send window]
    The streams of several ranks into one server do not share its network card evenly, nor are servers served evenly. A
    segment of an all-reduce goes back when the last rank's has come. So what a fast stream sends early is of no use,
    and takes the card from the slow ones. And when one stripe is done early, the card of its server's host is idle
    while the others run. So an upload may be only so far ahead of the slowest stripe's download, that is, of the
    slowest rank and the slowest server. *Measured*, 64 MiB at 500 Mbit/s: on 4 + 4 hosts 1.28 s without a window, 1.15
    with it; the card alone takes 1.08. With servers on the workers' hosts, where all cards are full in both directions,
    1.74 and 1.69; the card alone takes 1.68. An all-gather there goes up on one stripe and comes down on the others:
    the window stops a rank whose data is read fast from sending more (0.91 s and 0.87; the card alone takes 0.84).

Invariants:
- No wait is without end. Take the upload that is furthest behind, of all ranks and stripes: once everything under way
  has come, its rank's downloads are at least as far, so this upload may go on. Progress is counted in fractions of
  a stripe, so that this holds for ranks with less to send, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.aggregation.core.stripes import StripePlan
from axon_ps.reduction.call import Operation

WINDOW_SEGMENTS = {Operation.ALL_REDUCE: 3, Operation.ALL_GATHER: 2}
"""How many segments a stripe's upload may be ahead of the slowest stripe's download. Other operations have no window:
what a rank sends does not come back there, or not evenly."""


class SendWindow:
    """The bytes that one rank has sent and received on every stripe.

    Args:
        plans: by stripe, what it sends and receives.
    """

    def __init__(self, plans: Sequence[StripePlan]) -> None:
        call = plans[0].call
        self._limit_bytes = WINDOW_SEGMENTS.get(call.operation, math.inf) * max(plan.segment_bytes() for plan in plans)
        self._uploads = [plan.upload_numel() * call.dtype.itemsize for plan in plans]
        self._downloads = [plan.download_numel() * call.dtype.itemsize for plan in plans]
        self._sent = [0] * len(plans)
        self._received = [0] * len(plans)

    def may_send(self, stripe: int, nbytes: int) -> bool:
        """Whether the next `nbytes` of a stripe may be sent; never False when nothing is under way."""
        slowest = min(self._progress(other) for other in range(len(self._received)))
        lead_bytes = self._sent[stripe] - slowest * self._uploads[stripe]
        return lead_bytes <= 0 or lead_bytes + nbytes <= self._limit_bytes

    def sent(self, stripe: int, nbytes: int) -> None:
        """`nbytes` of a stripe were sent."""
        self._sent[stripe] += nbytes

    def received(self, stripe: int, nbytes: int) -> None:
        """`nbytes` of a stripe have come."""
        self._received[stripe] += nbytes

    def _progress(self, stripe: int) -> float:
        """The fraction of a stripe that has come."""
        return self._received[stripe] / self._downloads[stripe] if self._downloads[stripe] else 1.0
