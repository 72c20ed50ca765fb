"""`fully_shard` against plain torch. Tests of `parallel/fsdp2/api.py` and `parallel/fsdp2/marks.py`."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
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
from composed_model import STEPS, Block, Model, State, difference, init, plain, shard, train

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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_that_are_compiled(in_place: bool) -> None:
    """Without a break in their graphs, which fullgraph=True would refuse."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=True)

    def run(world: World) -> State:
        model = Model()
        for index, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend="eager", fullgraph=True)  # type: ignore[no-untyped-call]
            else:
                model.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)
        return trained(shard(model, mp_policy=policy), world)

    (values,) = run_threads(run, 1)
    values = {name.replace("_orig_mod.", ""): value for name, value in values.items()}
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
        "precision": (lambda: fully_shard(Model(), mp_policy=3), "mp_policy is 3"),
        "offload": (lambda: fully_shard(Model(), offload_policy=3), "offload_policy is 3"),
        "ignored": (lambda: fully_shard(Model(), ignored_params=[3]), "ignored_params is"),  # type: ignore[list-item]
        "dimensions": (lambda: fully_shard(Model(), dp_mesh_dims=("dp",)), "dp_mesh_dims is given"),  # type: ignore[arg-type]
        "unmarked": (lambda: sharded_model(Model()), "was not called on this Model"),
        "method": (lambda: register_fsdp_forward_method(twice, "absent"), "has no method 'absent'"),
        "unit later": (lambda: fully_shard(twice.emb), "on a Linear after the Model around it"),
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


def test_without_a_world_the_first_use_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXON_PS_COORDINATOR", raising=False)
    with pytest.raises(Misuse, match=r"World\.init\(\)"):
        shard(Model())(torch.ones(1, 8))


def test_a_process_of_a_launcher_joins_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[World] = []

    def join() -> World:
        joined.append(World.mock())
        return joined[0]

    monkeypatch.setenv("AXON_PS_COORDINATOR", "coordinator:1")
    monkeypatch.setattr(World, "init", join)
    model = shard(Model())
    assert not joined
    model(torch.ones(1, 8))
    model(torch.ones(1, 8))
    (world,) = joined
    world.close()


def test_other_methods_may_run_as_forward() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        with pytest.raises(Misuse):
            model.score(torch.ones(1, 8))
        register_fsdp_forward_method(model, "score")
        assert torch.equal(model.score(torch.ones(1, 8)), Model().score(torch.ones(1, 8)))

    run_threads(run, 1)
    register_fsdp_forward_method(Model(), "absent")  # does nothing, as in torch


def test_methods_of_units_may_run_as_forward() -> None:
    def run(world: World) -> State:
        model = Model()
        model.blocks[1].encode = Block.forward.__get__(model.blocks[1])
        model.blocks[1].forward = lambda x: model.blocks[1].encode(x)
        shard(model)
        register_fsdp_forward_method(model.blocks[1], "encode")
        return trained(model, world)

    for values in run_threads(run, 2):
        assert difference(values, plain(adamw)) < 1e-5


def test_a_method_is_cast_as_forward_is() -> None:
    def run(world: World) -> None:
        model = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
        register_fsdp_forward_method(model, "score")
        assert model.score(torch.ones(1, 8)).dtype is torch.float32

    run_threads(run, 1)


def test_blocks_with_composable_checkpoints() -> None:
    """They push their hooks for saved tensors after ours in a forward, and before ours in a recomputation."""

    def run(world: World) -> State:
        model = Model()
        for block in model.blocks:
            checkpoint(block)
        return trained(shard(model), world)

    for values in run_threads(run, 2):
        assert difference(values, plain(adamw)) < 1e-5


def test_accumulated_gradients_are_summed_in_the_dtype_in_which_they_are_sent() -> None:
    """256 + 1 is 256 in bf16."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def run(world: World) -> None:
        model = fully_shard(nn.Linear(1, 1, bias=False), mp_policy=precision)
        model.load_state_dict({"weight": torch.zeros(1, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for value in (256.0, 1.0, 1.0, 1.0):
            model.set_requires_gradient_sync(False)
            model(torch.full((1, 1), value)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert model.state_dict()["weight"].item() == -260.0

    run_threads(run, 1)


@dataclasses.dataclass
class Pair:
    one: torch.Tensor
    two: tuple[torch.Tensor, int]


def test_tensors_in_dataclasses_are_cast() -> None:
    class Inner(nn.Linear):
        def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
            return Pair(super().forward(pair.one), (super().forward(pair.two[0]), pair.two[1]))

    def run(world: World) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        out = fully_shard(Inner(2, 2), mp_policy=policy)(Pair(torch.ones(2), (torch.ones(2), 3)))
        assert (out.one.dtype, out.two[0].dtype, out.two[1]) == (torch.float32, torch.float32, 3)

    run_threads(run, 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block, self.out = nn.Embedding(5, 16), Block(), nn.Linear(16, 5, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.emb(x)))


@pytest.mark.parametrize("assign", [False, True])
def test_tied_parameters_stay_tied_when_they_are_filled(assign: bool) -> None:
    """`to_empty()` and `load_state_dict(assign=True)` of torch part them, and FSDP2 ties them again."""

    def run(world: World) -> None:
        with torch.device("meta"):
            model = Tied()
        fully_shard([model.emb, model.out])
        fully_shard(model)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict({k: v.clone() for k, v in Tied().state_dict().items()}, assign=assign)
        assert model.out.weight is model.emb.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, dtype=torch.long)).sum().backward()
        optimizer.step()
        values = model.state_dict()
        assert torch.equal(values["emb.weight"], values["out.weight"])

    run_threads(run, 1)


def test_ignored_parameters_are_ignored_when_they_are_others_now() -> None:
    def run(world: World) -> None:
        with torch.device("meta"):
            model = Model()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, ignored_params=set(model.emb.parameters())).to_empty(device="cpu")
        model.load_state_dict(init())
        assert "emb.weight" not in {p.name for _, p in sharded_model(model).spec.layout.parameters()}

    run_threads(run, 1)


def test_units_run_alone() -> None:
    """A tied parameter is the root's, and there for the unit that runs."""
    rows = torch.arange(5)

    def steps(model: Any) -> State:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            hidden = model.block(model.emb(rows)) if step % 2 else model.emb(rows)
            model.out(hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    reference = Tied()
    first = copy.deepcopy(reference.state_dict())

    def run(world: World) -> State:
        model = Tied()
        model.load_state_dict(first)
        fully_shard(model.block)
        fully_shard([model.emb, model.out])
        return steps(fully_shard(model))

    expected = steps(reference)
    for values in run_threads(run, 2):
        assert difference(values, expected) < 1e-5


def test_the_first_use_may_be_in_inference_mode() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        with torch.inference_mode():
            model(torch.ones(1, 8))
        assert difference(trained(model, world), plain(adamw)) < 1e-5

    run_threads(run, 1)


def test_transforms_are_refused_at_the_first_use_too() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        with pytest.raises(Misuse, match=r"torch\.func's transforms"):
            torch.vmap(model)(torch.ones(1, 1, 8))

    run_threads(run, 1)


def test_a_model_is_freed() -> None:
    def run(world: World) -> weakref.ref[nn.Module]:
        model = shard(Model())
        trained(model, world)
        return weakref.ref(model)

    (left,) = run_threads(run, 1)
    gc.collect()
    assert left() is None
