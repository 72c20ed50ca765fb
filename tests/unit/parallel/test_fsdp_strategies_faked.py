"""What a wrapped model offers by hand, per strategy and offload, with the servers faked.

Tests of `parallel/fsdp/abstract_runtime.py`, `parallel/fsdp/build.py`, `parallel/fsdp/values.py`,
`parallel/fsdp/no_shard/replicated.py` and `parallel/grad_scaler.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axon_ps import World
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import FSDP, SGD, CPUOffload, FSDPMemoryStats, GradScaler, MixedPrecision, ShardingStrategy
from axon_ps.sharding.partitions import even_options
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import run_threads
from parallel_fakes import FakeGroup, FakeSteps

ALL = list(ShardingStrategy)
SERVED = [s for s in ALL if s is not ShardingStrategy.NO_SHARD]


class Block(nn.Module):
    """A unit."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks, a norm with running statistics, and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x)))


def make(module: nn.Module, **options: Any) -> tuple[FSDP, SGD, FakeSteps]:
    group = FakeGroup()
    model = FSDP(module, group, unit_types={Block}, **options)  # type: ignore[arg-type]
    return model, SGD(model, lr=0.1), group.world.steps


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Any, steps: int = 3, microbatches: int = 1) -> None:
    """Every step takes one batch, in as many microbatches."""
    for step in range(steps):
        *first, last = batch(step).chunk(microbatches)
        for microbatch in first:
            if isinstance(model, FSDP):
                with model.no_sync():
                    model(microbatch).square().mean().backward()
            else:
                model(microbatch).square().mean().backward()
        model(last).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: FSDP, plain: nn.Module, rtol: float = 1e-6) -> None:
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("offload", list(CPUOffload))
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_equals_plain_torch(strategy: ShardingStrategy, offload: CPUOffload, microbatches: int) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy, cpu_offload=offload)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), microbatches=microbatches)
    train(model, optimizer, microbatches=microbatches)
    assert_equal(model, plain)


def test_params_on_the_host_are_gathered_once_a_step_and_frozen_ones_once() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        module = Model()
        module.blocks[0].requires_grad_(False)
        model, optimizer, steps = make(module, sharding_strategy=strategy, cpu_offload=CPUOffload.PARAMS)
        train(model, optimizer, 2)
        steps.log.clear()
        train(model, optimizer, 1)
        assert steps.spec is not None
        trainable = [i for i, unit in enumerate(steps.spec.layout.units) if unit.trainable]
        assert steps.units("gather") == []
        assert sorted(steps.units("speculative")) == trainable  # behind its push, and no frozen one
        assert model.statistics()["host_gathers"] > 0


def test_no_shard_works_with_torchs_optimizers_and_precision_with_f32_masters() -> None:
    torch.manual_seed(0)
    plain = Model()
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    kinds: list[tuple[MixedPrecision, Any]] = [(MixedPrecision(), torch.optim.AdamW), (low, torch.optim.SGD)]
    for precision, kind in kinds:
        model = FSDP(
            copy.deepcopy(plain),
            FakeGroup(),  # type: ignore[arg-type]
            unit_types={Block},
            sharding_strategy=ShardingStrategy.NO_SHARD,
            mixed_precision=precision,
        )
        reference = copy.deepcopy(plain)
        optimizer = kind(model.parameters(), lr=1e-2)
        theirs = kind(reference.parameters(), lr=1e-2)
        for step in range(3):
            for m in (model, reference):
                m(batch(step)).square().mean().backward()
            norm = model.clip_grad_norm(0.1)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            assert norm == pytest.approx(float(expected), rel=1e-6 if precision.param_dtype is None else 0.05)
            for o in (optimizer, theirs):
                o.step()
                o.zero_grad()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        if precision.param_dtype is None:
            assert_equal(model, reference)
        for name, value in reference.named_parameters():
            assert (model.state_dict()[name] - value).norm() <= 0.1 * value.norm()


@pytest.mark.parametrize("present", [0, 1, 4])
def test_units_are_cut_for_the_jobs_servers_not_for_those_that_are_there(present: int) -> None:
    group = FakeGroup()
    group.world.num_shards = 4
    group.world.membership = dataclasses.replace(group.world.membership, shards=group.world.membership.shards * present)
    FSDP(nn.Linear(1024, 500), group)  # type: ignore[arg-type]
    assert group.world.steps.spec is not None
    layout = group.world.steps.spec.layout
    assert group.world.steps.spec.options == even_options(layout, 4, 1, PlanOptions())
    assert group.world.steps.spec.options != even_options(layout, 1, 1, PlanOptions())


