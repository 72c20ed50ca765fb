"""`Pipeline` on ranks that are threads, and in one process, computes what the sequential model computes.

Tests of `parallel/pipeline/pipeline.py`.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Broken, Disagreement, InvalidRequest, Misuse
from axon_ps.parallel.pipeline import (
    Pipeline,
    PipelineMemoryStats,
    PipelineSchedule,
    PipelineStage,
    ideal_bubble,
)
from axon_ps.parallel.pipeline.schedule import ActionKind
from axon_ps.parallel.pipeline.stage import SPLITS_RIGHT, torch_version

WIDTH, ROWS = 6, 16
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = PipelineSchedule
needs_right_splits = pytest.mark.skipif(
    torch_version() < SPLITS_RIGHT, reason="ZERO_BUBBLE needs torch 2.13, and refuses older ones"
)
SCHEDULES = [
    pytest.param(s, marks=needs_right_splits if s is ZERO_BUBBLE else (), id=s.value) for s in PipelineSchedule
]


@pytest.fixture(autouse=True)
def one_thread_each() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_threads(ranks: int, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What `work` returns on each rank, or raises."""
    groups = ProcessGroup.mock(ranks)
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(groups[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return results


def well(results: Sequence[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


def blocks(count: int = 8) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(count)))


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def sequential(
    model: nn.Module, x: Any, y: Tensor, loss_fn: Any = functional.mse_loss
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return loss.item(), grads


def grads_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """By the names of the sequential model."""
    named = pipeline.named_parameters(remove_duplicate=False)
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def merged(results: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: grad for result in results for name, grad in result.items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_sequential_gradients(schedule: PipelineSchedule) -> None:
    """4 ranks x 8 microbatches; also peaks, timeline and inference."""
    model, (x, y) = blocks(), batch()
    loss, expected = sequential(model, x, y)
    output = model(x)
    stages = 8 if schedule.loops else 4

    def work(group: ProcessGroup) -> Any:
        own = copy.deepcopy(parts[group.rank])
        options: Any = {"num_microbatches": 8, "schedule": schedule, "loss_fn": functional.mse_loss}
        with Pipeline.from_modules(own, stages, group, **options) as pipeline:
            first = pipeline.step(x if pipeline.is_first else None, y if pipeline.is_last else None)
            grads = grads_of(pipeline)
            stats, timeline = pipeline.memory_stats(), pipeline.timeline()
            pipeline.step(x, y)
            twice = grads_of(pipeline)
            everywhere, last = pipeline(x, everywhere=True), pipeline(x)
            assert (last is not None) is pipeline.is_last
            assert pipeline.num_stages == stages
            return first, grads, stats, timeline, twice, everywhere

    model.zero_grad()
    parts = [copy.deepcopy(model) for _ in range(4)]
    results = well(on_threads(4, work))
    assert_equal(merged([r[1] for r in results]), expected)
    assert_equal(merged([r[4] for r in results]), {n: 2 * g for n, g in expected.items()})
    for rank, (got, _, stats, timeline, _, everywhere) in enumerate(results):
        assert got.item() == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(everywhere, output.detach())
        formula = {
            GPIPE: PipelineMemoryStats.gpipe_peak_activations(4, 8),
            ONE_F_ONE_B: PipelineMemoryStats.one_f_one_b_peak_activations(4, 8, rank),
            INTERLEAVED: PipelineMemoryStats.interleaved_peak_activations(4, 2, 8, rank),
        }
        assert stats.peak_activations == stats.expected == formula.get(schedule, stats.expected)
        backwards = 2 if schedule is ZERO_BUBBLE else 1
        assert len(timeline.spans) == stages * 8 * (1 + backwards)
        # In units of actions, not of seconds: who runs when on this machine is chance.
        cost = {
            ActionKind.FORWARD: 1.0,
            ActionKind.BACKWARD: 2.0,
            ActionKind.BACKWARD_INPUT: 1.0,
            ActionKind.BACKWARD_WEIGHT: 1.0,
        }
        units = type(timeline)(tuple(s._replace(cpu_s=cost[s.action.kind]) for s in timeline.spans), 4).replayed()
        if schedule is ZERO_BUBBLE:
            assert units.bubble_fraction < 0.5 * ideal_bubble(4, 8, 2)
        else:
            assert units.bubble_fraction == pytest.approx(ideal_bubble(4, 8, stages // 4), rel=0.15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_stages_in_one_process(schedule: PipelineSchedule) -> None:
    model, (x, y) = blocks(), batch(13)  # microbatches of unequal size
    loss, expected = sequential(copy.deepcopy(model), x, y)
    options: Any = {"num_microbatches": 4, "schedule": schedule, "loss_fn": functional.mse_loss}
    pipeline = Pipeline.from_modules(model, 3, sizes=[1, 5, 2], **options)
    assert pipeline.step(x, y).item() == pytest.approx(loss, rel=1e-6)
    assert_equal(grads_of(pipeline), expected)
    assert pipeline.memory_stats().peak_activations == (12 if schedule is GPIPE else 3)
    torch.testing.assert_close(pipeline(x), model(x).detach())
    assert pipeline.timeline().bubble_fraction < 1.0
    assert pipeline.memory_stats() == PipelineMemoryStats(
        peak_activations=0, peak_by_stage={0: 0, 1: 0, 2: 0}, expected=0
    )


def test_state_dicts_do_not_depend_on_the_cut() -> None:
    model = language_model()

    def work(group: ProcessGroup) -> dict[str, Tensor]:
        pipeline = Pipeline.from_modules(copies[group.rank], 3, group, num_microbatches=1)
        return pipeline.state_dict()

    copies = [copy.deepcopy(model) for _ in range(3)]
    saved = merged(well(on_threads(3, work)))
    assert sorted(saved) == sorted(model.state_dict())
    loaded = Pipeline.from_modules(copy.deepcopy(model), 2, num_microbatches=1)
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    loaded.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    by_hand = Pipeline([PipelineStage(nn.Linear(2, 2)), PipelineStage(nn.Linear(2, 2))], num_microbatches=1)
    assert list(by_hand.state_dict()) == ["stages.0.weight", "stages.0.bias", "stages.1.weight", "stages.1.bias"]


def test_unequal_stages_and_several_on_a_rank() -> None:
    model, (x, y) = blocks(7), batch(11)
    _, expected = sequential(copy.deepcopy(model), x, y, nn.MSELoss(reduction="sum"))
    parts = [copy.deepcopy(model) for _ in range(2)]

    def work(group: ProcessGroup) -> dict[str, Tensor]:
        options: Any = {"num_microbatches": 5, "loss_fn": nn.MSELoss(reduction="sum"), "loss_reduction": "sum"}
        with Pipeline.from_modules(parts[group.rank], 3, group, sizes=[1, 4, 2], **options) as pipeline:
            assert pipeline.local_stages == ((0, 1), (2,))[group.rank]
            pipeline.step(x, y)
            pipeline.step(x[:6], y[:6])  # another batch size
            pipeline.zero_grad()
            pipeline.step(x, y)
            return grads_of(pipeline)

    assert_equal(merged(well(on_threads(2, work))), expected)


class Fork(nn.Module):
    """A tuple of different shapes and dtypes: f32[B, 4], f64[B, 2, 3], f32[B, 6] without a gradient, i64[B]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        right = self.right(x.double()).view(-1, 2, 3)
        return self.left(x), right, x.detach(), (x[:, 0] > 0).long()


class Swap(nn.Module):
    """Passes the tuple on, changed; one tensor stays unused by who comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor, plain: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return right.transpose(1, 2), self.inner(left), plain, index, left * 2.0


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(2, WIDTH), nn.Linear(4 + 6, WIDTH)

    def forward(self, right: Tensor, left: Tensor, plain: Tensor, index: Tensor, unused: Tensor) -> Tensor:
        joined = torch.cat((left, right.flatten(1).float()), dim=1)
        return self.out(torch.tanh(joined)) + plain + self.table(index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_may_return_tuples_of_any_shapes(schedule: PipelineSchedule) -> None:
    torch.manual_seed(1)
    parts, (x, y) = [Fork(), Swap(), Join()], batch(7)
    reference = copy.deepcopy(parts)
    functional.mse_loss(reference[2](*reference[1](*reference[0](x))), y).backward()
    expected = {f"{i}.{n}": p.grad for i, part in enumerate(reference) for n, p in part.named_parameters()}

    def work(group: ProcessGroup) -> dict[str, Tensor]:
        options: Any = {"num_microbatches": 3, "schedule": schedule, "loss_fn": functional.mse_loss}
        with Pipeline.from_modules(copy.deepcopy(parts), 3, group, **options) as pipeline:
            pipeline.step(x, y)
            return grads_of(pipeline)

    assert_equal(merged(well(on_threads(3, work))), expected)


class Head(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def language_model() -> nn.Sequential:
    torch.manual_seed(2)
    table = nn.Embedding(10, WIDTH)
    return nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Head(table))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_and_last_stage_share_the_embedding(schedule: PipelineSchedule) -> None:
    model = language_model()
    tokens = torch.randint(10, (8, 3), generator=torch.Generator().manual_seed(3))

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    loss, expected = sequential(copy.deepcopy(model), tokens, tokens.roll(1, 1), loss_fn)
    parts = [copy.deepcopy(model) for _ in range(2)]

    def work(group: ProcessGroup) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        options: Any = {"num_microbatches": 4, "schedule": schedule, "loss_fn": loss_fn}
        with Pipeline.from_modules(parts[group.rank], 2, group, **options) as pipeline:
            got = pipeline.step(tokens, tokens.roll(1, 1)).item()
            once = grads_of(pipeline)
            pipeline.step(tokens, tokens.roll(1, 1))  # accumulates, once
            return got, once, grads_of(pipeline)

    results = well(on_threads(2, work))
    assert results[0][0] == results[1][0] == pytest.approx(loss, rel=1e-6)
    assert_equal(merged([r[1] for r in results]), expected)
    assert_equal(merged([r[2] for r in results]), {n: 2 * g for n, g in expected.items()})
    assert torch.equal(results[0][1]["0.weight"], results[1][1]["3.weight"])


def test_shared_parameters_can_be_named() -> None:
    """Stages made one by one have a parameter each: they begin as the first one's and have the sum of gradients."""
    tokens, target = torch.arange(4), torch.tensor([1, 2, 3, 0])
    begin = [torch.full((4, 4), float(rank + 1)).tril() for rank in range(2)]
    shared = begin[0].clone().requires_grad_()
    functional.cross_entropy(functional.linear(functional.embedding(tokens, shared), shared), target).backward()

    def work(group: ProcessGroup | None, ranks: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
        modules = [nn.Embedding(4, 4, _weight=begin[0].clone()), nn.Linear(4, 4, bias=False)]
        modules[1].weight = nn.Parameter(begin[1].clone())
        tied = [((0, "weight"), (1, "weight"))]
        options: Any = {"num_microbatches": 2, "loss_fn": functional.cross_entropy, "tied": tied, "group": group}
        with Pipeline([PipelineStage(modules[rank], "cpu") for rank in ranks], **options) as pipeline:
            pipeline.step(tokens, target)
            return [(p.detach(), p.grad) for p in pipeline.parameters()]

    def separate(group: ProcessGroup) -> list[tuple[Tensor, Tensor | None]]:
        return work(group, [group.rank])

    for weight, grad in (*work(None, [0, 1]), *itertools.chain(*well(on_threads(2, separate)))):
        assert torch.equal(weight, begin[0])
        torch.testing.assert_close(grad, shared.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_stages_get_no_gradient(schedule: PipelineSchedule) -> None:
    model, (x, y) = blocks(4), batch()
    for module in (model[0], model[1], model[3]):
        module.requires_grad_(False)
    _, expected = sequential(copy.deepcopy(model), x, y)
    assert sorted(expected) == [f"2.{name}" for name in ("0.bias", "0.weight", "2.bias", "2.weight")]

    def work(group: ProcessGroup) -> dict[str, Tensor]:
        options: Any = {"num_microbatches": 4, "schedule": schedule, "loss_fn": functional.mse_loss}
        with Pipeline.from_modules(copy.deepcopy(model), 4, group, **options) as pipeline:
            pipeline.step(x, y)
            return grads_of(pipeline)

    assert_equal(merged(well(on_threads(4, work))), expected)


class Trouble(nn.Module):
    """Fails in the forward or the backward of one microbatch."""

    def __init__(self, phase: str, microbatch: int) -> None:
        super().__init__()
        self.phase, self.microbatch, self.seen = phase, microbatch, 0

    def forward(self, x: Tensor) -> Tensor:
        now = self.seen == self.microbatch
        self.seen += 1
        if now and self.phase == "forward":
            raise ValueError("out of ideas")
        if now and x.requires_grad:
            x.register_hook(self.fail)
        return x * 1.0

    def fail(self, grad: Tensor) -> None:
        raise ValueError("out of ideas")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("phase", "stage", "microbatch"), [("forward", 0, 0), ("forward", 1, 2), ("forward", 2, 5), ("backward", 1, 5)]
)
def test_an_error_in_a_stage_ends_all_ranks(
    schedule: PipelineSchedule, phase: str, stage: int, microbatch: int
) -> None:
    x, y = batch(6)
    model = blocks(3)

    def work(group: ProcessGroup) -> tuple[Exception, Exception, float]:
        modules = copy.deepcopy(list(model))
        modules[stage] = nn.Sequential(modules[stage], Trouble(phase, microbatch), nn.Linear(WIDTH, WIDTH))
        options: Any = {"num_microbatches": 6, "schedule": schedule, "loss_fn": functional.mse_loss}
        pipeline = Pipeline.from_modules(modules, 3, group, **options)
        with pytest.raises((ValueError, Broken)) as raised:
            pipeline.step(x, y)
        with pytest.raises(Broken) as over:
            pipeline.step(x, y)
        with Pipeline.from_modules(copy.deepcopy(list(model)), 3, group, **options) as another:
            return raised.value, over.value, another.step(x, y).item()

    results = well(on_threads(3, work))
    message = f"stage {stage} on rank {stage} of the pipeline failed in {phase}"
    for rank, (raised, over, loss) in enumerate(results):
        if rank == stage:
            assert type(raised) is ValueError
            assert raised.__notes__[0].startswith(message)
        else:
            assert type(raised) is Broken
            assert re.match(f"{message}.* of microbatch {microbatch}: ValueError: out of ideas", str(raised))
        assert message in str(over)
        assert loss == pytest.approx(functional.mse_loss(model(x), y).item(), rel=1e-5)


class Interrupted(BaseException):
    """As Ctrl-C is."""


class Interrupt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise Interrupted


def test_a_rank_that_leaves_does_not_hang_the_others() -> None:
    x, y = batch(6)

    def work(group: ProcessGroup) -> str:
        modules = [nn.Linear(WIDTH, WIDTH), Interrupt(), nn.Linear(WIDTH, WIDTH)]
        pipeline = Pipeline.from_modules(modules, 3, group, num_microbatches=3, loss_fn=functional.mse_loss)
        with pytest.raises((Interrupted, Broken)) as raised:
            pipeline.step(x, y)
        with pytest.raises(Broken, match="rank 1 left the pipeline by Interrupted"):
            pipeline(x)
        return type(raised.value).__name__

    assert well(on_threads(3, work)) == ["Broken", "Interrupted", "Broken"]


def test_alone_a_pipeline_survives_errors() -> None:
    (x, y), trouble = batch(6), Trouble("forward", 1)
    modules = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(trouble, nn.Linear(WIDTH, WIDTH)))
    pipeline = Pipeline.from_modules(modules, 2, num_microbatches=3, loss_fn=functional.mse_loss)
    with pytest.raises(ValueError, match="out of ideas"):
        pipeline.step(x, y)
    assert pipeline.step(x, y).item() == pytest.approx(functional.mse_loss(modules(x), y).item())
    with pytest.raises(RuntimeError, match="zero-dimensional"):
        Pipeline.from_modules([nn.Flatten(), Scalar()], 2, num_microbatches=2)(x)


class Scalar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_a_bad_batch_on_one_rank_ends_all() -> None:
    x, y = batch(4)

    def work(group: ProcessGroup) -> str:
        pipeline = Pipeline.from_modules(blocks(2), 2, group, num_microbatches=3, loss_fn=functional.mse_loss)
        with pytest.raises((InvalidRequest, Broken)) as raised:
            pipeline.step(x[:2] if group.rank == 0 else x, y)
        return str(raised.value)

    first, second = well(on_threads(2, work))
    assert "the batch has [2] rows; needed is one number, at least 3" in first
    assert "rank 0 of the pipeline was given a batch that it cannot use: InvalidRequest: the batch has" in second


def test_ranks_must_make_the_same_pipeline() -> None:
    def work(group: ProcessGroup) -> str:
        with pytest.raises(Disagreement) as raised:
            Pipeline([PipelineStage(nn.Identity())], num_microbatches=2 + group.rank, group=group)
        return str(raised.value)

    assert all("rank 0: 1f1b, 2 microbatches" in message for message in well(on_threads(2, work)))


def test_what_cannot_be_is_refused_here() -> None:
    with pytest.raises(InvalidRequest, match="2 modules were to become 3 stages"):
        Pipeline.from_modules(blocks(2), 3, num_microbatches=1)
    with pytest.raises(InvalidRequest, match=r"sizes are \[1, 2\]"):
        Pipeline.from_modules(blocks(2), 2, sizes=[1, 2], num_microbatches=1)
    with pytest.raises(InvalidRequest, match="loss_reduction"):
        Pipeline([PipelineStage(nn.Identity())], num_microbatches=1, loss_reduction="max")
    pipeline = Pipeline.from_modules(blocks(2), 2, num_microbatches=2)
    with pytest.raises(Misuse, match="no loss_fn"):
        pipeline.step(*batch())
    with pytest.raises(Misuse, match="has not done a step"):
        pipeline.timeline()
    with pytest.raises(InvalidRequest, match="batch is None"):
        pipeline()
    learns = Pipeline.from_modules(blocks(2), 2, num_microbatches=2, loss_fn=lambda output: output)
    with pytest.raises(InvalidRequest, match=r"returned a \(8, 6\) tensor"):
        learns.step(batch()[0])
    pipeline.close()


def test_a_torch_that_splits_backward_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(InvalidRequest, match=r"torch 2\.12.*use torch 2\.13 or later"):
        Pipeline.from_modules(blocks(), 4, schedule=ZERO_BUBBLE, num_microbatches=4)
