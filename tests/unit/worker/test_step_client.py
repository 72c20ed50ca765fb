"""`StepClient` between a coordinator and servers that receive events at different times."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import StepAborted
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.types import DType
from axon_ps.wire.events import JobState
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.client import StepClient


class Restored:
    """Servers that have been restored to an older version, which the worker does not know yet."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.mappings = self

    async def gather(self, *_: Any, **__: Any) -> int:
        self.asked.set()
        raise StepAborted("the job was restored to version 1; version 3 is no more")

    map = gather

    def forget_residuals(self) -> None:
        pass


@pytest.mark.parametrize("ask", ["gather", "map"])
def test_an_event_that_a_server_gets_first_is_no_error_before_the_worker_has_it(ask: str) -> None:
    loop, servers = BackgroundLoop("test"), Restored()
    try:
        membership = SimpleNamespace(generation=1)
        view = JobView(lambda: "me", 60.0)
        client = StepClient(loop, SimpleNamespace(context=None, tracer=Tracer()), servers, view)  # type: ignore[arg-type]
        view.known = membership  # type: ignore[assignment]
        client.on_event(JobState(initialized=True, version=3))
        out = np.zeros(4, np.float32)
        work: Any = client.parameters.gather(0, out) if ask == "gather" else client.parameters.map(0, DType.F32)
        assert servers.asked.wait(10.0)
        loop.run(_turn())  # what failed has been dealt with
        assert not work.is_completed()
        loop.run(_tell(client, JobState(initialized=False, version=1, epoch=1)))
        with pytest.raises(StepAborted, match="the parameters were replaced meanwhile: this is epoch 1, no longer 0"):
            work.wait(10.0)
        assert client.view.latest == (1, 1)
    finally:
        loop.close()


async def _turn() -> None:
    pass


async def _tell(client: StepClient, event: JobState) -> None:
    client.on_event(event)
