"""The departure of a shard server: others take the slices that it holds, step by step, and no step is aborted.

It is `axon-ps drain` of itself. Where that cannot be (it is the last server, nobody trains, the coordinator does not
answer, time is up) it leaves with what it holds, of which others have the copies.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from axon_ps.errors import AxonError
from axon_ps.shard.server.job_watch import JobWatch

_logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""How long the coordinator may take to answer."""

AWAY_S: Final = 30.0
"""How long it may be away meanwhile."""


class Drains(Protocol):
    """The needed part of the session with the coordinator."""

    @property
    def rank(self) -> int:
        """Of this server."""

    async def drain(self, rank: int, timeout_s: float | None = ...) -> int:
        """As `coordinator.client.calls.Calls.drain`."""


async def hand_over(session: Drains, watch: JobWatch, failure: asyncio.Future[None], limit_s: float) -> None:
    """Give everything up to other servers; return when that cannot be.

    Args:
        session: with the coordinator.
        watch: of the job.
        failure: ends with `Drained` when this server holds nothing any more.
        limit_s: how long it may take, in seconds.

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
    """Wait until nothing is held any more, or it makes no sense to; then why."""
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
