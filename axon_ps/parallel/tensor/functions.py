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
- Replicated tensors have the same bits on every rank with a backend that sums in rank order (shm, grpc, mock).
- The ranks must call them in the same order, in forward and so in backward. A model that is the same everywhere does
  so.

After an error: as for `ProcessGroup`. The forward or backward that it was in has no result. `torch.compile` breaks the
graph here, since the functions are ordinary Python.
"""

from __future__ import annotations

import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.chunks import Exchange, Shards, all_reduce, counts_of, exchanged


def copy_to_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the replicated tensor as it is. Its gradient is the sum of all ranks' gradients."""
    return _paired(x, group, lambda x: x.view_as(x), lambda grad: all_reduce(grad, group))


def reduce_from_group(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' tensors, on every rank. Its gradient is passed to each tensor as it is."""
    return _paired(x, group, lambda x: all_reduce(x, group), lambda grad: grad)


def scatter_to_group(x: torch.Tensor, group: ProcessGroup, dim: int = -1) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor along a dimension, divided as by `torch.chunk`."""
    shards = Shards(group, dim, counts_of(x.size(dim), group.world_size))
    return _paired(x, group, shards.own, shards.gather)


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
    n = group.world_size
    shards = Shards(group, dim, (x.size(dim),) * n if size is None else counts_of(size, n))
    return _paired(x, group, shards.gather, shards.own)


def gather_sequence(x: torch.Tensor, group: ProcessGroup, dim: int = -2) -> torch.Tensor:
    """Return the full sequence, of which every rank has an equal shard. Its gradient is reduce-scattered.

    Raises:
        Disagreement: the shards differ.
    """
    shards = Shards(group, dim, (x.size(dim),) * group.world_size)
    return _paired(x, group, shards.gather, shards.reduce_scatter)


def reduce_scatter_sequence(x: torch.Tensor, group: ProcessGroup, dim: int = -2) -> torch.Tensor:
    """Sum all ranks' tensors, and return this rank's equal shard of the sequence.

    Raises:
        InvalidRequest: the sequence does not divide.
    """
    check_divides(x, group, dim)
    shards = Shards(group, dim, counts_of(x.size(dim), group.world_size))
    return _paired(x, group, shards.reduce_scatter, shards.gather)


def check_divides(x: torch.Tensor, group: ProcessGroup, dim: int) -> None:
    """Check that a sequence has equal shards on all ranks. Else its size could not be computed from one shard.

    Raises:
        InvalidRequest: it does not divide.
    """
    if x.size(dim) % group.world_size:
        raise InvalidRequest(
            f"dimension {dim} of {list(x.shape)} is the sequence and does not divide among {group.world_size} ranks; "
            "pad it, or do without sequence_parallel"
        )


def _paired(x: torch.Tensor, group: ProcessGroup, forward: Exchange, backward: Exchange) -> torch.Tensor:
    """Exchange, unless the group is this rank alone."""
    return x if group.world_size == 1 else exchanged(x, forward, backward)
