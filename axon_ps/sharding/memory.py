"""The memory of a model's slices on a shard server, computed before anything is allocated. Pure.

The formula is Note: [Memory of a slice] of `shard.core.slices`. Every copy is counted as a primary, since a backup must
be able to take over. Chunks are counted, too, since they may be very small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import ELEMENT_BYTES
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.types import OptimizerSpec

CHUNK_BYTES: Final = 256
"""Bytes of a chunk beside its elements: its bounds, its counters and the header of its frame."""

_F32_BYTES: Final = 4


def slice_bytes(spec: JobSpec, moments: int, num_cuts: int, *, replicas: int = 1) -> tuple[int, ...]:
    """Return the bytes that each slice of a model takes on a server that holds it, by number.

    Args:
        spec: layout, dtypes and policy.
        moments: number of state arrays of its optimizer; 0 without an optimizer.
        num_cuts: number of servers that units are cut over.
        replicas: number of replicas; counts only if they step asynchronously, since each then has an accumulator.
    """
    units, chunk_numel = spec.layout.units, spec.options.chunk_numel
    accumulators = max(1, replicas) if spec.policy.asynchronous else 1
    residual = spec.precision.param_compression is not None
    wire_bytes = spec.precision.param.itemsize
    trainable = _F32_BYTES * (1 + accumulators + moments + residual) + wire_bytes
    frozen = {False: _F32_BYTES + wire_bytes, True: ELEMENT_BYTES}  # raw ones have no frames
    known = spec.sizes.get((trainable, num_cuts))
    if known is None:
        known = spec.sizes[trainable, num_cuts] = tuple(
            s.numel * (trainable if units[s.unit].trainable else frozen[units[s.unit].raw])
            + -(-s.numel // chunk_numel) * CHUNK_BYTES
            for s in spec.plan(num_cuts).numbered
        )
    return known


def slice_sizes(spec: JobSpec, optimizer: OptimizerSpec | None, num_cuts: int, replicas: int = 1) -> tuple[int, ...]:
    """Return the bytes that each slice of a model takes on a server that holds it, by number."""
    moments = 0 if optimizer is None else len(create(optimizer.name).state_names(optimizer.groups))
    return slice_bytes(spec, moments, num_cuts, replicas=replicas)


def placed_bytes(placement: Placement, sizes: Sequence[int]) -> Counter[int]:
    """Return the bytes of a model on each server that holds some of it, by rank.

    Args:
        placement: the holders of its slices.
        sizes: bytes of each slice, from `slice_bytes`.
    """
    total: Counter[Holders] = Counter()
    for holders, size in zip(placement.holders, sizes, strict=True):
        total[holders] += size
    placed: Counter[int] = Counter()
    for holders, size in total.items():
        for rank in holders.servers:
            placed[rank] += size
    return placed


def format_bytes(count_bytes: float) -> str:
    """Return a number of bytes as text: "1.5 GiB"."""
    size = float(count_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
