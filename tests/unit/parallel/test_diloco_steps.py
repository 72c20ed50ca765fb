"""DiLoCo with a job, step by step; `tests/integration/test_diloco.py` holds it to plain torch.

Tests of `parallel/diloco/diloco.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.errors import InvalidRequest, StepAborted, Timeout
from axon_ps.parallel import FSDP, Asynchronous, BoundedStaleness, DiLoCo, LocalSGD, ShardingStrategy
from axon_ps.parallel.fsdp.strategy import CPUOffload
from axon_ps.sharding.policy import LocalSteps
from axon_ps.types import Outcome
from parallel_fakes import FakeGroup, FakeSteps


def fake_group(steps: FakeSteps) -> Any:
    group = FakeGroup()
    group.world.steps = steps
    return group


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, step: Any, count: int, seed: int = 0) -> list[Any]:
    """`count` steps on batches of their own; what each gave."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(count):
        data = torch.randn(3, 4, generator=generator)
        model.zero_grad()
        model(data.to(next(model.parameters()).dtype)).float().square().sum().backward()
        results.append(step())
    return results


def made(kind: Any = DiLoCo, model: nn.Module | None = None, **options: Any) -> tuple[Any, nn.Module, FakeSteps]:
    steps = FakeSteps()
    model = model or module()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = kind(model, inner, fake_group(steps), **{"inner_steps": 3, "unit_types": {nn.Linear}, **options})
    return trainer, model, steps


def assert_trained_by_plain_torch(model: nn.Module, *runs: tuple[int, int]) -> None:
    """The model is what plain torch makes of as many steps, of batches with this seed, one run after the other."""
    plain = module()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for count, seed in runs:
        train(plain, optimizer.step, count, seed)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_what_it_registers() -> None:
    _, _, steps = made()
    assert steps.spec is not None
    assert steps.optimizer is not None
    assert steps.spec.policy == LocalSteps(inner_steps=3)
    assert steps.optimizer.groups == ({"lr": 0.7, "momentum": 0.9, "nesterov": 1.0},)
    _, _, steps = made(LocalSGD)
    assert steps.optimizer is not None
    assert steps.optimizer.groups == ({"lr": 1.0, "momentum": 0.0, "nesterov": 0.0},)


def test_only_every_nth_step_is_one_of_the_job() -> None:
    trainer, model, steps = made()
    results = train(model, trainer.step, 7)
    assert [r is not None for r in results] == [False, False, True, False, False, True, False]
    assert [r.version for r in results if r is not None] == [1, 2]
    assert steps.units("push") == [0, 1, 0, 1]
    assert steps.units("gather") == [0, 1] * 3
    assert trainer.statistics()["inner_steps"] == 7


def test_local_sgd_of_one_worker_is_its_inner_optimizer() -> None:
    trainer, model, _ = made(LocalSGD)
    train(model, trainer.step, 9)
    assert_trained_by_plain_torch(model, (9, 0))


def test_an_aborted_outer_step_keeps_the_progress_and_the_next_pushes_all_of_it() -> None:
    trainer, model, steps = made(LocalSGD)
    steps.outcome = Outcome.ABORT
    (*_, result) = train(model, trainer.step, 3)
    assert not result.committed
    assert ("wait_complete", -1) in steps.log
    steps.outcome = Outcome.COMMIT
    (*_, result) = train(model, trainer.step, 3, seed=1)
    assert result.committed
    assert_trained_by_plain_torch(model, (3, 0), (3, 1))


@pytest.mark.parametrize("diverged", [True, False])
def test_after_a_skipped_step_only_who_diverged_goes_back(diverged: bool) -> None:
    trainer, model, steps = made()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, trainer.step, 2)
    if diverged:
        with torch.no_grad():
            next(model.parameters()).fill_(float("inf"))
    local = [p.detach().clone() for p in model.parameters()]
    steps.outcome = Outcome.SKIP
    assert not trainer.outer_step().committed
    for param, old, own in zip(model.parameters(), before, local, strict=True):
        assert torch.equal(param, old if diverged else own)
    assert bool(trainer.inner_optimizer.state) is not diverged


