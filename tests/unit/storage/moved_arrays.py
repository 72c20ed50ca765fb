"""Moves between layouts, carried out on arrays."""

from __future__ import annotations

from axon_ps.sharding.moves import Move
from axon_ps.sharding.raw import put, range_with, stored
from axon_ps.types import Array


def carry_out(move: Move, values: Array, out: Array, begin: int) -> None:
    """Do to arrays what `OpenSlices.copy` does to files."""
    for row in range(move.rows):
        first, at = move.source_begin + row * move.source_step, move.begin + row * move.step
        if move.converts is None:
            out[at - begin : at - begin + move.numel] = values[first : first + move.numel]
            continue
        source, target = move.converts
        words, end = range_with(source, first, first + move.numel)
        read = values[source.offset + words : source.offset + end]
        put(stored(read, source, words, first, first + move.numel, target), target, at, out, begin)
