"""The moves of copies (made, swapped, dropped) that give every slice enough copies, and all servers equal loads. Pure.

`plan_moves` returns the moves that are possible now for the present placement. The caller performs them, and calls it
again after every change. No state is kept between two calls: a copy that was begun is in the placement, and a slice
with one copy too many has one holder too many.

Note: [The moves end]
    A slice moves in three calls: a copy is made, the primary is swapped if it is to go, a holder is dropped. The holder
    to drop is chosen at the end, so that the slice stays on the most nodes. Among equals it is the most loaded one at
    that time. No sequence of moves repeats, because the sum of the squares of the loads falls. The sum is that of the
    loads as they will be when every slice has given up its extra holder.
    Slices begin to move only when none has an extra holder. No server then holds two moving slices, or holds one and
    gets another. Each move lowers the sum if its source F drops the slice: `load[F] - load[target] > numel` with the
    other moves counted. If another holder X is more loaded by then and is dropped instead of F, the sum is lower still:
    no other move changes the load of X, and the load of F still counts this slice. A move to another node may raise the
    sum, but the slice is on more nodes than before for good.

    With one moving slice a server, backups also stay evenly spread (see Note: [Declustered backups]). With more at a
    time, most slices of an added server would also be on one and the same other server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from axon_ps.sharding.placement import Holders, Placement, Server, choose_backup

EVEN = 16
"""Loads that differ by at most 1/16 of the mean are even, also where a smaller slice could move."""


BUDGET_SLICES = 256
"""Slices of a model that may be copied at a time: each costs a call and a report, independent of its size."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Begin to copy a slice to a server that does not have it (`Holders.with_copying`).

    Attributes:
        index: number of the slice.
        rank: rank of the server.
    """

    index: int
    rank: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Make a complete backup the primary (`Holders.with_primary`); possible only between two steps.

    Attributes:
        index: number of the slice.
        rank: rank of the backup.
    """

    index: int
    rank: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Have a server that is not the primary give a slice up, or cancel its copy (`Holders.without`).

    Attributes:
        index: number of the slice.
        rank: rank of the server.
    """

    index: int
    rank: int


Move: TypeAlias = Copy | Promote | Drop


def plan_moves(
    placement: Placement,
    numels: Sequence[int],
    servers: Sequence[Server],
    draining: frozenset[int],
    replication: int,
    budget_numel: int,
    full: frozenset[int] = frozenset(),
) -> list[Move]:
    """Return the moves for now: at most one a slice, all possible together. Equal arguments give equal moves.

    They are planned in this order. Slices with too few holders are copied, those with the fewest first. Draining
    servers give slices up, and so do holders beyond the wanted number. Primaries are evened out. When none of these
    moves is left or under way, slices move to other nodes and then to less loaded servers.

    A slice whose primary is not live (no other server has it) gets no move.

    Args:
        placement: the holders of every slice.
        numels: elements of each slice.
        servers: the live shard servers.
        draining: ranks of the servers that are to give everything up. If all servers are, nothing moves.
        replication: the number of servers that shall hold each slice; all that do not drain if they are fewer.
        budget_numel: elements that may be copied at a time, of `BUDGET_SLICES` slices. One slice may always be copied.
        full: ranks of the servers that have no memory for more slices: they get none.
    """
    planner = _Planner(placement, numels, servers, draining, replication, budget_numel)
    planner.full = full
    if planner.usable:
        planner.replicate()
        planner.release()
        planner.even_primaries()
        planner.move()
    return list(planner.moves.values())


class _Planner:
    """The moves of one call, and the loads as they are with these moves. A server is *usable* if it does not drain."""

    def __init__(
        self,
        placement: Placement,
        numels: Sequence[int],
        servers: Sequence[Server],
        draining: frozenset[int],
        replication: int,
        budget_numel: int,
    ) -> None:
        self.moves: dict[int, Move] = {}
        self.full: frozenset[int] = frozenset()
        self.usable = {s.rank: s for s in servers if s.rank not in draining}
        self._leaving = {s.rank for s in servers if s.rank in draining}
        self._wanted = min(replication, len(self.usable))
        self._holders, self._numels, self._budget_numel = placement.holders, numels, budget_numel
        self._load: Counter[int] = Counter()  # elements that a server holds or gets
        self._primary_load: Counter[int] = Counter()
        self._sending: Counter[int] = Counter()  # elements being copied, by primary
        self._under_way = 0  # elements being copied
        self._copies = 0  # slices being copied
        self._unsettled: list[tuple[int, Holders]] = []  # slices whose holders are not as wanted
        self._survey()

    def _survey(self) -> None:
        usable = frozenset(self.usable)
        load, primary_load = self._load, self._primary_load
        numels: Counter[Holders] = Counter()  # see Note: [Many slices on few servers] of `sharding.placement`
        for h, numel in zip(self._holders, self._numels, strict=True):
            numels[h] += numel
        unsettled = set()
        for h, numel in numels.items():
            primary_load[h.complete[0]] += numel
            for rank in h.complete:
                load[rank] += numel
            if len(h.complete) == self._wanted and not h.copying and usable.issuperset(h.complete):
                continue
            for rank in h.copying:
                load[rank] += numel
            if h.primary in usable or h.primary in self._leaving:
                unsettled.add(h)
                self._sending[h.primary] += numel * len(h.copying)
        if unsettled:
            self._unsettled = [(index, h) for index, h in enumerate(self._holders) if h in unsettled]
        self._under_way = self._sending.total()
        self._copies = sum(len(h.copying) for _, h in self._unsettled)

    def replicate(self) -> None:
        """Copy slices with too few holders: those with the fewest first, alternating between primaries."""
        missing = [(self._complete(h), i, h) for i, h in self._unsettled if len(self._on_usable(h)) < self._wanted]
        missing.sort(key=lambda m: (len(m[0]), m[1]))
        sent = self._sending.copy()
        order = []
        for complete, index, h in missing:
            order.append((len(complete), sent[h.primary], index, h))
            sent[h.primary] += self._numels[index]
        for _, _, index, h in sorted(order, key=lambda m: m[:3]):
            if not self._fits(index):
                return  # else smaller slices could overtake one with fewer copies for ever
            if self._candidates(h):
                self._copy(index, self._choose(h))

    def release(self) -> None:
        """Have draining servers, and holders beyond the wanted number, give slices up."""
        for index, h in self._unsettled:
            if index in self.moves:
                continue
            complete = self._complete(h)
            enough = len(complete) >= self._wanted
            leaving = [r for r in h.servers[1:] if r in self._leaving and (enough or r in h.copying)]
            if complete and h.primary not in self.usable:
                self._promote(index, complete)
            elif leaving:
                self._drop(index, leaving[0])
            elif len(complete) > self._wanted:
                self._drop_one(index, h, complete)

    def _drop_one(self, index: int, h: Holders, complete: Sequence[int]) -> None:
        def order(rank: int) -> tuple[int, int, bool, int]:
            others = (r for r in complete if r != rank)
            return self._nodes_of(others), self._load[rank], rank != h.primary, rank

        rank = max(complete, key=order)
        if rank == h.primary:
            self._promote(index, [r for r in complete if r != rank])
        else:
            self._drop(index, rank)

    def even_primaries(self) -> None:
        """Make a backup the primary where that evens out the primary loads of the two servers."""
        load = self._primary_load
        least, tolerance = min(load[rank] for rank in self.usable), self._tolerance(load)
        if max(load.values(), default=0) - tolerance <= least:
            return
        for index, (h, numel) in enumerate(zip(self._holders, self._numels, strict=True)):
            limit = load[h.complete[0]] - (numel if numel > tolerance else tolerance)
            if limit > least and index not in self.moves and h.primary in self.usable:
                better = [rank for rank in self._complete(h)[1:] if load[rank] < limit]
                if better:
                    self._promote(index, better)

    def move(self) -> None:
        """Move slices onto more nodes, or else from more to less loaded servers. See Note: [The moves end].

        A moving slice has one holder more than wanted, until `release` drops one.
        """
        if self._unsettled:
            return
        nodes = min(self._wanted, self._nodes_of(self.usable))
        crowded = [(i, h) for i, h in enumerate(self._holders) if nodes > 1 and self._is_crowded(h, nodes)]
        for index, h in crowded:
            if index not in self.moves and self._fits(index) and self._candidates(h):
                self._copy(index, self._choose(h))
        if not crowded:
            self._even_loads()

    def _is_crowded(self, h: Holders, nodes: int) -> bool:
        return h.primary in self.usable and self._nodes_of(h.complete) < nodes

    def _even_loads(self) -> None:
        load, tolerance = self._load, self._tolerance(self._load)
        givers: set[int] = set()  # holders of slices that move; they give nothing else, and get nothing
        targets: set[int] = set()
        for source in sorted(self.usable, key=lambda r: (-load[r], r)):
            if load[source] - min(load[rank] for rank in self.usable) <= tolerance:
                return
            found = self._best_move(source, tolerance, givers, targets)
            if found:
                index, target = found
                givers.update(self._holders[index].complete)
                targets.add(target)
                self._copy(index, target)

    def _best_move(self, source: int, tolerance: int, givers: Set[int], targets: Set[int]) -> tuple[int, int] | None:
        """Return a slice of `source`, and the least loaded server that it may move to, to even out both best."""
        load, numels = self._load, self._numels
        busy = givers | targets
        mine = [
            (i, h)
            for i, h in enumerate(self._holders)
            if source in h.complete and i not in self.moves and busy.isdisjoint(h.complete) and self._fits(i)
        ]
        for target in sorted(self.usable.keys() - givers - self.full, key=lambda r: (load[r], r)):
            apart = load[source] - load[target]
            if apart <= tolerance:
                return None
            candidates = [
                (abs(apart - 2 * numels[i]), self._between[h.primary, target] - self._between[h.primary, source], i)
                for i, h in mine
                if numels[i] < apart and target not in h.complete and self._may(h, source, target)
            ]
            if candidates:
                return min(candidates)[2], target
        return None

    def _may(self, h: Holders, source: int, target: int) -> bool:
        """Return True if a slice would be on at least as many nodes as before after a move."""
        moved = (target if rank == source else rank for rank in h.complete)
        return self._nodes_of(moved) >= self._nodes_of(h.complete)

    @cached_property
    def _between(self) -> Counter[tuple[int, int]]:
        """The elements of each (primary, backup)."""
        between: Counter[tuple[int, int]] = Counter()
        for h, numel in zip(self._holders, self._numels, strict=True):
            first = self._first(h)
            for rank in h.servers:
                if rank != first:
                    between[first, rank] += numel
        return between

    def _first(self, h: Holders) -> int:
        """Return the primary, or the backup that will be primary when this one has drained."""
        return next((rank for rank in h.complete if rank in self.usable), h.primary)

    def _tolerance(self, load: Counter[int]) -> int:
        """Return the tolerated difference of loads: never more than the largest slice."""
        mean = sum(load[rank] for rank in self.usable) // len(self.usable)
        return min(max(self._numels, default=0), mean // EVEN)

    def _complete(self, h: Holders) -> list[int]:
        return [rank for rank in h.complete if rank in self.usable]

    def _on_usable(self, h: Holders) -> list[Server]:
        return [self.usable[rank] for rank in h.servers if rank in self.usable]

    def _nodes_of(self, ranks: Iterable[int]) -> int:
        return len({self.usable[rank].node for rank in ranks})

    def _fits(self, index: int) -> bool:
        small = self._under_way + self._numels[index] <= self._budget_numel
        return not self._under_way or (small and self._copies < BUDGET_SLICES)

    def _candidates(self, h: Holders) -> list[Server]:
        """Return the servers that a slice may be copied to."""
        return [s for s in self.usable.values() if s.rank not in self.full and s.rank not in h.servers]

    def _choose(self, h: Holders) -> int:
        return choose_backup(self._on_usable(h), self._candidates(h), self._load, self._between).rank

    def _copy(self, index: int, rank: int) -> None:
        numel = self._numels[index]
        self.moves[index] = Copy(index, rank)
        self._load[rank] += numel
        self._between[self._first(self._holders[index]), rank] += numel
        self._under_way += numel
        self._copies += 1

    def _promote(self, index: int, ranks: Iterable[int]) -> None:
        """Make the server of `ranks` with the fewest elements as primary the primary."""
        rank = min(ranks, key=lambda r: (self._primary_load[r], r))
        self.moves[index] = Promote(index, rank)
        self._primary_load[self._holders[index].primary] -= self._numels[index]
        self._primary_load[rank] += self._numels[index]

    def _drop(self, index: int, rank: int) -> None:
        self.moves[index] = Drop(index, rank)
        self._load[rank] -= self._numels[index]
