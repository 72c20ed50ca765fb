"""Callbacks of collectives, which may wait for other collectives. The oracle: over gloo and NCCL they may."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from deadlines import HANG_S
from mock_ranks import on_ranks


def test_a_callback_begins_collectives_and_waits_for_them() -> None:
    def body(group: ProcessGroup) -> list[float]:
        done, seen = threading.Event(), []

        def again(work: Work[Any]) -> None:
            seen.append(group.all_reduce(work.wait(), async_op=True).wait(10.0).item())
            group.all_reduce(np.ones(1), async_op=True).add_done_callback(last)

        def last(work: Work[Any]) -> None:
            seen.append(group.all_reduce(np.ones(1), timeout_s=10.0).item() + work.wait().item())
            done.set()

        group.all_reduce(np.ones(1), async_op=True).add_done_callback(again)
        assert done.wait(20.0)
        return seen

    assert on_ranks(2, body) == [[4.0, 4.0]] * 2


def test_a_callback_that_waits_holds_up_no_other() -> None:
    def body(group: ProcessGroup) -> None:
        first, second, ended = threading.Event(), threading.Event(), threading.Event()
        work = group.all_reduce(np.ones(1), async_op=True)
        work.add_done_callback(lambda _: (first.set(), second.wait(10.0), ended.set()))
        work.add_done_callback(lambda _: second.set())
        assert first.wait(10.0)
        assert ended.wait(10.0)

    on_ranks(2, body)


def test_what_a_callback_raises_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = threading.Event()
    monkeypatch.setattr("axon_ps.collectives.work._logger.exception", lambda _message: logged.set())

    def body(group: ProcessGroup) -> None:
        after = threading.Event()
        work = group.all_reduce(np.ones(1), async_op=True)
        work.add_done_callback(lambda _: 1 / 0)
        work.wait(HANG_S)
        work.add_done_callback(lambda _: after.set())
        assert after.wait(HANG_S)

    on_ranks(1, body)
    assert logged.wait(HANG_S)
