"""Shards of tensor-parallel layers as DTensors, which torch.distributed.checkpoint reads and fills.

Tests of `parallel/tensor/dcp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import ColumnParallelLinear, RowParallelLinear
from axon_ps.parallel.tensor import distributed_optimizer_state_dict, distributed_state_dict

RANK, RANKS = 1, 3
FULL = {"up.weight": (7, 4), "up.bias": (7,), "down.weight": (4, 7), "down.bias": (4,), "norm.weight": (4,)}
SHARDED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


@pytest.fixture(autouse=True)
def torchs_group() -> Iterator[None]:
    """A process group of torch whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    """The modules of rank 1 of 3; 7 features are 3 + 3 + 1 there."""
    group = ProcessGroup.mock(RANKS)[RANK]
    return nn.ModuleDict(
        {
            "up": ColumnParallelLinear(4, 7, group=group),
            "down": RowParallelLinear(7, 4, group=group),
            "norm": nn.RMSNorm(4),
        }
    )


def mesh(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks or range(RANKS)), _init_backend=False)


def check(name: str, value: Any, memory: torch.Tensor) -> None:
    """A value of a parameter, or of its optimizer's state, which is `memory` on this rank."""
    if name in SHARDED:
        assert isinstance(value, DTensor)
        assert value.placements == (Shard(SHARDED[name]),)
        assert tuple(value.shape) == FULL[name]
        assert value.stride() == torch.empty(FULL[name]).stride()
        assert value.to_local().data_ptr() == memory.data_ptr()
        assert value.to_local().shape == memory.shape
    else:
        assert not isinstance(value, DTensor)
        assert tuple(value.shape) == FULL[name]
        assert value.data_ptr() == memory.data_ptr()


def test_sharded_parameters_are_dtensors_in_the_memory_of_the_module_and_others_are_as_they_were() -> None:
    module = model()
    state = distributed_state_dict(module, mesh())
    parameters = dict(module.named_parameters())
    assert state.keys() == FULL.keys() == parameters.keys()
    for name, value in state.items():
        check(name, value, parameters[name])


def test_a_state_that_is_given_is_taken_in_place_of_the_modules() -> None:
    module = model()
    averaged = {name: value.clone() for name, value in module.state_dict().items()}
    for name, value in distributed_state_dict(module, mesh(), averaged).items():
        check(name, value, averaged[name])


def test_moments_are_dtensors_and_numbers_of_steps_are_not() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = distributed_optimizer_state_dict(module, optimizer, mesh())
    assert state["param_groups"][0]["params"] == list(FULL)
    assert state["param_groups"][0]["lr"] == 0.1
    parameters = dict(module.named_parameters())
    for name, moments in state["state"].items():
        own = optimizer.state[parameters[name]]
        for moment in ("exp_avg", "exp_avg_sq"):
            check(name, moments[moment], own[moment])
        assert moments["step"] is own["step"]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0, 2)])
def test_a_mesh_of_other_ranks_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"1 axes with the ranks .*'up.weight' is sharded among the ranks"):
        distributed_state_dict(model(), mesh(*ranks))


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(InvalidRequest, match="the optimizer has a parameter that the model has not"):
        distributed_optimizer_state_dict(model(), optimizer, mesh())
