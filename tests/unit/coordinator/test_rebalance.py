"""Rebalancing: whatever servers do, every slice gets its copies, draining servers end empty, loads become even."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.coordinator.core.placement.rebalance import Copy, Drop, Move, Promote, plan_moves
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.placement import Holders, Placement, Server, new_placement
from axon_ps.sharding.plan import PlanOptions, make_plan
from axon_ps.types import DType

ANY = 1 << 60
"""A budget that limits nothing."""


def servers(nodes: str) -> list[Server]:
    """One server per letter, on the node of this name."""
    return [Server(rank, node) for rank, node in enumerate(nodes)]


def plan(
    holders: Sequence[Holders],
    nodes: str = "aaaa",
    *,
    numels: Sequence[int] | None = None,
    draining: Iterable[int] = (),
    replication: int = 2,
    budget: int = ANY,
) -> list[Move]:
    numels = numels or [10] * len(holders)
    return plan_moves(
        Placement(tuple(holders), num_cuts=4), numels, servers(nodes), frozenset(draining), replication, budget
    )


def apply(placement: Placement, move: Move) -> Placement:
    """What the caller of the planner does, with a check that it may."""
    h = placement.holders[move.index]
    match move:
        case Copy(index, rank):
            assert rank not in h.servers
            return placement.changed({index: h.with_copying(rank)})
        case Promote(index, rank):
            assert rank in h.complete[1:]
            return placement.changed({index: h.with_primary(rank)})
        case Drop(index, rank):
            assert rank in h.followers
            return placement.changed({index: h.without(rank)})


class World:
    """Servers that come, drain and die, and a placement that the planner looks after."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        largest = rng.choice([1, 10, 1000])
        sizes = [rng.randint(1, largest) * rng.choice([1, 1, 1, 20]) for _ in range(rng.randint(1, 12))]
        self.nodes = "abc"[: rng.randint(1, 3)]
        self.servers = [Server(rank, rng.choice(self.nodes)) for rank in range(rng.randint(1, 6))]
        self.draining: set[int] = set()
        self.replication = rng.randint(1, 3)
        self.next_rank = len(self.servers)
        units = [build_unit(f"u{i}", [(f"w{i}", (size,), DType.F32)]) for i, size in enumerate(sizes)]
        cut = make_plan(Layout(units=tuple(units)), len(self.servers), PlanOptions(min_slice_numel=rng.randint(1, 300)))
        self.numels = [s.numel for s in cut.numbered][:40]
        self.placement = Placement(new_placement(cut, self.servers, self.replication).holders[:40], cut.num_servers)
        self.budget = rng.choice([0, largest, 5 * largest, ANY])

    @property
    def usable(self) -> dict[int, str]:
        return {s.rank: s.node for s in self.servers if s.rank not in self.draining}

    @property
    def wanted(self) -> int:
        return min(self.replication, len(self.usable))

    def complete(self, index: int) -> list[int]:
        return [rank for rank in self.placement.holders[index].complete if rank in self.usable]

    def copying(self) -> list[tuple[int, int]]:
        return [(i, rank) for i, h in enumerate(self.placement.holders) for rank in h.copying]

    def copying_numel(self) -> int:
        return sum(self.numels[i] for i, _ in self.copying())

    def moves(self) -> list[Move]:
        return plan_moves(
            self.placement, self.numels, self.servers, frozenset(self.draining), self.replication, self.budget
        )

    def round(self) -> bool:
        """One call of the planner, with what must hold after it; whether it found something to do."""
        moves = self.moves()
        assert moves == self.moves(), "equal arguments give equal moves"
        assert len({m.index for m in moves}) == len(moves), "at most one move a slice"
        before, under_way = self.placement, self.copying_numel()
        enough = [min(len(self.complete(i)), self.wanted) for i in range(len(self.numels))]
        for move in moves:
            self.placement = apply(self.placement, move)
        for i, h in enumerate(self.placement.holders):
            assert len(set(h.servers)) == len(h.servers)
            assert len(self.complete(i)) >= enough[i], f"{before.holders[i]} lost a copy: {moves}"
            assert set(h.copying) - set(before.holders[i].copying) <= set(self.usable)
        copied = self.copying_numel()
        assert copied <= max(self.budget, under_way) or len(self.copying()) == 1
        return bool(moves)

    def complete_copies(self, fraction: float) -> None:
        for index, rank in self.copying():
            if self.random.random() < fraction:
                self.placement = self.placement.copied([index], rank, range(99))

    def settle(self) -> int:
        """Until nothing is left to do; how many rounds that takes."""
        rounds = 0
        while self.round() or self.copying():
            rounds += 1
            assert rounds <= 8 * (len(self.numels) + 5), "it does not end"
            self.complete_copies(self.random.choice([0.3, 1.0]))
        return rounds

    def disturb(self) -> None:
        """A server comes, drains, drains no more, or is lost."""
        event: Callable[[], None] = self.random.choice([self.add, self.add, self.drain, self.undrain, self.lose])
        event()

    def add(self) -> None:
        if len(self.servers) < 6:
            self.servers.append(Server(self.next_rank, self.random.choice(self.nodes)))
            self.next_rank += 1

    def drain(self) -> None:
        self.draining.add(self.random.choice(self.servers).rank)

    def undrain(self) -> None:
        self.draining.discard(self.random.choice(self.servers).rank)

    def lose(self) -> None:
        server = self.random.choice(self.servers)
        if all(h.complete != (server.rank,) for h in self.placement.holders):
            self.servers.remove(server)
            self.draining.discard(server.rank)
            self.placement = self.placement.without(server.rank)

    def check_goal(self) -> None:
        """What the planner works for, when it has come to rest."""
        usable, wanted = self.usable, self.wanted
        if not usable:
            return
        load: Counter[int] = Counter()
        primary_load: Counter[int] = Counter()
        for h, numel in zip(self.placement.holders, self.numels, strict=True):
            assert set(h.servers) <= set(usable), "draining servers are empty"
            assert len(h.complete) == wanted
            assert on_nodes(h.complete, usable) == min(wanted, len(set(usable.values())))
            load.update(dict.fromkeys(h.complete, numel))
            primary_load[h.primary] += numel
        largest = max(self.numels)
        for h in self.placement.holders:
            assert all(primary_load[h.primary] - primary_load[backup] <= largest for backup in h.complete[1:])
        if len(set(usable.values())) in (1, len(usable)):  # nodes do not matter
            assert max(load[r] for r in usable) - min(load[r] for r in usable) <= largest
        for h in self.placement.holders:
            for source in h.complete:
                for target in set(usable) - set(h.complete):
                    moved = {*h.complete, target} - {source}
                    if on_nodes(moved, usable) == on_nodes(h.complete, usable):
                        assert load[source] - load[target] <= largest