def test_no_shard_leaves_unused_parameters_alone() -> None:
    class Skips(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.blocks[0](x)))

    model, optimizer, _ = make(Skips(), sharding_strategy=ShardingStrategy.NO_SHARD)
    model(batch()).sum().backward()
    grads = {name: p.grad is not None for name, p in model.module.named_parameters()}
    assert grads["blocks.0.up.weight"]
    assert not grads["blocks.1.up.weight"]
    before = model.module.blocks[1].up.weight.clone()  # type: ignore[index,union-attr]
    assert optimizer.step().committed
    assert torch.equal(before, model.module.blocks[1].up.weight)  # type: ignore[index,union-attr]


def test_no_shard_names_a_unit_whose_gradient_comes_twice_in_a_backward() -> None:
    class Twice(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.blocks[2], x, use_reentrant=True)  # type: ignore[assignment]
            return self.head(x)

    model, _, _ = make(Twice(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(Misuse, match=r"'blocks\.2' got its gradient twice.*use_reentrant=True"):
        model(batch().requires_grad_()).sum().backward()


def break_off(model: Any) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("broken off")

    hook = model.module.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="broken off"):
        model(batch()).sum().backward()
    hook.remove()


def test_no_shard_of_one_worker_drops_a_backward_that_was_broken_off() -> None:
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=ShardingStrategy.NO_SHARD)
    break_off(model)
    with pytest.raises(Misuse, match="broken off by an error"):
        model(batch()).sum().backward()
    for _ in range(2):
        plain(batch())  # running statistics move before backward fails
    optimizer.zero_grad()
    train(model, optimizer)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert_equal(model, plain)
    assert model.statistics()["grad_buffer_bytes"] == 0


def test_no_shard_of_several_refuses_to_average_what_a_broken_off_backward_has_begun() -> None:
    def worker(world: World) -> None:
        model = FSDP(Model(), unit_types={Block}, sharding_strategy=ShardingStrategy.NO_SHARD)
        break_off(model)
        with pytest.raises(Misuse, match="build the model again"):
            model.zero_grad()

    run_threads(worker, 2)


def test_no_shard_skips_what_is_not_finite() -> None:
    model, optimizer, _ = make(Model(), sharding_strategy=ShardingStrategy.NO_SHARD)
    before = {k: v.clone() for k, v in model.module.named_parameters()}
    (model(batch()).sum() * float("inf")).backward()
    result = optimizer.step()
    assert not result.committed
    assert "finite" in result.reason
    assert all(torch.equal(before[k], v) for k, v in model.module.named_parameters())


@pytest.mark.parametrize("strategy", ALL)
def test_gather_and_reshard_by_hand(strategy: ShardingStrategy) -> None:
    model, _, _ = make(Model(), sharding_strategy=strategy)
    before = model.statistics()["param_memory_bytes"]
    model.gather_parameters()
    full = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    assert all(torch.isfinite(p).all() for p in full.values())
    assert all(torch.equal(p, full[name]) for name, p in model.full_parameters())
    model.reshard_parameters()
    if strategy is not ShardingStrategy.SHARD_GRAD_OP:
        assert model.statistics()["param_memory_bytes"] == before
    with model.summon_full_params():
        assert all(torch.equal(p, full[name]) for name, p in model.module.named_parameters())


