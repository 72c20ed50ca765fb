"""Compression errors of gradients: by bucket, moved with the gradients, saved, and without infinities.

Tests of `parallel/comm_hooks/residuals.py`.
"""

from __future__ import annotations

import pytest
import torch

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.comm_hooks.residuals import Residuals, drop_non_finite
from axon_ps.parallel.ddp.buckets import GradientBucket, build

TENSORS = [torch.empty(shape) for shape in ((2,), (3,), (1, 4), (5,))]


def buckets(*plan: tuple[int, ...]) -> list[GradientBucket]:
    return build(TENSORS, plan, None)[0]


def test_errors_begin_as_zeros_and_stay_with_their_bucket() -> None:
    residuals = Residuals()
    first, second = buckets((0, 1), (2,))
    assert torch.equal(residuals.of(first), torch.zeros(5))
    residuals.of(first).fill_(1.0)
    residuals.of_average(first, 2).fill_(7.0)
    assert residuals.of(first).tolist() == [1.0] * 5
    assert residuals.of_average(first, 2).tolist() == [7.0] * 2
    assert residuals.of(second).tolist() == [0.0] * 4


def test_errors_of_another_size_are_refused() -> None:
    residuals = Residuals()
    residuals.of(buckets((0, 1))[0])
    with pytest.raises(InvalidRequest, match="the errors of bucket 0 are of 5 elements and it has 4"):
        residuals.of(buckets((2,))[0])


def test_the_error_of_an_average_counts_once_for_every_rank_in_its_segment() -> None:
    residuals = Residuals()
    (bucket,) = buckets((0, 1))
    residuals.of(bucket)[:] = torch.arange(5.0)
    residuals.of_average(bucket, 2)[:] = torch.tensor([1.0, -2.0])
    residuals.fold_average(bucket, slice(3, 5), 4)
    assert residuals.of(bucket).tolist() == [0.0, 1.0, 2.0, 3.0 + 4 * 1.0, 4.0 - 4 * 2.0]
    residuals.fold_average(bucket, slice(3, 5), 4)  # it is taken once
    assert residuals.of(bucket).tolist() == [0.0, 1.0, 2.0, 7.0, -4.0]


def test_errors_follow_their_gradients_into_other_buckets() -> None:
    residuals = Residuals()
    before = buckets((0, 1), (2, 3))
    by_member = [torch.randn(tensor.numel()) for tensor in TENSORS]
    for bucket in before:
        residuals.of(bucket)[:] = torch.cat([by_member[member] for member in bucket.members])
    after = buckets((3,), (1, 0, 2))
    residuals.move(before, after)
    for bucket in after:
        expected = torch.cat([by_member[member] for member in bucket.members])
        assert torch.equal(residuals.of(bucket), expected)


def test_moving_without_errors_makes_none() -> None:
    residuals = Residuals()
    residuals.move(buckets((0, 1)), buckets((0,), (1,)))
    assert residuals.state_dict() == {}


def test_a_saved_state_comes_back_in_memory_of_its_own() -> None:
    residuals = Residuals()
    (bucket,) = buckets((0, 1))
    residuals.of(bucket)[:] = torch.arange(5.0)
    residuals.of_average(bucket, 3)[:] = 2.0
    state = residuals.state_dict()
    assert state.keys() == {"residual.0", "average.0"}
    other = Residuals()
    other.of(buckets((2,), (3,))[1])  # forgotten, as the state has none of bucket 1
    other.load_state_dict({name: value.double() for name, value in state.items()})
    residuals.of(bucket).zero_()
    assert other.state_dict().keys() == state.keys()
    assert other.of(bucket).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert other.of(bucket).dtype is torch.float32
    assert other.of_average(bucket, 3).tolist() == [2.0] * 3


@pytest.mark.parametrize("name", ["residual", "residual.x", "momentum.0"])
def test_a_state_that_is_not_of_errors_is_refused_and_changes_nothing(name: str) -> None:
    residuals = Residuals()
    (bucket,) = buckets((0,))
    residuals.of(bucket)[:] = 1.0
    with pytest.raises(InvalidRequest, match=f"{name!r} is no error of ours"):
        residuals.load_state_dict({"residual.0": torch.zeros(2), name: torch.zeros(2)})
    assert residuals.of(bucket).tolist() == [1.0, 1.0]


def test_what_is_not_finite_is_forgotten_and_nothing_else() -> None:
    residual = torch.tensor([1.0, float("inf"), -2.0, float("nan"), float("-inf")])
    drop_non_finite(residual)
    assert residual.tolist() == [1.0, 0.0, -2.0, 0.0, 0.0]
    finite = torch.tensor([3.0, -3.0])
    drop_non_finite(finite)
    assert finite.tolist() == [3.0, -3.0]