def on_nodes(ranks: Iterable[int], nodes: dict[int, str]) -> int:
    return len({nodes[rank] for rank in ranks})


@given(st.integers(0, 1 << 32))
@settings(max_examples=150)
def test_whatever_servers_do_every_slice_gets_its_copies_and_loads_become_even(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(1, 8)):
        world.disturb()
        for _ in range(world.random.choice([0, 1, 5])):
            world.round()
            world.complete_copies(0.5)
        if world.random.random() < 0.3:
            world.settle()
            world.check_goal()
    world.settle()
    world.check_goal()
    assert world.moves() == []


def test_a_slice_with_too_few_holders_is_copied_to_the_server_with_the_fewest_backups_of_its_primary() -> None:
    holders = [Holders((0, 1)), Holders((0, 2)), Holders((0,)), Holders((3, 2)), Holders((3, 1))]
    assert plan(holders, "aaaa")[0] == Copy(2, 3)
    assert plan(holders, "abca")[0] == Copy(2, 1), "of the servers on other nodes"


def test_a_copy_under_way_counts_as_one() -> None:
    assert plan([Holders((0,), (1,)), Holders((1, 0))], "aa") == []


def test_the_slice_with_the_fewest_holders_is_copied_first_and_no_smaller_one_overtakes_it() -> None:
    holders = [Holders((0, 1)), Holders((1,)), Holders((2,), (3,))]
    assert plan(holders, numels=[1, 50, 1], replication=3, budget=51) == [Copy(1, 0)]
    assert plan(holders, numels=[1, 50, 1], replication=3, budget=50) == []
    assert plan(holders[:2], numels=[1, 50], replication=3, budget=0) == [Copy(1, 2)], "one may always be under way"


