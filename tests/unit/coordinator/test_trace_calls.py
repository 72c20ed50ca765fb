"""The orders of `axon-ps trace` end with the leadership that gave them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server.feed import Feed
from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import Timeout
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.types import Role
from axon_ps.wire.events import JoinRequest
from axon_ps.wire.v1 import trace_pb2
from deadlines import HANG_S


def test_a_trace_ends_when_the_coordinator_leads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        state = CoordinatorState(CoordinatorConfig(job="job", world_size=1, num_shards=1), 0.0)
        monkeypatch.setattr(state.models, "step_of", lambda name: (0, 0))
        shell = Shell(state, MemoryStateStore())
        servicer = CoordinatorServicer(shell, Feed(shell))
        session = shell.open_session()
        request = JoinRequest(job="job", incarnation="1" * 32, node="n", address="n:1")
        shell.perform(state.join(session.number, Role.WORKER, request, shell.now()))
        tracing = asyncio.ensure_future(servicer._traces.run(trace_pb2.TraceRequest(steps=1, timeout_s=HANG_S)))
        while not (servicer._traces._waited_for or tracing.done()):
            await asyncio.sleep(0)
        servicer.close()
        done, _ = await asyncio.wait([tracing], timeout=HANG_S / 10)
        assert done
        with contextlib.suppress(Timeout):  # the coordinator's own spans may have come
            await tracing
        await shell.close()

    asyncio.run(main())