@pytest.mark.parametrize("strategy", ALL)
def test_gradients_are_synced_by_hand(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(batch()).sum().backward()
    reference.step()
    with model.no_sync():
        model(batch()).sum().backward()
    model.sync_gradients()
    optimizer.step()
    assert_equal(model, plain)


def test_prefetch_by_hand() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
        model, optimizer, steps = make(Model(), sharding_strategy=strategy, prefetch=False)
        train(model, optimizer, 1)
        steps.log.clear()
        assert not model.has_pending_prefetch()
        assert strategy is ShardingStrategy.HYBRID_SHARD or not steps.units("gather")
        model.prefetch_forward_params()
        assert model.has_pending_prefetch()
        with pytest.raises(Misuse, match="twice"):
            model.prefetch_forward_params()
        model(batch())
        assert not model.has_pending_prefetch()
        model.prefetch_forward_params()
        model.reshard_parameters()
        assert not model.has_pending_prefetch()
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model, _, _ = make(Model(), sharding_strategy=strategy)
        with pytest.raises(Misuse, match=strategy.name):
            model.prefetch_forward_params()


def test_without_prefetch_nothing_is_gathered_before_it_is_needed() -> None:
    model, optimizer, steps = make(Model(), prefetch=False)
    train(model, optimizer, 1)
    steps.log.clear()
    train(model, optimizer, 1)
    assert steps.units("gather") == [0, 1, 2, 3, 1]


@pytest.mark.parametrize("strategy", ALL)
def test_updated_params_are_brought_at_once(strategy: ShardingStrategy) -> None:
    model, optimizer, steps = make(Model(), sharding_strategy=strategy)
    train(model, optimizer, 1)
    model.broadcast_updated_params()
    steps.log.clear()
    if strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        with torch.no_grad():
            model(batch())
        assert not steps.log


@pytest.mark.parametrize("strategy", ALL)
def test_values_are_replaced(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    model, optimizer, _ = make(Model(), sharding_strategy=strategy)
    train(model, optimizer, 1)
    torch.manual_seed(1)
    other = Model()
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 1)
    assert model.load_state_dict(other.state_dict()) == ([], [])
    assert_equal(model, other)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch()), other.eval()(batch()))
    model.train()
    with pytest.raises(InvalidRequest, match=r"missing.*head\.bias"):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "head.bias"})
    with pytest.raises(InvalidRequest, match=r"head\.bias.*\[3\].*\[2\]"):
        model.load_state_dict(other.state_dict() | {"head.bias": torch.zeros(3)})
    keys = model.load_state_dict({"head.bias": torch.ones(2), "extra": torch.ones(1)}, strict=False)
    assert keys.unexpected_keys == ["extra"]
    assert torch.equal(model.state_dict()["head.bias"], torch.ones(2))
    assert torch.equal(model.state_dict()["head.weight"], other.state_dict()["head.weight"])
    flat = torch.arange(model.spec.layout.numel, dtype=torch.float32)
    model.update_shards(flat)
    assert torch.equal(torch.cat([p.flatten() for _, p in model.full_parameters()]), flat)
    with pytest.raises(InvalidRequest, match=r"needed is \["):
        model.update_shards(flat[1:])


def test_ignored_parameters_stay_the_workers_own() -> None:
    torch.manual_seed(0)
    module = Model()
    head = module.head
    model, optimizer, steps = make(module, ignored_parameters=head.parameters())
    assert steps.spec is not None
    assert not [p for _, p in steps.spec.layout.parameters() if p.name.startswith("head")]
    before = head.weight.detach().clone()
    train(model, optimizer, 1)
    assert torch.equal(head.weight, before)
    assert head.weight.grad is not None  # for an optimizer of the worker's own
    assert torch.equal(model.state_dict()["head.weight"], before)


