"""A job that is watched: what is yielded while its coordinator answers, is gone, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from axon_ps.cli.settings import Settings
from axon_ps.cli.terminal import feed
from axon_ps.cli.terminal.feed import JobView, views
from axon_ps.cli.terminal.members import measures_of, of_the_job, works_of
from axon_ps.cli.terminal.status_view import rendered
from axon_ps.coordinator.core.events import Status
from axon_ps.errors import AxonError, PermissionDenied, Unreachable
from axon_ps.observe.work import Work
from axon_ps.types import Member, Membership, Role

WORKER = Member(role=Role.WORKER, rank=0, node="n", address="", incarnation="0" * 32, replica=0)


def status(finished: bool = False, **counters: float) -> Status:
    members = {"finished": (WORKER,), "workers": ()} if finished else {"workers": (WORKER,)}
    membership = Membership(generation=1, step=4, version=3, num_replicas=1, shards=(), complete=True, **members)  # type: ignore[arg-type]
    return Status(
        job="j", membership=membership, version=3, step=4, registered=True, initialized=True, parameters=10,
        lease_s=5.0, counters=counters, pending=(),
    )  # fmt: skip


def view(finished: bool = False, **progress: float) -> JobView:
    return JobView(status=status(finished), progress=dict(progress), at_s=0.0)


def watched(
    answers: Iterator[JobView | AxonError], monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> list[JobView]:
    async def look(operator: object, timeout_s: float) -> JobView:
        answer = next(answers)
        if isinstance(answer, AxonError):
            raise answer
        return answer

    async def all_of() -> list[JobView]:
        settings = Settings(coordinator="127.0.0.1:1")
        return [seen async for seen in views(settings, 0.0, 1.0, patience_s=patience_s)]

    monkeypatch.setattr(feed, "look", look)
    return asyncio.run(all_of())


def test_a_coordinator_that_fails_over_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Unreachable("nobody listens")
    seen = watched(iter([view(), gone, view(), view(finished=True)]), monkeypatch, float("inf"))
    assert [bool(v.error) for v in seen] == [False, True, False, False]
    assert "nobody listens" in seen[1].error


def test_the_end_of_a_job_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(watched(iter([view(step=9, steps=9), Unreachable("gone")]), monkeypatch, float("inf"))) == 1


def test_silence_in_the_middle_of_a_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreachable, match="no answer for"):
        watched(iter([view(step=1, steps=9), Unreachable("gone")]), monkeypatch, 0.0)


@pytest.mark.parametrize("error", [Unreachable("nobody"), PermissionDenied("wrong token")])
def test_nobody_who_ever_answered_is_an_error_at_once(error: AxonError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        watched(iter([error]), monkeypatch, float("inf"))


def test_measures_are_the_members_and_not_the_jobs() -> None:
    counters = {"joins": 2.0, "shard/1/copy_total_bytes": 10.0, "shard/1/copy_done_bytes": 4.0, "worker/0/cpu_s": 1.0}
    assert measures_of(counters, Role.SHARD) == {1: {"copy_total_bytes": 10.0, "copy_done_bytes": 4.0}}
    assert of_the_job(counters) == {"joins": 2.0}
    assert works_of(status(**counters)) == [Work("copy", 10, 4)]


def test_a_status_shows_work_memory_and_silence() -> None:
    from rich.console import Console

    measured = {"worker/0/memory_bytes": 2e9, "shard/0/upload_total_bytes": 100.0, "shard/0/upload_done_bytes": 25.0}
    seen = JobView(status=status(**measured), progress={"step": 3}, at_s=0.0, silent_s=4.0, error="nobody listens")
    console = Console(width=120)
    with console.capture() as captured:
        console.print(rendered(seen, "h:1"))
    text = captured.get()
    assert "not answered for 4s, trying again: nobody listens" in text
    assert "first values are uploaded: 25 B of 100 B (25 %)" in text
    assert "2 GB" in text
    assert "worker/0/" not in text
