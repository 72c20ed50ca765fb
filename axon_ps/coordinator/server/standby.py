"""A coordinator while another one leads: it refuses calls, with the leader's address, and tries to lead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.errors import AxonError, Broken, NotLeader
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.rpc.auth.credentials import Credentials, Revocations
from axon_ps.storage.state_store.base import SharedStateStore, StateStore

POLL_S: Final = 0.25
"""How often a standby tries to lead."""

_logger = logging.getLogger(__name__)


class Switch:
    """The coordinator's service as gRPC knows it: a servicer's methods while there is one and we lead, else refusals.

    Args:
        store: knows whether we lead.

    Attributes:
        servicer: of the present leadership; None while we stand by.
        why: why calls are refused.
        tracer: the spans of this process.
        revocations: what the servers of this process refuse.
    """

    def __init__(self, store: StateStore) -> None:
        self.servicer: CoordinatorServicer | None = None
        self.why = "this coordinator is starting"
        self.tracer = Tracer()
        self.revocations = Revocations()
        self._store = store

    def refused(self, path: str, credentials: Credentials, peer: str, error: AxonError) -> None:
        """A caller's role does not allow a call; see `CoordinatorServicer.refused`."""
        if self.servicer is not None:
            self.servicer.refused(path, credentials, peer, error)

    def statistics(self) -> dict[str, float]:
        """The numbers of the job while we lead; on a standby, that it does not."""
        return {"leads": 0.0} if self.servicer is None else self.servicer.statistics()

    def histograms(self) -> dict[str, Histogram]:
        """The times of the job's steps, while we lead."""
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
    """Return True as soon as we lead, False when we are to stop. Says in the log now and then who leads instead."""
    loop, pauses = asyncio.get_running_loop(), reminder_pauses()
    why, remind_s = "", loop.time()
    while not stop.is_set():
        try:
            if not (leader := await asyncio.to_thread(store.campaign)):
                return True
            why = f"the coordinator at {leader} leads"
        except Broken as error:
            why = f"nobody is known to lead: {error}"
        if switch.why != f"this coordinator stands by: {why}" or loop.time() >= remind_s:
            switch.why = f"this coordinator stands by: {why}"
            remind_s = loop.time() + next(pauses)
            _logger.info("standing by: %s", why)
        await rest(stop, POLL_S)
    return False


async def rest(stop: asyncio.Event, seconds: float) -> None:
    """Wait a while, or until we are to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
