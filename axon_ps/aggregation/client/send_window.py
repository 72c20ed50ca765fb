"""How far a rank's uploads may run ahead of its downloads. Pure arithmetic; the client waits as it is told.

Note: [In step]
    The flows of several ranks into one server do not share its card evenly, nor are servers served evenly. A piece of
    an all-reduce goes back when the last rank's has come, so what a fast flow has too early is of no use, and the card
    that carried it is missing to the slow ones; and when one share is done early, the card of its server's host has
    nothing to do while the others run. So an upload may be only so far ahead of the slowest share's download, which is
    to say of the slowest rank and the slowest server. *Measured*, 64 MiB at 500 Mbit/s: on 4 + 4 hosts 1.28 s without,
    1.15 with; the card alone takes 1.08. With servers on the workers' hosts, where all cards are full in both
    directions, 1.74 and 1.69; the card alone takes 1.68. An all-gather there goes up on one share and comes down on the
    others: the bound keeps those that are read fast from being sent more (0.91 s and 0.87; the card alone takes 0.84).

Invariants:
- Nobody waits for ever. Take the upload that is furthest behind, of all ranks and shares: what comes down to its rank
  is at least as far once everything under way has come, so this one may go on. Progress is counted in fractions of a
  share, so that ranks with less to send are no exception.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.aggregation.core.stripes import Exchange
from axon_ps.reduction.call import Operation

AHEAD_BYTES = {Operation.ALL_REDUCE: 9 << 16, Operation.ALL_GATHER: 9 << 17}
"""What a share may have been sent beyond what has come of the slowest share: three pieces, or two. Other operations are
not held back: what a rank sends does not come back there, or not evenly."""


class SharesInStep:
    """What one rank has sent and got of every share.

    Args:
        exchanges: its part in each share.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        call = exchanges[0].call
        self._limit_bytes = AHEAD_BYTES.get(call.operation, math.inf)
        self._uploads = [exchange.upload_numel() * call.dtype.itemsize for exchange in exchanges]
        self._downloads = [exchange.download_numel() * call.dtype.itemsize for exchange in exchanges]
        self._sent = [0] * len(exchanges)
        self._came = [0] * len(exchanges)

    def may_send(self, share: int, nbytes: int) -> bool:
        """Whether the next `nbytes` of a share may go; never False when nothing is under way."""
        slowest = min(self._progress(other) for other in range(len(self._came)))
        ahead_bytes = self._sent[share] - slowest * self._uploads[share]
        return ahead_bytes <= 0 or ahead_bytes + nbytes <= self._limit_bytes

    def sent(self, share: int, nbytes: int) -> None:
        """So much of a share was sent."""
        self._sent[share] += nbytes

    def came(self, share: int, nbytes: int) -> None:
        """So much of a share has come."""
        self._came[share] += nbytes

    def _progress(self, share: int) -> float:
        """The fraction of a share that has come."""
        return self._came[share] / self._downloads[share] if self._downloads[share] else 1.0
