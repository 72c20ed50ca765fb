"""A job that is watched: what is yielded while its coordinator answers, is gone, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from axon_ps.cli.settings import Settings
from axon_ps.cli.terminal import feed
from axon_ps.cli.terminal.members import measures_of, of_the_job, works_of
from axon_ps.cli.terminal.status_view import rendered
from axon_ps.cli.terminal.watched_job import WatchedJob
from axon_ps.coordinator.messages import status_to_proto
from axon_ps.errors import AxonError, PermissionDenied, Timeout, Unreachable
from axon_ps.observe.work import LongWork
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.events import Status
from axon_ps.wire.report import Report
from axon_ps.wire.v1 import watch_pb2

WORKER = Member(role=Role.WORKER, rank=0, node="n", address="", incarnation="0" * 32, replica=0)


def status(finished: bool = False, **counters: float) -> Status:
    membership = Membership(
        generation=1,
        step=4,
        version=3,
        num_replicas=1,
        shards=(),
        complete=True,
        workers=() if finished else (WORKER,),
        finished=(WORKER,) if finished else (),
        is_over=finished,
    )
    return Status(
        job="j", membership=membership, version=3, step=4, registered=True, initialized=True, parameters=10,
        lease_s=5.0, counters=counters, pending=(),
    )  # fmt: skip


def test_a_worker_in_no_replica_is_shown_as_that() -> None:
    from rich.console import Console

    lonely = replace(WORKER, rank=3, replica=-1)
    seen = status()
    seen = replace(seen, membership=replace(seen.membership, workers=(WORKER, lonely)))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(rendered(seen, "h:1"))
    assert captured.get().count("in none") == 1


def event(finished: bool = False, step: int | None = None) -> watch_pb2.WatchEvent:
    progress = None if step is None else Report(step=step, steps=9)
    return watch_pb2.WatchEvent(begins=True, status=status_to_proto(replace(status(finished), progress=progress)))


Answers = Sequence[watch_pb2.WatchEvent | AxonError]


class Operator:
    """A client whose feed gives these; the last, if it is an error that is to be raised, it raises."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def __aenter__(self) -> Operator:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def watch(self) -> AsyncGenerator[watch_pb2.WatchEvent | AxonError, None]:
        for answer in self._answers:
            if isinstance(answer, PermissionDenied):
                raise answer
            yield answer
        await asyncio.Event().wait()


def watched(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, patience_s: float = float("inf"), first_s: float | None = None
) -> list[str]:
    async def all_of() -> list[str]:
        settings = Settings(coordinator="127.0.0.1:1")
        changes = feed.followed(settings, WatchedJob(), first_s=first_s, patience_s=patience_s)
        return [note async for note in changes]

    monkeypatch.setattr(feed, "client", lambda _: Operator(answers))
    return asyncio.run(all_of())


def test_a_coordinator_that_fails_over_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched([event(), Unreachable("nobody listens"), event(), event(finished=True)], monkeypatch)
    assert [bool(note) for note in seen] == [False, True, False, False]
    assert seen[1].endswith("trying again: nobody listens")


def test_the_end_of_a_job_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched([event(step=9), Unreachable("gone")], monkeypatch) == [""]


def test_silence_in_the_middle_of_a_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreachable, match="no answer for"):
        watched([event(step=1), Unreachable("gone")], monkeypatch, patience_s=0.0)


@pytest.mark.parametrize("error", [Unreachable("nobody"), PermissionDenied("wrong token")])
def test_nobody_who_ever_answered_is_an_error_at_once(error: AxonError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        watched([error], monkeypatch)


def test_a_first_answer_may_take_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Timeout, match=r"no answer from the coordinator at 127\.0\.0\.1:1 in 0\.01 s"):
        watched([], monkeypatch, first_s=0.01)


def test_measures_are_the_members_and_not_the_jobs() -> None:
    counters = {"joins": 2.0, "shard/1/copy_total_bytes": 10.0, "shard/1/copy_done_bytes": 4.0, "worker/0/cpu_s": 1.0}
    assert measures_of(counters, Role.SHARD) == {1: {"copy_total_bytes": 10.0, "copy_done_bytes": 4.0}}
    assert of_the_job(counters) == {"joins": 2.0}
    assert works_of(status(**counters)) == [LongWork("copy", 10, 4)]


def test_a_status_shows_work_memory_and_silence() -> None:
    from rich.console import Console

    measured = {"worker/0/memory_bytes": 2e9, "shard/0/upload_total_bytes": 100.0, "shard/0/upload_done_bytes": 25.0}
    seen = replace(status(**measured), progress=Report(step=3))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(rendered(seen, "h:1", "trying again: nobody listens"))
    text = captured.get()
    assert "trying again: nobody listens" in text
    assert "first values are uploaded: 25 B of 100 B (25 %)" in text
    assert "2 GB" in text
    assert "worker/0/" not in text
    narrow = Console(width=40)
    with narrow.capture() as captured:
        narrow.print(rendered(seen, "h:1", width=40))
    assert "│worker│0   │n   │0      │2 GB  │" in captured.get()
