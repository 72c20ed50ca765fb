"""The state of a job, kept up to date from the coordinator's feed, also while that fails over or is gone.

A coordinator that does not answer is not the end: another may lead soon. It is called again until it has been silent
for `PATIENCE_S`. Until then the last known state stays, with the reason why there is nothing newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from axon_ps.cli.operations import client
from axon_ps.cli.terminal.quantities import duration
from axon_ps.errors import AxonError, Broken, NotLeader, Timeout, Unreachable

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.cli.terminal.watched_job import WatchedJob

PATIENCE_S: Final = 30.0
"""Seconds for which a coordinator that has answered once may be silent."""

PASSING: Final = (Broken, NotLeader, Timeout, Unreachable)
"""Errors after which the coordinator, or another one, may answer again."""


async def followed(
    settings: Settings, job: WatchedJob, *, first_s: float | None = None, patience_s: float = PATIENCE_S
) -> AsyncGenerator[str, None]:
    """Bring `job` up to date; yields after each change the reason why nothing newer comes, or "".

    It ends when the job has finished, or its coordinator is gone after the last step.

    Args:
        settings: those that name the job.
        job: its known state.
        first_s: seconds that the first answer may take; None = as many as connecting may take.
        patience_s: seconds for which the coordinator may be silent later.

    Raises:
        AxonError: the coordinator has never answered, refuses, or was silent for too long.
    """
    newest_s = time.monotonic()
    async with client(settings) as operator, contextlib.aclosing(operator.watch()) as feed:
        while True:
            try:
                async with asyncio.timeout(first_s if job.status is None else None):
                    event = await anext(feed)
            except TimeoutError as error:
                if isinstance(error, Timeout):
                    raise
                raise Timeout(f"no answer from the coordinator at {settings.coordinator} in {first_s:g} s") from None
            if not isinstance(event, AxonError):
                newest_s = time.monotonic()
                job.apply(event)
                yield ""
                if job.finished:
                    return
                continue
            silent_s = time.monotonic() - newest_s
            if job.status is None:
                raise event
            if job.at_the_end:
                return
            if silent_s >= patience_s:
                raise type(event)(f"no answer for {silent_s:.0f} s, at {settings.coordinator}: {event}") from event
            yield f"the coordinator has not answered for {duration(silent_s)}, trying again: {event}"