def test_buffers_have_their_own_dtype_and_keep_the_one_they_were_built_with_in_state_dicts() -> None:
    model, _, _ = make(Model(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    assert model.module.norm.running_mean.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert model.module.norm.num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]
    assert model.state_dict()["norm.running_mean"].dtype == torch.float32


def test_meta_buffers_get_their_values() -> None:
    with torch.device("meta"):
        module = Model()
    model, optimizer, _ = make(module)
    assert torch.equal(model.module.norm.running_var, torch.ones(8))  # type: ignore[union-attr]
    train(model, optimizer, 1)
    assert torch.isfinite(model.module.norm.running_mean).all()  # type: ignore[union-attr]


def test_no_shard_from_the_meta_device() -> None:
    with torch.device("meta"):
        module = Model()
    model, optimizer, _ = make(module, sharding_strategy=ShardingStrategy.NO_SHARD)
    train(model, optimizer, 1)
    assert all(torch.isfinite(p).all() for p in model.module.parameters())


@pytest.mark.parametrize("strategy", ALL)
def test_the_scaler_divides_what_it_multiplied_and_backs_off(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy)
    scaler = GradScaler(model, init_scale=1024.0, growth_interval=2)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, reference, 2)
    for step in range(2):
        scaler.scale(model(batch(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer).committed
        scaler.update()
        optimizer.zero_grad()
    assert_equal(model, plain)
    assert scaler.get_scale() == 2048.0
    with pytest.raises(Misuse, match="without a step"):
        scaler.update()
    if strategy is ShardingStrategy.NO_SHARD:
        scaler.scale(model(batch()).sum() * float("inf")).backward()
        assert not scaler.step(optimizer).committed
        scaler.update()
        assert scaler.get_scale() == 1024.0
        with pytest.raises(Misuse, match="zero_grad"):  # torch would add a scaled gradient to one that is not
            scaler.scale(model(batch()).sum()).backward()


@pytest.mark.parametrize("strategy", ALL)
def test_gradients_of_a_scaled_loss_are_for_the_scalers_step_alone(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(Model(), sharding_strategy=strategy)
    scaler = GradScaler(model, init_scale=1024.0)
    scaler.scale(model(batch()).sum()).backward()
    with pytest.raises(Misuse, match=r"scaled by 1024.*scaler\.step\(optimizer\)"):
        optimizer.step()
    optimizer.zero_grad()
    model(batch()).sum().backward()
    with pytest.raises(Misuse, match=r"scaled by 1, .*scaled by 1024.*optimizer\.step\(\)"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.scale(model(batch()).sum()).backward()
    assert scaler.step(optimizer).committed


@pytest.mark.parametrize("strategy", ALL)
def test_scaled_gradients_are_not_added_to_others(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(Model(), sharding_strategy=strategy)
    scaler, other = GradScaler(model, init_scale=8.0), GradScaler(model, init_scale=2.0)
    for first, then in ((scaler, None), (None, scaler), (scaler, other)):
        losses = [model(batch()).sum(), model(batch()).sum()]
        losses = [loss if by is None else by.scale(loss) for loss, by in zip(losses, (first, then), strict=True)]
        with model.no_sync():
            losses[0].backward()
        with pytest.raises(Misuse, match="would be added"):
            losses[1].backward()
        optimizer.zero_grad()
    with pytest.raises(Misuse, match="one backward of losses that were scaled by"):
        (scaler.scale(model(batch()).sum()) + other.scale(model(batch()).sum())).backward()


@pytest.mark.parametrize("strategy", ALL)
def test_a_scale_is_that_of_a_backward_whatever_ends_or_begins_around_it(strategy: ShardingStrategy) -> None:
    """A checkpoint of the whole model makes a backward of its own; a backward before it was broken off."""
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler, theirs = GradScaler(model, init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=64.0)

    def losses(made: Any) -> list[torch.Tensor]:
        x = batch().requires_grad_()
        return [made(batch(0)).sum(), checkpoint(made, x, use_reentrant=True).square().mean(), made(batch(2)).sum()]

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def broken(by: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            by.scale(Stop.apply(torch.ones((), requires_grad=True))).backward()

    for made, by, opt in ((model, scaler, optimizer), (plain, theirs, reference)):
        for step in range(3):
            broken(by)
            loss = losses(made)[step]
            if step < 2:
                loss = by.scale(loss)
            opt.zero_grad()  # after the loss was scaled
            loss.backward()
            if step < 2:
                by.step(opt)
                by.update()
            else:
                opt.step()
    assert_equal(model, plain, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_inner_modules_may_be_compiled() -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain))
    for block in model.module.blocks:  # type: ignore[union-attr]
        block.up = torch.compile(block.up, backend="eager")
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    train(model, optimizer)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(dict(model.full_parameters())[name], value.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ALL)
def test_accessors_and_estimates(strategy: ShardingStrategy) -> None:
    module = Model()
    model, optimizer, _ = make(module, sharding_strategy=strategy)
    train(model, optimizer, 2)
    assert model.unwrap() is model.module is module
    assert model.strategy is strategy
    estimate = model.memory_estimate()
    assert isinstance(estimate, FSDPMemoryStats)
    assert estimate.total_params == sum(p.numel() for p in module.parameters())
    assert estimate.world_size == 1
    assert estimate.total_memory_mb == pytest.approx(estimate.total_memory_bytes / 2**20)
    assert estimate.memory_savings < 1.0
    if strategy is ShardingStrategy.FULL_SHARD:
        assert estimate.memory_savings > 0.5
        assert estimate.optim_memory_bytes == 0
    if strategy is ShardingStrategy.NO_SHARD:
        assert estimate.param_memory_bytes == 4 * estimate.total_params
    measured = model.memory_stats()
    assert 0 <= measured.current_allocation_mb <= measured.peak_memory_mb


def test_what_cannot_be_says_why() -> None:
    with pytest.raises(InvalidRequest, match="NO_SHARD moves nothing"):
        make(
            Model(),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            mixed_precision=MixedPrecision(reduce_dtype="int8"),
        )
    with pytest.raises(InvalidRequest, match="intra_node_size is for HYBRID_SHARD"):
        make(Model(), sharding_strategy=ShardingStrategy.FULL_SHARD, intra_node_size=2)
    with pytest.raises(InvalidRequest, match="intra_node_size is 2 and the world has 1 workers"):
        make(Model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, intra_node_size=2)
