"""`axon-ps logs` reads page after page from whichever coordinator leads. Tests of `cli/terminal/logs.py`."""

from __future__ import annotations

import asyncio
import json
from typing import Self

import pytest

from axon_ps.cli.settings import Settings
from axon_ps.cli.terminal import logs
from axon_ps.cli.terminal.log_view import Wanted
from axon_ps.errors import AxonError, PermissionDenied, Unreachable
from axon_ps.wire.v1 import common_pb2, logs_pb2

WORKER = common_pb2.ROLE_WORKER
AWAY = Unreachable("nobody answers")


def page(
    *numbers: int, history: str = "a", more: bool = False, finished: bool = False, dropped: int = 0
) -> logs_pb2.LogsReply:
    """Records of worker 0, of which the last ones are the oldest."""
    records = [
        logs_pb2.LogRecord(at_s=100.0 - n, level=20 + 10 * (n % 2), text=f"record {n}", number=n, role=WORKER)
        for n in numbers
    ]
    return logs_pb2.LogsReply(history=history, records=records, more=more, finished=finished, dropped=dropped)


class Operator:
    """A coordinator that answers with these pages, or does not answer."""

    def __init__(self, *answers: logs_pb2.LogsReply | AxonError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, float, float]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def logs(self, history: str, after: float, wait_s: float) -> logs_pb2.LogsReply:
        self.asked.append((history, after, wait_s))
        answer = self.answers.pop(0)
        if isinstance(answer, AxonError):
            raise answer
        return answer


def show(
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
    wanted: Wanted | None = None,
    *,
    follow: bool = True,
    as_json: bool = True,
) -> None:
    monkeypatch.setattr(logs, "client", lambda settings: operator)
    monkeypatch.setattr(logs, "AGAIN_S", 0.0)
    asyncio.run(logs.show_logs(Settings(), wanted or Wanted(), follow=follow, as_json=as_json))


def texts(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """The records that were shown, and the warnings."""
    shown = capsys.readouterr()
    return [json.loads(line)["message"] for line in shown.out.splitlines()], shown.err.splitlines()


def test_pages_that_are_there_are_read_at_once_and_shown_by_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Operator(page(1, 2, more=True), page(3))
    show(operator, monkeypatch, follow=False)
    assert texts(capsys) == (["record 3", "record 2", "record 1"], [])
    assert operator.asked == [("", 0.0, 0.0), ("a", 2.0, logs.WAIT_S)]


def test_following_goes_on_until_the_job_has_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Operator(page(1, dropped=5), page(), page(2), page(finished=True))
    show(operator, monkeypatch)
    assert texts(capsys) == (["record 1", "record 2"], ["axon-ps: 5 older records are not there any more"])
    assert [after for _, after, _ in operator.asked] == [0.0, 1.0, 1.0, 2.0]


def test_only_the_wanted_records_are_shown_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show(Operator(page(1, 2, 3, finished=True)), monkeypatch, Wanted(level=30), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line[-8:] for line in lines] == ["record 3", "record 1"]
    assert all("WARNING worker 0" in line for line in lines)


def test_another_coordinator_is_waited_for_and_its_log_is_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Operator(page(1), AWAY, AWAY, page(1, history="b"), page(2, history="b", finished=True))
    show(operator, monkeypatch)
    shown, warned = texts(capsys)
    assert shown == ["record 1", "record 1", "record 2"]
    assert warned == [
        "axon-ps: no answer, trying again: nobody answers",
        "axon-ps: the coordinator has begun a new log; it does not know what was logged before it led",
    ]
    assert [history for history, _, _ in operator.asked] == ["", "a", "a", "a", "b"]


def test_a_new_log_is_read_from_its_beginning_although_its_first_page_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Operator(page(5), page(history="b"), page(1, history="b", finished=True))
    show(operator, monkeypatch)
    assert texts(capsys)[0] == ["record 5", "record 1"]
    assert [(history, after) for history, after, _ in operator.asked] == [("", 0.0), ("a", 5.0), ("b", 0.0)]


@pytest.mark.parametrize(
    ("answers", "patience_s"),
    [([AWAY], 30.0), ([page(1), PermissionDenied("no")], 30.0), ([page(1), AWAY, AWAY], 0.0)],
    ids=["never answered", "refuses", "silent for too long"],
)
def test_an_error_ends_it(
    answers: list[logs_pb2.LogsReply | AxonError], patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "PATIENCE_S", patience_s)
    operator = Operator(*answers)
    error = answers[-1]
    assert isinstance(error, AxonError)
    with pytest.raises(type(error)):
        show(operator, monkeypatch)
    assert not operator.answers
