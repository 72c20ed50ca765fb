"""The prediction of which unit comes next."""

from __future__ import annotations

from axon_ps.parallel.fsdp.gathering import GatherOrder


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