def test_a_job_that_was_restored_is_pulled_at_once() -> None:
    trainer, model, steps = made()
    train(model, trainer.step, 2)
    steps.version, steps.epoch = 5, 1
    for values in steps.values.values():
        values.fill_(0.25)
    (result,) = train(model, trainer.step, 1)
    assert (result.committed, result.version) == (False, 5)
    assert "from version 0 to 5 without this worker" in result.reason
    assert all(torch.equal(p, torch.full_like(p, 0.25)) for p in model.parameters())
    assert [r is not None for r in train(model, trainer.step, 3)] == [False, False, True]  # it counts from there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_that_the_job_went_on_without_takes_what_it_did_and_retains_its_progress(dtype: torch.dtype) -> None:
    trainer, model, steps = made(LocalSGD, module(dtype))
    before = {unit: values.clone() for unit, values in steps.values.items()}
    train(model, trainer.step, 2)
    moved = [p.detach().float() - b for p, b in zip(model.parameters(), parameters(trainer, before), strict=True)]
    steps.version = 5
    for values in steps.values.values():
        values += 0.25
    (result,) = train(model, lambda: trainer.outer_step(), 1)
    assert (result.committed, result.version) == (True, 6)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    for unit, own, old in zip(parameters(trainer, steps.values), moved, parameters(trainer, before), strict=True):
        torch.testing.assert_close(unit, old + 0.25 + own, rtol=tolerance, atol=tolerance)
    assert trainer.statistics()["rebases"] == 1


def parameters(trainer: Any, values: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """What a fake server has, by parameter."""
    units = enumerate(trainer.spec.layout.units)
    return [values[i][p.offset : p.end].view(p.shape) for i, unit in units for p in unit.parameters]


def test_the_average_is_weighted_and_weights_cannot_be_negative() -> None:
    trainer, model, steps = made(LocalSGD)
    train(model, lambda: trainer.step(weight=2.0), 2)
    moved = [p.detach().clone() for p in model.parameters()]
    trainer.outer_step()
    for param, own in zip(model.parameters(), moved, strict=True):
        torch.testing.assert_close(param, own, rtol=1e-6, atol=1e-6)
    train(model, lambda: trainer.step(weight=0.0), 2)
    assert trainer.sync() == []  # nothing was trained that counts
    train(model, lambda: trainer.step(weight=0.0), 1)
    assert steps.units("absent") == [0, 1]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="the weight of a step is"):
            trainer.step(weight=wrong)


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="inner_steps must be a multiple of the fragments"):
        made(inner_steps=3, fragments=2)
    with pytest.raises(InvalidRequest, match="the module has 2 units with trainable parameters"):
        made(inner_steps=3, fragments=3)
    with pytest.raises(InvalidRequest, match="overlap_steps is 3; it must be from 0 to 2"):
        made(overlap_steps=3)
    with pytest.raises(
        InvalidRequest, match="param_wire_dtype is torch.bfloat16; use one of float32, bf16, fp16, int4, int8"
    ):
        made(param_wire_dtype=torch.bfloat16)
    with pytest.raises(InvalidRequest, match="param_wire_dtype is 'float8_e4m3', for layers that compute in it"):
        made(param_wire_dtype="float8_e4m3")
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest, match=f"mixing is {wrong}; it must be from 0 to 1, or None"):
            made(overlap_steps=1, mixing=wrong)


def test_inner_steps_go_on_while_an_outer_step_is_under_way() -> None:
    trainer, model, _ = made(LocalSGD, overlap_steps=2)
    results = train(model, trainer.step, 8)
    assert [r is not None for r in results] == [False] * 4 + [True, False, False, True]  # pushed after 3, ended after 5
    assert_trained_by_plain_torch(model, (8, 0))  # nothing is lost or counts twice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_averages_the_new_values_with_the_local_ones(dtype: torch.dtype) -> None:
    trainer, model, steps = made(model=module(dtype), overlap_steps=2, mixing=0.25)
    train(model, trainer.step, 4)
    trainer.inner_optimizer.param_groups[0]["lr"] = 0.0  # the last step changes nothing
    local = [p.detach().float().clone() for p in model.parameters()]
    (result,) = train(model, trainer.step, 1)
    assert result.committed
    new, tolerance = parameters(trainer, steps.values), 1e-6 if dtype == torch.float32 else 2**-7
    for param, own, value in zip(model.parameters(), local, new, strict=True):
        expected = 0.25 * own + 0.75 * value
        torch.testing.assert_close(param.detach().float(), expected, rtol=tolerance, atol=1e-6)
    anchor = parameters(trainer, dict(enumerate(trainer._fragments[0].anchor)))
    for param, own, value, start in zip(model.parameters(), local, new, anchor, strict=True):
        torch.testing.assert_close(param.detach() - start, 0.25 * (own - value), rtol=1e-4, atol=1e-6)
        assert dtype == torch.bfloat16 or torch.equal(start, value)


