"""The division of a unit among the workers of a node, one contiguous partition each, and chunk sizes for it. Pure.

A worker that is a replica by itself has one partition, the full unit. A partition begins and ends at chunk boundaries,
because a server sums a chunk of a gradient at once. Partitions are as even as that allows. A unit of few chunks has
empty ones.

Invariant: partitions are a function of plan and count only, so all workers of a node agree on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from axon_ps.sharding.layout import Layout
from axon_ps.sharding.plan import ALIGN_NUMEL, PlanOptions, Slice, make_plan

_MIN_CHUNK_NUMEL = 1 << 14

_EXTRA_FRACTION = 8
"""Chunks may be an eighth longer than asked for: a message for the last few elements costs as much as any other."""


def partition_bounds(slices: Sequence[Slice], chunk_numel: int, count: int) -> tuple[int, ...]:
    """Return the boundaries of the partitions of a unit: count + 1 numbers.

    Args:
        slices: slices of the unit, ascending.
        chunk_numel: elements of a chunk.
        count: number of partitions.
    """
    numel = slices[-1].end
    cuts = [begin for s in slices for begin, _ in s.chunks(chunk_numel)] + [numel]
    bounds = [0]
    for i in range(1, count):
        wanted = numel * i // count
        bounds.append(max(bounds[-1], min(cuts, key=lambda cut: (abs(cut - wanted), cut))))
    return (*bounds, numel)


def even_options(layout: Layout, num_servers: int, count: int, options: PlanOptions) -> PlanOptions:
    """Return options that cut the largest slices into equal chunks, the same number for each of `count` workers.

    Chunks are as large as that allows, and not smaller than 16 Ki elements (unless `options` asks for smaller
    ones), since each costs a message. For example, a slice may have 512 elements more than two chunks of the default
    size. It is then three messages by default, and two with these options.

    Args:
        layout: layout of the job.
        num_servers: number of shard servers.
        count: number of workers of a node that divide a unit.
        options: the sizes to start from. Chunks grow by at most an eighth.
    """
    plan = make_plan(layout, num_servers, options)
    largest = max(s.numel for unit in plan.slices for s in unit)
    longest = options.chunk_numel + options.chunk_numel // _EXTRA_FRACTION
    chunks = count * -(-largest // (longest * count))
    even = -(-largest // chunks)
    chunk_numel = -(-even // ALIGN_NUMEL) * ALIGN_NUMEL
    return replace(options, chunk_numel=min(longest, max(chunk_numel, _MIN_CHUNK_NUMEL)))
