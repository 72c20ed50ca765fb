"""The departure of a shard server: others take over its slices, step by step, and no step is aborted.

The server drains itself as `axon-ps drain` would. If that is impossible (it is the last server, the job has no workers,
the coordinator does not answer, time is up), it leaves with its slices, of which others have the copies.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from axon_ps.errors import AxonError
from axon_ps.shard.server.job_watch import JobWatch

_logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds that the coordinator may take to answer."""

AWAY_S: Final = 30.0
"""Seconds that the coordinator may be away meanwhile."""


class Drains(Protocol):
    """The part of the session with the coordinator that is needed here."""

    @property
    def rank(self) -> int:
        """The rank of this server."""

    async def drain(self, rank: int, timeout_s: float | None = ...) -> int:
        """Drain a server; see `coordinator.client.calls.Calls.drain`."""


async def hand_over(session: Drains, watch: JobWatch, failure: asyncio.Future[None], limit_s: float) -> None:
    """Hand over all slices to other servers; returns if that is impossible.

    Args:
        session: with the coordinator.
        watch: of the job.
        failure: ends with `Drained` when this server does not hold any slice.
        limit_s: time limit in seconds.

    Raises:
        Drained: it is done.
        AxonError: this server cannot go on.
    """
    if not watch.trains:
        return
    try:
        async with asyncio.timeout(limit_s):
            left = await session.drain(session.rank, min(limit_s, ANSWER_S))
            _logger.info("leaving: %d slices go to other shard servers first", left)
            why = await _handed_over(watch, failure)
    except TimeoutError:
        why = f"not everything was handed over in {limit_s:g} s"
    except AxonError as error:
        why = str(error)
    if failure.done():
        failure.result()
    _logger.warning("leaving with what this server holds: %s", why)


async def _handed_over(watch: JobWatch, failure: asyncio.Future[None]) -> str:
    """Wait until all slices are handed over, or waiting is useless; returns the reason, empty for success."""
    while not failure.done():
        await watch.until(lambda: failure.done() or not (watch.trains and watch.connected))
        if not watch.trains:
            return "nobody trains any more"
        if not failure.done() and not watch.connected:
            try:
                async with asyncio.timeout(AWAY_S):
                    await watch.until(lambda: failure.done() or watch.connected)
            except TimeoutError:
                return f"the coordinator is away for {AWAY_S:g} s"
    return ""