def test_mixing_leaves_an_outer_step_without_inner_steps_as_it_is() -> None:
    trainer, model, steps = made(overlap_steps=2, mixing=0.5)
    train(model, trainer.step, 4)  # the outer step that is under way has one
    assert [r.committed for r in trainer.sync()] == [True]
    for param, value in zip(model.parameters(), parameters(trainer, steps.values), strict=True):
        assert torch.equal(param, value)
    assert trainer.statistics()["inner_steps_committed"] == 4


def test_what_is_pushed_again_after_an_error_is_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval may lie between both pushes; one worker's plain average changes nothing then."""
    trainer, model, steps = made(LocalSGD, inner_steps=4, overlap_steps=1, mixing=0.5)
    vote, push, failing = steps.vote, steps.push, [Timeout("no decision")]

    def failing_vote(*args: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop()
        return vote(*args, **options)

    def dropping_push(unit: int, *rest: Any, **where: Any) -> Any:
        steps.grads.pop(unit, None)  # the servers drop what they have
        return push(unit, *rest, **where)

    monkeypatch.setattr(steps, "vote", failing_vote)
    monkeypatch.setattr(steps, "push", dropping_push)
    train(model, trainer.step, 4)
    with pytest.raises(Timeout):
        train(model, trainer.step, 1, seed=1)
    results = train(model, trainer.step, 5, seed=2)
    assert [result.committed for result in results if result is not None] == [True]
    assert_trained_by_plain_torch(model, (4, 0), (1, 1), (5, 2))


@pytest.mark.parametrize("mixing", [0.5, None])
def test_after_a_sync_all_have_the_servers_values_whatever_counted_for_nothing(mixing: float | None) -> None:
    trainer, model, steps = made(inner_steps=4, overlap_steps=2, mixing=mixing)
    train(model, trainer.step, 4)
    train(model, lambda: trainer.step(weight=0.0), 2, seed=2)
    assert trainer.sync() == []
    for param, value in zip(model.parameters(), parameters(trainer, steps.values), strict=True):
        assert torch.equal(param, value)


def test_a_restore_during_a_pull_is_taken_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model, steps = made()
    gather, failed = steps.gather, []

    def once(unit: int, out: Any, **options: Any) -> Any:
        work = gather(unit, out, **options)
        if not failed:
            failed.append(unit)
            steps.epoch += 1

            def restored(timeout_s: float | None = None) -> None:
                raise StepAborted("restored")

            monkeypatch.setattr(work, "wait", restored)
        return work

    monkeypatch.setattr(steps, "gather", once)
    trainer.pull()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert trainer.step() is None


def test_progress_is_measured_from_the_rounded_values_of_a_bf16_module() -> None:
    trainer, _, steps = made(LocalSGD, module(torch.bfloat16))
    for values in steps.values.values():
        values += 1e-5  # what the servers hold is between two bf16 values
    trainer.pull()
    before = {unit: values.clone() for unit, values in steps.values.items()}
    trainer.outer_step()  # no progress
    assert all(torch.equal(values, before[unit]) for unit, values in steps.values.items())


def test_pseudo_gradients_travel_in_the_dtype_asked_for() -> None:
    trainer, model, steps = made(LocalSGD, wire_dtype=torch.bfloat16)
    assert steps.spec is not None
    assert (steps.spec.precision.param.value, steps.spec.precision.grad.value) == ("f32", "bf16")
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    train(model, trainer.step, 2)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    trainer.outer_step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert not torch.equal(after, moved)
    torch.testing.assert_close(after, moved, rtol=2**-8, atol=1e-6)


def test_values_of_the_last_sync_can_be_looked_at() -> None:
    trainer, model, _ = made()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, trainer.step, 2)
    local = [p.detach().clone() for p in model.parameters()]
    with trainer.synced_parameters() as synced:
        assert all(torch.equal(p, b) for p, b in zip(synced.parameters(), before, strict=True))
    assert all(torch.equal(p, own) for p, own in zip(model.parameters(), local, strict=True))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="inner_steps is 0"):
        made(inner_steps=0)
    with pytest.raises(InvalidRequest, match=r"parameter '0\.weight' is on the meta device"):
        made(model=module().to("meta"))
    with pytest.raises(InvalidRequest, match="no parameter of the module is trainable"):
        made(model=module().requires_grad_(False))