def test_copies_come_from_different_primaries_and_go_to_different_servers() -> None:
    holders = [Holders((0,)), Holders((0,)), Holders((1,)), Holders((1,))]
    moves = plan(holders, budget=20)
    assert [m.index for m in moves] == [0, 2]
    assert len({m.rank for m in moves}) == 2


def test_a_draining_server_gives_everything_up_without_a_copy_less() -> None:
    assert plan([Holders((0, 1)), Holders((1, 0))], "aa", draining=[0]) == [Promote(0, 1), Drop(1, 0)]
    holders = [Holders((0, 1)), Holders((1, 0)), Holders((1, 2)), Holders((2, 1))]
    assert plan(holders, "aaa", draining=[0], budget=10) == [Copy(0, 2)], "1 has no second copy elsewhere yet"
    assert plan([Holders((1, 0), (2,))], "aaa", draining=[0]) == []
    assert plan([Holders((1, 0, 2))], "aaa", draining=[0]) == [Drop(0, 0)]
    assert plan([Holders((1, 2), (0,))], "aaa", draining=[0]) == [Drop(0, 0)]


def test_the_only_server_cannot_drain() -> None:
    assert plan([Holders((0, 1)), Holders((1, 0))], "aa", draining=[0, 1]) == []


def test_of_a_slice_with_one_holder_too_many_the_most_loaded_server_gives_it_up() -> None:
    extra = [Holders((0, 1, 2)), Holders((1, 2))]
    assert plan(extra, "aaa", numels=[10, 1]) == [Drop(0, 2)]
    primary = [Holders((0, 1, 2)), Holders((0, 1)), Holders((2, 0))]
    moves = plan(primary, "aaa", numels=[10, 5, 3])
    assert moves == [Promote(0, 1)], "the primary has the most"
    placement = apply(Placement(tuple(primary), num_cuts=4), moves[0])
    assert plan(placement.holders, "aaa", numels=[10, 5, 3])[0] == Drop(0, 0)


def test_slices_given_up_in_one_call_are_those_of_different_servers() -> None:
    assert plan([Holders((0, 1, 2)), Holders((0, 1, 2))], "aaa") == [Drop(0, 2), Drop(1, 1)]


def test_a_slice_stays_on_two_nodes_when_a_holder_gives_it_up() -> None:
    holders = [Holders((0, 1, 2)), Holders((1, 0)), Holders((1, 2))]  # server 1 has the most
    assert plan(holders, "aba")[0] in (Drop(0, 2), Promote(0, 2))


def test_a_backup_becomes_primary_where_that_evens_out_the_primaries() -> None:
    assert plan([Holders((0, 1))] * 3, "aa") == [Promote(0, 1)]
    assert plan([Holders((0, 1)), Holders((0, 1))], "aa", numels=[10, 20]) == [Promote(0, 1)]
    assert plan([Holders((0, 1))], "aa") == []


def test_slices_move_to_a_server_that_was_added() -> None:
    holders = [Holders((i % 2,)) for i in range(12)]

    def next_moves() -> list[Move]:
        return plan(placement.holders, "aaa", replication=1)

    placement = Placement(tuple(holders), num_cuts=4)
    assert next_moves() == [Copy(0, 2), Copy(1, 2)], "one of every server at a time"
    placement = placement.changed({i: placement.holders[i].with_copying(2) for i in (0, 1)})
    assert next_moves() == []
    placement = placement.copied([0], 2, range(99))
    assert next_moves() == [Promote(0, 2)]
    placement = placement.changed({0: placement.holders[0].with_primary(2)})
    assert next_moves() == [Drop(0, 0)]
    placement = placement.changed({0: placement.holders[0].without(0)})
    assert next_moves() == [], "no other moves before these have"
    placement = placement.copied([1], 2, range(99))
    placement = placement.changed({1: placement.holders[1].with_primary(2).without(1)})
    assert next_moves() == [Copy(2, 2), Copy(3, 2)]


