"""What each worker computes with: every sample of every step once, whoever is there, and weights that make the mean."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.data.elastic import Coordinates, ElasticBatch, MicroBatch, Position, SamplePlan
from axon_ps.errors import InvalidRequest


def all_coordinates(replicas: int, workers: int) -> list[Coordinates]:
    """Every worker of a job."""
    return [
        Coordinates(replica=r, num_replicas=replicas, index=i, workers=workers)
        for r, i in itertools.product(range(replicas), range(workers))
    ]


def plan_of(length: int, samples: int, at_a_time: int, *, seed: int = 0, drop_last: bool = False) -> SamplePlan:
    batch = ElasticBatch(samples=samples, at_a_time=at_a_time)
    return SamplePlan(length, batch, seed=seed, drop_last=drop_last)


def steps(plan: SamplePlan, begin: Position, coordinates: Coordinates) -> Iterator[list[MicroBatch]]:
    """A worker's micro-batches, step by step."""
    for _, micro in itertools.groupby(plan.micro_batches(begin, coordinates), lambda m: m.after):
        yield list(micro)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_step_has_every_sample_once_and_the_weights_make_a_mean(workers: int) -> None:
    """All batches up to 13 samples, 1 to 4 at a time, 1 to 5 replicas."""
    for count, at_a_time, replicas in itertools.product(range(1, 14), range(1, 5), range(1, 6)):
        batch = ElasticBatch(samples=13, at_a_time=at_a_time)
        taken, weights, turns = [], Fraction(0), set[tuple[int, int]]()
        for coordinates in all_coordinates(replicas, workers):
            ranges = batch.cut(100, count, coordinates)
            turns.add((coordinates.replica, len(ranges)))
            assert ranges, "every worker runs the model in every step"
            assert all(0 <= end - begin <= at_a_time for begin, end in ranges)
            assert [e - b for b, e in ranges] == sorted(e - b for b, e in ranges), "the shortest come first"
            taken += [sample for begin, end in ranges for sample in range(begin, end)]
            weights += sum(Fraction(end - begin, count) for begin, end in ranges)
        assert sorted(taken) == list(range(100, 100 + count))
        assert weights == 1
        assert len(turns) == replicas, "the workers of a replica have the same number"
        assert max(n for _, n in turns) - min(n for _, n in turns) <= 1, "nearly as many each"


def test_survivors_take_over_the_same_samples_in_the_same_cut() -> None:
    batch = ElasticBatch(samples=32, at_a_time=8)
    four = [batch.cut(0, 32, coordinates) for coordinates in all_coordinates(4, 1)]
    assert four == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 32)]]
    three = [batch.cut(0, 32, coordinates) for coordinates in all_coordinates(3, 1)]
    assert three == [[(24, 32), (0, 8)], [(8, 16)], [(16, 24)]]
    assert batch.cut(0, 32, Coordinates()) == [(24, 32), (16, 24), (8, 16), (0, 8)]
    five = [batch.cut(0, 32, coordinates) for coordinates in all_coordinates(5, 1)]
    assert five == [[(0, 7)], [(7, 14)], [(14, 20)], [(20, 26)], [(26, 32)]], "all of them take part"


@given(
    length=st.integers(1, 60),
    samples=st.integers(1, 20),
    at_a_time=st.integers(1, 9),
    seed=st.integers(0, 9),
    moves=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 2), st.sampled_from(["commit", "abort"])), max_size=40),
)
def test_an_epoch_has_every_sample_once_whoever_is_there(
    length: int, samples: int, at_a_time: int, seed: int, moves: list[tuple[int, int, str]]
) -> None:
    """Each step is made by other members, who know the stored position only, and some are aborted."""
    state, used = None, []
    for replicas, workers, outcome in [*moves, *[(1, 1, "commit")] * length]:
        plan = plan_of(length, samples, at_a_time, seed=seed)
        position = plan.current(plan.position(state))
        if position.epoch:
            break
        firsts = [next(steps(plan, position, coordinates)) for coordinates in all_coordinates(replicas, workers)]
        assert len({micro.after for mine in firsts for micro in mine}) == 1, "all vote for the same"
        if outcome == "commit":
            used += [i for mine in firsts for micro in mine if micro.weight for i in plan.indices(micro)]
            state = json.dumps(plan.state(firsts[0][0].after))
    assert sorted(used) == list(range(length))


