"""Placements: every slice has its holders, spread evenly and over nodes, and each change does what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.placement import Holders, Placement, Server, choose_backup, new_placement
from axon_ps.sharding.plan import Plan, PlanOptions, make_plan
from axon_ps.types import DType


def cut(sizes: Sequence[int], servers: int) -> Plan:
    units = [build_unit(f"u{i}", [(f"w{i}", (size,), DType.F32)]) for i, size in enumerate(sizes)]
    return make_plan(Layout(units=tuple(units)), servers, PlanOptions(min_slice_numel=8))


def backups(plan: Plan, placement: Placement) -> Counter[tuple[int, int]]:
    """Elements by (primary, backup)."""
    found: Counter[tuple[int, int]] = Counter()
    for s, h in zip(plan.numbered, placement.holders, strict=True):
        for rank in h.complete[1:]:
            found[h.primary, rank] += s.numel
    return found


sizes_of_units = st.lists(st.integers(1, 2000), min_size=1, max_size=20)


@given(sizes_of_units, st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(1, 4))
def test_every_slice_of_a_new_model_has_holders_on_different_nodes(
    sizes: list[int], nodes: list[str], replication: int
) -> None:
    plan = cut(sizes, len(nodes))
    servers = [Server(rank=10 + i, node=node) for i, node in enumerate(nodes)]
    placement = new_placement(plan, servers, replication)
    node_of = {s.rank: s.node for s in servers}
    for s, h in zip(plan.numbered, placement.holders, strict=True):
        assert h.primary == servers[s.server].rank
        assert h.copying == ()
        assert len(set(h.complete)) == len(h.complete) == min(replication, len(servers))
        assert len({node_of[rank] for rank in h.complete}) == min(len(h.complete), len(set(nodes)))


@pytest.mark.parametrize("several_nodes", [False, True])
@given(sizes_of_units, st.integers(2, 6), st.integers(2, 3))
def test_backups_of_a_server_are_spread_evenly_over_all_others(
    several_nodes: bool, sizes: list[int], count: int, replication: int
) -> None:
    plan = cut(sizes, count)
    placement = new_placement(plan, [Server(i, f"n{i * several_nodes}") for i in range(count)], replication)
    found = backups(plan, placement)
    largest = max(s.numel for s in plan.numbered)
    for primary in range(count):
        loads = [found[primary, other] for other in range(count) if other != primary]
        assert max(loads) - min(loads) <= largest


def test_backups_are_spread_evenly_over_the_servers_of_other_nodes() -> None:
    plan = cut([4000] * 8, 4)
    placement = new_placement(plan, [Server(i, "ab"[i // 2]) for i in range(4)], 2)
    numel = plan.numbered[0].numel
    expected = dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)], 4 * numel)
    found = backups(plan, placement)
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) <= numel for key in expected)


def test_a_plan_for_more_servers_than_there_are_is_placed_on_those() -> None:
    plan = cut([4000], 3)
    placement = new_placement(plan, [Server(7), Server(9)], 2)
    assert [h.complete for h in placement.holders] == [(7, 9), (9, 7), (7, 9)]
    with pytest.raises(InvalidRequest, match="no shard server"):
        new_placement(plan, [], 2)


def test_a_lost_server_is_replaced_by_backups_but_stays_the_holder_of_what_nobody_else_has() -> None:
    placement = Placement((Holders((1, 2)), Holders((2, 1, 3)), Holders((1,), (2,)), Holders((3, 2), (1,))), num_cuts=3)
    assert placement.without(1).holders == (
        Holders((2,)),
        Holders((2, 3)),
        Holders((1,), (2,)),
        Holders((3, 2)),
    )
    assert placement.holders[0] == Holders((1, 2)), "a placement is a value; it does not change"
    assert placement.without(1).num_cuts == 3
    assert placement.not_copying(2).holders == (*placement.holders[:2], Holders((1,)), placement.holders[3])


def test_a_copy_is_begun_and_completed() -> None:
    placement = Placement((Holders((1,)).with_copying(2), Holders((1, 2)), Holders((3,), (2,))), num_cuts=3)
    assert placement.holders[0] == Holders((1,), (2,))
    assert placement.holders[0].followers == (2,)
    assert placement.holders[0].servers == (1, 2)
    done = placement.copied([0, 1, 7], 2, range(99))  # 1 it has already, 7 is none
    assert done.holders == (Holders((1, 2)), Holders((1, 2)), Holders((3,), (2,)))
    assert done.copied([0, 2], 5, range(99)).holders == done.holders


def test_of_two_copies_under_way_one_completes() -> None:
    placement = Placement((Holders((1,), (2, 3)),), num_cuts=3).copied([0], 3, range(99))
    assert placement.holders == (Holders((1, 3), (2,)),)
    assert placement.holders[0].followers == (3, 2)


def test_a_promoted_backup_and_the_primary_change_places() -> None:
    assert Holders((1, 2, 3), (4,)).with_primary(3) == Holders((3, 1, 2), (4,))


def test_a_slice_is_dropped_by_a_backup_or_by_one_that_is_getting_it_but_not_by_the_last() -> None:
    assert Holders((1, 2), (3,)).without(2) == Holders((1,), (3,))
    assert Holders((1, 2), (3,)).without(3) == Holders((1, 2))
    assert Holders((2,)).without(2) == Holders((2,))


def test_what_a_server_has() -> None:
    placement = Placement((Holders((1, 2)), Holders((2,), (3,)), Holders((1,))), num_cuts=3)
    assert [placement.slices_of(rank) for rank in (1, 2, 3, 4)] == [(0, 2), (0, 1), (1,), ()]
    assert placement.servers == {1, 2, 3}


def test_a_backup_is_chosen_by_node_then_by_what_it_has_of_the_primary_then_by_load() -> None:
    a, b, c, d = (Server(i, node) for i, node in enumerate("xxyz"))
    none: Counter[tuple[int, int]] = Counter()
    load = Counter({1: 0, 2: 9, 3: 8})
    assert choose_backup([a], [a, b, c, d], load, none) == d
    assert choose_backup([a], [a, b, c, d], load, Counter({(0, 3): 1, (1, 2): 5})) == c
    assert choose_backup([a, c, d], [a, b, c, d], load, none) == b
    assert choose_backup([a], [c, d], Counter(), none) == c
    assert choose_backup([], [a, b, c, d], Counter({0: 1, 1: 0, 2: 5, 3: 5}), none) == b
