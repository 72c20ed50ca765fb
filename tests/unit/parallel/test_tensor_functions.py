"""The conjugate pairs: each does in forward and in backward what its line in the table says.

Tests of `parallel/tensor/functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.tensor import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)
from mock_ranks import close, on_ranks, rand

N = 3
Values = Callable[[int], torch.Tensor]


def own(full: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """A rank's shard, and for ranks beyond the last shard an empty one."""
    shards = full.chunk(N, dim)
    return shards[rank] if rank < len(shards) else full.narrow(dim, 0, 0)


def check(
    group: ProcessGroup,
    function: Callable[..., torch.Tensor],
    given: Values,
    result: Values,
    grad: Values,
    back: Values,
) -> None:
    """`function` of what a rank is given is its result; of a gradient there, what comes back; neither is written to."""
    x = given(group.rank).requires_grad_()
    y = function(x, group)
    close(y.detach(), result(group.rank))
    upstream = grad(group.rank)
    y.backward(upstream)
    close(x.grad, back(group.rank))
    assert torch.equal(x.detach(), given(group.rank))
    assert torch.equal(upstream, grad(group.rank))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_every_function_and_its_mirror(dim: int) -> None:
    def full(_: int) -> torch.Tensor:
        return rand(6, 3, 9)

    def each(rank: int) -> torch.Tensor:
        return rand(6, 3, 9, seed=1 + rank)

    def total(_: int) -> torch.Tensor:
        return each(0) + each(1) + each(2)

    def shard(rank: int) -> torch.Tensor:
        return own(full(0), dim, rank).clone()

    def shard_of_total(rank: int) -> torch.Tensor:
        return own(total(0), dim, rank)

    def along(function: Any) -> Callable[..., torch.Tensor]:
        return lambda x, group: function(x, group, dim)

    def body(group: ProcessGroup) -> None:
        check(group, copy_to_group, full, full, each, total)
        check(group, reduce_from_group, each, total, full, full)
        check(group, along(scatter_to_group), full, shard, shard, full)
        check(group, along(gather_from_group), shard, full, full, shard)
        check(group, along(gather_sequence), shard, full, each, shard_of_total)
        check(group, along(reduce_scatter_sequence), each, shard_of_total, shard, full)

    on_ranks(N, body)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_features_need_not_divide(size: int) -> None:
    full = rand(2, size)

    def body(group: ProcessGroup) -> None:
        mine = own(full, -1, group.rank).clone()
        check(group, scatter_to_group, lambda _: full.clone(), lambda _: mine, lambda _: mine, lambda _: full)
        check(
            group,
            lambda x, g: gather_from_group(x, g, -1, size),
            lambda _: mine.clone(),
            lambda _: full,
            lambda _: full,
            lambda _: mine,
        )

    on_ranks(N, body)


def test_an_exchange_is_differentiated_once() -> None:
    def body(group: ProcessGroup) -> None:
        x = rand(2, 2).requires_grad_()
        (grad,) = torch.autograd.grad((copy_to_group(x, group) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
        with pytest.raises(InvalidRequest, match="does not divide among 2 ranks"):
            reduce_scatter_sequence(rand(3, 2), group)

    on_ranks(2, body)


def test_alone_nothing_is_exchanged() -> None:
    def body(group: ProcessGroup) -> None:
        x = rand(2, 2)
        for function in (copy_to_group, reduce_from_group, scatter_to_group, gather_from_group, gather_sequence):
            assert function(x, group) is x
        assert group.sequence == 0

    on_ranks(1, body)
