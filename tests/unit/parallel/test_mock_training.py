"""Training on workers that are threads, with the real engines in this process: every strategy against one process.

Tests of `parallel/fsdp/no_shard/local_checkpoint.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import World
from axon_ps.collectives.backends.mock import MockBackend, mock_contexts
from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import DDP, FSDP, SGD, AdamW, Mesh, ShardingStrategy
from axon_ps.testing import run_threads
from deadlines import HANG_S
from mock_ranks import close, generator

NO_SHARD = ShardingStrategy.NO_SHARD
STEPS, ROWS = 10, 8
State = dict[str, torch.Tensor]


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(16, 31), nn.Tanh(), nn.Linear(31, 7))
    values = generator(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=values) * 0.3)
    return made


INPUTS = torch.randn(STEPS, ROWS, 16, generator=generator(2))
TARGETS = torch.randn(STEPS, ROWS, 7, generator=generator(3))


def loss_of(made: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """Of this rank's rows."""
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return nn.functional.mse_loss(made(INPUTS[step, rows]), TARGETS[step, rows])


def single_process(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = STEPS) -> State:
    """What one process of torch's trains."""
    made = model()
    optimizer = make(made)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(made, step).backward()
        nn.utils.clip_grad_norm_(made.parameters(), 0.5)
        optimizer.step()
    return made.state_dict()


def adam(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=1e-2)


def train(made: Any, optimizer: torch.optim.Optimizer, world: World, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(made, step, world.rank, world.world_size).backward()
        made.clip_grad_norm(0.5)
        result = optimizer.step()
        assert result is None or result.committed  # type: ignore[attr-defined]


def full_parameters_of(made: FSDP) -> State:
    with made.summon_full_params():
        return {k: v.detach().clone() for k, v in made.module.state_dict().items()}


def sharded(world: World, strategy: ShardingStrategy, group: Any = None) -> State:
    made = FSDP(model(), group, sharding_strategy=strategy, unit_types={nn.Linear})
    train(made, AdamW(made.parameters(), lr=1e-2), world, range(STEPS))
    return full_parameters_of(made)


def same(states: list[State], expected: State) -> None:
    for state in states:
        for name, value in expected.items():
            close(state[name], value, 1e-5)


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("shards", [1, 2])
def test_every_strategy_on_two_threads_equals_one_process(strategy: ShardingStrategy, shards: int) -> None:
    same(run_threads(sharded, 2, args=(strategy,), shards=shards), single_process(adam))


def test_hybrid_shard_on_two_nodes_of_two_equals_one_process() -> None:
    same(run_threads(sharded, 4, args=(ShardingStrategy.HYBRID_SHARD,), nodes=2), single_process(adam))


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_a_world_of_one_needs_no_thread(strategy: ShardingStrategy) -> None:
    with World.mock() as world:
        assert World.current() is world
        same([sharded(world, strategy)], single_process(adam))
    assert World.current() is None


def test_groups_of_backends_train_as_well() -> None:
    def one(backend: MockBackend) -> State:
        group = axon_ps.ProcessGroup(backend)
        try:
            return sharded(group.world, ShardingStrategy.FULL_SHARD, group)
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        same(list(pool.map(one, MockBackend.create_world(2))), single_process(adam))


def test_a_norm_that_no_number_of_32_bits_can_be_is_infinite() -> None:
    """Servers sum it in 64 bits: `make lab NAME=fuzz` found a RuntimeError of torch's in the step."""
    with World.mock():
        made = FSDP(nn.Linear(64, 1))
        optimizer = AdamW(made.parameters(), lr=1e-3)
        (made(torch.ones(1, 64)) * 1e38).sum().backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        assert norm.item() == float("inf")


def test_data_parallel_with_an_optimizer_of_torchs_equals_one_process() -> None:
    def one(world: World) -> State:
        made = DDP(model())
        optimizer = adam(made)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(made, step, world.rank, world.world_size).backward()
            nn.utils.clip_grad_norm_(made.parameters(), 0.5)
            optimizer.step()
        return made.module.state_dict()

    same(run_threads(one, 2), single_process(adam))


def test_a_checkpoint_of_two_goes_on_with_three_workers_and_other_servers(tmp_path: Path) -> None:
    half = STEPS // 2

    def first(world: World) -> int:
        made = FSDP(model())
        train(made, SGD(made.parameters(), lr=0.1, momentum=0.9), world, range(half))
        return world.save_checkpoint(str(tmp_path), extra={"next": half}).version

    def second(world: World) -> tuple[int, State]:
        made = FSDP(model())
        optimizer = SGD(made.parameters(), lr=0.1, momentum=0.9)
        world.resume_checkpoint(str(tmp_path))
        begun = world.version
        train(made, optimizer, world, range(half, STEPS))
        return begun, full_parameters_of(made)

    assert run_threads(first, 4, shards=2) == [half] * 4
    found = run_threads(second, 2, shards=3)
    assert [begun for begun, _ in found] == [half] * 2
    same([state for _, state in found], single_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)))


