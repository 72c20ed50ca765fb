"""What a reader of the originals or of torch gives first: it works, or the error says what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import ProcessGroup, World
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import (
    DDP,
    FSDP,
    ColumnParallelLinear,
    DiLoCo,
    FSDPMemoryStats,
    GradientSynchronizer,
    MixedPrecision,
    Pipeline,
    RowParallelLinear,
)
from parallel_fakes import FakeGroup


def mock() -> ProcessGroup:
    return ProcessGroup.mock()


def diloco(**options: Any) -> DiLoCo:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, optimizer, mock(), inner_steps=2, **options)


UNCLEAR: dict[str, tuple[Callable[[], object], str]] = {
    "a precision that is a word": (
        lambda: FSDP(nn.Linear(2, 2), FakeGroup(), mixed_precision="bf61"),
        r"mixed_precision is 'bf61'; give a MixedPrecision, a floating-point dtype or its name, True \(bf.*\) or False",
    ),
    "FSDP of a number of workers": (
        lambda: FSDP(nn.Linear(2, 2), 4),  # type: ignore[arg-type]
        "group is 4; give a ProcessGroup, or a World for all of its workers",
    ),
    "DDP of a number of workers": (
        lambda: DDP(nn.Linear(2, 2), 4),  # type: ignore[arg-type]
        "group is 4; give a ProcessGroup, or a World for all of its workers",
    ),
    "a pipeline of modules and a group": (
        lambda: Pipeline.from_modules([nn.Linear(2, 2)], mock()),  # type: ignore[arg-type]
        r"num_stages is a ProcessGroup; .*from_modules\(modules, num_stages, group\)",
    ),
    "a synchronizer of a number": (
        lambda: GradientSynchronizer().prepare(10),  # type: ignore[arg-type]
        r"prepare\(\) was given 10; it needs a list of the parameters",
    ),
    "a column layer and a group": (
        lambda: ColumnParallelLinear(4, 4, mock()),  # type: ignore[arg-type]
        "bias is a ProcessGroup; it is True or False, and the group comes after it or as group=",
    ),
    "a row layer and a group": (
        lambda: RowParallelLinear(4, 4, mock()),  # type: ignore[arg-type]
        "bias is a ProcessGroup; it is True or False, and the group comes after it or as group=",
    ),
    "DiLoCo without momentum": (
        lambda: diloco(outer_momentum=0),
        "outer_momentum is 0, and Nesterov's momentum .* give outer_momentum=0, nesterov=False",
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_was_given_and_what_is_needed_is_said(name: str) -> None:
    attempt, message = UNCLEAR[name]
    with pytest.raises(InvalidRequest, match=message):
        attempt()


def test_a_pipeline_that_was_called_for_inference_has_no_graph_and_torch_says_so() -> None:
    pipeline = Pipeline.from_modules([nn.Linear(2, 2)], 1, num_microbatches=1)
    with pytest.raises(RuntimeError, match="does not require grad"):
        pipeline(torch.ones(2, 2)).sum().backward()


def test_names_that_the_crates_have_for_what_is_here() -> None:
    group = mock()
    ddp = DDP(nn.Linear(2, 2), group)
    assert ddp.into_inner() is ddp.unwrap() is ddp.module
    fsdp = FSDP(nn.Linear(2, 2), FakeGroup())  # type: ignore[arg-type]
    assert fsdp.into_inner() is fsdp.unwrap() is fsdp.module
    assert axon_ps.all_reduce_sum_group(torch.ones(2), group).tolist() == [1.0, 1.0]


def test_short_forms_of_mixed_precision() -> None:
    assert MixedPrecision.of(None) == MixedPrecision.of(False) == MixedPrecision()
    assert MixedPrecision.of(True) == MixedPrecision(param_dtype=torch.bfloat16)
    assert MixedPrecision.of(torch.float16) == MixedPrecision(param_dtype=torch.float16)
    model = FSDP(nn.Linear(2, 2), FakeGroup(), mixed_precision=True)  # type: ignore[arg-type]
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_memory_stats_by_hand() -> None:
    stats = FSDPMemoryStats(1000, 1000, 1000, 2000, 4)
    assert (stats.total_memory_bytes, stats.memory_savings) == (4000, 0.75)
    assert FSDPMemoryStats(0, 0, 0, 0, 1).memory_savings == 0.0


def test_a_world_stands_for_its_workers() -> None:
    with World.mock() as world:
        ddp = DDP(nn.Linear(2, 2), world)
        assert ddp.process_group is world.default_group
        assert FSDP(nn.Linear(2, 2), world).process_group is world.default_group
        assert ColumnParallelLinear(4, 4, group=world).group is world.default_group  # type: ignore[arg-type]
        assert Pipeline.from_modules([nn.Linear(2, 2)], 1, world, num_microbatches=1).num_stages == 1
