"""`fully_shard` against plain torch. Tests of `parallel/fsdp2/api.py` and `parallel/fsdp2/marks.py`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from axon_ps import World
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import (
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
    sharded_model,
)
from axon_ps.testing import run_threads
from composed_model import STEPS, Model, State, difference, init, plain, shard, train

FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def trained(model: nn.Module, world: World, **how: Any) -> State:
    return train(model, adamw(model), world.rank, world.world_size, **how)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("reshard", "strategy"), [(None, FULL), (True, FULL), (False, GRAD_OP)])
def test_a_step_is_that_of_plain_torch(workers: int, reshard: Any, strategy: ShardingStrategy) -> None:
    def run(world: World) -> State:
        model = shard(Model(), reshard_after_forward=reshard)
        values = trained(model, world)
        found = sharded_model(model)
        assert (found.strategy, found.version) == (strategy, STEPS)
        assert list(values) == list(init()), "names are the user's"
        return values

    for values in run_threads(run, workers):
        assert difference(values, plain(adamw)) < 1e-5


def test_a_number_names_the_workers_of_a_node() -> None:
    def run(world: World) -> State:
        model = shard(Model(), reshard_after_forward=2)
        values = trained(model, world)
        assert sharded_model(model).strategy is HYBRID
        return values

    for values in run_threads(run, 4, nodes=2):
        assert difference(values, plain(adamw)) < 1e-5


def test_of_units_that_differ_one_that_reshards_decides() -> None:
    def run(world: World) -> None:
        model = Model()
        fully_shard(model.blocks[0], reshard_after_forward=True)
        fully_shard(model.blocks[1], reshard_after_forward=False)
        fully_shard(model)
        assert sharded_model(model).strategy is FULL

    run_threads(run, 1)


@pytest.mark.parametrize(("reshard", "strategy"), [(None, GRAD_OP), (False, GRAD_OP), (True, FULL)])
def test_a_model_without_units_is_a_unit(reshard: Any, strategy: ShardingStrategy) -> None:
    def run(world: World) -> None:
        model = fully_shard(Model(), reshard_after_forward=reshard)
        assert difference(trained(model, world), plain(adamw)) < 1e-5
        assert sharded_model(model).strategy is strategy

    run_threads(run, 2)


def test_gradients_accumulate_until_they_are_to_be_sent() -> None:
    def run(world: World) -> State:
        return trained(shard(Model()), world, accumulate=True)

    for values in run_threads(run, 2):
        assert difference(values, plain(adamw, accumulate=True)) < 1e-5


def test_a_model_on_the_meta_device_is_filled_before_its_first_use() -> None:
    def run(world: World) -> State:
        with torch.device("meta"):
            model = Model()
        shard(model).to_empty(device="cpu")
        model.load_state_dict(init())
        return trained(model, world)

    for values in run_threads(run, 2):
        assert difference(values, plain(adamw)) < 1e-5


def test_parameters_on_the_meta_device_stay_those_of_the_optimizer() -> None:
    def run(world: World) -> None:
        with torch.device("meta"):
            model = Model()
        optimizer = adamw(shard(model))
        train(model, optimizer, world.rank, world.world_size)
        assert sharded_model(model).version == STEPS

    run_threads(run, 2)


def test_blocks_with_activation_checkpoints() -> None:
    def run(world: World) -> State:
        model = Model()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
        return trained(shard(model), world)

    for values in run_threads(run, 2):
        assert difference(values, plain(adamw)) < 1e-5


@pytest.mark.parametrize("policy", [CPUOffloadPolicy(), CPUOffload.FULL, True])
def test_parameters_may_be_on_the_host(policy: Any) -> None:
    def run(world: World) -> None:
        model = shard(Model(), offload_policy=policy)
        assert difference(trained(model, world), plain(adamw)) < 1e-5
        assert sharded_model(model)._wrapping.offload is CPUOffload.FULL

    run_threads(run, 1)


def test_a_policy_without_offload_changes_nothing() -> None:
    def run(world: World) -> None:
        model = shard(Model(), offload_policy=OffloadPolicy())
        assert sharded_model(model)._wrapping.offload is CPUOffload.NONE

    run_threads(run, 1)


def test_precision_is_that_of_torch() -> None:
    """Each module casts its inputs and outputs; parameters compute in `param_dtype`."""
    seen: list[torch.dtype] = []

    def run(world: World) -> torch.Tensor:
        model = Model()
        block = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        root = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        for each in model.blocks:
            fully_shard(each, mp_policy=block)
        fully_shard(model, mp_policy=root)
        model.blocks[1].register_forward_hook(lambda _m, args, out: seen.extend((args[0].dtype, out.dtype)))
        return model(torch.ones(2, 8))

    (out,) = run_threads(run, 1)
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert out.dtype is torch.float32

    reference = Model().to(torch.bfloat16)
    assert torch.equal(out, reference(torch.ones(2, 8, dtype=torch.bfloat16)).float())


def test_precisions_that_differ_are_refused() -> None:
    def run(world: World) -> None:
        model = Model()
        fully_shard(model.blocks[0], mp_policy=MixedPrecision(param_dtype=torch.bfloat16))
        fully_shard(model)
        with pytest.raises(InvalidRequest, match="mp_policy of a Block is param_dtype=torch.bfloat16"):
            model(torch.ones(1, 8))

    run_threads(run, 1)


def test_ignored_parameters_stay_as_they_are() -> None:
    def run(world: World) -> None:
        model = Model()
        ignored = set(model.emb.requires_grad_(False).parameters())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, ignored_params=ignored)
        before = model.emb.weight.detach().clone()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p not in ignored], lr=1e-2)
        train(model, optimizer, world.rank, world.world_size)
        assert torch.equal(model.emb.weight, before)
        assert sharded_model(model).version == STEPS

    run_threads(run, 1)


def test_the_class_stays_the_users_too() -> None:
    model = shard(Model())
    assert isinstance(model, Model)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], FSDPModule)
    assert type(model).__name__ == "FSDPModel"
    with pytest.raises(Misuse, match="cannot be copied"):
        copy.deepcopy(model)


def test_a_part_of_a_sequential_is_a_plain_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    fully_shard(model)
    assert type(model[:1]) is nn.Sequential


def test_a_list_is_of_units() -> None:
    def run(world: World) -> None:
        model = Model()
        given = [model.emb, model.out]
        assert fully_shard(given) is given
        fully_shard(model)
        assert difference(trained(model, world), plain(adamw)) < 1e-5
        assert {unit.name for unit in sharded_model(model).spec.layout.units} == {"(root)", "emb", "out"}

    run_threads(run, 1)


def wrong_calls() -> dict[str, tuple[Callable[[], Any], str]]:
    twice = shard(Model())
    return {
        "module": (lambda: fully_shard(3), "give an nn.Module"),  # type: ignore[type-var]
        "containers": (lambda: fully_shard(Model().blocks), "ModuleList, which has no forward"),
        "twice": (lambda: fully_shard(twice), "twice on the same Model"),
        "reshard": (lambda: fully_shard(Model(), reshard_after_forward="yes"), "reshard_after_forward is 'yes'"),  # type: ignore[arg-type]
        "mesh": (lambda: fully_shard(Model(), mesh=3), "mesh is 3"),
        "placement": (lambda: fully_shard(Model(), shard_placement_fn=0), "shard_placement_fn is 0"),  # type: ignore[arg-type]
        "precision": (lambda: fully_shard(Model(), mp_policy=3), "mixed_precision is 3"),
        "offload": (lambda: fully_shard(Model(), offload_policy=3), "cpu_offload is 3"),
        "ignored": (lambda: fully_shard(Model(), ignored_params=[3]), "ignored_parameters is"),  # type: ignore[list-item]
        "dimensions": (lambda: fully_shard(Model(), dp_mesh_dims=("dp",)), "dp_mesh_dims is given"),  # type: ignore[arg-type]
        "unmarked": (lambda: sharded_model(Model()), "was not called on this Model"),
        "method": (lambda: register_fsdp_forward_method(twice, "absent"), "has no method 'absent'"),
        "unit": (lambda: register_fsdp_forward_method(twice.blocks[0], "forward"), "call it on the model"),
    }


@pytest.mark.parametrize("name", list(wrong_calls()))
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    call, says = wrong_calls()[name]
    with pytest.raises(InvalidRequest, match=says):
        call()


class Mesh:
    """The part of torch's `DeviceMesh` that is read."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def test_a_mesh_of_two_dimensions_has_nodes() -> None:
    def run(world: World) -> State:
        model = shard(Model(), mesh=Mesh(2, 2))
        values = trained(model, world)
        assert sharded_model(model).strategy is HYBRID
        assert sharded_model(model)._wrapping.node_size == 2
        return values

    for values in run_threads(run, 4, nodes=2):
        assert difference(values, plain(adamw)) < 1e-5


