"""`Shards`: shards are those of `torch.chunk`, and their exchanges leave alone what they are given."""

from __future__ import annotations

import pytest
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.parallel.chunks import Shards, all_reduce, counts_of, exchanged
from axon_ps.types import ReduceOp
from mock_ranks import close, on_ranks, rand

N = 3


def test_parts_are_those_of_chunk() -> None:
    for size in range(1, 14):
        for n in range(1, 6):
            chunks = [len(c) for c in torch.arange(size).chunk(n)]
            assert counts_of(size, n) == (*chunks, *[0] * (n - len(chunks)))


@pytest.mark.parametrize("size", [3, 6, 7, 2])  # ranks beyond the last shard have an empty one
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_exchanges_of_shards(size: int, dim: int) -> None:
    def body(group: ProcessGroup) -> None:
        shards = Shards(group, dim, counts_of(size, N))
        each = [rand(size, size, size, seed=rank) for rank in range(N)]
        own = shards.own(each[0])
        close(own, torch.split(each[0], list(shards.counts), dim)[group.rank])
        close(shards.gather(own), each[0])
        close(shards.reduce_scatter(each[group.rank]), shards.own(each[0] + each[1] + each[2]))
        close(shards.reduce_scatter(each[group.rank], ReduceOp.MAX), shards.own(torch.stack(each).amax(0)))
        close(all_reduce(each[group.rank], group), each[0] + each[1] + each[2])
        for result in (own, shards.gather(own), shards.reduce_scatter(each[0])):
            assert result.is_contiguous()
        own.zero_()  # it has memory of its own
        close(each[0], rand(size, size, size, seed=0))

    on_ranks(N, body)


def test_a_gradient_takes_the_mirror() -> None:
    x = torch.ones(3, requires_grad=True)
    y = exchanged(x, lambda x: x * 2.0, lambda grad: grad * 10.0)
    y.sum().backward()
    close(y.detach(), torch.full((3,), 2.0))
    close(x.grad, torch.full((3,), 10.0))
