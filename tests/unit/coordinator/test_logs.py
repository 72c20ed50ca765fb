"""The job's log: in order, bounded, fair to those who log little, and read page by page."""

from __future__ import annotations

import math

import pytest

from axon_ps.coordinator.core.history import logs as module
from axon_ps.coordinator.core.history.logs import COORDINATOR, MAX_NAME, MAX_TEXT, Logs
from axon_ps.wire.v1 import common_pb2, logs_pb2
from coordinator_driver import Driver

WORKER = common_pb2.ROLE_WORKER, 0
NOISY = common_pb2.ROLE_WORKER, 1


def record(text: str, level: int = 20) -> logs_pb2.LogRecord:
    return logs_pb2.LogRecord(at_s=1.0, level=level, logger="axon_ps.x", text=text)


def test_records_have_their_process_and_pages_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_RECORDS", 2)
    log = Logs()
    log.add(WORKER, "a", [record("1"), record("2")])
    log.add(COORDINATOR, "b", [record("3")])
    first, more = log.after(0)
    assert ([(r.text, r.role, r.rank, r.node) for r in first], more) == ([("1", 1, 0, "a"), ("2", 1, 0, "a")], True)
    second, more = log.after(first[-1].number)
    assert ([(r.text, r.role) for r in second], more) == ([("3", 0)], False)
    assert log.after(second[-1].number) == ([], False)


def test_who_logs_without_end_pushes_out_its_own_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100_000)
    log = Logs()
    log.add(WORKER, "a", [record("rare")])
    for number in range(2000):
        log.add(NOISY, "a", [record(f"flood {number}")])
    there, _ = log.after(0)
    assert there[0].text == "rare"
    assert there[-1].text == "flood 1999"
    assert log.dropped == 2001 - len(there)
    assert 100 < len(there) < 200


def test_what_a_process_dropped_is_said() -> None:
    log = Logs()
    log.add(WORKER, "a", [record("newer")], dropped=7)
    (notice, newer), _ = log.after(0)
    assert notice.text.startswith("7 records of this process are missing here")
    assert (notice.level, newer.text) == (30, "newer")
    log.add(WORKER, "a", [], dropped=3)
    assert len(log.after(0)[0]) == 3


def test_what_a_process_sends_is_bounded() -> None:
    log = Logs()
    hostile = logs_pb2.LogRecord(at_s=math.nan, level=1 << 31, logger="l" * 999, text="t" * 99_999, number=-5, rank=9)
    log.add(WORKER, "a", [hostile])
    (kept,), _ = log.after(0)
    assert (len(kept.text), len(kept.logger), kept.at_s, kept.number, kept.rank) == (MAX_TEXT, MAX_NAME, 0.0, 1, 0)


def test_only_members_are_in_it() -> None:
    d = Driver()
    (worker, _), _ = d.assembled()
    d.perform(d.state.logged(worker.session, [record("mine")], 0, d.clock()))
    d.perform(d.state.logged(999, [record("a stranger's")], 0, d.clock()))
    assert [r.text for r in d.state.history.logs.after(0)[0]] == ["mine"]