def test_the_slice_that_evens_out_two_servers_best_moves() -> None:
    assert plan([Holders((0,))] * 3, "aa", numels=[1, 5, 4], replication=1) == [Copy(1, 1)]
    assert plan([Holders((0,))] * 3, "aa", numels=[1, 12, 9], replication=1) == [Copy(1, 1)]


def test_copies_move_to_a_node_that_was_added() -> None:
    assert plan([Holders((0, 1)), Holders((1, 0))], "aab") == [Copy(0, 2), Copy(1, 2)]


def test_nothing_can_be_done_for_a_slice_whose_only_holder_is_lost() -> None:
    lost = Holders((9,))
    assert plan([lost, Holders((0, 1)), Holders((1, 0))], "ab") == []
    assert plan([Holders((9,), (0,)), Holders((0,))], "ab", budget=0) == [Copy(1, 1)], "nor does it block others"


def new_model() -> tuple[list[int], Callable[[str, int], Placement]]:
    """160 equal slices, and where they are placed on four servers."""
    units = tuple(build_unit(f"u{i}", [(f"w{i}", (4096,), DType.F32)]) for i in range(40))
    cut = make_plan(Layout(units=units), 4, PlanOptions(min_slice_numel=1024))
    return [s.numel for s in cut.numbered], lambda nodes, replication: new_placement(cut, servers(nodes), replication)


def rest(
    placement: Placement, numels: Sequence[int], nodes: str, replication: int, draining: Iterable[int] = ()
) -> tuple[Placement, int, int]:
    """The placement when nothing is left to do, the slices copied, and the calls of the planner."""
    copied, calls = 0, 0
    while moves := plan(placement.holders, nodes, numels=numels, replication=replication, draining=draining):
        calls += 1
        for move in moves:
            placement = apply(placement, move)
            if isinstance(move, Copy):
                copied += 1
                placement = placement.copied([move.index], move.rank, range(99))
    return placement, copied, calls


def test_a_new_model_is_left_as_it_was_placed() -> None:
    numels, new = new_model()
    for nodes in ("aaaa", "abcd", "aabb"):
        for replication in (1, 2):
            assert rest(new(nodes, replication), numels, nodes, replication)[1:] == (0, 0)


@pytest.mark.parametrize(("replication", "copies"), [(1, 32), (2, 64), (3, 96)])
def test_a_server_that_was_added_gets_its_fair_load_and_nothing_else_moves(replication: int, copies: int) -> None:
    numels, new = new_model()
    placement = rest(new("aaaa", replication), numels, "aaaa", replication)[0]
    placement, copied, calls = rest(placement, numels, "aaaaa", replication)
    assert copies - 1 <= copied <= copies + 1
    assert calls <= 2 * copies
    load = Counter(rank for h in placement.holders for rank in h.complete)
    primaries = Counter(h.primary for h in placement.holders)
    assert max(load.values()) - min(load.values()) <= 1
    assert max(primaries.values()) - min(primaries.values()) <= 1


@pytest.mark.parametrize(("nodes", "draining"), [("aaaaa", ()), ("aaaa", (0,)), ("aabb", (0,)), ("aabbcc", ())])
def test_backups_of_every_server_stay_spread_evenly(nodes: str, draining: tuple[int, ...]) -> None:
    numels, new = new_model()
    placement = rest(new("aaaa", 2), numels, nodes, 2, draining)[0]
    backups = Counter(h.complete for h in placement.holders)
    usable = {rank for rank in range(len(nodes)) if rank not in draining}
    for primary in usable:
        others = [rank for rank in usable if nodes[rank] != nodes[primary]] or list(usable - {primary})
        loads = [backups[primary, other] for other in others]
        assert sum(loads) == sum(n for (p, _), n in backups.items() if p == primary)
        assert max(loads) - min(loads) <= 3, (primary, loads)


def test_a_draining_server_is_empty_after_three_calls_with_each_slice_copied_once() -> None:
    numels, new = new_model()
    assert rest(new("aaaa", 2), numels, "aaaa", 2, [0])[1:] == (80, 3)
