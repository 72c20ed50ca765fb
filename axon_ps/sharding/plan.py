"""The ranges of units that shard servers own.

The plan is a pure function of (layout, number of servers, options), so coordinator, servers and workers each
compute it and agree. A large unit is cut into one slice per server. Their sizes differ by less than two alignment
steps. A small unit goes to fewer servers, those with the fewest elements so far, so that all end with about the same
number. A parameter that travels as float8 is not cut. Slices of its unit are as even as that allows, and the larger
ones go to the servers with the fewest elements.

A slice is cut into *chunks* of `chunk_numel` elements (the last may be shorter). Chunk boundaries are part of the plan,
so a chunk is named by its offset, and a server has a counter per chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, pairwise

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Layout, Unit
from axon_ps.sharding.precision import WirePrecision

ALIGN_NUMEL = 64
"""Slices begin at multiples of this many elements: two cache lines of bf16 and four of f32."""

DEFAULT_CHUNK_NUMEL = 1 << 18
"""Elements of a chunk: 1 MiB of f32, the size at which one gRPC stream is fastest."""

DEFAULT_MIN_SLICE_NUMEL = 1 << 13
"""A unit is not cut into slices shorter than this: below it a request costs more than the bytes it carries."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Elements [begin, end) of unit number `unit`, owned by shard server number `server`."""

    unit: int
    server: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return self.end - self.begin

    def chunks(self, chunk_numel: int) -> Iterator[tuple[int, int]]:
        """Yield the (begin, end) of each chunk, as offsets in the unit."""
        for begin in range(self.begin, self.end, chunk_numel):
            yield begin, min(begin + chunk_numel, self.end)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The sizes into which units are cut.

    Attributes:
        chunk_numel: elements of a chunk.
        min_slice_numel: smallest slice, up to alignment, except of a unit that is smaller itself.
    """

    chunk_numel: int = DEFAULT_CHUNK_NUMEL
    min_slice_numel: int = DEFAULT_MIN_SLICE_NUMEL

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_numel <= 1 << 22:
            raise InvalidRequest(f"chunk_numel is {self.chunk_numel}; it must be from 1 to {1 << 22} (4 Mi elements)")
        if self.min_slice_numel < 1:
            raise InvalidRequest(f"min_slice_numel is {self.min_slice_numel}; it must be at least 1")


def default_options(precision: WirePrecision) -> PlanOptions:
    """Return the options of a job that names none: chunks of 2^18 elements, or 2^19 if both directions are compressed.

    `partitions.even_options` then fits them to the job's layout.

    *Measured* with int8 both ways, 17M parameters, four workers and servers on two cores:

        elements of a chunk    2^18    2^19
        CPU seconds a step     1.36    1.20
    """
    compressed = precision.param_compression is not None and precision.grad_compression is not None
    return PlanOptions(chunk_numel=2 * DEFAULT_CHUNK_NUMEL if compressed else DEFAULT_CHUNK_NUMEL)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The slices of every unit.

    Attributes:
        num_servers: number of shard servers that units are cut over.
        options: chunk and slice sizes.
        slices: per unit of the layout, its slices in ascending order. Together they cover the unit exactly.
    """

    num_servers: int
    options: PlanOptions
    slices: tuple[tuple[Slice, ...], ...]

    @cached_property
    def by_server(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices of each server, in unit order."""
        owned: list[list[Slice]] = [[] for _ in range(self.num_servers)]
        for unit in self.slices:
            for s in unit:
                owned[s.server].append(s)
        return tuple(tuple(o) for o in owned)

    @cached_property
    def numbered(self) -> tuple[Slice, ...]:
        """All slices by number: unit by unit, ascending."""
        return tuple(s for unit in self.slices for s in unit)

    @cached_property
    def placed(self) -> dict[tuple[object, ...], tuple[tuple[int, ...], ...]]:
        """The last result of `placement.new_placement` by its arguments, as a cache: the ranks of holders by slice."""
        return {}

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """The number of each unit's first slice, and then the number of all slices."""
        return tuple(accumulate((len(unit) for unit in self.slices), initial=0))

    def number_of(self, s: Slice) -> int:
        """Return the number of a slice of this plan."""
        return self.first_of[s.unit] + bisect_right(self.ends_of[s.unit], s.begin)

    @cached_property
    def ends_of(self) -> tuple[tuple[int, ...], ...]:
        """The ends of each unit's slices."""
        return tuple(tuple(s.end for s in unit) for unit in self.slices)

    def slice_of(self, unit: int, server: int) -> Slice | None:
        """Return the slice of `unit` that `server` owns, if it owns one."""
        return next((s for s in self.slices[unit] if s.server == server), None)


def make_plan(layout: Layout, num_servers: int, options: PlanOptions | None = None) -> Plan:
    """Cut every unit of `layout` over `num_servers` servers.

    Raises:
        InvalidRequest: there is no server.
    """
    if num_servers < 1:
        raise InvalidRequest(f"a plan needs at least one shard server; {num_servers} given")
    options = options or PlanOptions()
    loads = [(0, server) for server in range(num_servers)]  # a heap: elements so far of each server
    slices: list[tuple[Slice, ...]] = []
    for index, unit in enumerate(layout.units):
        numel = unit.numel
        if (count := _count(numel, num_servers, options)) == 1:  # a small unit; a model may have thousands
            load, server = loads[0]
            slices.append((Slice(unit=index, server=server, begin=0, end=numel),))
            heapreplace(loads, (load + numel, server))
            continue
        bounds = _bounds(unit, count, options)
        owners = [heappop(loads) for _ in range(len(bounds) - 1)]
        slices.append(_cut(index, bounds, [server for _, server in owners], even=not unit.has_float8))
        added = {s.server: s.numel for s in slices[-1]}
        for load, server in owners:
            heappush(loads, (load + added.get(server, 0), server))
    return Plan(num_servers=num_servers, options=options, slices=tuple(slices))


def num_slices(layout: Layout, num_servers: int, options: PlanOptions) -> int:
    """Return the number of slices of a plan, without making it."""
    counts = ((unit, _count(unit.numel, num_servers, options)) for unit in layout.units)
    return sum(len(_bounds(unit, count, options)) - 1 if unit.has_float8 else count for unit, count in counts)


def _count(numel: int, num_servers: int, options: PlanOptions) -> int:
    """Return the number of servers that a unit is cut over."""
    return max(1, min(num_servers, numel // options.min_slice_numel))


def _bounds(unit: Unit, count: int, options: PlanOptions) -> list[int]:
    """Return the bounds of up to `count` slices of a unit, which are as even as possible."""
    align = min(ALIGN_NUMEL, options.min_slice_numel)
    bounds = [unit.numel * i // count // align * align for i in range(count)] + [unit.numel]
    return sorted({_beside_float8(unit, bound) for bound in bounds}) if unit.has_float8 else bounds


def _beside_float8(unit: Unit, bound: int) -> int:
    """Return the bound, or the nearest end of the parameter that it is in, if that travels as float8."""
    p = unit.parameters[bisect_right(unit.parameters, bound, key=lambda p: p.offset) - 1]
    return min((p.offset, p.end), key=lambda end: abs(end - bound)) if p.float8 else bound


def _cut(unit: int, bounds: list[int], by_load: list[int], *, even: bool) -> tuple[Slice, ...]:
    """Return the slices between these bounds, on servers that are given in the order of their elements."""
    cuts = list(pairwise(bounds))
    servers = sorted(by_load)
    if not even:
        largest_first = sorted(cuts, key=lambda cut: cut[0] - cut[1])
        servers = [server for _, server in sorted(zip(largest_first, by_load, strict=True))]
    return tuple(
        Slice(unit=unit, server=server, begin=begin, end=end)
        for server, (begin, end) in zip(servers, cuts, strict=True)
        if end > begin
    )
