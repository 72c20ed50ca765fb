"""How far a rank's uploads may run ahead of its downloads. Pure arithmetic; the client waits as it is told.

Note: [Ranks in step]
    The flows of several ranks into one server do not share its card evenly, least of all at the beginning. A piece of
    an all-reduce goes back when the last rank's has come, so what a fast flow has too early is of no use, and the card
    that carried it is missing to the slow ones. So an upload may be only so far ahead of the same share's download,
    which is to say of the slowest rank. *Measured* on 4 + 4 hosts at 500 Mbit/s, 64 MiB: 1.28 s without, 1.17 with; the
    card alone takes 1.08. On loopback it makes no difference.

Note: [Shares in step]
    Nor are servers served evenly: of four shares of that all-reduce one was done after 1.57 s and another after 1.83,
    and while the last ones ran, the cards of the first servers' hosts had nothing to do. So an upload may also be only
    so far ahead of the *slowest* share's download. That is one piece more than the other bound: with equal ones, pieces
    under way hold up others (1.30 s instead of 1.16 with dedicated servers); with 1 MiB it has little effect.
    *Measured* with servers on the workers' hosts, where all cards are full in both directions: 1.74 s without, 1.70
    with; the card alone takes 1.68. An all-gather goes up on one share and comes down on the others: there the bound
    keeps those that are read fast from being sent more (0.91 s and 0.87; the card alone takes 0.84).

Invariants:
- Nobody waits for ever. Take the upload that is furthest behind, of all ranks and shares: what comes down to its rank
  is at least as far once everything under way has come, so this one may go on. Progress is counted in fractions of a
  share, so that ranks with less to send are no exception.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axon_ps.reduction.call import Operation
from axon_ps.shard.pieces import Exchange


@dataclass(frozen=True)
class Ahead:
    """Bytes that may have been sent beyond what has come.

    Attributes:
        own: beyond the same share's download.
        slowest: beyond the slowest share's download.
    """

    own: float = math.inf
    slowest: float = math.inf


AHEAD = {
    Operation.ALL_REDUCE: Ahead(own=7 << 16, slowest=9 << 16),
    Operation.ALL_GATHER: Ahead(slowest=9 << 17),
}
"""Operations whose uploads are held back. In the others what a rank sends does not come back, or not evenly."""


class SharesInStep:
    """What one rank has sent and got of every share.

    Args:
        exchanges: its part in each share.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        call = exchanges[0].call
        self._limits = AHEAD.get(call.operation, Ahead())
        self._uploads = [exchange.upload_numel() * call.dtype.itemsize for exchange in exchanges]
        self._downloads = [exchange.download_numel() * call.dtype.itemsize for exchange in exchanges]
        self._sent = [0] * len(exchanges)
        self._came = [0] * len(exchanges)

    def may_send(self, share: int, nbytes: int) -> bool:
        """Whether the next `nbytes` of a share may go; never False when nothing is under way."""
        progress = [self._progress(other) for other in range(len(self._came))]
        return self._within(share, nbytes, progress[share], self._limits.own) and self._within(
            share, nbytes, min(progress), self._limits.slowest
        )

    def sent(self, share: int, nbytes: int) -> None:
        """So much of a share was sent."""
        self._sent[share] += nbytes

    def came(self, share: int, nbytes: int) -> None:
        """So much of a share has come."""
        self._came[share] += nbytes

    def _progress(self, share: int) -> float:
        """The fraction of a share that has come."""
        return self._came[share] / self._downloads[share] if self._downloads[share] else 1.0

    def _within(self, share: int, nbytes: int, progress: float, limit_bytes: float) -> bool:
        ahead_bytes = self._sent[share] - progress * self._uploads[share]
        return ahead_bytes <= 0 or ahead_bytes + nbytes <= limit_bytes
