"""No sample is lost or counted twice, whoever dies: the loop of the README, with processes that are killed in it.

Every worker writes down which samples it is given, in an attempt at which step, before it computes with them; and which
attempts have committed. A sample was used if its attempt has committed, whatever became of the worker. The oracles are
plain torch on the same samples, and the same job with nobody killed, of which every bit must be the same as long as the
number of replicas stays.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import axon_ps
from axon_ps.data.elastic import Coordinates, ElasticBatch, Position, SamplePlan
from axon_ps.observe import moments
from axon_ps.parallel import FSDP, SGD, ElasticLoader, ShardingStrategy
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster, run_threads
from axon_ps.testing.processes import COORDINATOR
from axon_ps.testing.workers import WorkerProcess
from axon_ps.types import Decision, Role
from checkpointed_job import until, versions
from deadlines import HANG_S
from pausing import make_pipes, pause, paused

SAMPLES, BATCH, EPOCHS, WIDTH = 44, 8, 2, 16
STEPS = EPOCHS * 6
"""An epoch ends with a step of 4 samples."""

SEEDED = threading.Lock()
"""Workers that are threads have one random generator."""

Values = dict[str, Any]


def build() -> nn.Module:
    with SEEDED:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


def train(world: axon_ps.World, notes: Path, **how: Any) -> Values:
    """The loop; the values in the end.

    Args:
        world: the world.
        notes: a directory, in which this worker writes down what it is given.
        how: `strategy`; `loader_workers`; `dies`: (version, number), to be killed there; `dies_knowing`:
            version, to be killed when that is decided; `pauses`: (version, pipes);
            `waits`: (version, workers), for so many to be there.
    """
    torch.set_num_threads(1)
    model = FSDP(
        build(),
        world.default_group,
        sharding_strategy=ShardingStrategy[how.get("strategy", "FULL_SHARD")],
        unit_types={nn.Linear},
        plan_options=PlanOptions(chunk_numel=64, min_slice_numel=16),
    )
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ElasticLoader(samples(), model, batch_size=BATCH, num_workers=how.get("loader_workers", 0))
    if "dies" in how:
        die_at(model, *how["dies"])
    if "dies_knowing" in how:
        die_knowing(world, how["dies_knowing"])
    with open(notes / f"{world.rank}-{os.getpid()}", "w") as file:
        for _ in loader.epochs(EPOCHS):
            for x, y in loader:
                if "pauses" in how and model.version == how["pauses"][0]:
                    pause(how.pop("pauses")[1])
                if "waits" in how and model.version == how["waits"][0]:
                    count = how.pop("waits")[1]
                    world.view.wait_members(lambda m, count=count: len(m.workers) == count, 30.0, "another joined")
                attempt = [model.version, model.runtime.accumulation.batch.generation]
                note(file, attempt=attempt, samples=loader.samples, epoch=loader.epoch)
                nn.functional.mse_loss(model(x), y).backward()
                result = optimizer.step()
                optimizer.zero_grad()
                if result.committed:
                    note(file, committed=attempt)
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def worker(notes: str, how: Mapping[str, Any]) -> Values:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        return train(world, Path(notes), **how)


def die_at(model: FSDP, version: int, number: int) -> None:
    """Have this process killed at a moment of the step after a version: at the first, second, ... that it reaches."""
    left = [number]

    def watcher(moment: moments.Moment, _: int) -> None:
        if model.version >= version:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    moments.watch(watcher)


def die_knowing(world: axon_ps.World, version: int) -> None:
    """Have this process killed when it receives the commit of a version: the program does not come to know of it."""
    client = world.models.client(0)
    on_event = client.on_event

    def watched(event: Any) -> None:
        if isinstance(event, Decision) and event.version >= version:
            os.kill(os.getpid(), signal.SIGKILL)
        on_event(event)

    client.on_event = watched  # type: ignore[method-assign]


def note(file: Any, **what: Any) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def used(notes: Path, before: Sequence[Path] = (), version: int = 0) -> list[Counter[int]]:
    """How often each sample was used, by epoch.

    Args:
        notes: what the workers wrote.
        before: what those wrote that died before the job went back to a checkpoint, of `version`.
        version: what they did up to it counts.
    """
    lines = [(line, False) for path in before for line in path.read_text().splitlines()]
    lines += [(line, True) for path in notes.iterdir() for line in path.read_text().splitlines()]
    attempts, committed = [], set[tuple[int, int, bool]]()
    for line, now in lines:
        found = json.loads(line)
        if "attempt" in found:
            attempts.append((*found["attempt"], now, found["epoch"], found["samples"]))
        elif now or found["committed"][0] < version:
            committed.add((*found["committed"], now))
    assert sorted(v for v, _, _ in committed) == list(range(STEPS)), "each step committed once"
    counts = [Counter[int]() for _ in range(EPOCHS)]
    for of_version, generation, now, epoch, taken in attempts:
        if (of_version, generation, now) in committed:
            counts[epoch].update(taken)
    return counts


EACH_ONCE = [Counter(range(SAMPLES))] * EPOCHS


def plain() -> Values:
    """Plain torch on the samples of each step."""
    x, y = samples().tensors
    plan = SamplePlan(SAMPLES, ElasticBatch(samples=BATCH, at_a_time=BATCH))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for step in plan.micro_batches(Position(epoch=epoch), Coordinates()):
            taken = plan.indices(step)
            nn.functional.mse_loss(model(x[taken]), y[taken]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory: pytest.TempPathFactory) -> Values:
    """What two workers make of it that nobody kills."""
    notes = tmp_path_factory.mktemp("notes")
    first, second = run_threads(train, 2, args=(notes,), shards=2)
    assert_same([first], second)
    assert_close([first])
    return first


def assert_same(results: Sequence[Values], expected: Values) -> None:
    """Every bit of them."""
    for values in results:
        assert all(np.array_equal(values[name], value) for name, value in expected.items())


def assert_close(results: Sequence[Values]) -> None:
    """They are plain torch's but for the order of additions."""
    for values in results:
        for name, value in plain().items():
            np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def start(cluster: LocalCluster, notes: Path, rank: int, *, standby: bool = False, **how: Any) -> WorkerProcess:
    notes.mkdir(exist_ok=True)
    env = {"AXON_PS_STANDBY": "1"} if standby else {}
    (started,) = cluster.start_workers(worker, ranks=[-1 if standby else rank], args=(str(notes), how), env=env)
    return started


