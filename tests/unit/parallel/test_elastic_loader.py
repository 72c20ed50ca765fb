"""The loop over an `ElasticLoader`, with the real engines in this process: what it trains on, and what comes again.

Tests of `parallel/elastic_loader.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, TensorDataset

import axon_ps
from axon_ps import World
from axon_ps.data.elastic import Coordinates, ElasticBatch, Position, SamplePlan
from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.parallel import FSDP, SGD, BoundedStaleness, CPUOffload, ElasticLoader, GradScaler, ShardingStrategy
from axon_ps.testing import run_threads
from mock_ranks import generator

SAMPLES, BATCH, EPOCHS, MAX_NORM = 22, 8, 2, 0.3
INPUTS = torch.randn(SAMPLES, 6, generator=generator(2))
TARGETS = torch.randn(SAMPLES, 3, generator=generator(3))
DATA = TensorDataset(torch.arange(SAMPLES), INPUTS, TARGETS)
EACH_ONCE = [Counter(range(SAMPLES))] * EPOCHS
State = dict[str, torch.Tensor]


def close(values: State, expected: State) -> bool:
    """Equal but for the order of additions."""
    assert values.keys() == expected.keys()
    return all(torch.allclose(values[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())


def build() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    values = generator(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=values) * 0.3)
    return made


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def wrapped(world: World, **options: Any) -> tuple[FSDP, SGD]:
    model = FSDP(build(), world.default_group, unit_types={nn.Linear}, **options)
    return model, sgd(model.parameters())


def plain(max_norm: float = MAX_NORM) -> State:
    """What one process of torch's makes of the samples of each step."""
    plan = SamplePlan(SAMPLES, ElasticBatch(samples=BATCH, at_a_time=BATCH))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for step in plan.micro_batches(Position(epoch=epoch), Coordinates()):
            rows = plan.indices(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(INPUTS[rows]), TARGETS[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return model.state_dict()


def train(world: World, micro_batch_size: int | None, zero_first: bool, options: Any) -> tuple[list[Any], State]:
    """Each batch's epoch, samples and norm as torch's clipping tells it, and the values in the end."""
    model, optimizer = wrapped(world, **options)
    loader = ElasticLoader(DATA, model, BATCH, micro_batch_size=micro_batch_size)
    seen: list[Any] = []
    for epoch in loader.epochs(EPOCHS):
        for indices, x, y in loader:
            if zero_first:
                optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            result = optimizer.step()
            if not zero_first:
                optimizer.zero_grad()
                model.zero_grad()
            assert set(loader.samples) <= set(indices.tolist())
            seen.append((epoch, loader.samples, result.committed, float(norm)))
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize(("workers", "micro_batch_size"), [(1, None), (1, 3), (2, None), (3, 1), (3, 8)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "cpu_offload": CPUOffload.FULL},
    ],
    ids=["FULL_SHARD", "SHARD_GRAD_OP"],
)
def test_every_division_trains_as_one_process(
    options: Any, workers: int, micro_batch_size: int | None, zero_first: bool
) -> None:
    results = run_threads(train, workers, args=(micro_batch_size, zero_first, options))
    check(results, plain())


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_the_workers_of_a_node_divide_what_it_gets(micro_batch_size: int | None) -> None:
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    check(run_threads(train, 4, args=(micro_batch_size, False, options), nodes=2), plain())


def check(results: list[tuple[list[Any], State]], expected: State) -> None:
    counts = [Counter[int]() for _ in range(EPOCHS)]
    for seen, values in results:
        assert sum(committed for _, _, committed, _ in seen) == EPOCHS * 3
        assert [norm > 0 for _, _, _, norm in seen] == [committed for _, _, committed, _ in seen]
        assert close(values, expected)
        for epoch, taken, _, _ in seen:
            counts[epoch].update(taken)
    assert counts == EACH_ONCE


class Fetched(Dataset[Any]):
    """Rows, and how often each was fetched."""

    def __init__(self) -> None:
        self.times: Counter[int] = Counter()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.times[index] += 1
        return {"x": INPUTS[index], "index": torch.tensor(index)}


def again(world: World, changes: bool) -> tuple[list[list[int]], list[int], Counter[int]]:
    """The second and third step are aborted twice, since the workers commit different values."""
    model, optimizer = wrapped(world)
    data = Fetched()
    loader = ElasticLoader(data, model, BATCH)
    given, addresses, attempts = [], [], 0
    for batch in loader:
        step, attempts = model.version, attempts + 1
        given.append(batch.pop("index").tolist())
        addresses.append(batch["x"].data_ptr())
        assert torch.equal(batch["x"], INPUTS[given[-1]]), "unchanged, or fetched again"
        model(batch["x"]).square().mean().backward()
        if changes:
            batch["x"].zero_()
        aborts = step > 0 and attempts % 3
        result = optimizer.step(commit={"mine": world.rank if aborts else 0})
        assert result.committed != bool(aborts)
        assert not aborts or "the votes disagree on 'mine', which is committed with the step" in result.reason
        optimizer.zero_grad()
    return given, addresses, data.times


@pytest.mark.parametrize("changes", [False, True])
def test_a_batch_of_an_aborted_step_comes_again(changes: bool) -> None:
    def one(world: World) -> Any:
        return again(world, changes)

    used = Counter[int]()
    for given, addresses, times in run_threads(one, 2):
        steps = [given[0], given[1], given[3]] if given[1] == given[2] else []
        assert given == [steps[0], *[steps[1]] * 2, *[steps[2]] * 3]
        same = addresses[1] == addresses[2] and addresses[3] == addresses[4] == addresses[5]
        assert same or changes
        assert max(times.values()) == (3 if changes else 1)
        used.update(i for step in steps for i in step)
    assert used == EACH_ONCE[0]


def test_a_step_that_is_aborted_for_ever_is_an_error() -> None:
    def one(world: World) -> str:
        model, optimizer = wrapped(world)
        with pytest.raises(StepAborted) as error:
            for _, x, _ in ElasticLoader(DATA, model, BATCH, micro_batch_size=4 + 4 * world.rank):
                model(x).sum().backward()
                optimizer.step()
        return str(error.value)

    for message in run_threads(one, 2):
        assert message.startswith("3 steps in a row were aborted because of what the workers voted")
        assert "the votes disagree on 'samples', which is committed with the step" in message


def test_samples_that_were_dealt_to_others_do_not_count() -> None:
    """Rank 1 leaves when both have their first batch: that of rank 0 alone is no step."""

    def one(world: World) -> list[Any]:
        model, optimizer = wrapped(world)
        loader = ElasticLoader(DATA, model, BATCH)
        batches, reasons = iter(loader), []
        for _, x, _ in batches:
            if world.rank == 1:
                world.barrier()
                world.close()
                return []
            if not reasons:
                world.barrier()
                world.view.wait_members(lambda m: len(m.workers) == 1, 30.0, "the other left")
            reasons.append((loader.samples, step(model, optimizer, x)))
        return reasons

    (dealt, first), *others = run_threads(one, 2)[0]
    assert not first.committed
    assert first.reason == "the members changed after the samples of the step had been dealt to them"
    used = Counter(i for samples, _ in others for i in samples)
    assert (len(dealt), used) == (BATCH // 2, EACH_ONCE[0])


def test_a_worker_that_leaves_leaves_its_samples_to_the_others() -> None:
    """Rank 1 goes after its second step, in the middle of the third."""

    def one(world: World) -> list[Any]:
        model, optimizer = wrapped(world)
        loader = ElasticLoader(DATA, model, BATCH)
        used = []
        for _ in loader.epochs(EPOCHS):
            for _, x, y in loader:
                nn.functional.mse_loss(model(x), y).backward()
                if world.rank == 1 and model.version == 2:
                    world.close()
                    return used
                samples = loader.samples
                accumulates = model.runtime.accumulation.goes_on
                result = optimizer.step()
                optimizer.zero_grad()
                if result.committed or accumulates:
                    used.append((loader.position.epoch, samples))
        return [*used, model.state_dict()]

    first, second = run_threads(one, 2)
    assert close(first.pop(), plain(torch.inf))
    assert sum((Counter(s) for _, s in (*first, *second)), Counter()) == Counter([*range(SAMPLES)] * EPOCHS)
    assert len(first) > EPOCHS * 3, "it got the micro-batches of both"


# ---------------------------------------------------------------------- one worker


def step(model: FSDP, optimizer: SGD, x: torch.Tensor, **options: Any) -> axon_ps.types.StepResult:
    model(x).square().mean().backward()
    result = optimizer.step(**options)
    optimizer.zero_grad()
    return result


def test_a_step_that_is_skipped_has_used_its_samples(world: World) -> None:
    model, optimizer = wrapped(world)
    x = INPUTS.clone()
    x[3] = torch.nan
    loader, used, outcomes = ElasticLoader(TensorDataset(x), model, BATCH), Counter[int](), []
    for (batch,) in loader:
        used.update(loader.samples)
        outcomes.append(step(model, optimizer, batch).committed)
    assert (used, outcomes.count(False), model.version) == (EACH_ONCE[0], 1, 2)


def test_what_counts_for_nothing_is_not_even_multiplied() -> None:
    """Three workers and two samples in the last step; the third computes with one of them, and gets no numbers."""

    def one(world: World) -> State:
        model, optimizer = wrapped(world)
        loader = ElasticLoader(TensorDataset(INPUTS[:5], TARGETS[:5]), model, 3)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            (loss if loader.samples else loss * torch.inf).backward()
            assert optimizer.step().committed
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    for values in run_threads(one, 3):
        assert all(value.isfinite().all() for value in values.values())


def test_batches_that_the_program_accumulates_are_used_together(world: World) -> None:
    model, optimizer = wrapped(world)
    loader = ElasticLoader(DATA, model, 4, micro_batch_size=3)
    used, positions = Counter[int](), []
    for number, (_, x, y) in enumerate(loader):
        used.update(loader.samples)
        complete = number % 4 == 3 or loader.samples[-1:] == []  # two batches of two micro-batches
        if complete:
            nn.functional.mse_loss(model(x), y).backward()
            positions.append((optimizer.step().committed, loader.position.samples))
            optimizer.zero_grad()
        else:
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
    assert positions == [(True, 8), (True, 16)]
    optimizer.step()
    assert (used, loader.position) == (EACH_ONCE[0], Position(epoch=1))


def test_gradients_of_batches_of_other_sizes_are_weighted(world: World) -> None:
    """5 samples, 2 at a time: 1, 2 and 2 of them; the gradient is that of the mean."""
    model, optimizer = wrapped(world)
    loader = ElasticLoader(TensorDataset(INPUTS[:5], TARGETS[:5]), model, 5, micro_batch_size=2, shuffle=False)
    scaler = GradScaler(model, init_scale=8.0, growth_interval=2)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (sizes, scaler.get_scale()) == ([1, 2, 2], 8.0)
    reference = build()
    nn.functional.mse_loss(reference(INPUTS[:5]), TARGETS[:5]).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert close(model.state_dict(), reference.state_dict())


def test_it_goes_on_where_a_checkpoint_was_written(tmp_path: Path) -> None:
    used = Counter[int]()

    def run(world: World, stop: int) -> None:
        model, optimizer = wrapped(world)
        if stop == 0:
            world.restore_checkpoint(str(tmp_path))
            assert (model.version, model.committed["mine"]) == (4, {"step": 4})
        loader = ElasticLoader(DATA, model, BATCH)
        for _ in loader.epochs(EPOCHS):
            for _, x, _ in loader:
                samples = loader.samples
                assert step(model, optimizer, x, commit={"mine": {"step": model.version + 1}}).committed
                if not stop or model.version <= 4:
                    used.update(samples)
                if model.version == 4 and stop:
                    world.save_checkpoint(str(tmp_path))
                if model.version == stop:
                    return

    for stop in (5, 0):
        with World.mock() as world:
            run(world, stop)
    assert used == Counter([*range(SAMPLES)] * EPOCHS)


def test_a_loop_goes_back_when_the_job_does(world: World, tmp_path: Path) -> None:
    model, optimizer = wrapped(world)
    loader, positions = ElasticLoader(DATA, model, BATCH), []
    for _ in loader.epochs(EPOCHS):
        for _, x, _ in loader:
            if len(positions) == 2:
                world.save_checkpoint(str(tmp_path))
            if len(positions) == 4:
                world.restore_checkpoint(str(tmp_path))
                assert not step(model, optimizer, x).committed, "its samples are of what was undone"
                positions.append(Position())
                continue
            step(model, optimizer, x)
            positions.append(model.committed["samples"])
    found = [(p["epoch"], p["samples"]) if isinstance(p, dict) else None for p in positions]
    first, second = [(0, 8), (0, 16), (0, 22)], [(1, 8), (1, 16), (1, 22)]
    assert found == [*first, second[0], None, first[2], *second]


def test_one_iteration_at_a_time(world: World) -> None:
    model, optimizer = wrapped(world)
    loader = ElasticLoader(DATA, model, BATCH)
    assert len(loader) == 3
    older = iter(loader)
    first = next(older)
    newer = iter(loader)
    assert torch.equal(next(newer)[0], first[0]), "nothing has been used"
    with pytest.raises(Misuse, match="another iteration over this loader has begun"):
        next(older)
    step(model, optimizer, first[1])
    assert len(loader) == 2
    loader.close()


def test_one_loader_at_a_time(world: World) -> None:
    model, optimizer = wrapped(world)
    one, other = (ElasticLoader(DATA, model, BATCH, name=name) for name in ("one", "other"))
    with pytest.raises(Misuse, match="StackDataset makes one of several"):
        next(zip(one, other, strict=True))
    one.close()
    for _, x, _ in other:
        step(model, optimizer, x)
    assert (one.position, other.position) == (Position(), Position(epoch=1))
    for (_, x, _), (index, *_) in ElasticLoader(StackDataset(DATA, DATA), model, SAMPLES, name="both"):
        assert sorted(index.tolist()) == list(range(SAMPLES))
        step(model, optimizer, x)


def test_an_epoch_without_a_step_is_no_epoch(world: World) -> None:
    model, _ = wrapped(world)
    loader, seen = ElasticLoader(DATA, model, BATCH), 0
    with pytest.raises(Misuse, match=r"epoch 0 went by without optimizer\.step"):
        for _ in loader.epochs(1):
            seen += sum(len(x) for _, x, _ in loader)
    assert seen == SAMPLES


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def test_what_cannot_be_dealt_is_refused(world: World) -> None:
    model, optimizer = wrapped(world)
    with pytest.raises(InvalidRequest, match="no length"):
        ElasticLoader(Endless(), model, 1)
    with pytest.raises(InvalidRequest, match="leave sampler= out"):
        ElasticLoader(DATA, model, 1, sampler=[1])
    with pytest.raises(InvalidRequest, match="under NO_SHARD .* use DistributedSampler"):
        local = FSDP(build(), world.default_group, sharding_strategy=ShardingStrategy.NO_SHARD)
        ElasticLoader(DATA, local, 1)
    with pytest.raises(InvalidRequest, match="use DistributedSampler"):
        free = FSDP(
            build(),
            world.default_group,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            policy=BoundedStaleness(max_staleness=1),
            name="free",
        )
        ElasticLoader(DATA, free, 1)
    loader = ElasticLoader(DATA, model, BATCH)
    for _, x, _ in loader:
        step(model, optimizer, x)
        break
    with pytest.raises(InvalidRequest, match="seed=0, and this loader has 22 samples with shuffle=True, seed=1"):
        ElasticLoader(DATA, model, BATCH, seed=1)
    assert ElasticLoader(DATA, model, 3).position == Position(samples=BATCH), "another batch may follow"


def test_loader_workers(world: World) -> None:
    model, optimizer = wrapped(world)
    used = Counter[int]()
    loader = ElasticLoader(DATA, model, BATCH, num_workers=2, persistent_workers=True)
    for _ in loader.epochs(EPOCHS):
        for indices, x, _ in loader:
            used.update(indices.tolist())
            step(model, optimizer, x)
    assert used == Counter([*range(SAMPLES)] * EPOCHS)
    assert isinstance(loader._prefetched._loader, DataLoader)


def test_values_of_your_own(world: World) -> None:
    model, optimizer = wrapped(world)
    assert model.committed == {}
    assert step(model, optimizer, INPUTS, commit={"tokens": 7, "best": {"loss": 0.5}}).committed
    assert step(model, optimizer, INPUTS, commit={"tokens": 8}).committed
    assert model.committed == {"tokens": 8, "best": {"loss": 0.5}}
    for wrong, why in (({"x": {1, 2}}, "must be JSON"), ({"x": "y" * 5000}, "have 5003 bytes; at most 4096")):
        with pytest.raises(InvalidRequest, match=why):
            optimizer.step(commit=wrong)
    with pytest.raises(InvalidRequest, match="the loader commits 'samples' with this step"):
        for _, x, _ in ElasticLoader(DATA, model, BATCH):
            step(model, optimizer, x, commit={"samples": 1})
    local = FSDP(build(), world.default_group, sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(Misuse, match="nothing can be committed"):
        sgd(local.parameters()).step(commit={"tokens": 7})
    assert local.committed == {}
