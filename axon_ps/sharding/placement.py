"""The shard servers that hold each slice: one primary, and backups that hold the same values. Pure.

The plan (`sharding.plan`) cuts units into slices, once. The placement names the holders of each slice and changes while
the job runs: a backup becomes primary when its primary dies, a copy is made on another server, a slice moves. Slices
are numbered in plan order (`Plan.numbered`). Servers are named by rank.

Note: [Declustered backups]
    The backups of one server's slices are spread over all other servers, on other nodes if there are any. So the work
    of a server that dies is spread evenly (Muntz & Lui 1990, "Performance analysis of disk arrays under failure",
    called it declustering).

Note: [Many slices on few servers]
    A job has many more slices than combinations of servers that hold them. Questions about all slices are answered from
    these combinations (`Placement.counts`). Several slices change with one new placement, in which each combination is
    changed once. So the work per slice is one look-up in a dictionary for each placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.plan import Plan


@dataclass(frozen=True, slots=True)
class Holders:
    """The shard servers that hold one slice, by rank.

    Attributes:
        complete: servers that have its values, the primary first; never empty.
        copying: servers that are receiving its values. They become backups.
    """

    complete: tuple[int, ...]
    copying: tuple[int, ...] = ()

    @property
    def primary(self) -> int:
        """The server that sums gradients and answers."""
        return self.complete[0]

    @property
    def followers(self) -> tuple[int, ...]:
        """The servers that receive every summed gradient from the primary: backups, and servers that become backups."""
        return self.complete[1:] + self.copying

    @property
    def servers(self) -> tuple[int, ...]:
        """All holders, the primary first."""
        return self.complete + self.copying

    def with_copying(self, rank: int) -> Holders:
        """Return the holders after a server began to receive the slice."""
        return Holders(self.complete, (*self.copying, rank))

    def with_primary(self, rank: int) -> Holders:
        """Return the holders with a backup as the primary, and the primary as a backup."""
        return Holders((rank, *(r for r in self.complete if r != rank)), self.copying)

    def without(self, rank: int) -> Holders:
        """Return the holders without a server. The last complete copy stays."""
        complete = tuple(r for r in self.complete if r != rank) or self.complete
        return Holders(complete, tuple(r for r in self.copying if r != rank))


@dataclass(frozen=True, slots=True)
class Server:
    """A shard server that can hold slices.

    Attributes:
        rank: its rank.
        node: its host. Copies are put on different ones where possible.
    """

    rank: int
    node: str = ""


@dataclass(frozen=True)
class Placement:
    """The holders of every slice of a model.

    Attributes:
        holders: the holders of each slice, by number.
        num_cuts: number of servers that the plan cuts units over.
        number: one more than the previous placement's.
        replication: number of servers that are to hold each slice.
    """

    holders: tuple[Holders, ...]
    num_cuts: int
    number: int = 1
    replication: int = 1

    def check(self, plan: Plan) -> None:
        """Check that this is a placement of a plan's slices.

        Raises:
            InvalidRequest: the plan, over `num_cuts` servers, has another number of slices.
        """
        if len(self.holders) != len(plan.numbered):
            raise InvalidRequest(
                f"{len(self.holders)} slices are placed; the model, cut over {self.num_cuts} servers, has "
                f"{len(plan.numbered)}"
            )

    @cached_property
    def counts(self) -> Mapping[Holders, int]:
        """The number of slices of each set of holders. See Note: [Many slices on few servers]."""
        return Counter(self.holders)

    @cached_property
    def servers(self) -> frozenset[int]:
        """Every server that holds a slice, or is receiving one."""
        return frozenset(rank for h in self.counts for rank in h.servers)

    @cached_property
    def is_copied(self) -> bool:
        """True if a server is receiving a slice."""
        return any(h.copying for h in self.counts)

    def lacking(self, copies: int, unknown: Collection[int] = ()) -> int:
        """Count the slices that fewer than `copies` servers have. Servers that may be dead (`unknown`) do not count."""
        few = (h for h in self.counts if len([rank for rank in h.complete if rank not in unknown]) < copies)
        return sum(self.counts[h] for h in few)

    def slices_of(self, rank: int) -> tuple[int, ...]:
        """Return the slices that a server holds or is receiving."""
        theirs = {h for h in self.counts if rank in h.servers}
        return tuple(i for i, h in enumerate(self.holders) if h in theirs)

    def without(self, rank: int) -> Placement:
        """Remove a lost server: backups become primaries. It remains the holder of slices that it alone has."""
        return self._map(range(len(self.holders)), lambda h: h.without(rank))

    def not_copying(self, rank: int) -> Placement:
        """Cancel the copies that a server was receiving."""
        return self._map(range(len(self.holders)), lambda h: h.without(rank) if rank in h.copying else h)

    def copied(self, indexes: Iterable[int], rank: int, present: Container[int]) -> Placement:
        """Record that a server has received slices. Slices that it was not receiving are ignored.

        `present` are the servers in the job. Others, which were named only as the last holder, are removed.
        """

        def complete(h: Holders) -> Holders:
            if rank not in h.copying:
                return h
            return Holders((*(r for r in h.complete if r in present), rank), tuple(r for r in h.copying if r != rank))

        return self._map([i for i in indexes if i < len(self.holders)], complete)

    def corrupted(self, index: int, rank: int) -> Placement:
        """Record that a server has lost its copy of a slice and receives it again from another holder."""
        h = self.holders[index]
        return self.changed({index: Holders(tuple(r for r in h.complete if r != rank), (*h.copying, rank))})

    def taken_back(self, indexes: Iterable[int], rank: int, present: Container[int]) -> Placement:
        """Record that a lost server is back with valid slices. `present` are the servers in the job."""
        return self._map(
            indexes,
            lambda h: Holders(
                (*(r for r in h.complete if r in present and r != rank), rank),
                tuple(r for r in h.copying if r != rank),
            ),
        )

    def changed(self, holders: Mapping[int, Holders]) -> Placement:
        """Return the placement with other holders for some slices, by number."""
        if not holders:
            return self
        after, known = list(self.holders), {h: h for h in self.counts}
        for index, h in holders.items():
            after[index] = known.setdefault(h, h)
        return replace(self, holders=tuple(after))

    def _map(self, indexes: Iterable[int], change: Callable[[Holders], Holders]) -> Placement:
        made: dict[Holders, Holders] = {}
        after: dict[int, Holders] = {}
        for index in indexes:
            h = self.holders[index]
            if h not in made:
                made[h] = change(h)
            after[index] = made[h]
        return self.changed(after)


def new_placement(plan: Plan, servers: Sequence[Server], replication: int, number: int = 1) -> Placement:
    """Place the slices of a new or restored model.

    Args:
        plan: the cut of its units. Server p of the plan is the p-th of `servers`, if there are as many.
        servers: the servers in the job, by rank.
        replication: number of servers that hold each slice; all of them if there are fewer.
        number: number of the placement.

    Raises:
        InvalidRequest: `servers` is empty.
    """
    if not servers:
        raise InvalidRequest("slices cannot be placed: the job has no shard server")
    key = replication, *((s.rank, s.node) for s in servers)
    ranks = plan.placed.get(key)
    if ranks is None:
        plan.placed.clear()
        ranks = plan.placed[key] = tuple(_assign(plan, servers, min(replication, len(servers))))
    made = {each: Holders(each) for each in set(ranks)}
    return Placement(tuple([made[each] for each in ranks]), plan.num_servers, number, replication)


def _assign(plan: Plan, servers: Sequence[Server], copies: int) -> Iterator[tuple[int, ...]]:
    """Return the ranks of the holders of each slice, the primary first."""
    slices = [(s.numel, [servers[s.server % len(servers)]]) for s in plan.numbered]
    load: Counter[int] = Counter()
    for numel, (primary,) in slices:
        load[primary.rank] += numel
    between: Counter[tuple[int, int]] = Counter()
    for numel, holders in sorted(slices, key=lambda s: -s[0]):  # small slices even out the loads
        while len(holders) < copies:
            backup = choose_backup(holders, servers, load, between)
            holders.append(backup)
            load[backup.rank] += numel
            between[holders[0].rank, backup.rank] += numel
    return (tuple([h.rank for h in holders]) for _, holders in slices)


def choose_backup(
    holders: Sequence[Server],
    servers: Iterable[Server],
    load: Counter[int],
    between: Counter[tuple[int, int]],
) -> Server:
    """Return the server for another copy of a slice. See Note: [Declustered backups].

    Args:
        holders: servers that hold it, the primary first; empty if the copy is to become the primary.
        servers: the candidates. At least one is not a holder.
        load: elements that each server holds, by rank.
        between: elements by (rank of the primary, rank of the backup).
    """
    nodes, ranks = {h.node for h in holders}, {h.rank for h in holders}
    return min(
        (s for s in servers if s.rank not in ranks),
        key=lambda s: (s.node in nodes, between[holders[0].rank, s.rank] if holders else 0, load[s.rank], s.rank),
    )
