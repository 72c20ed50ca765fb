"""`Lifecycle`: a step ends alike on all ranks, and a pipeline that is over stays so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Broken, Closed
from axon_ps.parallel.pipeline.channel import Channel, PeerFailed
from axon_ps.parallel.pipeline.executor import StageFailed
from axon_ps.parallel.pipeline.lifecycle import Lifecycle

Failure = StageFailed | PeerFailed | None


def conclude_on_two_ranks(first: Failure, second: Failure) -> list[list[float | None] | Exception]:
    """End a step, whose loss rank 1 has, on two ranks; return what each of them gets from it, and from the next."""

    def work(rank: int) -> list[float | None] | Exception:
        lifecycle = Lifecycle(groups[rank], Channel(groups[rank], (0, 1), {}))
        loss = 0.5 if rank and not second else None
        try:
            losses = lifecycle.conclude(loss, (first, second)[rank])
        except Exception as error:
            with pytest.raises(Broken):
                lifecycle.check_open()
            return error
        lifecycle.check_open()
        lifecycle.end(Closed("over"))
        return losses

    groups = ProcessGroup.mock(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, range(2)))


def test_every_rank_gets_the_losses_of_all() -> None:
    assert conclude_on_two_ranks(None, None) == [[None, 0.5], [None, 0.5]]


def test_a_failure_is_the_own_error_on_its_rank_and_broken_on_the_others() -> None:
    cause = ValueError("out of ideas")
    first, second = conclude_on_two_ranks(StageFailed("stage 0 failed in forward", cause), None)
    assert first is cause
    assert cause.__notes__ == ["stage 0 failed in forward"]
    assert isinstance(second, Broken)
    assert str(second).startswith("stage 0 failed in forward: ValueError: out of ideas; the pipeline is over")


def test_a_ranks_own_failure_is_told_and_not_what_followed_from_it() -> None:
    cause = ValueError("out of ideas")
    first, second = conclude_on_two_ranks(PeerFailed("a message of it"), StageFailed("stage 1 failed", cause))
    assert str(first).startswith("stage 1 failed: ValueError: out of ideas")
    assert second is cause


def test_long_errors_are_cut_to_fit_in_a_header() -> None:
    _, second = conclude_on_two_ranks(StageFailed("stage 0 failed", ValueError("line\n" * 1000)), None)
    assert "stage 0 failed: ValueError: line line line" in str(second)
    assert len(str(second)) < 1000


def test_without_a_group_errors_end_nothing() -> None:
    lifecycle = Lifecycle(None, Channel(None, (0, 0), {}))
    with pytest.raises(ValueError, match="out of ideas"):
        lifecycle.conclude(None, StageFailed("stage 0 failed", ValueError("out of ideas")))
    lifecycle.break_off(KeyboardInterrupt())
    lifecycle.check_open()
    assert lifecycle.conclude(0.5, None) == [0.5]


def test_a_pipeline_that_is_over_keeps_its_first_error() -> None:
    (group,) = ProcessGroup.mock(1)
    lifecycle = Lifecycle(group, Channel(group, (0,), {}))
    lifecycle.break_off(KeyboardInterrupt("Ctrl-C"))
    lifecycle.end(Closed("the pipeline was closed"))
    with pytest.raises(Broken, match="rank 0 left the pipeline by KeyboardInterrupt: Ctrl-C"):
        lifecycle.check_open()
