"""A worker's connections: they join a job, and are closed in order whatever fails meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.errors import Broken
from axon_ps.observe.metrics.sources import Source
from axon_ps.types import Membership
from axon_ps.wire.events import Event
from axon_ps.worker.connections import Connections
from axon_ps.worker.mock_job import START_S, thread_workers
from axon_ps.worker.worker import Worker


def joined() -> tuple[Worker, Connections, list[Event]]:
    events: list[Event] = []
    (worker,) = thread_workers(1, shards=1, nodes=1)
    connections = Connections(worker, events.append)
    connections.loop.run(connections.coordinator.start(START_S), START_S)
    connections.observe(Source(kind="worker", read=dict))
    return worker, connections, events


def test_the_events_of_the_job_come_until_the_worker_leaves_it() -> None:
    _, connections, events = joined()
    assert connections.coordinator.rank == 0
    assert any(isinstance(event, Membership) for event in events)
    connections.close(finished=True)
    with pytest.raises(Exception, match="closed"):
        connections.loop.run(connections.coordinator.kv_get("key"), START_S)


def test_the_worker_is_closed_though_a_connection_fails_to(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, connections, _ = joined()
    closed: list[str] = []

    async def fail() -> None:
        assert connections.coordinator.membership is not None
        closed.append("shards")
        raise Broken("the server is gone")

    def close(then: Any = worker.close) -> None:
        closed.append("worker")
        then()

    monkeypatch.setattr(connections.shards, "close", fail)
    monkeypatch.setattr(worker, "close", close)
    with pytest.raises(Broken, match="server is gone"):
        connections.close(finished=True)
    assert closed == ["shards", "worker"]
