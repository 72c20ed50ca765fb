"""One reduction of gradients, bucket by bucket: one order, whatever order gradients come in.

Tests of `parallel/rounds.py`.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future

import pytest

from axon_ps.collectives.work import Work
from axon_ps.errors import Broken
from axon_ps.parallel.rounds import Round

BUCKETS = [(0, 3), (1,), (2, 4)]


class Reductions:
    """Starts reductions that a test ends."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.futures: list[Future[str]] = []

    def __call__(self, position: int) -> Work[str]:
        self.started.append(position)
        self.futures.append(Future())
        return Work(self.futures[-1], f"reducing bucket {position}")


@pytest.mark.parametrize("order", [*itertools.permutations(range(5))][::7])
def test_a_bucket_is_reduced_once_it_and_all_before_it_are_complete(order: tuple[int, ...]) -> None:
    reductions = Reductions()
    made = Round(BUCKETS, reductions)
    assert not made.has_begun
    for n in range(5):
        made.ready(order[n])
        come = set(order[: n + 1])
        complete = itertools.takewhile(come.issuperset, BUCKETS)
        assert reductions.started == list(range(len(list(complete))))
        assert made.missing.keys() == set(range(5)) - come
        assert made.has_begun


def test_without_overlap_buckets_wait_to_be_started() -> None:
    reductions = Reductions()
    made = Round(BUCKETS, reductions, overlapped=False)
    for member in (4, 2, 1, 0):
        made.ready(member)
    assert reductions.started == []
    made.start_complete()
    assert reductions.started == []  # the first bucket lacks a gradient
    made.ready(3)
    made.start_complete()
    made.start_complete()
    assert reductions.started == [0, 1, 2]


def test_missing_gradients_are_known_with_their_buckets_and_none_comes_twice() -> None:
    made = Round(BUCKETS, Reductions())
    made.ready(1)
    assert made.missing == {0: 0, 3: 0, 2: 2, 4: 2}
    with pytest.raises(KeyError):
        made.ready(1)


def test_results_come_in_order_up_to_the_reduction_that_failed() -> None:
    reductions = Reductions()
    made = Round(BUCKETS, reductions)
    for member in range(5):
        made.ready(member)
    first, second, third = reductions.futures
    third.set_result("c")
    second.set_exception(Broken("a rank is gone"))
    first.set_result("a")
    results = made.results()
    assert next(results) == "a"
    with pytest.raises(Broken, match="a rank is gone"):
        next(results)


def test_a_round_of_no_buckets_is_over() -> None:
    made = Round([], Reductions())
    assert not made.missing
    made.start_complete()
    assert list(made.results()) == []
