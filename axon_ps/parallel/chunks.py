"""Shards of a tensor along a dimension, as `torch.chunk` and DTensor cut it, and exchanges of them between ranks.

Owns: the sizes of shards, their exchanges along any dimension, and the autograd function of an exchange and its mirror.
Refuses: to pair exchanges with their mirrors; `redistribute` and `tensor.functions` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.parallel.compile import uncompiled
from axon_ps.types import ReduceOp

Exchange = Callable[[Tensor], Tensor]


def counts_of(size: int, num_shards: int) -> tuple[int, ...]:
    """Return the number of elements in each shard: ceil(size / num_shards), but fewer or none in the last ones."""
    each = -(-size // num_shards)
    return tuple(max(0, min(each, size - i * each)) for i in range(num_shards))


def all_reduce(x: Tensor, group: ProcessGroup, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Return the reduction of all ranks' tensors, in new memory."""
    result = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(result, op)
    return result


@dataclass(frozen=True)
class Shards:
    """The shards of a tensor among the ranks of a group, and their exchanges, whose results have memory of their own.

    Attributes:
        group: the ranks.
        dim: the dimension along which the tensor is sharded.
        counts: size of each rank's shard there.
    """

    group: ProcessGroup
    dim: int
    counts: tuple[int, ...]

    def own(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that it has in full."""
        begin, length = sum(self.counts[: self.group.rank]), self.counts[self.group.rank]
        return full.narrow(self.dim, begin, length).clone(memory_format=torch.contiguous_format)

    def gather(self, shard: Tensor) -> Tensor:
        """Return the full tensor. Every rank calls it."""
        rows: Tensor = self.group.all_gather(shard.movedim(self.dim, 0).contiguous(), counts=self.counts)
        return rows.movedim(0, self.dim).contiguous()

    def reduce_scatter(self, full: Tensor, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        """Return this rank's shard of the reduction of all ranks' tensors. Every rank calls it."""
        rows: Tensor = self.group.reduce_scatter(full.movedim(self.dim, 0).contiguous(), op, counts=self.counts)
        return rows.movedim(0, self.dim).contiguous()


@uncompiled
def exchanged(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """Return `forward(x)`. The gradient g of the result becomes `backward(g)`. There is no second derivative."""
    result: Tensor = _Exchanged.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.mirror = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.mirror(grad), None, None
