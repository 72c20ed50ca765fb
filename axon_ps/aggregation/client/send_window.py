"""The window of a rank, by which its uploads may be ahead of its downloads. Pure; the client waits.

Note: [Send window]
    The streams of several ranks to one server do not share its network card evenly, nor are servers served evenly. A
    segment of an all-reduce goes back once the last rank's has arrived. So segments that a fast stream sends early are
    useless, and take the card's capacity from the slow streams. When one stripe is done early, the card of its server's
    host is idle while the others run. So an upload may be only so far ahead of the slowest stripe's download, that is,
    of the slowest rank and the slowest server. These are the measured seconds of 64 MiB at 500 Mbit/s:

        operation, hosts                              without a window    with it    limit of the card
        all-reduce, 4 + 4                             1.28                1.15       1.08
        all-reduce, servers on the workers' hosts     1.74                1.69       1.68
        all-gather, servers on the workers' hosts     0.91                0.87       0.84

    With servers on the workers' hosts, all cards are full in both directions. An all-gather there is uploaded on one
    stripe and downloaded on the others. With the window, a rank whose data is read fast must wait before it sends more.

Invariants:
- Every wait ends. Take the upload that is furthest behind, of all ranks and stripes. Once everything in flight has
  arrived, its rank's downloads are at least as far, so this upload may go on. Progress is counted in fractions of a
  stripe, so that this holds for ranks with less to send, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.aggregation.core.stripes import StripePlan
from axon_ps.reduction.call import Operation

WINDOW_SEGMENTS = {Operation.ALL_REDUCE: 3, Operation.ALL_GATHER: 2}
"""Segments that a stripe's upload may be ahead of the slowest stripe's download.

Other operations have no window, since their data does not come back, or not evenly.
"""


class SendWindow:
    """The bytes that one rank has sent and received on every stripe.

    Args:
        plans: the data that it sends and receives, by stripe.
    """

    def __init__(self, plans: Sequence[StripePlan]) -> None:
        call = plans[0].call
        self._limit_bytes = WINDOW_SEGMENTS.get(call.operation, math.inf) * max(plan.segment_bytes() for plan in plans)
        self._uploads = [plan.upload_numel() * call.dtype.itemsize for plan in plans]
        self._downloads = [plan.download_numel() * call.dtype.itemsize for plan in plans]
        self._sent = [0] * len(plans)
        self._received = [0] * len(plans)

    def may_send(self, stripe: int, nbytes: int) -> bool:
        """Return True if the next `nbytes` of a stripe may be sent; never False if nothing is in flight."""
        slowest = min(self._progress(other) for other in range(len(self._received)))
        lead_bytes = self._sent[stripe] - slowest * self._uploads[stripe]
        return lead_bytes <= 0 or lead_bytes + nbytes <= self._limit_bytes

    def sent(self, stripe: int, nbytes: int) -> None:
        """Record that `nbytes` of a stripe were sent."""
        self._sent[stripe] += nbytes

    def received(self, stripe: int, nbytes: int) -> None:
        """Record that `nbytes` of a stripe have arrived."""
        self._received[stripe] += nbytes

    def _progress(self, stripe: int) -> float:
        """Return the fraction of a stripe that has arrived."""
        return self._received[stripe] / self._downloads[stripe] if self._downloads[stripe] else 1.0
