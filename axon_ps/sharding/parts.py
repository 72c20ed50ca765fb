"""How the workers of a node share a unit: each has one contiguous part of it. Pure.

A part begins and ends where chunks do, because a chunk of a gradient is summed as a whole on its server. Parts are as
even as that allows; a unit of few chunks has empty ones.

Invariant: parts are a function of plan and count alone, so all workers of a node agree on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from axon_ps.sharding.layout import Layout
from axon_ps.sharding.plan import ALIGN_NUMEL, PlanOptions, Slice, make_plan

_LEAST_CHUNK_NUMEL = 1 << 14


def part_bounds(slices: Sequence[Slice], chunk_numel: int, count: int) -> tuple[int, ...]:
    """Where the parts of a unit begin, and at the end where the last one ends: count + 1 numbers.

    Args:
        slices: of the unit, ascending.
        chunk_numel: elements of a chunk.
        count: how many parts.
    """
    numel = slices[-1].end
    cuts = [begin for s in slices for begin, _ in s.chunks(chunk_numel)] + [numel]
    bounds = [0]
    for i in range(1, count):
        wanted = numel * i // count
        bounds.append(max(bounds[-1], min(cuts, key=lambda cut: (abs(cut - wanted), cut))))
    return (*bounds, numel)


def even_options(layout: Layout, num_servers: int, count: int, options: PlanOptions) -> PlanOptions:
    """Options whose chunks let `count` workers share the slices of the largest units evenly.

    Chunks become as large as they may for that, and not smaller than 16 Ki elements: each costs a message.

    Args:
        layout: of the job.
        num_servers: shard servers.
        count: workers of a node.
        options: the chunk size is at most theirs.
    """
    plan = make_plan(layout, num_servers, options)
    largest = max(s.numel for unit in plan.slices for s in unit)
    parts = count * -(-largest // (options.chunk_numel * count))
    even = -(-largest // parts)
    chunk_numel = -(-even // ALIGN_NUMEL) * ALIGN_NUMEL
    return replace(options, chunk_numel=min(options.chunk_numel, max(chunk_numel, _LEAST_CHUNK_NUMEL)))