def test_two_jobs_at_once_know_nothing_of_each_other() -> None:
    first, second = World.mock(), World.mock()
    with second, first:
        one, other = FSDP(model(), first), FSDP(model(), second)
        optimizers = AdamW(one.parameters(), lr=1e-2), AdamW(other.parameters(), lr=1e-2)
        train(one, optimizers[0], first, range(STEPS))
        train(other, optimizers[1], second, range(1))
        assert (first.version, second.version) == (STEPS, 1)
        same([full_parameters_of(one)], single_process(adam))
        same([full_parameters_of(other)], single_process(adam, steps=1))


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_who_fails_ends_the_others_at_once_and_is_what_is_raised(strategy: ShardingStrategy) -> None:
    def fail(world: World) -> None:
        made = FSDP(model(), sharding_strategy=strategy)
        optimizer = AdamW(made.parameters(), lr=1e-2)
        for step in range(STEPS):
            loss_of(made, step).backward()
            if (step, world.rank) == (2, 1):
                raise ZeroDivisionError("of rank 1")
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        run_threads(fail, 2, timeout_s=HANG_S)


def test_nothing_is_left_behind_closed_or_not() -> None:
    gc.collect()
    before = set(threading.enumerate())

    def ours() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("axon-ps") and t not in before]

    def end() -> None:
        gc.collect()  # wrappers are in circles of references
        for thread in ours():
            thread.join(20)
            assert not thread.is_alive()

    run_threads(sharded, 2, args=(ShardingStrategy.HYBRID_SHARD,))
    end()
    group = axon_ps.ProcessGroup.mock()
    assert not ours(), "a group begins a job only when it needs one"
    made = FSDP(model(), group)
    train(made, AdamW(made.parameters(), lr=1e-2), group.world, range(2))
    assert "axon-ps-mock" in [t.name for t in ours()]
    del made, group
    end()


@pytest.mark.parametrize("strategy", [s for s in ShardingStrategy if s is not ShardingStrategy.NO_SHARD])
def test_servers_train_for_the_whole_world_only(strategy: ShardingStrategy) -> None:
    def one(world: World) -> None:
        subgroup = world.new_group([0])
        if world.rank == 0:
            message = rf"sub-group, of 1 of the world's 2 workers.*{strategy.name}.*NO_SHARD"
            with pytest.raises(InvalidRequest, match=message):
                FSDP(model(), subgroup, sharding_strategy=strategy)
        world.barrier()

    run_threads(one, 2)


def test_without_servers_each_line_of_a_mesh_trains_for_itself(tmp_path: Path) -> None:
    def one(world: World) -> tuple[State, State]:
        data = Mesh(world.default_group, data=2, tensor=2)
        line, place = data.coordinate("tensor"), data.group("data")
        made = FSDP(model(), place, sharding_strategy=ShardingStrategy.NO_SHARD)
        optimizer = adam(made)
        for step in range(STEPS if line else 1):
            optimizer.zero_grad()
            loss_of(made, step, place.rank, 2).backward()
            made.clip_grad_norm(0.5)
            optimizer.step()
        uri = str(tmp_path / str(line))
        made.save_checkpoint(uri, optimizer)
        again = FSDP(nn.Sequential(nn.Linear(16, 31), nn.Tanh(), nn.Linear(31, 7)), place, sharding_strategy=NO_SHARD)
        again.load_checkpoint(uri)
        return full_parameters_of(made), full_parameters_of(again)

    found = run_threads(one, 4)
    for states, steps in ((found[0::2], 1), (found[1::2], STEPS)):
        same([state for pair in states for state in pair], single_process(adam, steps))


def test_zero_by_number_is_a_strategy() -> None:
    zero = ShardingStrategy.ZERO_1, ShardingStrategy.ZERO_2, ShardingStrategy.ZERO_3
    assert zero == (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD)
    assert ShardingStrategy.ZERO_1 is ShardingStrategy.SHARD_GRAD_OP
    assert [s.name for s in ShardingStrategy] == ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]


def test_a_group_of_another_backend_has_no_job() -> None:
    mock = mock_contexts(1)[0]
    group = axon_ps.ProcessGroup(SharedMemoryBackend(mock))
    with pytest.raises(Misuse, match=r"made of a backend and is in no job.*World.mock\(\)"):
        FSDP(model(), group)
    group.close()
