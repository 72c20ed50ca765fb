"""The prediction of which unit comes next, and the units that are in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from axon_ps.parallel.fsdp.gathering import GatherOrder, UnitGathering
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.stats import Counters
from axon_ps.parallel.markers import Markers


def visits(order: GatherOrder, units: list[int]) -> list[list[int]]:
    seen = []
    for unit in units:
        order.visit(unit)
        seen.append(list(order.upcoming()))
    return seen


def test_before_anything_was_seen_the_given_order_is_expected() -> None:
    order = GatherOrder([0, 1, 2])
    assert list(order.upcoming()) == [0, 1, 2]
    assert visits(order, [0, 1, 2]) == [[1, 2], [2], []]


def test_the_last_complete_iteration_is_expected() -> None:
    order = GatherOrder([0, 1, 2])
    visits(order, [0, 2, 1, 1])
    order.finish()
    assert visits(order, [0, 2, 1, 1]) == [[2, 1, 1], [1, 1], [1], []]


def test_a_skipped_unit_does_not_derail() -> None:
    order = GatherOrder([0, 1, 2, 3])
    assert visits(order, [0, 2]) == [[1, 2, 3], [3]]


def test_an_unknown_unit_keeps_the_place() -> None:
    order = GatherOrder([0, 1])
    assert visits(order, [0, 9, 1]) == [[1], [1], []]


def test_restart_forgets_and_finish_without_visits_keeps() -> None:
    order = GatherOrder([0, 1])
    visits(order, [1, 0])
    order.restart()
    order.finish()
    assert list(order.upcoming()) == [0, 1]


def test_forwards_for_ever_do_not_grow() -> None:
    order = GatherOrder([0])
    for _ in range(1000):
        order.visit(0)
    assert len(order._seen) <= 64


class Flat:
    """A unit of four bytes."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.nbytes = self.gather_bytes = self.unsharded_bytes = 4
        self.missing = True
        self.retained = False

    @property
    def reshardable_bytes(self) -> int:
        return 0 if self.missing else 4

    def start_gather(self) -> None:
        if self.missing:
            self.log.append(f"gather {self.name}")
        self.missing = False

    def unshard(self) -> None:
        assert not self.missing

    def reshard(self) -> None:
        if not self.missing:
            self.log.append(f"reshard {self.name}")
        self.missing = True

    def discard_speculative(self) -> None:
        pass


class Model:
    """A root and three units, one after the other."""

    def __init__(self, *, prefetch: bool = True) -> None:
        self.log: list[str] = []
        self.units: Any = [
            SimpleNamespace(number=i, name=f"{i}", is_root=not i, flats=[Flat(self.log, f"{i}")], nbytes=4, held=False)
            for i in range(4)
        ]
        wrapping: Any = SimpleNamespace(counters=Counters(), prefetch=prefetch, replicated=False)
        buffers = BufferPool(1 << 20, Meter())
        self.gathering = UnitGathering(wrapping, self.units, buffers, Markers(), self.free)

    def free(self, unit: Any) -> None:
        self.log.append(f"free {unit.name}")
        self.gathering.reshard(unit)

    def taken(self) -> list[str]:
        """What was done since the last call."""
        log, self.log[:] = list(self.log), []
        return log


def test_units_are_gathered_before_their_use_as_long_as_two_are_in_memory() -> None:
    model = Model()
    model.gathering.begin_forward(training=False)
    model.gathering.need(model.units[0])
    assert model.taken() == ["gather 0", "gather 1", "gather 2"]
    model.gathering.need(model.units[1])
    assert model.taken() == []
    model.gathering.used(model.units[1])
    assert model.taken() == ["reshard 1", "gather 3"]


def test_the_budget_grows_with_what_is_on_its_way() -> None:
    model = Model()
    model.gathering.extend(4)
    model.gathering.begin_forward(training=False)
    model.gathering.need(model.units[0])
    assert model.taken() == ["gather 0", "gather 1", "gather 2", "gather 3"]


def test_a_unit_that_backward_needs_first_stays_after_forward() -> None:
    model = Model(prefetch=False)
    model.gathering.begin_forward(training=True)
    for unit in model.units:
        model.gathering.need(unit)
        model.gathering.used(unit)
    assert model.taken() == ["gather 0", "gather 1", "reshard 1", "gather 2", "gather 3"]


def test_a_unit_is_freed_when_backward_comes_to_another() -> None:
    model = Model(prefetch=False)
    model.gathering.begin_forward(training=True)
    model.gathering.need(model.units[3])
    model.taken()
    model.gathering.finish(model.units[3])
    model.gathering.need(model.units[3])
    assert model.taken() == [], "it is read once more"
    model.gathering.finish(model.units[3])
    model.gathering.need(model.units[2])
    assert model.taken() == ["free 3", "reshard 3", "gather 2"]
    model.gathering.finish(model.units[2])
    model.gathering.forget_backward()
    model.gathering.need(model.units[1])
    assert model.taken() == ["gather 1"]


def test_a_unit_that_a_graph_reads_stays() -> None:
    model = Model()
    model.gathering.gather(model.units)
    model.units[2].held = True
    model.taken()
    for unit in model.units:
        model.gathering.reshard(unit)
    assert model.taken() == ["reshard 0", "reshard 1", "reshard 3"]
    model.gathering.reset()
    assert model.taken() == ["reshard 2"]


def test_a_prefetch_by_hand_needs_no_option() -> None:
    model = Model(prefetch=False)
    model.gathering.prefetch_by_hand()
    assert model.gathering.prefetched
    assert model.taken() == ["gather 0", "gather 1", "gather 2"]
    model.gathering.begin_forward(training=True)
    assert not model.gathering.prefetched


def test_the_next_forward_needs_the_first_units_if_there_is_memory() -> None:
    model = Model()
    first, last = model.units[1], model.units[3]
    assert model.gathering.is_first(first, first.flats[0])
    assert not model.gathering.is_first(last, last.flats[0])
    model.gathering.gather(model.units)
    assert not model.gathering.is_first(first, first.flats[0]), "the budget is full"