def values_of(workers: Sequence[WorkerProcess]) -> list[Values]:
    results = [each.result() for each in workers]
    assert [result.error for result in results] == [""] * len(workers), results
    return [result.value for result in results]


def assert_killed(*workers: WorkerProcess) -> None:
    for each in workers:
        assert each.result().exit_code == -signal.SIGKILL


def moment_of(seed: int, first: int, last: int) -> tuple[int, int]:
    """Where to be killed: a version, and how many moments later; a step has about ten."""
    chance = random.Random(seed)
    return chance.randint(first, last), chance.randint(0, 9)


@pytest.mark.parametrize("seed", range(3))
def test_standbys_take_the_places_of_workers_that_are_killed(seed: int, tmp_path: Path, unfailed: Values) -> None:
    how = {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP"][seed % 2], "loader_workers": 2 * (seed == 0)}
    with LocalCluster(shards=2, world_size=2) as cluster:
        survivor = start(cluster, tmp_path, 0, **how)
        dies = {"dies_knowing": 3} if seed == 2 else {"dies": moment_of(seed, 1, 5)}
        killed = start(cluster, tmp_path, 1, **dies, **how)
        second = start(cluster, tmp_path, 1, standby=True, dies=moment_of(100 + seed, 6, 10), **how)
        assert_killed(killed, second)
        third = start(cluster, tmp_path, 1, standby=True, **how)
        values = values_of([survivor, third])
    assert_same(values, unfailed)
    assert used(tmp_path) == EACH_ONCE


@pytest.mark.parametrize("seed", range(3))
def test_survivors_take_over_and_a_joiner_takes_part_again(seed: int, tmp_path: Path) -> None:
    how = {"strategy": ["SHARD_GRAD_OP", "FULL_SHARD"][seed % 2]}
    with LocalCluster(shards=2, world_size=3, min_workers=1) as cluster:
        survivor = start(cluster, tmp_path, 0, waits=(9, 2), **how)
        killed = [start(cluster, tmp_path, rank, dies=moment_of(10 * seed + rank, 1, 7), **how) for rank in range(1, 3)]
        assert_killed(*killed)
        joiner = start(cluster, tmp_path, 1, **how)
        values = values_of([survivor, joiner])
    assert_close(values)
    assert used(tmp_path) == EACH_ONCE
    versions = {json.loads(line)["attempt"][0] for line in written_by(tmp_path, joiner) if "attempt" in line}
    assert versions >= set(range(9, STEPS)), "it took part"


def written_by(notes: Path, one: WorkerProcess) -> list[str]:
    (path,) = notes.glob(f"*-{one.process.pid}")
    return path.read_text().splitlines()


def test_the_coordinator_is_killed_and_comes_back(tmp_path: Path, unfailed: Values) -> None:
    make_pipes(tmp_path)
    notes = tmp_path / "notes"
    with LocalCluster(shards=2, world_size=2, durable=True) as cluster:
        workers = [start(cluster, notes, 0, pauses=(4, tmp_path)), start(cluster, notes, 1)]
        with paused(tmp_path):
            cluster.kill(COORDINATOR)
            cluster.restart(COORDINATOR)
        values = values_of(workers)
    assert_same(values, unfailed)
    assert used(notes) == EACH_ONCE


def test_everything_is_killed_and_goes_on_from_a_checkpoint(tmp_path: Path, unfailed: Values) -> None:
    make_pipes(tmp_path)
    notes, checkpoints = tmp_path / "before", tmp_path / "checkpoints"
    with LocalCluster(shards=2, world_size=2, checkpoint_dir=checkpoints, checkpoint_every="2") as cluster:
        workers = [start(cluster, notes, 0, pauses=(9, tmp_path)), start(cluster, notes, 1)]
        with paused(tmp_path):
            until(lambda: bool(versions(checkpoints)))
            for rank in range(2):
                cluster.kill(Role.SHARD, rank)
            cluster.kill(COORDINATOR)
        for each in workers:
            each.kill()
        cluster.restart(COORDINATOR)
        for rank in range(2):
            cluster.restart(Role.SHARD, rank)
        version = max(versions(checkpoints))
        values = values_of([start(cluster, tmp_path / "after", rank) for rank in range(2)])
    assert 0 < version <= 9
    assert_same(values, unfailed)
    assert used(tmp_path / "after", list(notes.iterdir()), version) == EACH_ONCE


def test_a_server_is_lost_and_the_loop_goes_back_with_the_parameters(tmp_path: Path, unfailed: Values) -> None:
    """The loop is in the second epoch when the job goes back to the first: it goes on there."""
    make_pipes(tmp_path)
    notes, checkpoints = tmp_path / "notes", tmp_path / "checkpoints"
    with LocalCluster(shards=2, world_size=2, checkpoint_dir=checkpoints, checkpoint_every="5") as cluster:
        workers = [start(cluster, notes, 0, pauses=(8, tmp_path)), start(cluster, notes, 1)]
        with paused(tmp_path):
            until(lambda: versions(checkpoints) == [5])
            cluster.kill(Role.SHARD)
            cluster.restart(Role.SHARD)
        values = values_of(workers)
    assert_same(values, unfailed)


def test_a_worker_of_a_node_is_killed_and_started_again(tmp_path: Path) -> None:
    how = {"strategy": "HYBRID_SHARD"}
    nodes = [{"AXON_PS_NODE": name} for name in "aabb"]

    def begin(cluster: LocalCluster, rank: int, **more: Any) -> WorkerProcess:
        return cluster.start_workers(worker, ranks=[rank], args=(str(tmp_path), how | more), env=nodes[rank])[0]

    with LocalCluster(shards=2, world_size=4) as cluster:
        others = [begin(cluster, rank) for rank in (0, 1, 2)]
        assert_killed(begin(cluster, 3, dies=(4, 3)))
        values = values_of([*others, begin(cluster, 3)])
    assert_close(values)
    assert used(tmp_path) == EACH_ONCE
