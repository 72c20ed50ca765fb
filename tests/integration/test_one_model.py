"""A second model in one job is refused, in every strategy and order of making, on every rank."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import errors, parallel
from axon_ps.testing import LocalCluster

SERVED = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
MAKERS = (*SERVED, "DiLoCo")


class Teacher(nn.Sequential):
    """16 parameters."""


class Student(nn.Sequential):
    """As many, laid out the same."""


class Larger(nn.Sequential):
    """Laid out otherwise."""


def build(kind: type[nn.Sequential], value: float) -> nn.Module:
    module = kind(nn.Linear(4, 5 if kind is Larger else 3), nn.Identity())
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(value)
    return module


def make(world: axon_ps.World, kind: type[nn.Sequential], value: float, maker: str) -> Any:
    module, group = build(kind, value), world.default_group
    if maker == "DiLoCo":
        return parallel.DiLoCo(module, torch.optim.SGD(module.parameters(), lr=0.1), group, inner_steps=2)
    return parallel.FSDP(module, group, sharding_strategy=parallel.ShardingStrategy[maker])


def refusal(attempt: Callable[[], object], wanted: type[errors.AxonError] = errors.Misuse) -> str:
    try:
        attempt()
    except wanted as error:
        return str(error)
    return ""


def second_models(first_maker: str) -> Any:
    """Every second model after every first one, while the first one lives; and what the first one is then."""
    found = {}
    with axon_ps.World.init() as world:
        first = make(world, Teacher, 1.0, first_maker)
        order = list(itertools.product(MAKERS, (Student, Teacher, Larger)))
        for maker, kind in order if world.rank else order[::-1]:
            found[maker, kind.__name__] = refusal(lambda m=maker, k=kind: make(world, k, 2.0, m))  # type: ignore[misc]
        if world.rank == 0:  # on one rank only
            found["alone"] = refusal(lambda: make(world, Student, 2.0, "FULL_SHARD"))
        apart = [
            make(world, kind, value, "NO_SHARD") for kind, value in ((Student, 3.0), (Larger, 4.0), (Teacher, 5.0))
        ]
        kept = [float(next(iter(model.state_dict().values())).mean()) for model in apart]
        module = first.model if isinstance(first, parallel.DiLoCo) else first
        mine = float(next(iter(module.state_dict().values())).mean())
        del first, module
        gc.collect()
        found["deleted"] = refusal(lambda: make(world, Student, 2.0, "FULL_SHARD"))
    return found, kept, mine


@pytest.mark.parametrize("first", MAKERS)
def test_a_second_model_is_refused_on_every_rank_and_names_both(first: str) -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        results = [result.value for result in cluster.run_workers(second_models, args=(first,))]
    for rank, (found, kept, mine) in enumerate(results):
        assert ("alone" in found) == (rank == 0)
        for what, message in found.items():
            name = what[1] if isinstance(what, tuple) else "Student"
            size = 25 if name == "Larger" else 15
            assert f"{name} ({size} parameters) cannot be wrapped" in message, (rank, what)
            assert "has wrapped Teacher (15 parameters)" in message, (rank, what)
            assert "NO_SHARD" in message
        assert kept == [3.0, 4.0, 5.0]
        assert mine == 1.0


def models_by_rank() -> Any:
    """Each rank makes another model of the same layout; then both try the other's. What each was refused, and why."""
    with axon_ps.World.init() as world:
        mine, other = (Teacher, Student)[:: 1 if world.rank == 0 else -1]
        first = refusal(lambda: make(world, mine, float(world.rank), "FULL_SHARD"), errors.InvalidRequest)
        world.barrier("first")
        second = refusal(lambda: make(world, other, float(world.rank), "FULL_SHARD"))
        world.barrier("second")
        return first, second


def test_workers_that_make_two_models_in_different_orders_are_told_and_not_bound_to_each_others() -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        results = [result.value for result in cluster.run_workers(models_by_rank)]
    (refused,) = (rank for rank in range(2) if results[rank][0])
    assert "Student (15 parameters)" in results[refused][0]
    assert "Teacher (15 parameters)" in results[refused][0]
    assert results[refused][1] == ""  # it may make the job's model, having none yet
    assert results[1 - refused][0] == ""
    assert "cannot be wrapped" in results[1 - refused][1]


def comes_and_goes() -> Any:
    """What a process trained, and what it finds when it has left and joined again."""
    with axon_ps.World.init() as world:
        model = make(world, Teacher, 1.0, "FULL_SHARD")
        optimizer = parallel.SGD(model, lr=0.5)
        model(torch.ones(1, 4)).sum().backward()
        assert optimizer.step().committed
        trained = float(model.state_dict()["0.bias"].mean())
    with axon_ps.World.init() as world:
        again = make(world, Teacher, 7.0, "FULL_SHARD")
        return trained, float(again.state_dict()["0.bias"].mean())


def test_who_joins_again_registers_again_and_gets_the_jobs_values() -> None:
    with LocalCluster(shards=1, world_size=1) as cluster:
        ((trained, again),) = [result.value for result in cluster.run_workers(comes_and_goes)]
    assert trained == again == 0.5
