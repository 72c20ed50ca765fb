"""The hooks and the runtime against plain torch, with the servers faked: every shape a module tree can take.

Tests of `parallel/fsdp/fsdp.py`, `parallel/fsdp/hooks.py`, `parallel/fsdp/runtime.py`,
`parallel/fsdp/on_servers/server_runtime.py` and `parallel/fsdp/on_servers/served_masters.py`.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import FSDP, SGD, MixedPrecision, ShardingStrategy
from axon_ps.types import Outcome
from parallel_fakes import FakeGroup, FakeSteps

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


class Block(nn.Module):
    """A unit: residual MLP with a norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between a projection and its transpose (tied)."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(4, width, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight


class Reused(Model):
    """Every block runs twice in a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x @ self.head.weight


class Checkpointed(Model):
    """Blocks are recomputed in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.head.weight


class Reentrant(Checkpointed):
    """The same with the older, reentrant form."""

    reentrant = True


class Nested(nn.Module):
    """Outputs in a dict in a tuple; a unit in a unit's place is reached through keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, *, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        return {"y": self.second(x=self.first(x=x))}, 3


def make(module: nn.Module, **options: Any) -> tuple[FSDP, SGD, FakeSteps]:
    group = FakeGroup()
    model = FSDP(module, group, unit_types={Block}, **options)  # type: ignore[arg-type]
    return model, SGD(model, lr=0.1), group.world.steps


def train(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def batches(n: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 4, generator=generator) for _ in range(n)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", [Model, Reused, Checkpointed, Reentrant])
def test_training_equals_plain_torch(build: Callable[[], nn.Module], strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = build()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches())
    assert train(model, optimizer, batches()) == pytest.approx(expected, rel=1e-6)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_full_shard_frees_every_unit_and_keeps_to_two_units_and_the_root() -> None:
    model, optimizer, steps = make(Model(blocks=5))
    train(model, optimizer, batches(3))
    assert steps.spec is not None
    sizes = [4 * unit.numel for unit in steps.spec.layout.units]
    root, largest = sizes[0], max(sizes[1:])
    stats = model.statistics()
    # peak = root + the unit in use + the prefetched one
    assert root + largest <= stats["peak_param_memory_bytes"] <= root + 2 * largest
    model.runtime.reset()
    assert model.statistics()["param_memory_bytes"] == 0
    assert stats["grad_buffer_bytes"] <= 2 * largest


def test_a_step_gathers_each_unit_twice_but_the_root_and_the_last_two_once() -> None:
    model, optimizer, steps = make(Model(blocks=3))
    train(model, optimizer, batches(2))
    steps.log.clear()
    train(model, optimizer, batches(1))
    # the step before gathered the root and blocks 1 and 2 speculatively; this one does so behind their push
    assert [event for event in steps.log if event[0] != "push"] == [
        *(("gather", 3), ("gather", 1)),
        *(("speculative", 2), ("speculative", 1), ("speculative", 0), ("vote", 3)),
    ]
    assert steps.units("push") == [3, 2, 1, 0]


def test_shard_grad_op_gathers_each_unit_once_when_backward_has_left_it_and_keeps_it() -> None:
    model, optimizer, steps = make(Model(blocks=3), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    train(model, optimizer, batches(3))
    steps.log.clear()
    train(model, optimizer, batches(1))
    assert steps.units("push") == steps.units("speculative") == [3, 2, 1, 0]
    assert steps.log.index(("speculative", 3)) < steps.log.index(("push", 2))
    assert steps.log[-1] == ("vote", 4)
    assert model.statistics()["param_memory_bytes"] >= 4 * steps.spec.layout.numel  # type: ignore[union-attr]


def test_a_freed_parameter_has_its_shape_cannot_be_read_and_summon_makes_it_whole() -> None:
    model, _, _ = make(Model())
    resharded = model.module.blocks[0].up.weight  # type: ignore[index,union-attr]
    assert resharded.shape == (16, 8)
    assert resharded.numel() == 128
    with pytest.raises(Misuse, match=r"blocks\.0\.up\.weight.*summon_full_params"):
        torch.isnan(resharded)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.isnan(resharded).all()
        with torch.no_grad():
            resharded.fill_(1.0)  # nobody can stop this
    with model.summon_full_params():
        unsharded = model.module.blocks[0].up.weight.detach().clone()  # type: ignore[index,union-attr]
    assert torch.equal(unsharded, dict(model.full_parameters())["blocks.0.up.weight"])
    assert model.statistics()["param_memory_bytes"] == 0
    assert resharded.numel() == 128
    with pytest.raises(Misuse, match=r"blocks\.0\.up\.weight.*summon_full_params"):
        torch.isnan(resharded)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.isnan(resharded).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_equals_plain_torch(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, steps = make(copy.deepcopy(plain), sharding_strategy=strategy)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        *first, last = batches(3)
        for batch in (*first, last):
            plain(batch).square().mean().backward()
        reference.step()
        reference.zero_grad()
        with model.no_sync():
            for batch in first:
                model(batch).square().mean().backward()
        assert not steps.units("push") or steps.log[-1][0] != "push"
        model(last).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_only_accumulated_gradients_are_pushed_by_step() -> None:
    model, optimizer, steps = make(Model())
    with model.no_sync():
        model(batches(1)[0]).sum().backward()
    assert not steps.units("push")
    optimizer.step()
    assert sorted(steps.units("push")) == [0, 1, 2, 3]


def test_the_gradients_of_several_backwards_are_added_up() -> None:
    plain = Model()
    model, optimizer, steps = make(copy.deepcopy(plain))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for count in (2, 1, 3):
        for x in batches(count):
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        assert steps.units("push")[-4 * count :] == [3, 2, 1, 0] * count
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_unit_without_gradient_is_absent() -> None:
    class Skips(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](self.embed(x))) @ self.head.weight

    model, optimizer, steps = make(Skips())
    before = dict(model.full_parameters())["blocks.2.up.weight"].clone()
    train(model, optimizer, batches(2))
    assert steps.units("absent") == [3, 3]
    assert torch.equal(before, dict(model.full_parameters())["blocks.2.up.weight"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parts_move_no_gradient_and_stay(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = Model()
    for block in plain.blocks:
        block.up.requires_grad_(False)  # type: ignore[union-attr]
    plain.embed.weight.requires_grad_(False)
    model, optimizer, steps = make(copy.deepcopy(plain), sharding_strategy=strategy)
    trainable = [p for p in plain.parameters() if p.requires_grad]
    expected = train(plain, torch.optim.SGD(trainable, lr=0.1), batches())
    assert train(model, optimizer, batches()) == pytest.approx(expected, rel=1e-6)
    assert steps.spec is not None
    frozen = {i for i, u in enumerate(steps.spec.layout.units) if not u.trainable}
    assert frozen
    assert not frozen & set(steps.units("push"))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_nested_outputs_and_keyword_inputs() -> None:
    torch.manual_seed(0)
    plain = Nested()
    model, optimizer, _ = make(copy.deepcopy(plain))
    x = torch.randn(3, 8)
    plain(x=x)[0]["y"].sum().backward()
    model(x=x)[0]["y"].sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_between_steps_changes_nothing(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches(3):
        train(plain, reference, [batch])
        train(model, optimizer, [batch])
        with torch.no_grad():
            torch.testing.assert_close(model(batch), plain(batch), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(model(batch), plain(batch), rtol=1e-5, atol=1e-6)
    assert torch.isfinite(model(batches(1)[0])).all()  # a forward with gradients that has no backward
    train(plain, reference, batches(1))
    train(model, optimizer, batches(1))
    torch.testing.assert_close(model.state_dict()["embed.weight"], plain.state_dict()["embed.weight"])


def test_a_forward_that_raises_leaves_a_model_that_works() -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.randn(5, 3))
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches())
    assert train(model, optimizer, batches()) == pytest.approx(expected, rel=1e-6)


def test_meta_device_model_gets_values_from_its_own_initialisation() -> None:
    with torch.device("meta"):
        module = Model()
    model, optimizer, _ = make(module)
    train(model, optimizer, batches(2))
    weight = dict(model.full_parameters())["blocks.0.norm.weight"]
    assert float(weight.mean()) == pytest.approx(1.0, abs=0.2)
    assert model.module.head.weight is model.module.embed.weight  # type: ignore[union-attr]


def test_meta_device_without_a_way_to_initialise_names_the_submodule() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(InvalidRequest, match=r"Bare.*param_init_fn"):
        make(Bare())


@pytest.mark.parametrize(
    "precision",
    [
        MixedPrecision(param_dtype=torch.bfloat16),
        MixedPrecision(wire_dtype=torch.bfloat16),
        MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_computes_and_travels_as_told(precision: MixedPrecision, strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, _ = make(copy.deepcopy(plain), sharding_strategy=strategy, mixed_precision=precision)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches())
    assert train(model, optimizer, batches()) == pytest.approx(expected, rel=0.05)
    output = model(batches(1)[0])
    assert output.dtype == (precision.param_dtype or torch.float32)
    assert all(v.dtype == torch.float32 for v in model.state_dict().values())


def test_a_step_that_does_not_commit_changes_nothing_and_training_goes_on() -> None:
    model, optimizer, steps = make(Model())
    train(model, optimizer, batches(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    steps.outcome = Outcome.ABORT
    model(batches(1)[0]).sum().backward()
    result = optimizer.step()
    assert not result.committed
    assert result.version == 1
    assert ("wait_complete", -1) in steps.log
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    steps.outcome = Outcome.COMMIT
    model(batches(1)[0]).sum().backward()
    assert optimizer.step().version == 2


def test_a_restore_makes_every_copy_stale() -> None:
    model, optimizer, steps = make(Model(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    train(model, optimizer, batches(1))
    with torch.no_grad():
        before = model(batches(1)[0])
        for value in steps.values.values():
            value.zero_()
        steps.epoch += 1
        after = model(batches(1)[0])
    assert float(before.abs().sum()) > 0
    assert float(after.abs().sum()) == 0


@pytest.mark.parametrize("moved", ["version", "epoch"])
@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_a_step_during_which_the_job_moved_does_not_commit_and_the_next_one_does(moved: str, when: str) -> None:
    model, optimizer, steps = make(Model())
    train(model, optimizer, batches(1))

    def move() -> None:
        setattr(steps, moved, getattr(steps, moved) + 1)

    batch = batches(1)[0]
    if when == "before forward":
        move()
    loss = model(batch).sum()
    if when == "before backward":
        move()
    loss.backward()
    result = optimizer.step()
    assert not result.committed
    assert result.reason == "the parameters changed"
    model(batch).sum().backward()
    assert optimizer.step().committed


def test_a_step_begins_anew_where_this_worker_itself_asks_for_other_parameters() -> None:
    model, optimizer, _ = make(Model())
    train(model, optimizer, batches(1))
    model.load_state_dict(model.state_dict())
    model(batches(1)[0]).sum().backward()
    assert optimizer.step().committed


def test_a_forward_that_was_not_of_one_version_is_made_again() -> None:
    model, _, steps = make(Model())
    seen = model(batches(1)[0])
    moves = iter([True])

    def others_commit(*_: object) -> None:
        if next(moves, False):
            steps.version += 1
            for value in steps.values.values():
                value.mul_(0.5)

    model.module.blocks[1].register_forward_pre_hook(others_commit)
    again = model(batches(1)[0])
    assert model.statistics()["forwards_repeated"] == 1
    assert not torch.equal(again, seen)
    assert torch.equal(again, model(batches(1)[0]))


@pytest.mark.parametrize("surprise", ["clip", "lr", "skip", "abort"])
def test_a_speculative_gather_is_discarded_when_the_decision_is_another(surprise: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    model, optimizer, steps = make(copy.deepcopy(plain), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, reference, batches(2))
    train(model, optimizer, batches(2))
    for m in (plain, model):
        m(batches(1)[0]).square().mean().backward()
    assert steps.units("speculative")
    if surprise == "clip":
        model.clip_grad_norm(1.0)
        steps.clip_factor = 0.5
        reference.param_groups[0]["lr"] = 0.05
    if surprise == "lr":
        reference.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.3
    if surprise in ("skip", "abort"):
        steps.outcome = Outcome[surprise.upper()]
        reference.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    reference.step()
    reference.zero_grad()
    with torch.no_grad():  # a resident copy must be that of the servers
        torch.testing.assert_close(model(batches(1)[0]), plain(batches(1)[0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict()["embed.weight"], plain.state_dict()["embed.weight"])
    steps.log.clear()
    steps.outcome, steps.clip_factor = Outcome.COMMIT, 1.0
    train(model, optimizer, batches(1))
    assert bool(steps.units("speculative")) == (surprise != "clip")  # a user who clips will clip again


def test_torch_schedulers_drive_the_hyperparameters() -> None:
    model, optimizer, _ = make(Model())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0 if epoch else 1.0)
    train(model, optimizer, batches(1))
    moved = model.state_dict()["embed.weight"].clone()
    scheduler.step()
    train(model, optimizer, batches(1))
    assert torch.equal(moved, model.state_dict()["embed.weight"])


def test_what_cannot_be_wrapped_or_optimised_says_why() -> None:
    group: Any = FakeGroup()
    with pytest.raises(InvalidRequest, match="no parameters"):
        FSDP(nn.ReLU(), group)
    with pytest.raises(InvalidRequest, match=r"weight.*float64"):
        FSDP(nn.Linear(2, 2).double(), group)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(InvalidRequest, match=r"several dtypes: torch\.bfloat16 \(.1\.weight.\), torch"):
        FSDP(mixed, group)
    with pytest.raises(InvalidRequest, match="one of them"):
        FSDP(Model(), group, unit_types={Block}, auto_wrap_policy=lambda m: False)
    model = FSDP(Model(), group, unit_types={Block})
    with pytest.raises(InvalidRequest, match="wrapped model"):
        SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(InvalidRequest, match="max_norm is 0"):
        model.clip_grad_norm(0.0)
    with pytest.raises(InvalidRequest, match="missing"):
        model.load_state_dict({})


TRAINS = """
import axon_ps.parallel, sys
print("numba" in sys.modules)
from test_fsdp_hooks import Model, batches, make, train
train(*make(Model())[:2], batches(2))
print(*{"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules))
"""


def test_training_loads_nothing_that_only_a_compiler_needs() -> None:
    run = subprocess.run([sys.executable, "-c", TRAINS], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert run.stdout == "False\n\n", run.stdout + run.stderr
