"""Sharding of a dimension of a parameter among the ranks of a group, and drawing a shard of a full matrix.

Invariants:
- Shards are those of `torch.chunk`, which are DTensor's too: all but the last ranks have ceil(size / n), the last ones
  less or nothing. The largest shard, which determines the time of a step, is as small as in any other division.
- A drawn shard has the values of the full matrix there, for any number of ranks. Drawing it leaves the generator in the
  state in which drawing the full matrix would have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axon_ps.parallel.chunks import counts_of

_DRAWN_NUMEL = 1 << 20
"""Elements of the full matrix that are in memory at a time."""


@dataclass(frozen=True)
class Partition:
    """One dimension of a parameter, and this rank's shard of it.

    Attributes:
        dim: the dimension.
        size: size of the full parameter there.
        num_shards: number of ranks.
        index: this rank.
    """

    dim: int
    size: int
    num_shards: int
    index: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The size of each rank's shard."""
        return counts_of(self.size, self.num_shards)

    @property
    def begin(self) -> int:
        """The beginning of this rank's shard."""
        return sum(self.counts[: self.index])

    @property
    def length(self) -> int:
        """The size of this rank's shard."""
        return self.counts[self.index]

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard, as a view of the full tensor."""
        return full.narrow(self.dim, self.begin, self.length)

    def full_shape(self, shard: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full tensor, from that of a shard."""
        return *shard[: self.dim], self.size, *shard[self.dim + 1 :]


@torch.no_grad()
def draw_uniform_(
    shard: torch.Tensor, bound: float, partition: Partition | None, generator: torch.Generator | None = None
) -> None:
    """Fill this rank's shard of a matrix or vector that is uniform in [-bound, bound).

    All of it is drawn on the host, some rows at a time (at most 4 MiB in f32, and no less than one row), and everything
    but the shard is dropped. Order and generator are those of `torch.nn.init.uniform_`, so the shard has the values
    that would be drawn there. It takes the time of drawing the full matrix.

    Args:
        shard: [rows] or [rows, columns], of any device. Nothing is drawn for the meta device.
        bound: 0 = zeros, and nothing is drawn.
        partition: the shard's partition; None = it is the full tensor.
        generator: a host generator; None = torch's default one, which must be in the same state on all ranks.
    """
    if shard.is_meta or bound == 0.0:
        shard.zero_()
        return
    partition = partition or Partition(0, shard.shape[0], 1, 0)
    rows, *columns = partition.full_shape(shard.shape)
    width = columns[0] if columns else 1
    step = max(1, _DRAWN_NUMEL // max(1, width))
    for first in range(0, rows, step):
        drawn = torch.empty(min(step, rows - first), *columns, dtype=shard.dtype, device="cpu")
        drawn.uniform_(-bound, bound, generator=generator)
        if partition.dim:
            shard[first : first + len(drawn)] = partition.shard_of(drawn)
        else:
            begin = max(first, partition.begin)
            end = min(first + len(drawn), partition.begin + partition.length)
            if begin < end:
                shard[begin - partition.begin : end - partition.begin] = drawn[begin - first : end - first]
