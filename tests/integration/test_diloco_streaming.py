"""Streaming DiLoCo on shard servers equals a simulation of the algorithm in plain torch; workers come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import results_of
from deadlines import HANG_S, WHOLE_S
from parity_model import Block, Values, batch, build
from test_diloco import OPTIONS, adamw, open_pipe, step_after_restore, values_of

INNER, FRAGMENTS, OVERLAP, STEPS, WORKERS = 6, 3, 1, 20, 2
INTERVAL = INNER // FRAGMENTS


def fragment_of(name: str) -> int:
    """The root is the first unit, then the two blocks."""
    return 1 + int(name.split(".")[1]) if name.startswith("blocks.") else 0


class Replica:
    """One worker of the simulation."""

    def __init__(self) -> None:
        self.model = build()
        self.inner = adamw(self.model)
        self.sent: dict[str, torch.Tensor] = {}


def simulate(mixing: float | None) -> list[Values]:
    """Each worker's values after `STEPS` steps, every outer step included."""
    shared = dict(build().named_parameters())
    outer = [
        torch.optim.SGD([p for n, p in shared.items() if fragment_of(n) == i], lr=0.7, momentum=0.9, nesterov=True)
        for i in range(FRAGMENTS)
    ]
    replicas = [Replica() for _ in range(WORKERS)]
    under_way = None
    for step in range(STEPS):
        for rank, replica in enumerate(replicas):
            replica.model(batch(step, rank)).backward()
            replica.inner.step()
            replica.inner.zero_grad()
        if under_way is not None and step - under_way[1] == OVERLAP:
            apply(shared, outer, replicas, under_way[0], mixing)
            under_way = None
        if (step + 1) % INTERVAL == 0:
            fragment = (step + 1) // INTERVAL % FRAGMENTS - 1
            under_way = fragment % FRAGMENTS, step
            for replica in replicas:
                replica.sent = {n: p.detach().clone() for n, p in replica.model.named_parameters()}
    return [values_of(replica.model) for replica in replicas]


def apply(
    shared: dict[str, Any], outer: list[Any], replicas: list[Replica], fragment: int, mixing: float | None
) -> None:
    names = [n for n in shared if fragment_of(n) == fragment]
    for name in names:
        shared[name].grad = torch.stack([shared[name].detach() - r.sent[name] for r in replicas]).mean(0)
    outer[fragment].step()
    with torch.no_grad():
        for replica in replicas:
            params = dict(replica.model.named_parameters())
            for name in names:
                if mixing is None:
                    params[name].copy_(shared[name] + (params[name] - replica.sent[name]))
                else:
                    params[name].copy_(mixing * params[name] + (1 - mixing) * shared[name])


def make(world: axon_ps.World, **changes: Any) -> tuple[nn.Module, Any, parallel.DiLoCo]:
    torch.set_num_threads(1)
    model = build()
    inner = adamw(model)
    settings = {"inner_steps": INNER, "fragments": FRAGMENTS, "overlap_steps": OVERLAP, **changes}
    return model, inner, parallel.DiLoCo(
        model, inner, world, unit_types={Block}, plan_options=OPTIONS, **settings
    )  # fmt: skip


def train(model: nn.Module, inner: Any, diloco: parallel.DiLoCo, rank: int, steps: range) -> None:
    for step in steps:
        model(batch(step, rank)).backward()
        diloco.step()
        inner.zero_grad()


def work(directory: Path, mixing: float | None) -> dict[str, Any]:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, inner, diloco = make(world, mixing=mixing)
        train(model, inner, diloco, world.rank, range(STEPS))
        values, before = values_of(model), diloco.version
        results = diloco.sync()
        synced = values_of(model)
        with diloco.synced_parameters() as same:
            assert all(np.array_equal(v, synced[n]) for n, v in values_of(same).items())
        if world.rank == 0:
            world.save_checkpoint(str(directory / "checkpoint"))
        world.barrier("saved")
        train(model, inner, diloco, world.rank, range(INTERVAL))
        result = step_after_restore(world, model, diloco, directory)
        return {
            "values": values, "version": before, "committed": [r.committed for r in results], "synced": synced,
            "restored": values_of(model), "why": None if result is None else result.reason,
            "statistics": diloco.statistics(),
        }  # fmt: skip


