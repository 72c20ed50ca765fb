"""What a worker's threads find when the news of a membership wakes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from axon_ps.coordinator.client.session import Event
from axon_ps.types import Membership
from axon_ps.worker.models import Models
from job_services import JobServices
from job_worker import joined

WORKERS = 2
BLOCKED_S = 1.0  # below the lease, in which the blocked thread sends nothing


def test_a_complete_job_is_complete_for_the_default_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that waited runs on before the one that told it does."""
    tell = Models.on_event
    asked = threading.Semaphore(0)

    def tell_and_let_them_run(self: Models, event: Event) -> None:
        tell(self, event)
        if isinstance(event, Membership) and event.complete and len(event.workers) == WORKERS:
            asked.acquire(timeout=BLOCKED_S)

    monkeypatch.setattr(Models, "on_event", tell_and_let_them_run)

    def ranks(address: str, rank: int) -> Sequence[int]:
        with joined(address, rank, WORKERS) as world:
            found = world.default_group.ranks
            asked.release(100)  # it is told more than once
            world.barrier("asked")
            return found

    with JobServices([(WORKERS, 1)]) as services, ThreadPoolExecutor(WORKERS) as threads:
        found = list(threads.map(lambda rank: ranks(services.addresses[0], rank), range(WORKERS)))
    assert found == [(0, 1), (0, 1)]
