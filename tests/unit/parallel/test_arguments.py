"""Every argument of a wrapper is understood in all its spellings, or refused by a message that names it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.fsdp import wrap as torch_wrap
from torch.nn.modules.batchnorm import _BatchNorm

from axon_ps import World
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import FSDP, Asynchronous, CPUOffload, DiLoCo, ElasticLoader, MixedPrecision, ShardingStrategy
from axon_ps.parallel.fsdp import arguments
from axon_ps.sharding.policy import Synchronous

S, Offload = ShardingStrategy, CPUOffload


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh())


def made() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


UNDERSTOOD: list[tuple[str, Any, Any]] = [
    *(("sharding_strategy", member, member) for member in S),
    *(("sharding_strategy", name, member) for name, member in S.__members__.items()),
    *(("sharding_strategy", name.lower(), member) for name, member in S.__members__.items()),
    *(("sharding_strategy", torchs.ShardingStrategy[m.name], m) for m in S),
    ("cpu_offload", True, Offload.FULL),
    ("cpu_offload", False, Offload.NONE),
    ("cpu_offload", None, Offload.NONE),
    ("cpu_offload", "PARAMS", Offload.PARAMS),
    ("cpu_offload", torchs.CPUOffload(offload_params=True), Offload.FULL),
    ("cpu_offload", torchs.CPUOffload(), Offload.NONE),
    ("mixed_precision", True, MixedPrecision(param_dtype=torch.bfloat16)),
    ("mixed_precision", None, MixedPrecision()),
    (
        "mixed_precision",
        torchs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float16),
        MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float16,
            uncast_types=(_BatchNorm,),
        ),
    ),
    (
        "mixed_precision",
        torchs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False),
        MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False),
    ),
    (
        "mixed_precision",
        MixedPrecision(uncast_types=[nn.LayerNorm]),  # type: ignore[arg-type]
        MixedPrecision(uncast_types=(nn.LayerNorm,)),
    ),
    ("unit_types", Block, (Block,)),
    ("unit_types", [Block, nn.Linear], (Block, nn.Linear)),
    ("policy", None, Synchronous()),
    ("policy", Asynchronous(), Asynchronous()),
    ("device", "cpu", torch.device("cpu")),
    ("device", None, None),
]


@pytest.mark.parametrize(("name", "value", "meaning"), UNDERSTOOD)
def test_a_spelling_is_understood(name: str, value: Any, meaning: Any) -> None:
    assert arguments.understood(name, value) == meaning


REFUSED: list[tuple[str, Any, str]] = [
    ("sharding_strategy", 7, "ShardingStrategy.FULL_SHARD, .*ShardingStrategy.HYBRID_SHARD"),
    ("sharding_strategy", "nonsense", "ShardingStrategy.NO_SHARD"),
    ("sharding_strategy", True, "ShardingStrategy"),
    ("sharding_strategy", CPUOffload.NONE, "ShardingStrategy"),
    (
        "sharding_strategy",
        torchs.ShardingStrategy._HYBRID_SHARD_ZERO2,
        "_HYBRID_SHARD_ZERO2.*HYBRID_SHARD comes closest",
    ),
    ("cpu_offload", "disk", "CPUOffload.OPTIMIZER_STATES"),
    ("cpu_offload", 1, "CPUOffload"),
    ("mixed_precision", "bf61", "a MixedPrecision"),
    ("mixed_precision", 16, "a MixedPrecision"),
    ("unit_types", "Block", "module classes"),
    ("unit_types", ["Block"], "'Block' is no module class; give module classes"),
    ("unit_types", [Block()], "is no module class"),
    ("unit_types", int, "is no module class"),
    ("unit_types", Block(), "module classes"),
    ("auto_wrap_policy", {Block}, "a function"),
    ("auto_wrap_policy", Block, "a function"),
    ("ignored_parameters", nn.Parameter(torch.zeros(1)), "parameters of the module"),
    ("ignored_parameters", ["0.weight"], "it has str '0.weight', which is no parameter"),
    ("intra_node_size", "2", "how many workers a node has"),
    ("intra_node_size", True, "how many workers a node has"),
    ("prefetch", "no", "True or False"),
    ("param_init_fn", "zeros", "a function of a submodule"),
    ("plan_options", {}, "PlanOptions"),
    ("device", "gpu", "Expected one of cpu, cuda.*a torch.device"),
    ("device", [], "a torch.device"),
    ("policy", "bounded", r"BoundedStaleness\(max_staleness=...\), Asynchronous\(\) or .async., or None"),
    ("policy", Asynchronous, r"Synchronous\(\)"),
    ("name", 3, "a string"),
    ("module", [nn.Linear(1, 1)], "an nn.Module"),
]


@pytest.mark.parametrize(("name", "value", "needed"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_touched(name: str, value: Any, needed: str) -> None:
    module = made()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    keywords = {"module": module, name: value}
    with pytest.raises(InvalidRequest, match=rf"(?s)^{name} is .*give .*") as refused:
        FSDP(keywords.pop("module"), **keywords)
    assert refused.match(f"(?s){needed}")
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


def test_every_argument_of_the_wrapper_is_in_the_table() -> None:
    names = set(inspect.signature(FSDP.__init__).parameters) - {"self", "group", "of_torch"}
    assert names == set(arguments._TABLE)


@pytest.mark.parametrize("spelling", ["NO_SHARD", torchs.ShardingStrategy.NO_SHARD])
def test_a_strategy_by_another_name_is_that_strategy(spelling: Any) -> None:
    (world,) = World.mock(1)
    with world:
        assert FSDP(made(), world, sharding_strategy=spelling, unit_types=Block).strategy is S.NO_SHARD


@pytest.mark.parametrize(
    "policy",
    [
        torch_wrap.ModuleWrapPolicy({Block}),
        partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        lambda module: isinstance(module, Block),
    ],
)
def test_torchs_wrapping_policies_choose_the_same_units(policy: Any) -> None:
    (world,) = World.mock(1)
    with world:
        wrapped = FSDP(made(), world, sharding_strategy="NO_SHARD", auto_wrap_policy=policy)
        assert [unit.name for unit in wrapped.spec.layout.units] == ["(root)", "0", "1"]


def test_the_elastic_loader_names_the_model_that_is_not_wrapped() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    with pytest.raises(InvalidRequest, match=r"model is a Linear; .* wrap it first"):
        ElasticLoader(data, nn.Linear(1, 1), 4)  # type: ignore[arg-type]


def test_diloco_takes_one_class_too_and_names_what_is_none() -> None:
    (world,) = World.mock(1)
    with world:
        module = made()
        with pytest.raises(InvalidRequest, match="unit_types is 'Block'"):
            DiLoCo(module, torch.optim.SGD(module.parameters(), lr=0.1), world, inner_steps=1, unit_types="Block")
