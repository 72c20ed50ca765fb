"""`GradientBucket`, the assignment of gradients to buckets, and `GradientSynchronizer` among threads.

Tests of `parallel/ddp/synchronizer.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import GradientBucket, GradientSynchronizer, GradSyncStrategy
from axon_ps.parallel.ddp.buckets import assign
from mock_ranks import on_ranks


def test_a_bucket_takes_what_fits_and_gives_it_back() -> None:
    bucket = GradientBucket(10)
    a, b = torch.randn(2, 3), torch.randn(4)
    assert bucket.add(a)
    assert not bucket.add(torch.randn(5))
    assert bucket.add(b)
    assert (bucket.numel, bucket.is_full) == (10, True)
    assert torch.equal(bucket.flat, torch.cat([a.view(-1), b]))
    bucket.flat.mul_(2.0)
    extracted = bucket.extract()
    assert torch.equal(extracted[0], 2 * a)
    assert torch.equal(extracted[1], 2 * b)
    bucket.clear()
    assert (bucket.numel, bucket.extract()) == (0, [])
    assert bucket.add(torch.randn(10))
    assert torch.equal(extracted[1], 2 * b)  # copies


def test_a_bucket_refuses_another_dtype_and_dtypes_without_sums() -> None:
    with pytest.raises(InvalidRequest, match="bfloat16 was given to a bucket of torch.float32"):
        GradientBucket(4).add(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(InvalidRequest, match="int64, which is not reduced"):
        GradientBucket(4, dtype=torch.int64)


def test_neighbours_of_one_dtype_share_a_bucket() -> None:
    f32, bf16 = (lambda n: torch.zeros(n)), (lambda n: torch.zeros(n, dtype=torch.bfloat16))
    tensors = [f32(10), f32(10), bf16(10), f32(100), bf16(10), f32(1), f32(1)]
    plan = assign(tensors, range(7), first_bytes=80, bucket_bytes=400)
    assert plan == [(0, 1), (3,), (2, 4), (5, 6)]
    assert assign(tensors, reversed(range(7)), first_bytes=4, bucket_bytes=1000) == [
        (6,),
        (5,),
        (4,),
        (3,),
        (2,),
        (1, 0),
    ]
    grown = assign([f32(10)] * 16, range(16), first_bytes=40, bucket_bytes=200)
    assert [len(members) for members in grown] == [1, 2, 4, 5, 4], "each has room for twice as much, up to the limit"
    assert assign([], [], first_bytes=4, bucket_bytes=4) == []


def gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    half = torch.randn(7, generator=generator).bfloat16()
    return [torch.randn(3, 4, generator=generator), half, torch.randn(30, generator=generator), torch.zeros(0)]


@pytest.mark.parametrize("strategy", list(GradSyncStrategy))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_synchronizer_averages_over_ranks_whatever_order_gradients_come_in(
    strategy: GradSyncStrategy, world_size: int
) -> None:
    def body(group: ProcessGroup) -> None:
        synchronizer = GradientSynchronizer(strategy, 16, group=group)
        synchronizer.prepare(gradients(0))
        mine = gradients(group.rank)
        for _ in range(2):
            for index in (0, 1, 2, 3) if group.rank else (3, 2, 1, 0):
                synchronizer.add_gradient(index, mine[index])
            result = synchronizer.sync_all()
            expected = mine if strategy is GradSyncStrategy.NO_SYNC else averages(world_size)
            for got, wanted in zip(result, expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-2 if got.dtype is torch.bfloat16 else 1e-6)
            synchronizer.clear()

    on_ranks(world_size, body)


def averages(world_size: int) -> list[Tensor]:
    columns = zip(*(gradients(rank) for rank in range(world_size)), strict=True)
    return [torch.stack([g.float() for g in column]).mean(0).to(column[0].dtype) for column in columns]


def test_what_a_synchronizer_says_of_calls_out_of_order() -> None:
    def body(group: ProcessGroup) -> None:
        synchronizer = GradientSynchronizer(group=group)
        synchronizer.prepare([torch.zeros(2), torch.zeros(3)])
        synchronizer.add_gradient(0, torch.ones(2))
        with pytest.raises(Misuse, match="gradient 0 has come already"):
            synchronizer.add_gradient(0, torch.ones(2))
        with pytest.raises(Misuse, match=r"gradients \[1\] have not come"):
            synchronizer.sync_all()
        with pytest.raises(InvalidRequest, match=r"float32\[2\]; needed is torch.float32\[3\]"):
            synchronizer.add_gradient(1, torch.ones(2))
        with pytest.raises(InvalidRequest, match="no gradient 2"):
            synchronizer.add_gradient(2, torch.ones(2))
        synchronizer.add_gradient(1, torch.ones(3))
        assert [float(g.sum()) for g in synchronizer.sync_all()] == [2.0, 3.0]
        with pytest.raises(Misuse, match="call clear"):
            synchronizer.add_gradient(1, torch.ones(3))

    on_ranks(1, body)


def test_without_synchronizing_gradients_add_up() -> None:
    synchronizer = GradientSynchronizer(GradSyncStrategy.NO_SYNC)
    synchronizer.prepare([torch.zeros(2)])
    for _ in range(3):
        synchronizer.add_gradient(0, torch.ones(2))
    assert synchronizer.sync_all()[0].tolist() == [3.0, 3.0]
