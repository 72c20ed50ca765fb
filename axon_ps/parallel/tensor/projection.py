"""`project`: the products of one input with sharded matrices, and their backward, which exchanges while it computes.

Owns: one autograd function from a replicated tensor (or a shard of a sequence) to sharded features:
`copy_to_group` or `gather_sequence` and then `functional.linear`. It adds three optimizations:

- In host memory the input's gradient is summed over the ranks while the weights' gradients are computed (see `_begun`).
- Of a sequence only this rank's shard is saved for backward, 1/n of the bytes. It is gathered once more there, while
  the input's gradient is computed (Korthikanti et al. 2022, section 4.2.2).
- Several matrices of one input (queries, keys, values) share one exchange.

After an error: as for `tensor.functions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.parallel.compile import uncompiled

Matrix = tuple[torch.Tensor, torch.Tensor | None]
"""A weight [out, in] and a bias [out]."""

Wait = Callable[[], torch.Tensor]
"""A function that blocks until a collective that has begun is done, and returns its result."""


def project(
    x: torch.Tensor, group: ProcessGroup, matrices: Sequence[Matrix], sequence_dim: int | None = None
) -> list[torch.Tensor]:
    """Compute x W^T + b for each of some matrices, of which this rank has some rows.

    Args:
        x: [..., in], replicated; with `sequence_dim` this rank's equal shard of the sequence.
        group: the ranks that have the other rows.
        matrices: weights and biases.
        sequence_dim: the sharded dimension of x; None = x is replicated.

    Returns:
        [..., out] for each matrix, of the full sequence.

    Raises:
        Disagreement: the shards of the sequence differ.
    """
    if group.world_size == 1:
        return [functional.linear(x, weight, bias) for weight, bias in matrices]
    return list(_exchange(x, group, sequence_dim, *(tensor for matrix in matrices for tensor in matrix)))


@uncompiled
def _exchange(*arguments: Any) -> Any:
    return _Project.apply(*arguments)  # type: ignore[no-untyped-call]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int | None, *matrices: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = matrices[::2], matrices[1::2]
        ctx.group, ctx.dim, ctx.dtype = group, dim, x.dtype
        if x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as `linear` casts it, but before it is sent
        ctx.save_for_backward(x, *weights)
        full = x if dim is None else _gather(x, group, dim)()
        return tuple(functional.linear(full, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, dim = ctx.group, ctx.dim
        for_x, _, _, *for_matrices = ctx.needs_input_grad
        gathering = _gather(x, group, dim) if dim is not None and any(for_matrices[::2]) else None
        exchanging: Wait | None = None
        if for_x:  # under autocast the gradients have its dtype, and the weights do not
            partial = grads[0] @ _as(weights[0], grads[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                partial += grad @ _as(weight, grad)
            exchanging = _reduce(partial, group, dim)
        full = x if gathering is None else gathering()
        result: list[torch.Tensor | None] = [None, None, None]
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            for_weight, for_bias = for_matrices[2 * i : 2 * i + 2]
            rows = _rows(grad)
            result.append(_as(rows.T @ _as(_rows(full), rows), weight) if for_weight else None)
            result.append(_as(rows.sum(0), weight) if for_bias else None)
        if exchanging is not None:
            result[0] = exchanging().to(ctx.dtype)
        return tuple(result)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., features] to [rows, features]."""
    return x.reshape(math.prod(x.shape[:-1]), x.size(-1))


def _as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.dtype)


def _begun(call: Callable[..., Any], x: torch.Tensor) -> Wait:
    """Begin a collective of a tensor. It goes on in the background if the tensor is in host memory.

    On a device it would be put behind the kernels of this stream in any case. Threads could order the collectives
    of several groups on one stream differently on each rank, and NCCL would deadlock.
    """
    if x.device.type == "cpu":
        work: Work[torch.Tensor] = call(x, async_op=True)
        return lambda: work.wait()
    result: torch.Tensor = call(x)
    return lambda: result


def _gather(x: torch.Tensor, group: ProcessGroup, dim: int) -> Wait:
    """Begin to gather the full sequence."""
    rows = _begun(group.all_gather, x.movedim(dim, 0).contiguous())
    return lambda: rows().movedim(0, dim)


def _reduce(partial: torch.Tensor, group: ProcessGroup, dim: int | None) -> Wait:
    """Begin the sum over the ranks, or for a sequence this rank's shard of it."""
    if dim is None:
        return _begun(group.all_reduce, partial.contiguous())
    rows = _begun(group.reduce_scatter, partial.movedim(dim, 0).contiguous())
    return lambda: rows().movedim(0, dim)
