"""How a dimension of a parameter is split among the ranks of a group, and the drawing of a part of a whole matrix.

Invariants:
- Parts are those of `torch.chunk`, which are DTensor's too: all but the last ranks have ceil(size / n), the last ones
  less or nothing. The largest part, which is what a step waits for, is as small as with any other way.
- A part that is drawn holds the same values as in the whole, for any number of ranks, and leaves the generator where
  drawing the whole would have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axon_ps.parallel.chunks import counts_of

_DRAWN_NUMEL = 1 << 20
"""Elements of the whole matrix that are in memory at a time."""


@dataclass(frozen=True)
class Partition:
    """One dimension of a parameter, and which part of it this rank has.

    Attributes:
        dim: the dimension.
        size: how much the whole has there.
        num_parts: ranks.
        index: this rank.
    """

    dim: int
    size: int
    num_parts: int
    index: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How much each rank has."""
        return counts_of(self.size, self.num_parts)

    @property
    def begin(self) -> int:
        """Where this rank's part begins."""
        return sum(self.counts[: self.index])

    @property
    def length(self) -> int:
        """How much this rank has."""
        return self.counts[self.index]

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, as a view of the whole."""
        return whole.narrow(self.dim, self.begin, self.length)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole, from that of a part."""
        return *part[: self.dim], self.size, *part[self.dim + 1 :]


@torch.no_grad()
def draw_uniform_(
    part: torch.Tensor, bound: float, partition: Partition | None, generator: torch.Generator | None = None
) -> None:
    """Fill this rank's part of a matrix or vector that is uniform in [-bound, bound).

    The whole is drawn on the host, some rows at a time (at most 4 MiB in f32, and no less than one row), and all but
    the part is dropped: in the order and with the generator of `torch.nn.init.uniform_`, so a whole that is drawn here
    has the values of a whole drawn there. Costs a rank the time of drawing the whole.

    Args:
        part: [rows] or [rows, columns], of any device; nothing is drawn for the meta device.
        bound: 0 = zeros, and nothing is drawn.
        partition: what part it is; None = the whole.
        generator: of the host; None = torch's default one, which must be at the same place on all ranks.
    """
    if part.is_meta or bound == 0.0:
        part.zero_()
        return
    partition = partition or Partition(0, part.shape[0], 1, 0)
    rows, *columns = partition.whole_shape(part.shape)
    width = columns[0] if columns else 1
    step = max(1, _DRAWN_NUMEL // max(1, width))
    for first in range(0, rows, step):
        drawn = torch.empty(min(step, rows - first), *columns, dtype=part.dtype, device="cpu")
        drawn.uniform_(-bound, bound, generator=generator)
        if partition.dim:
            part[first : first + len(drawn)] = partition.part_of(drawn)
        else:
            begin = max(first, partition.begin)
            end = min(first + len(drawn), partition.begin + partition.length)
            if begin < end:
                part[begin - partition.begin : end - partition.begin] = drawn[begin - first : end - first]