def test_a_mesh_of_some_workers_is_refused() -> None:
    def run(world: World) -> None:
        with pytest.raises(InvalidRequest, match="mesh has 1 workers and the world 2"):
            shard(Model(), mesh=Mesh(1))(torch.ones(1, 8))
        with pytest.raises(InvalidRequest, match="has 3 dimensions"):
            shard(Model(), mesh=Mesh(1, 1, 2))

    run_threads(run, 2)


def test_units_after_the_first_use_are_refused() -> None:
    def run(world: World) -> None:
        model = Model()
        fully_shard(model.blocks[0])
        model.blocks[0](torch.ones(1, 16))
        with pytest.raises(InvalidRequest, match="after a Block inside it was used"):
            fully_shard(model)

    run_threads(run, 1)


def test_without_a_world_the_first_use_says_so() -> None:
    with pytest.raises(Misuse, match=r"World\.init\(\)"):
        shard(Model())(torch.ones(1, 8))


def test_other_methods_may_run_as_forward() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        with pytest.raises(Misuse):
            model.score(torch.ones(1, 8))
        register_fsdp_forward_method(model, "score")
        assert torch.equal(model.score(torch.ones(1, 8)), Model().score(torch.ones(1, 8)))

    run_threads(run, 1)
    register_fsdp_forward_method(Model(), "absent")  # does nothing, as in torch


def test_a_model_is_freed() -> None:
    def run(world: World) -> weakref.ref[nn.Module]:
        model = shard(Model())
        trained(model, world)
        return weakref.ref(model)

    (left,) = run_threads(run, 1)
    gc.collect()
    assert left() is None
