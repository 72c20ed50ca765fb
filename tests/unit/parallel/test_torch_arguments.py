"""Every argument of torch's wrappers is translated, without effect, or refused by name.

Tests of `parallel/ddp/torch_arguments.py`. The signatures are those of the torch that is installed.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs

from axon_ps import World
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import DDP, FSDP, CPUOffload, MixedPrecision, fully_shard
from axon_ps.parallel.ddp import torch_arguments as tables
from axon_ps.parallel.fsdp.arguments import understood

WRAPPERS = {
    "FSDP": (FSDP, torchs.FullyShardedDataParallel, tables.FSDP),
    "DDP": (DDP, nn.parallel.DistributedDataParallel, tables.DDP),
    "fully_shard": (fully_shard, torchs.fully_shard, {}),
}


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_every_argument_of_torch_is_known(name: str) -> None:
    ours, theirs, table = WRAPPERS[name]
    known = {*inspect.signature(ours).parameters, *table}
    unknown = [each for each in inspect.signature(theirs).parameters if each not in known]
    assert not unknown, "translate them, say that they have no effect, or refuse them by name"


def defaults(kind: Any) -> dict[str, Any]:
    given = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", ["FSDP", "DDP"])
def test_torchs_defaults_are_accepted(name: str, world: World) -> None:
    ours, theirs, _ = WRAPPERS[name]
    given = {**defaults(theirs), "sharding_strategy": None, "cpu_offload": None, "mixed_precision": None}
    accepted = {k: v for k, v in given.items() if k in defaults(theirs)}
    ours(nn.Linear(2, 2), **accepted)


class Mesh:
    """The part of torch's `DeviceMesh` that is read."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


LINEAR = nn.Linear(2, 3)
TRANSLATED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("FSDP", {"device_id": "cpu"}, {"device": "cpu"}),
    ("FSDP", {"device_id": 1}, {"device": torch.device("cuda", 1)}),
    ("FSDP", {"ignored_states": [LINEAR]}, {"ignored_parameters": [LINEAR.weight, LINEAR.bias]}),
    ("FSDP", {"ignored_states": [LINEAR.bias]}, {"ignored_parameters": [LINEAR.bias]}),
    ("FSDP", {"ignored_modules": [LINEAR]}, {"ignored_parameters": [LINEAR.weight, LINEAR.bias]}),
    ("FSDP", {"device_mesh": Mesh(2, 4)}, {"intra_node_size": 4}),
    ("FSDP", {"mesh": Mesh(8)}, {}),
    ("FSDP", {"process_group": None}, {}),
    ("FSDP", {"process_group": "a world"}, {"group": "a world"}),
    ("FSDP", {"forward_prefetch": True, "backward_prefetch": torchs.BackwardPrefetch.BACKWARD_POST}, {}),
    ("FSDP", {"limit_all_gathers": False, "use_orig_params": True, "sync_module_states": True}, {}),
    ("DDP", {"bucket_cap_mb": 3}, {"bucket_size_mb": 3}),
    ("DDP", {"bucket_cap_mb": None, "forward_sync_buffers": None}, {}),
    ("DDP", {"forward_sync_buffers": False}, {"broadcast_buffers": False}),
    ("DDP", {"device_ids": [0], "output_device": 0, "dim": 0, "static_graph": True, "init_sync": True}, {}),
    ("DDP", {"device_mesh": Mesh(4), "check_reduction": True, "batched_grad_copy": True}, {}),
]


@pytest.mark.parametrize(("name", "given", "wanted"), TRANSLATED)
def test_an_argument_means_what_it_means_in_torch(name: str, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    ours = tables.as_ours(name, WRAPPERS[name][2], given, {})
    assert ours.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (
            ours[key] is value or list(map(id, ours[key])) == list(map(id, value))
            if key in ("ignored_parameters",)
            else ours[key] == value
        )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("FSDP", {"no_such": 1}, "FSDP has no argument 'no_such'"),
    ("FSDP", {"process_group": (1, 2)}, "is a pair of groups; give sharding_strategy='hybrid_shard'"),
    ("FSDP", {"ignored_states": LINEAR.weight}, "give a list of parameters"),
    ("FSDP", {"device_mesh": Mesh(2, 2, 2)}, "device_mesh has 3 dimensions"),
    ("FSDP", {"device_mesh": 4}, "device_mesh is 4"),
    ("FSDP", {"ignored_states": [LINEAR], "ignored_modules": [LINEAR]}, "'ignored_parameters' twice"),
    ("FSDP", {"device_id": "cpu", "device": "cpu"}, "'device' twice, once as 'device_id'"),
    ("DDP", {"no_such": 1}, "DDP has no argument 'no_such'"),
    ("DDP", {"device_ids": [0, 1]}, "has 2 devices; start a worker for each"),
    ("DDP", {"dim": 1}, "dim is 1; batches are divided along the first dimension"),
    ("DDP", {"init_sync": False}, "init_sync is False"),
    ("DDP", {"device_mesh": Mesh(2, 2)}, "a mesh of one dimension"),
    ("DDP", {"delay_all_reduce_named_params": []}, r"use no_sync\(\)"),
    ("DDP", {"param_to_hook_all_reduce": 1}, r"use no_sync\(\)"),
    ("DDP", {"mixed_precision": 1}, "use torch.autocast"),
    ("DDP", {"skip_all_reduce_unused_params": True}, "use find_unused_parameters=True"),
    ("DDP", {"bucket_cap_mb_list": [1]}, "use bucket_size_mb"),
]


@pytest.mark.parametrize(("name", "given", "says"), REFUSED)
def test_an_argument_that_means_nothing_here_is_refused_by_name(
    name: str, given: dict[str, Any], says: str, world: World
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        WRAPPERS[name][0](nn.Linear(2, 2), **given)


OFFLOADS: list[tuple[Any, CPUOffload]] = [
    (torchs.CPUOffload(), CPUOffload.NONE),
    (torchs.CPUOffload(offload_params=True), CPUOffload.FULL),
    (torchs.OffloadPolicy(), CPUOffload.NONE),
    (torchs.CPUOffloadPolicy(), CPUOffload.FULL),
    (torchs.CPUOffloadPolicy(pin_memory=False), CPUOffload.FULL),
]


@pytest.mark.parametrize(("given", "wanted"), OFFLOADS)
def test_offload_policies(given: Any, wanted: CPUOffload) -> None:
    assert understood("cpu_offload", given) is wanted


FIELDS = {
    torchs.CPUOffload: {"offload_params"},
    torchs.CPUOffloadPolicy: {"pin_memory"},
    torchs.OffloadPolicy: set(),
    torchs.MixedPrecisionPolicy: {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"},
    torchs.MixedPrecision: {
        "param_dtype",
        "reduce_dtype",
        "buffer_dtype",
        "keep_low_precision_grads",
        "cast_forward_inputs",
        "cast_root_forward_inputs",
        "_module_classes_to_ignore",
    },
}
"""By torch's class, the fields that are read or known to have no effect here."""


@pytest.mark.parametrize("kind", list(FIELDS))
def test_every_field_of_torchs_classes_is_known(kind: Any) -> None:
    assert {field.name for field in dataclasses.fields(kind)} == FIELDS[kind]


def test_an_empty_policy_is_none() -> None:
    assert understood("mixed_precision", torchs.MixedPrecisionPolicy()) == MixedPrecision()
