"""Exchanges of all ranks of a pipeline, on ranks that are threads.

Tests of `parallel/pipeline/exchange.py`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest
from axon_ps.parallel.pipeline import exchange
from axon_ps.parallel.pipeline.exchange import HEADER_BYTES
from axon_ps.parallel.pipeline.schedule import Action, ActionKind
from axon_ps.parallel.pipeline.timeline import ActionSpan
from mock_ranks import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [None, 3, [1.5, "é"], {"a": [True, None]}, "x" * (HEADER_BYTES - 2)])
def test_a_small_value_comes_back_from_a_header_of_one_size(value: Any) -> None:
    header = exchange.pack(value)
    assert header.nbytes == HEADER_BYTES
    assert exchange.unpack(header) == value


def test_a_value_that_is_too_large_says_how_large() -> None:
    with pytest.raises(InvalidRequest, match=f"takes {HEADER_BYTES + 1} bytes to describe, of {HEADER_BYTES}"):
        exchange.pack("x" * (HEADER_BYTES - 1))


def test_every_rank_has_every_ranks_value() -> None:
    assert (
        on_ranks(3, lambda group: exchange.exchange(group, {"rank": group.rank}))
        == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    )


def test_ranks_agree_on_their_pipeline_and_know_each_others_stages() -> None:
    def same(group: ProcessGroup) -> list[int]:
        return exchange.agree(group, group.rank + 1, "2 stages", ["mse", 3])

    assert on_ranks(3, same) == [[1, 2, 3]] * 3
    assert exchange.agree(None, 4, "4 stages", None) == [4]


@pytest.mark.parametrize("in_rest", [True, False])
def test_ranks_that_made_different_pipelines_are_told_all_of_them(*, in_rest: bool) -> None:
    def different(group: ProcessGroup) -> str:
        last = group.rank == 1
        with pytest.raises(Disagreement) as error:
            exchange.agree(group, 1, "3 stages" if last and not in_rest else "2 stages", last and in_rest)
        return str(error.value)

    first, second = on_ranks(2, different)
    assert first == second
    assert first.startswith("the ranks made different pipelines")
    assert "rank 0: 2 stages" in first
    assert f"rank 1: {2 if in_rest else 3} stages" in first


def test_the_roots_tensors_are_everywhere_in_their_shapes_and_dtypes() -> None:
    given = torch.arange(6.0).view(2, 3), torch.tensor(7), torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 4)

    def spread(group: ProcessGroup) -> Any:
        return exchange.spread(group, given if group.rank == 1 else (), 1, CPU)

    for tensors in on_ranks(3, spread):
        assert len(tensors) == len(given)
        for tensor, expected in zip(tensors, given, strict=True):
            assert tensor.dtype is expected.dtype
            assert torch.equal(tensor, expected)


def span(rank: int, begin_s: float) -> ActionSpan:
    return ActionSpan(rank, Action(ActionKind.FORWARD, rank, 0), begin_s, begin_s + 1.0, 0.5)


def test_times_of_one_host_are_on_one_clock() -> None:
    timelines = on_ranks(2, lambda group: exchange.gather_timeline(group, [span(group.rank, 10.0 + group.rank)]))
    for timeline in timelines:
        assert timeline.ranks == 2
        assert timeline.spans == (span(0, 10.0), span(1, 11.0))


def test_times_of_another_host_are_moved_by_the_difference_of_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has a clock that is 1000 s ahead, and another boot id."""
    ahead = threading.local()
    boot, monotonic = exchange.boot_id(), time.monotonic
    monkeypatch.setattr(exchange, "boot_id", lambda: getattr(ahead, "boot", boot))
    monkeypatch.setattr(exchange, "time", type("Clock", (), {"monotonic": lambda: monotonic() + ahead.seconds}))

    def gather(group: ProcessGroup) -> Any:
        ahead.seconds = 1000.0 * group.rank
        if group.rank:
            ahead.boot = "another"
        return exchange.gather_timeline(group, [span(group.rank, 10.0 + ahead.seconds)])

    for timeline in on_ranks(2, gather):
        first, second = timeline.spans
        assert first == span(0, 10.0)
        assert second.begin_s == pytest.approx(10.0, abs=20.0)  # as exact as a barrier


def test_the_last_collective_before_an_end_raises_nothing() -> None:
    (group,) = ProcessGroup.mock(1)
    exchange.end_together(group)
    group.close()
    exchange.end_together(group)
