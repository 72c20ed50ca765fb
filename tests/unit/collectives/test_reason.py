"""The reason of a group's end, for ranks that see a broken connection alone.

Tests of `collectives/backends/reason.py`.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from axon_ps.collectives.backends import reason
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.store import MemoryStore
from axon_ps.errors import AxonError, Broken, MemberLost, NcclError, Timeout


@pytest.mark.parametrize(
    ("published", "found"), [(Timeout, Timeout), (MemberLost, MemberLost), (Broken, Broken), (NcclError, Broken)]
)
def test_every_rank_finds_the_error_of_the_rank_that_ended_the_group(
    published: type[AxonError], found: type[AxonError]
) -> None:
    first, second = mock_contexts(2)
    reason.publish(first, "nccl", published("rank 1 did not come, in time"))
    for context in (first, second):
        error = reason.find(context, "nccl", 0.0)
        assert type(error) is found
        assert str(error) == "rank 1 did not come, in time"


def test_another_group_and_another_transport_have_ended_for_no_reason() -> None:
    (context,) = mock_contexts(1)
    reason.publish(context, "nccl", Timeout("late"))
    assert reason.find(context, "gloo", 0.0) is None
    assert reason.find(replace(context, name="another"), "nccl", 0.0) is None


def test_a_store_that_fails_or_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Silent(MemoryStore):
        def put(self, key: str, value: bytes) -> None:
            answers.wait(20.0)

    class Failing(MemoryStore):
        def put(self, key: str, value: bytes) -> None:
            raise Broken("the coordinator is gone")

    monkeypatch.setattr(reason, "WAIT_S", 0.01)
    (context,) = mock_contexts(1)
    for store in (Silent(), Failing()):
        reason.publish(replace(context, store=store), "nccl", Timeout("late"))
        assert reason.find(replace(context, store=store), "nccl", 0.0) is None
    answers.set()
