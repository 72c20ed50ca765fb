"""`GroupCalls`: the order and the numbers of calls, refusals, the end. Its backend is that of threads, or a fake."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import numpy as np
import pytest

from axon_ps.collectives import arguments
from axon_ps.collectives.arguments import PreparedCall
from axon_ps.collectives.backends.base import Request
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.group_calls import GroupCalls
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InvalidRequest, MemberLost, Misuse, Timeout
from axon_ps.types import ReduceOp


class Slow(MockBackend):
    """A backend of one rank whose calls wait for `go`, and fail with `error` if it is set."""

    name = "slow"
    error: BaseException | None = None

    def start(self) -> Slow:
        self.go = Event()
        self.requests: list[Request] = []
        return self

    def run(self, request: Request, timeout_s: float) -> None:
        assert self.go.wait(10)
        self.requests.append(request)
        if self.error is not None and request.call.operation.value != "refusal":
            raise self.error
        super().run(request, timeout_s)

    def abort(self, error: AxonError) -> None:
        super().abort(error)
        self.go.set()


def alone() -> tuple[GroupCalls, Slow]:
    (backend,) = Slow.create_world(1)
    assert isinstance(backend, Slow)
    return GroupCalls.over(backend.start(), timeout_s=10.0), backend


def several(n: int) -> Sequence[GroupCalls]:
    return [GroupCalls.over(backend, timeout_s=10.0) for backend in MockBackend.create_world(n)]


def reduced(value: float) -> PreparedCall:
    return arguments.all_reduce(np.full(1, value), ReduceOp.SUM)


def test_calls_are_numbered_in_the_order_in_which_they_were_made() -> None:
    calls, backend = alone()
    works = [calls.make("all_reduce", partial(reduced, i), None, None, True) for i in range(5)]
    assert not any(work.is_completed() for work in works)
    backend.go.set()
    assert calls.make("barrier", arguments.barrier, None, None, False) is None
    assert [work.wait().item() for work in works] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [request.call.sequence for request in backend.requests] == [0, 1, 2, 3, 4, 5]
    assert calls.sequence == 6


def test_calls_that_are_made_together_end_with_the_first_error() -> None:
    calls, backend = alone()
    backend.go.set()
    result = object()
    assert calls.make_each("each", [reduced(1), reduced(2)], result, 10.0, False) is result
    backend.error = InvalidRequest("no")
    with pytest.raises(InvalidRequest, match="no"):
        calls.make_each("each", [reduced(1), reduced(2)], result, 10.0, False)
    numbers = [(request.call.sequence, request.call.operation.value) for request in backend.requests]
    assert numbers == [(0, "all_reduce"), (1, "all_reduce"), (2, "all_reduce"), (2, "refusal")]


def test_a_call_that_cannot_be_prepared_is_refused_with_its_number() -> None:
    def wrong() -> PreparedCall:
        raise ValueError("three is too many")

    def body(calls: GroupCalls) -> None:
        if calls.members.rank == 0:
            with pytest.raises(ValueError, match="too many"):
                calls.make("broadcast", wrong, None, None, False)
            with pytest.raises(ValueError, match="four"), calls.preparing("gather", False, None, False) as limit_s:
                raise ValueError(f"four in {limit_s}")
        else:
            for words in (r"refused broadcast: three is too many", r"refused gather: four in 10\.0"):
                with pytest.raises(Disagreement, match=words):
                    calls.make("barrier", arguments.barrier, None, None, False)
        assert calls.make("all_reduce", partial(reduced, 1), None, None, False).item() == 2.0
        assert calls.sequence == 3

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, several(2)))


def test_a_time_out_must_not_be_negative_and_is_told_to_the_others() -> None:
    calls, backend = alone()
    backend.go.set()
    with pytest.raises(InvalidRequest, match="timeout_s is -1"):
        calls.make("barrier", arguments.barrier, None, -1.0, False)
    assert [request.call.operation.value for request in backend.requests] == ["refusal"]


@pytest.mark.parametrize(
    ("error", "seen"), [(Timeout("late"), Timeout), (KeyboardInterrupt(), Broken), (RuntimeError("bug"), Broken)]
)
def test_an_error_ends_the_group_and_its_sub_groups(error: BaseException, seen: type[Exception]) -> None:
    calls, backend = alone()
    backend.go.set()
    below = calls.sub_group("0", [0], backend="auto")
    backend.error = error
    with pytest.raises(type(error)):
        calls.make("barrier", arguments.barrier, None, None, False)
    for ended in (calls, below):
        with pytest.raises(seen):
            ended.make("barrier", arguments.barrier, None, None, False)
        with pytest.raises(seen):
            ended.backend_of(device=False)
    assert [entry.outcome.partition(":")[0] for entry in calls.recorder.entries()] == [
        type(error).__name__,
        seen.__name__,
        seen.__name__,
    ]


def test_the_loss_of_a_member_ends_what_has_it() -> None:
    first = several(3)[0]
    pair, rest = first.sub_group("0", [0, 1], backend="auto"), first.sub_group("1", [0, 2], backend="auto")
    first.member_lost({first.members.context.members[1].id}, MemberLost("rank 1 has left"))
    assert [isinstance(calls.backends.error, MemberLost) for calls in (first, pair, rest)] == [True, True, False]
    assert not first.release()
    rest.abort(MemberLost("rank 2 has left"))
    assert first.release()


def test_a_worker_that_has_finished_ends_later_collectives() -> None:
    calls = several(2)[0]
    calls.member_finished({calls.members.context.members[1].id}, MemberLost("rank 1 has finished"))
    with pytest.raises(MemberLost, match="has finished"):
        calls.make("barrier", arguments.barrier, None, None, False)
    assert calls.recorder.entries() == []
    assert calls.sequence == 0


def test_a_sub_group_of_others_makes_no_calls() -> None:
    calls = several(2)[0].sub_group("0", [1], backend="auto")
    with pytest.raises(Misuse, match="not a member"):
        calls.make("barrier", arguments.barrier, None, None, False)
    with pytest.raises(Misuse, match="not a member"):
        calls.backend_of(device=False)
    assert calls.recorder.entries() == []


def test_closing_ends_pending_calls() -> None:
    calls, _ = alone()
    pending = calls.make("barrier", arguments.barrier, None, None, True)
    calls.close(0.0)
    with pytest.raises(Closed):
        pending.wait(10)
    with pytest.raises(Closed, match="group 'mock' was closed"):
        calls.make("barrier", arguments.barrier, None, None, False)
    calls.close(0.0)
