"""A job seen again and again: its status and its progress, also while its coordinator fails over or is gone.

A coordinator that does not answer is no end: another may lead soon. It is asked again until it has been silent for
`PATIENCE_S`; until then what was known last is given, with why there is nothing newer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from axon_ps.cli.operate import client
from axon_ps.errors import Broken, NotLeader, Timeout, Unreachable
from axon_ps.worker.progress import progress_of

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.coordinator.client.operator import OperatorClient
    from axon_ps.coordinator.core.events import Status

PATIENCE_S: Final = 30.0
"""How long a coordinator that has answered once may be silent."""

PASSING: Final = (Broken, NotLeader, Timeout, Unreachable)
"""Errors after which the coordinator, or another one, may answer again."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What is known of a job.

    Attributes:
        status: its newest status.
        progress: the training script's newest report; None = there is none.
        at_s: when that was, in seconds of `time.monotonic`.
        silent_s: for how long the coordinator has not answered; 0 = it has.
        error: why it does not.
    """

    status: Status
    progress: dict[str, Any] | None
    at_s: float
    silent_s: float = 0.0
    error: str = ""

    @property
    def finished(self) -> bool:
        """Whether the job is over: its workers have finished and left."""
        return is_finished(self.status)

    @property
    def at_the_end(self) -> bool:
        """Whether nothing is missing from a job that is not there any more."""
        steps = (self.progress or {}).get("steps")
        return self.finished or (steps is not None and (self.progress or {}).get("step", 0) >= steps)


def is_finished(status: Status) -> bool:
    """Whether the job is over: its workers have finished and left."""
    return bool(status.membership.finished) and not status.membership.workers


async def look(operator: OperatorClient, timeout_s: float) -> JobView:
    """The job as it is now.

    Raises:
        AxonError: the coordinator did not answer, or refused.
    """
    status = await operator.status(timeout_s=timeout_s)
    progress = await progress_of(lambda key: operator.kv_get(key, timeout_s=timeout_s))
    return JobView(status=status, progress=progress, at_s=time.monotonic())


async def views(
    settings: Settings, every_s: float, timeout_s: float, *, patience_s: float = PATIENCE_S
) -> AsyncIterator[JobView]:
    """The job as it is, every so often, until it has finished or its coordinator is gone at the end of training.

    Raises:
        AxonError: the coordinator has never answered, refuses, or was silent for `patience_s`.
    """
    newest: JobView | None = None
    async with client(settings) as operator:
        while True:
            try:
                newest = await look(operator, timeout_s)
            except PASSING as error:
                if newest is None:
                    raise
                silent_s = time.monotonic() - newest.at_s
                if newest.at_the_end or silent_s >= patience_s:
                    if newest.at_the_end:
                        return
                    raise type(error)(f"no answer for {silent_s:.0f} s, at {settings.coordinator}: {error}") from error
                newest = replace(newest, silent_s=silent_s, error=str(error))
            yield newest
            if newest.finished:
                return
            await asyncio.sleep(every_s)
