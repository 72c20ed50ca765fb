"""Cutting batches into microbatches and models into stages.

Tests of `parallel/pipeline/division.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.pipeline import PipelineSchedule
from axon_ps.parallel.pipeline.division import cut, divide, even, single

MODULES = [nn.Linear(2, 2) for _ in range(5)]
FLAT = PipelineSchedule.ONE_F_ONE_B
LOOPED = PipelineSchedule.INTERLEAVED_ONE_F_ONE_B


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("num_sizes", range(1, 5))
def test_sizes_are_even_and_the_first_are_one_larger(count: int, num_sizes: int) -> None:
    sizes = even(count, num_sizes)
    assert (len(sizes), sum(sizes)) == (num_sizes, count)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_microbatches_together_are_the_batch() -> None:
    batch = torch.arange(14.0).view(7, 2), torch.arange(7)
    parts = cut("batch", batch, 3)
    assert [len(rows) for rows, _ in parts] == [3, 2, 2]
    for position, tensor in enumerate(batch):
        assert torch.equal(torch.cat([part[position] for part in parts]), tensor)
    (alone,) = cut("target", batch[1], 1)
    assert torch.equal(single(alone), batch[1])
    assert single(parts[0]) is parts[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "the batch is None; this rank's stage needs it"),
        (torch.ones(2, 5), r"the batch has \[2\] rows; needed is one number, at least 3"),
        ((torch.ones(4), torch.ones(5)), r"the batch has \[4, 5\] rows"),
        (torch.tensor(1.0), r"the batch has \[0\] rows"),
        ("text", "the batch is of"),
    ],
)
def test_what_cannot_be_cut_is_refused(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        cut("batch", value, 3)


@pytest.mark.parametrize(("sizes", "lengths"), [(None, [2, 2, 1]), ([1, 3, 1], [1, 3, 1])])
def test_stages_have_all_modules_in_order_named_by_their_position(sizes: Any, lengths: list[int]) -> None:
    stages = divide(iter(MODULES), 3, 3, FLAT, sizes)
    assert [len(stage) for stage in stages] == lengths
    named = [child for stage in stages for child in stage.named_children()]
    assert [name for name, _ in named] == ["0", "1", "2", "3", "4"]
    assert [module for _, module in named] == MODULES


def test_a_schedule_with_several_stages_on_a_rank_takes_a_multiple_of_the_ranks() -> None:
    assert [len(stage) for stage in divide(MODULES, 4, 2, LOOPED, None)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("num_stages", "ranks", "schedule", "sizes", "words"),
    [
        (6, 2, FLAT, None, "5 modules were to become 6 stages on 2 ranks"),
        (2, 3, FLAT, None, "5 modules were to become 2 stages on 3 ranks"),
        (3, 2, LOOPED, None, f"{LOOPED.name} needs as many stages on every rank; 3 on 2 are not"),
        (2, 2, FLAT, [3, 3], r"sizes are \[3, 3\]; needed are 2 numbers from 1 that sum to 5"),
        (2, 2, FLAT, [5], r"sizes are \[5\]"),
        (2, 2, FLAT, [5, 0], r"sizes are \[5, 0\]"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    num_stages: int, ranks: int, schedule: PipelineSchedule, sizes: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        divide(MODULES, num_stages, ranks, schedule, sizes)
