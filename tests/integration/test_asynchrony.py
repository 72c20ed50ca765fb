"""Replicas that step alone, as real processes: nobody is held up, the bound holds, each gradient counts once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import Asynchronous, BoundedStaleness, Policy
from axon_ps.parallel.fsdp.strategy import CPUOffload
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from deadlines import HANG_S
from parity_model import Block, batch, build

OPTIONS = PlanOptions(chunk_numel=512, min_slice_numel=128)
FAST, SLOW, MORE = 12, 2, 4


def wrapped(world: axon_ps.World, policy: Policy, **keep: Any) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = parallel.FSDP(
        build(),
        world.default_group,
        **(keep or {"sharding_strategy": parallel.ShardingStrategy.SHARD_GRAD_OP}),
        unit_types={Block},
        plan_options=OPTIONS,
        policy=policy,
    )
    return model, parallel.SGD(model, lr=0.2)


def loss_of(model: Any) -> float:
    """On batches that are not trained on, with the newest parameters."""
    plain = build()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return float(np.mean([float(plain(batch(500 + i, 0))) for i in range(4)]))


def train_alone(pipe: Path) -> dict[str, Any]:
    """Worker 1 waits, in the middle of a step, until worker 0 has made all of its own."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, optimizer = wrapped(world, Asynchronous())
        refused = ""
        if world.rank == 0:
            with pytest.raises(InvalidRequest) as error:
                parallel.FSDP(build(), world.default_group, policy=Asynchronous())
            refused = str(error.value)
        before = loss_of(model)
        world.barrier("begin")
        versions = []
        for step in range(FAST if world.rank == 0 else SLOW):
            loss = model(batch(step, world.rank))
            if world.rank == 1 and step == 0:
                world.kv_put("computing", b"yes")
                world.kv_wait("fast is done")
            elif world.rank == 0 and step == 0:
                world.kv_wait("computing")
            loss.backward()
            if world.rank == 0 and step == FAST // 2:
                with open(pipe, "ab"):  # the coordinator is killed now
                    pass
            result = optimizer.step()
            optimizer.zero_grad()
            assert result.committed, result.reason
            versions.append(result.version)
        if world.rank == 0:
            world.kv_put("fast is done", b"yes")
        world.steps.view.wait_version(FAST + SLOW)
        after = loss_of(model)
        counters = world._loop.run(world._coordinator.status()).counters
        values = {n: v.numpy().copy() for n, v in model.state_dict().items()}
        statistics = model.statistics()
        world.barrier("done")  # who leaves begins a generation, in which clocks begin anew
        return {
            "versions": versions,
            "loss": (before, after),
            "values": values,
            "statistics": statistics,
            "stalest": counters["staleness_max"],
            "refused": refused,
        }


def test_a_slow_worker_holds_up_nobody_and_a_lost_coordinator_costs_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "half"
    os.mkfifo(pipe)
    with LocalCluster(shards=2, world_size=2, durable=True, lease_s=15.0) as cluster:
        workers = cluster.start_workers(train_alone, args=(pipe,))
        with open(pipe, "rb"):
            pass
        cluster.kill("coordinator")
        cluster.restart("coordinator")
        results = [worker.result() for worker in workers]
    assert not any(r.error for r in results), results
    fast, slow = (r.value for r in results)
    assert fast["versions"] == list(range(1, FAST + 1))  # all while worker 1 was in its first step
    assert slow["versions"] == list(range(FAST + 1, FAST + SLOW + 1))
    assert fast["stalest"] == FAST
    for name, value in replay().items():
        np.testing.assert_allclose(slow["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for result in (fast, slow):
        before, after = result["loss"]
        assert after < before
        assert result["statistics"]["wire_clock"] in (FAST, SLOW)
        assert all(np.array_equal(fast["values"][n], v) for n, v in result["values"].items())
    assert "use ShardingStrategy.SHARD_GRAD_OP" in fast["refused"]


def replay() -> dict[str, np.ndarray[Any, Any]]:
    """The same in plain torch: the slow worker's first gradient is of the first values, applied after FAST steps."""
    model, first = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def apply(grads: list[torch.Tensor]) -> None:
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()

    def grads_of(module: torch.nn.Module, step: int, rank: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(module(batch(step, rank)), list(module.parameters())))

    late = grads_of(first, 0, 1)
    for step in range(FAST):
        apply(grads_of(model, step, 0))
    apply(late)
    apply(grads_of(model, 1, 1))
    return {name: value.numpy() for name, value in model.state_dict().items()}


def train_bounded(steps: int, bound: int) -> dict[str, Any]:
    """Everybody as fast as it can; then the last worker leaves in the middle of a step, and the others go on."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, optimizer = wrapped(world, BoundedStaleness(max_staleness=bound), cpu_offload=CPUOffload.PARAMS)
        before = loss_of(model)
        world.barrier("begin")
        ahead, aborted, committed = 0, 0, 0
        for step in range(steps):
            model(batch(step, world.replica)).backward()
            assert optimizer.step().committed
            optimizer.zero_grad()
            committed += 1
            statistics = world.steps.statistics()
            ahead = max(ahead, int(statistics["clock"] - statistics["slowest_clock"]))
        generation = world.generation
        world.barrier("together")
        if world.rank == 2:
            model(batch(0, 0)).backward()  # and it is gone
            return {"ahead": ahead, "committed": committed, "aborted": 0}
        world.view.wait_generation(generation + 1, 30.0)
        while committed < steps + MORE:  # the first was begun, with the last step, in the generation that is over
            model(batch(steps + committed, world.replica)).backward()
            result = optimizer.step()
            optimizer.zero_grad()
            committed += result.committed
            aborted += not result.committed
        world.steps.view.wait_version(3 * steps + 2 * MORE)
        after = loss_of(model)
        counters = world._loop.run(world._coordinator.status()).counters
        world.barrier("done")
        return {
            "ahead": ahead,
            "committed": committed,
            "aborted": aborted,
            "loss": (before, after),
            "version": world.version,
            "stalest": counters["staleness_max"],
        }


def test_with_a_bound_nobody_runs_ahead_of_it_and_a_leaver_costs_one_attempt_each() -> None:
    steps, bound = 8, 1
    with LocalCluster(shards=1, world_size=3, min_workers=1) as cluster:
        results = [r.value for r in cluster.run_workers(train_bounded, args=(steps, bound))]
    for result in results:
        assert result["ahead"] <= bound
    stayed = results[:2]
    assert [r["aborted"] for r in stayed] == [1, 1]
    assert [r["version"] for r in stayed] == [sum(r["committed"] for r in results)] * 2  # each once
    assert stayed[0]["stalest"] <= (3 - 1) * (2 * bound + 1)
    assert all(after < before for before, after in (r["loss"] for r in stayed))
