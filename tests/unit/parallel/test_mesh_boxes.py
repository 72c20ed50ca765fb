"""The box of a DTensor on this worker. torch's fake process group stands for the other workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from axon_ps.parallel.fsdp.mesh.boxes import box_in, box_of, extent_of, is_divided, like, recast, with_spec

FULL = torch.arange(15.0).view(5, 3)


@pytest.fixture
def tp() -> Iterator[DeviceMesh]:
    """The axis tp of a mesh of four, seen by the last worker."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    dist.destroy_process_group()


def divided(tp: DeviceMesh, *placements: Shard | Replicate) -> DTensor:
    """A DTensor of which this worker has a box of `FULL`."""
    return distribute_tensor(FULL, tp, placements, src_data_rank=None)


def test_a_plain_tensor_is_its_own_box() -> None:
    tensor = torch.zeros(2, 3)
    assert not is_divided(tensor)
    assert box_of(tensor) is tensor
    assert extent_of(tensor, (0, 1)) == ((0, 1), (2, 3), (0, 0))
    assert like(tensor, FULL) is FULL
    assert box_in(FULL, tensor) is FULL


def test_the_place_of_a_box_in_uneven_divisions(tp: DeviceMesh) -> None:
    assert extent_of(divided(tp, Shard(0)), ()) == ((2, 3), (5, 3), (3, 0))
    assert extent_of(divided(tp, Replicate()), ()) == ((2, 3), (5, 3), (0, 0))
    assert box_of(divided(tp, Shard(0))).tolist() == FULL[3:].tolist()


def test_the_box_of_a_full_value(tp: DeviceMesh) -> None:
    assert box_in(FULL, divided(tp, Shard(1))).tolist() == FULL[:, 2:].tolist()
    assert box_in(divided(tp, Shard(1)), divided(tp, Shard(1))).tolist() == FULL[:, 2:].tolist()


def test_a_tensor_like_another_one(tp: DeviceMesh) -> None:
    param = divided(tp, Shard(0))
    for made in (like(param, box_of(param)), with_spec(box_of(param), param._spec)):
        assert isinstance(made, DTensor)
        assert made.shape == FULL.shape
        assert made.placements == param.placements


def test_another_dtype_leaves_the_parameter_the_same_object(tp: DeviceMesh) -> None:
    param = nn.Parameter(divided(tp, Shard(0)))
    known = {param: "known"}
    recast(param, torch.bfloat16)
    assert known[param] == "known"
    assert isinstance(param, nn.Parameter)
    assert (param.dtype, box_of(param).dtype, param.requires_grad) == (torch.bfloat16, torch.bfloat16, True)