@pytest.mark.parametrize("mixing", [0.3, None])
def test_streaming_diloco_equals_a_simulation_in_plain_torch(tmp_path: Path, mixing: float | None) -> None:
    with LocalCluster(shards=2, world_size=WORKERS) as cluster:
        results = [r.value for r in cluster.run_workers(work, args=(tmp_path, mixing))]
    for rank, (got, expected) in enumerate(zip(results, simulate(mixing), strict=True)):
        for name, value in expected.items():
            np.testing.assert_allclose(
                got["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} of worker {rank}"
            )
        ended = (STEPS - OVERLAP) // INTERVAL
        assert got["version"] in (ended, ended + 1)  # of the one under way the decision may have come
        assert got["committed"] == [True, True]  # of the last one nothing was trained since its outer step
    for name, value in results[0]["synced"].items():
        np.testing.assert_array_equal(value, results[1]["synced"][name])
        for result in results:
            np.testing.assert_array_equal(value, result["restored"][name])
    for result in results:
        assert "without this worker; it pulled" in result["why"]
        assert result["statistics"]["rebases"] == 0


def come_and_go(directory: Path) -> dict[str, Any]:
    """Three workers; the last one leaves in the middle of everything and comes back."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        rank = world.rank
        model, inner, diloco = make(world, wire_dtype="int4", param_wire_dtype="int4")
        train(model, inner, diloco, rank, range(9))
        if rank < 2:
            train(model, inner, diloco, rank, range(9, 30))
            if rank == 0:
                world.kv_wait("trained/1")
                open_pipe(directory / "alone", "ab")
            else:
                world.kv_put("trained/1", b"yes")
            world.kv_wait("joined")
            return finish(world, model, inner, diloco)
    open_pipe(directory / "alone", "rb")
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, inner, diloco = make(world, wire_dtype="int4", param_wire_dtype="int4")
        assert diloco.version > 3
        world.kv_put("joined", b"yes")
        return finish(world, model, inner, diloco)


def finish(world: axon_ps.World, model: nn.Module, inner: Any, diloco: parallel.DiLoCo) -> dict[str, Any]:
    train(model, inner, diloco, world.rank, range(30, 41))
    results = diloco.sync()
    assert all(result.committed for result in results)
    assert len(results) >= FRAGMENTS - 1
    before = values_of(model)
    assert diloco.sync() == []  # nothing was trained since
    world.barrier("done")
    return {"values": before, "statistics": diloco.statistics()}


def test_workers_of_fragments_come_and_go_and_agree_in_the_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alone")
    with LocalCluster(shards=2, world_size=3, min_workers=1) as cluster:
        results = [r.value for r in cluster.run_workers(come_and_go, args=(tmp_path,))]
    numel = sum(p.numel() for p in build().parameters())
    for result in results:
        for name, value in results[0]["values"].items():
            assert np.isfinite(value).all()
            np.testing.assert_array_equal(value, result["values"][name])
        statistics = result["statistics"]
        outer = statistics["outer_steps_committed"] + statistics["outer_steps_not_committed"]
        assert statistics["outer_steps_committed"] >= FRAGMENTS
        if result is results[2]:  # who joins uploads nothing
            assert statistics["wire_bytes_out"] < (outer / FRAGMENTS + 1) * 0.55 * numel


def released() -> list[str]:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        _, _, diloco = make(world, name="gpt")
        names = list(world.models.names)
        diloco.release()
        assert not list(world.models.names)
        with pytest.raises(axon_ps.errors.Misuse, match="was released"):
            diloco.outer_step()
        return names


def test_fragments_have_names_of_their_own_and_are_released_together() -> None:
    with LocalCluster(shards=1, world_size=1) as cluster:
        (result,) = cluster.run_workers(released)
    assert result.value == ["gpt", "gpt/1", "gpt/2"]


def freeze(directory: Path) -> dict[str, float]:
    """Worker 1 is frozen in the middle of its steps until worker 0 has made outer steps without it."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, inner, diloco = make(world)
        train(model, inner, diloco, world.rank, range(INTERVAL - 1))
        if world.rank == 1:
            open_pipe(directory / "trained", "ab")
            open_pipe(directory / "thawed", "rb")
        else:
            world.view.wait_members(lambda members: len(members.workers) == 1, 60.0, "worker 1 is there")
            train(model, inner, diloco, 0, range(INTERVAL, INTERVAL * (FRAGMENTS + 2)))
            open_pipe(directory / "went on", "ab")
            world.view.wait_members(lambda members: len(members.workers) == 2, 60.0, "worker 1 is away")
        step = 40
        while diloco.version < 4 * FRAGMENTS:
            train(model, inner, diloco, world.rank, range(step, step + 1))
            step += 1
        diloco.sync()
        values = values_of(model)
        world.barrier("done")
        return {"sum": float(sum(v.sum() for v in values.values())), **diloco.statistics()}


def test_a_worker_that_was_frozen_takes_what_it_missed_and_loses_nothing(tmp_path: Path) -> None:
    for name in ("trained", "thawed", "went on"):
        os.mkfifo(tmp_path / name)
    with LocalCluster(shards=1, world_size=2, min_workers=1, lease_s=0.5) as cluster:
        workers = cluster.start_workers(freeze, args=(tmp_path,))
        open_pipe(tmp_path / "trained", "rb")
        workers[1].kill(signal.SIGSTOP)
        open_pipe(tmp_path / "went on", "rb")
        workers[1].kill(signal.SIGCONT)
        open_pipe(tmp_path / "thawed", "ab")
        first, frozen = (r.value for r in results_of(workers, timeout_s=WHOLE_S, check=True))
    assert first["sum"] == frozen["sum"]
    assert frozen["rebases"] >= FRAGMENTS
    assert frozen["pulls"] == 1  # its start
    for statistics in (first, frozen):
        assert statistics["inner_steps_committed"] == pytest.approx(statistics["inner_steps"])


def leave_the_loop_early() -> dict[str, Any]:
    """Worker 0 stops while an outer step is under way that worker 1 has ended; both sync, and release."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, inner, diloco = make(world)
        train(model, inner, diloco, world.rank, range(INTERVAL))
        if world.rank == 1:
            train(model, inner, diloco, 1, range(INTERVAL, INTERVAL + OVERLAP))
            assert diloco.version == 1
            world.kv_put("ended", b"yes")
        else:
            world.kv_wait("ended")
        committed = [result.committed for result in diloco.sync()]
        values = values_of(model)
        train(model, inner, diloco, world.rank, range(INTERVAL + world.rank))  # one of them has begun an outer step
        diloco.release()
        return {"committed": committed, "values": values}


def test_workers_sync_and_release_wherever_each_is() -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        first, second = (r.value for r in cluster.run_workers(leave_the_loop_early))
    assert first["committed"] == second["committed"] == [True] * len(first["committed"])
    assert len(first["committed"]) >= FRAGMENTS - 1
    for name, value in first["values"].items():
        np.testing.assert_array_equal(value, second["values"][name])
