"""A standby: a coordinator that refuses calls, with the leader's address, and tries to lead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.errors import AxonError, Broken, NotLeader, StorageFull
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.rpc.auth.credentials import Credentials, Revocations
from axon_ps.storage.state_store.base import SharedStateStore, StateStore

POLL_S: Final = 0.25
"""Seconds between two attempts of a standby to lead."""

_logger = logging.getLogger(__name__)


class Switch:
    """The coordinator's service for gRPC: the methods of a servicer while this coordinator leads, else refusals.

    Args:
        store: its `leads` returns True while we lead.

    Attributes:
        servicer: of the present leadership; None while we stand by.
        why: the reason why calls are refused.
        tracer: the spans of this process.
        revocations: the names that the servers of this process refuse.
    """

    def __init__(self, store: StateStore) -> None:
        self.servicer: CoordinatorServicer | None = None
        self.why = "this coordinator is starting"
        self.tracer = Tracer()
        self.revocations = Revocations()
        self._store = store

    def refused(self, path: str, credentials: Credentials, peer: str, error: AxonError) -> None:
        """Record a call that the caller's role does not allow; see `CoordinatorServicer.refused`."""
        if self.servicer is not None:
            self.servicer.refused(path, credentials, peer, error)

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the job while we lead; on a standby only `leads`, which is 0."""
        return {"leads": 0.0} if self.servicer is None else self.servicer.statistics()

    def histograms(self) -> dict[str, Histogram]:
        """Return the times of the job's steps, while we lead."""
        return {} if self.servicer is None else self.servicer.histograms()

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def forward(*args: Any) -> Any:
            if self.servicer is None or not self._store.leads():
                if isinstance(self._store, SharedStateStore) and method == "session":
                    self._store.refused()
                raise NotLeader(self.why)
            return await getattr(self.servicer, method)(*args)

        return forward


async def stand_by(store: SharedStateStore, switch: Switch, stop: asyncio.Event) -> bool:
    """Return True as soon as we lead, False when we are to stop. Log the leader's address now and then."""
    loop, pauses = asyncio.get_running_loop(), reminder_pauses()
    why, remind_s = "", loop.time()
    while not stop.is_set():
        try:
            if not (leader := await asyncio.to_thread(store.campaign)):
                return True
            why = f"the coordinator at {leader} leads"
        except (Broken, StorageFull) as error:
            why = f"no leader is known: {error}"
        if switch.why != f"this coordinator stands by: {why}" or loop.time() >= remind_s:
            switch.why = f"this coordinator stands by: {why}"
            remind_s = loop.time() + next(pauses)
            _logger.info("standing by: %s", why)
        await rest(stop, POLL_S)
    return False


async def rest(stop: asyncio.Event, seconds: float) -> None:
    """Wait for some seconds, or until we are to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
