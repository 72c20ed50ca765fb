"""Handles of c10d over ours: they end with the operation, its result is stored by then, and errors stay ours.

Tests of `parallel/c10d/work.py`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch

from axon_ps.collectives.work import Work
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout
from axon_ps.parallel.c10d.work import AxonWork, CoalescedWork

LONG_S = 20.0


def following(finish: Any = lambda: None) -> tuple[Future[Any], AxonWork]:
    """A handle, and the future by which a test ends its operation."""
    future: Future[Any] = Future()
    return future, AxonWork.following([torch.zeros(1)], Work(future, "all_reduce"), finish)


def test_a_handle_is_complete_once_the_result_is_stored() -> None:
    stored = []
    future, work = following(lambda: stored.append(work.is_completed()))
    assert not work.is_completed()
    assert not work.is_success()
    future.set_result(None)
    assert stored == [False]
    assert work.wait()
    assert (work.is_completed(), work.is_success(), work.exception(), work.source_rank()) == (True, True, None, -1)


def test_a_receive_has_the_rank_that_sent() -> None:
    future, work = following()
    future.set_result(2)
    assert work.source_rank() == 2
    assert AxonWork.done([], "recv", 3).source_rank() == 3


def test_a_wait_that_is_too_long_says_so_and_the_operation_goes_on() -> None:
    future, work = following()
    with pytest.raises(Timeout, match="all_reduce is not done after 0.01 s; it goes on"):
        work.wait(timedelta(seconds=0.01))
    future.set_result(None)
    work.synchronize()


@pytest.mark.parametrize("in_storing", [True, False])
def test_an_error_is_that_of_the_operation_or_of_storing_its_result(*, in_storing: bool) -> None:
    def finish() -> None:
        raise MemberLost("rank 1 is gone")

    future, work = following(finish)
    if in_storing:
        future.set_result(None)
    else:
        future.set_exception(MemberLost("rank 1 is gone"))
    assert work.is_completed()
    assert not work.is_success()
    for _ in range(2):
        with pytest.raises(MemberLost, match="^rank 1 is gone$"):
            work.wait()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        work.get_future().wait()


@pytest.mark.parametrize("early", [True, False])
def test_a_future_gives_the_tensors_whenever_it_is_asked_for(*, early: bool) -> None:
    future, work = following()
    if early:
        asked = work.get_future()
        assert not asked.done()
        future.set_result(None)
    else:
        future.set_result(None)
        asked = work.get_future()
    assert asked.wait() is work.result()
    assert work.get_future() is asked


def test_callbacks_of_a_future_may_wait_for_other_operations() -> None:
    """They run on another thread than the one that ends operations."""
    first_end, first = following()
    second_end, second = following()
    called = threading.Event()

    def callback(_: Any) -> None:
        second.wait(timedelta(seconds=LONG_S))
        called.set()

    first.get_future().add_done_callback(callback)
    first_end.set_result(None)  # would not return if the callback ran here
    second_end.set_result(None)
    assert called.wait(LONG_S)


def several() -> tuple[list[Future[Any]], CoalescedWork]:
    pairs = [following() for _ in range(3)]
    return [future for future, _ in pairs], CoalescedWork([work for _, work in pairs], [torch.ones(2)])


def test_several_operations_end_as_one() -> None:
    futures, work = several()
    for future in futures:
        assert not work.is_completed()
        future.set_result(None)
    assert work.wait()
    work.synchronize()
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    assert work.get_future().wait() is work.result()


def test_of_several_operations_the_first_that_failed_counts_once_all_have_ended() -> None:
    futures, work = several()
    asked = work.get_future()
    errors: list[AxonError] = [Broken("the second"), MemberLost("the third")]
    futures[2].set_exception(errors[1])
    futures[1].set_exception(errors[0])
    assert not work.is_completed()
    futures[0].set_result(None)
    with pytest.raises(Broken, match="^the second$"):
        work.wait()
    assert not work.is_success()
    assert str(work.exception()) == "the second"
    with pytest.raises(RuntimeError, match="the second"):
        asked.wait()