@pytest.mark.parametrize("policy", [Asynchronous(), BoundedStaleness(max_staleness=1), LocalSteps(inner_steps=2)])
def test_fsdp_takes_a_policy_only_where_backward_sees_what_forward_saw(policy: Any) -> None:
    def wrap(strategy: ShardingStrategy, **options: Any) -> Any:
        steps = FakeSteps()
        return FSDP(module(), fake_group(steps), sharding_strategy=strategy, policy=policy, **options), steps

    if isinstance(policy, LocalSteps):
        with pytest.raises(InvalidRequest, match="use axon_ps.parallel.DiLoCo or LocalSGD"):
            wrap(ShardingStrategy.SHARD_GRAD_OP)
        return
    with pytest.raises(InvalidRequest, match="not FULL_SHARD"):
        wrap(ShardingStrategy.FULL_SHARD)
    for strategy, options in (
        (ShardingStrategy.SHARD_GRAD_OP, {}),
        (ShardingStrategy.FULL_SHARD, {"cpu_offload": CPUOffload.PARAMS}),
    ):
        model, steps = wrap(strategy, **options)
        assert steps.spec.policy == policy
        del model


def test_an_error_loses_no_progress_and_the_same_numbers_are_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model, steps = made(LocalSGD)
    vote, push, failing = steps.vote, steps.push, ["push", "vote"]
    pushed: list[tuple[int, bytes]] = []

    def failing_push(unit: int, grad: Any, ticket: Any, done: Any = None, **where: Any) -> Any:
        if failing[:1] == ["push"] and unit == 1:
            failing.pop(0)
            raise KeyboardInterrupt
        pushed.append((unit, grad.tobytes()))
        steps.grads.pop(unit, None)  # the servers drop what they have
        return push(unit, grad, ticket, done, **where)

    def failing_vote(*args: Any, **options: Any) -> Any:
        if failing[:1] == ["vote"]:
            failing.pop(0)
            raise Timeout("no decision")
        return vote(*args, **options)

    monkeypatch.setattr(steps, "push", failing_push)
    monkeypatch.setattr(steps, "vote", failing_vote)
    with pytest.raises(KeyboardInterrupt):
        train(model, trainer.step, 3)
    with pytest.raises(Timeout):
        train(model, trainer.step, 1, seed=1)
    results = train(model, trainer.step, 3, seed=2)
    assert [unit for unit, _ in pushed] == [0, 0, 1, 0, 1]
    assert len({data for unit, data in pushed if unit == 0}) == 1
    assert results[-1].committed
    assert_trained_by_plain_torch(model, (3, 0), (1, 1), (3, 2))
    assert trainer.statistics()["inner_steps_committed"] == 3
    train(model, trainer.step, 3, seed=3)
    assert trainer.statistics()["inner_steps_committed"] == 10


def test_parameters_that_were_moved_in_part_are_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model, steps = made(LocalSGD, overlap_steps=1)
    train(model, trainer.step, 3)
    fragment, count = trainer._fragments[0], iter(range(10))
    local = fragment._local

    def interrupted(wrapped: Any) -> torch.Tensor:
        if next(count) == 1:  # the first unit has its new values
            raise KeyboardInterrupt
        return local(wrapped)

    monkeypatch.setattr(fragment, "_local", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, trainer.step, 1)
    result = trainer.step()
    assert not result.committed
    assert "it pulled" in result.reason
    for param, value in zip(model.parameters(), parameters(trainer, steps.values), strict=True):
        assert torch.equal(param, value)