def test_who_has_nothing_computes_with_something_that_counts_for_nothing() -> None:
    plan = plan_of(2, 4, 1)
    last = [next(plan.micro_batches(Position(), coordinates)) for coordinates in all_coordinates(3, 1)]
    assert [(m.weight, len(plan.indices(m))) for m in last] == [(0.5, 1), (0.5, 1), (0.0, 1)]


def test_the_samples_of_a_worker_in_no_replica_count_for_nothing() -> None:
    plan = plan_of(8, 4, 4)
    batch = next(plan.micro_batches(Position(), Coordinates(replica=-1, num_replicas=2)))
    assert (batch.weight, batch.count) == (0.0, 1)


def test_weights_and_numbers() -> None:
    plan = plan_of(10, 7, 3)
    first, second = steps(plan, Position(), Coordinates())
    assert [(m.index, m.count, m.begin, m.end) for m in first] == [(0, 3, 5, 7), (1, 3, 3, 5), (2, 3, 0, 3)]
    assert math.isclose(sum(m.weight for m in first), 1.0)
    assert [m.weight for m in second] == [1.0]
    assert (second[0].before, second[0].after) == (Position(samples=7), Position(samples=10))
    assert plan.current(Position(samples=10)) == Position(epoch=1)
    assert list(plan.micro_batches(Position(samples=10), Coordinates())) == []


def test_drop_last() -> None:
    plan = plan_of(10, 4, 4, drop_last=True)
    assert [m.after.samples for m in plan.micro_batches(Position(), Coordinates())] == [4, 8]
    assert plan.current(Position(samples=8)) == Position(epoch=1)
    with pytest.raises(InvalidRequest, match="10 samples, so there is no step of 11"):
        plan_of(10, 11, 4, drop_last=True)
    with pytest.raises(InvalidRequest, match="0 samples"):
        plan_of(0, 1, 1)


def test_orders() -> None:
    whole = MicroBatch(before=Position(), after=Position(samples=9), begin=0, end=9, weight=1.0, index=0, count=1)
    next_epoch = MicroBatch(**{**vars(whole), "before": Position(epoch=1)})
    plan = plan_of(9, 9, 9)
    orders = [plan.indices(whole), plan.indices(next_epoch), plan_of(9, 9, 9, seed=1).indices(whole)]
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert plan.indices(whole) == orders[0], "going back to an epoch"
    straight = SamplePlan(9, ElasticBatch(samples=9, at_a_time=9), shuffle=False)
    assert straight.indices(whole) == list(range(9))


def test_a_position_is_of_a_data_set_and_its_order() -> None:
    plan = plan_of(10, 4, 2)
    state = json.dumps(plan.state(Position(epoch=2, samples=4)))
    assert plan.position(state) == Position(epoch=2, samples=4)
    assert plan_of(10, 5, 5, drop_last=True).position(state) == Position(epoch=2, samples=4), "another batch may follow"
    with pytest.raises(InvalidRequest, match=r"sample 4 of epoch 2 of 10 samples .*, and this loader has 11 samples"):
        plan_of(11, 4, 2).position(state)
    with pytest.raises(InvalidRequest, match="seed=0, and this loader has 10 samples with shuffle=True, seed=1"):
        plan_of(10, 4, 2, seed=1).position(state)
    for wrong in ("", "7", "{}", '{"epoch": "x"}', state.replace("4", "11", 1)):
        with pytest.raises(InvalidRequest):
            plan.position(wrong)


@pytest.mark.parametrize(("samples", "at_a_time"), [(0, 1), (1, 0), (-1, 1)])
def test_a_batch_has_samples(samples: int, at_a_time: int) -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        ElasticBatch(samples=samples, at_a_time=at_a_time)
