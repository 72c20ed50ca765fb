"""The conjugate pairs of tensor parallelism: an exchange of a group's ranks in forward, and its mirror in backward.

Owns: the autograd functions between *replicated* tensors (the same values on every rank) and *sharded* ones (each rank
has its shard). Refuses: to know layers.

    function                 forward          backward         from -> to
    copy_to_group            -                all-reduce       replicated -> input of sharded weights     (Megatron's f)
    reduce_from_group        all-reduce       -                partial sums -> replicated                 (Megatron's g)
    scatter_to_group         own shard        all-gather       replicated -> sharded along a dimension
    gather_from_group        all-gather       own shard        sharded along a dimension -> replicated
    gather_sequence          all-gather       reduce-scatter   sharded sequence -> input of sharded weights    (g bar)
    reduce_scatter_sequence  reduce-scatter   all-gather       partial sums -> sharded sequence                (f bar)

Sources: Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, Reducing Activation Recomputation,
section 4.2.2.

Note: [Replicated gradients]
The gradient of a replicated tensor is itself replicated: every rank computes the same loss from it. So the backward of
`gather_from_group` may take this rank's shard of the gradient instead of a sum. Every path from a replicated tensor
into sharded weights needs `copy_to_group` or `gather_sequence`, which replicate the gradient again.

Invariants:
- No function writes to its input, or to the gradient that it is given.
- Sums are in rank order where the backend promises it (shm, grpc, mock), so replicated tensors have the same bits
  everywhere.
- The ranks must call them in the same order, in forward and so in backward; a model that is the same everywhere does
  so.

After an error: as for `ProcessGroup`; the forward or backward that it was in has no result. `torch.compile` breaks the
graph here: the functions are ordinary Python to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.chunks import counts_of
from axon_ps.parallel.compile import uncompiled


def copy_to_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the replicated tensor as it is; its gradient is the sum of all ranks' gradients."""
    return _apply(_Copy, x, group)


def reduce_from_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' tensors, on every rank; the gradient goes to each as it is."""
    return _apply(_Reduce, x, group)


def scatter_to_group(x: torch.Tensor, group: ProcessGroup, dim: int = -1) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor along a dimension, divided as by `torch.chunk`."""
    return _apply(_Scatter, x, group, dim, counts_of(x.size(dim), group.world_size))


def gather_from_group(x: torch.Tensor, group: ProcessGroup, dim: int = -1, size: int | None = None) -> torch.Tensor:
    """Return the full tensor of shards along a dimension.

    Args:
        x: this rank's shard.
        group: the ranks that have the other shards.
        dim: the dimension along which it is sharded.
        size: size of the full tensor along it, if the shards are those of `torch.chunk`; None = the shards are equal.

    Raises:
        Disagreement: `size` is None and the shards differ.
    """
    return _apply(_Gather, x, group, dim, _counts(x, group, dim, size))


def gather_sequence(x: torch.Tensor, group: ProcessGroup, dim: int = -2) -> torch.Tensor:
    """Return the full sequence, of which every rank has an equal shard; its gradient is reduce-scattered.

    Raises:
        Disagreement: the shards differ.
    """
    return _apply(_GatherSequence, x, group, dim, _counts(x, group, dim, None))


def reduce_scatter_sequence(x: torch.Tensor, group: ProcessGroup, dim: int = -2) -> torch.Tensor:
    """Sum all ranks' tensors; each rank gets its equal shard of the sequence.

    Raises:
        InvalidRequest: the sequence does not divide.
    """
    check_divides(x, group, dim)
    return _apply(_ReduceScatterSequence, x, group, dim, counts_of(x.size(dim), group.world_size))


def check_divides(x: torch.Tensor, group: ProcessGroup, dim: int) -> None:
    """Check that a sequence has equal shards on all ranks: their size cannot be known from one shard otherwise.

    Raises:
        InvalidRequest: it does not divide.
    """
    if x.size(dim) % group.world_size:
        raise InvalidRequest(
            f"dimension {dim} of {list(x.shape)} is the sequence and does not divide among {group.world_size} ranks; "
            "pad it, or do without sequence_parallel"
        )


@uncompiled
def _exchange(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def _apply(function: type[torch.autograd.Function], x: torch.Tensor, group: ProcessGroup, *rest: Any) -> torch.Tensor:
    """Apply a function, unless the group is this rank alone."""
    result: torch.Tensor = x if group.world_size == 1 else _exchange(function, x, group, *rest)
    return result


def _counts(x: torch.Tensor, group: ProcessGroup, dim: int, size: int | None) -> tuple[int, ...]:
    n = group.world_size
    return (x.size(dim),) * n if size is None else counts_of(size, n)


def _all_reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(result)
    return result


def _all_gather(x: torch.Tensor, group: ProcessGroup, dim: int, counts: Sequence[int]) -> torch.Tensor:
    rows: torch.Tensor = group.all_gather(x.movedim(dim, 0).contiguous(), counts=counts)
    return rows.movedim(0, dim).contiguous()


def _reduce_scatter(x: torch.Tensor, group: ProcessGroup, dim: int, counts: Sequence[int]) -> torch.Tensor:
    rows: torch.Tensor = group.reduce_scatter(x.movedim(dim, 0).contiguous(), counts=counts)
    return rows.movedim(0, dim).contiguous()


def _own(x: torch.Tensor, group: ProcessGroup, dim: int, counts: Sequence[int]) -> torch.Tensor:
    return x.narrow(dim, sum(counts[: group.rank]), counts[group.rank]).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, counts: Sequence[int]) -> torch.Tensor:
        ctx.where = group, dim, counts
        return _own(x, group, dim, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_gather(grad, *ctx.where), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, counts: Sequence[int]) -> torch.Tensor:
        ctx.where = group, dim, counts
        return _all_gather(x, group, dim, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _own(grad, *ctx.where), None, None, None


class _GatherSequence(_Gather):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _reduce_scatter(grad, *ctx.where), None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, counts: Sequence[int]) -> torch.Tensor:
        ctx.where = group, dim, counts
        return _reduce_scatter(x, group, dim, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_gather(grad, *ctx.where), None, None, None
