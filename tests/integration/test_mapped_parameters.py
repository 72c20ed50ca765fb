"""FULL_SHARD on a server of the workers' own host: parameters are read where they lie, and nobody can tell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from deadlines import HANG_S
from parity_model import train_sharded
from pausing import make_pipes, pause, paused

WIDTH = 128


class Layer(nn.Sequential):
    """A unit."""


def model_of(world: axon_ps.World) -> parallel.FSDP:
    torch.manual_seed(0)
    layers = [Layer(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return parallel.FSDP(
        nn.Sequential(*layers),
        world.default_group,
        unit_types={Layer},
    )


def step(model: parallel.FSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    assert optimizer.step().committed
    optimizer.zero_grad()


def values_of(model: parallel.FSDP) -> dict[str, Any]:
    return {name: value.float().numpy().copy() for name, value in model.state_dict().items()}


def train(precision: dict[str, torch.dtype], direct: str) -> Any:
    os.environ["AXON_PS_DIRECT_MEMORY"] = direct
    with axon_ps.World.init() as world:
        values, _, _ = train_sharded(world, "AdamW", {"lr": 3e-3}, "FULL_SHARD", precision, steps=4)
        return values, world.statistics()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["f32", "bf16"])
def test_training_on_mapped_parameters_gives_the_same_bits(dtype: torch.dtype | None) -> None:
    precision = {} if dtype is None else {"param_dtype": dtype}
    found = []
    for direct in ("1", "0"):
        with LocalCluster(shards=1, world_size=2) as cluster:
            found.append([result.value for result in cluster.run_workers(train, args=(precision, direct))])
    for (mapped, counted), (copied, sent) in zip(*found, strict=True):
        assert counted["mapped_bytes_in"] > 0
        assert sent["mapped_bytes_in"] == 0
        assert list(mapped) == list(copied)
        for name, value in mapped.items():
            np.testing.assert_array_equal(value, copied[name])


def write_to_parameters() -> Any:
    """Rank 0 writes to what was gathered: seen by autograd, which is refused, and behind its back, which is lost."""
    with axon_ps.World.init() as world:
        model = model_of(world)
        optimizer = parallel.SGD(model, lr=0.1)
        step(model, optimizer, 0)
        before = values_of(model)

        def output(write: Callable[[nn.Parameter], Any] = lambda _: None) -> Any:
            def spoil(module: nn.Module, *_: Any) -> None:
                for param in module.parameters():
                    write(param)

            linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
            hooks = [module.register_forward_hook(spoil) for module in linear if world.rank == 0]
            try:
                with torch.no_grad():
                    return model(torch.ones(1, WIDTH)).numpy().copy()
            finally:
                for hook in hooks:
                    hook.remove()

        refused = []
        outputs = []
        for write in (lambda param: param.mul_(3.0), lambda param: param.data.add_(1.0)):
            try:
                output(write)
            except axon_ps.errors.Misuse as error:
                refused.append(str(error))
            outputs.append(output())
        outputs += [output(lambda param: param.detach().numpy().fill(1.0)), output()]
        world.barrier("written")
        return refused, before, values_of(model), outputs


def test_what_is_written_to_a_gathered_parameter_is_refused_or_lost_and_reaches_nobody() -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        results = [result.value for result in cluster.run_workers(write_to_parameters)]
    assert [said.count("was changed in place") for said in results[0][0]] == [1, 1]
    assert results[1][0] == []
    unspoiled = results[1][3][0]
    for _, before, after, outputs in results:
        for found in outputs:  # the hook comes behind the module's own use of its parameters
            np.testing.assert_array_equal(found, unspoiled)
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)


def lose_the_server(pipes: Path, uri: str) -> Any:
    """Two steps, a checkpoint, two steps, another server in between; and the same without."""
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = model_of(world)
        optimizer = parallel.AdamW(model, lr=1e-2)
        for seed in range(2):
            step(model, optimizer, seed)
        model.save_checkpoint(uri, optimizer)
        for seed in range(2, 4):
            step(model, optimizer, seed)
        expected = values_of(model)
        pause(pipes)
        model.load_checkpoint(uri, optimizer)
        for seed in range(2, 4):
            step(model, optimizer, seed)
        return expected, values_of(model), world.statistics()


def test_another_server_is_mapped_when_the_first_is_lost(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with LocalCluster(shards=1, world_size=1, lease_s=3.0) as cluster:
        (worker,) = cluster.start_workers(lose_the_server, args=(tmp_path, (tmp_path / "checkpoint").as_uri()))
        with paused(tmp_path):
            cluster.kill(Role.SHARD)
            cluster.restart(Role.SHARD)
        result = worker.result()
    assert not result.error, result.error
    expected, values, statistics = result.value
    assert statistics["mapped_bytes_in"] > 0
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value)


def count_gradients() -> Any:
    with axon_ps.World.init() as world:
        model = model_of(world)
        optimizer = parallel.SGD(model, lr=0.1)
        before = world.statistics()["bytes_out"]
        step(model, optimizer, 0)
        return world.server_statistics(0)["mapped_bytes_in"], world.statistics()["bytes_out"] - before


def test_gradients_are_added_from_where_they_lie() -> None:
    with LocalCluster(shards=1, world_size=1) as cluster:
        ((mapped, sent),) = (result.value for result in cluster.run_workers(count_gradients))
    assert mapped == sent == 3 * (WIDTH * WIDTH + WIDTH) * 4


def count_in_a_node() -> Any:
    with axon_ps.World.init() as world:
        layers = [Layer(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        strategy = parallel.ShardingStrategy.HYBRID_SHARD
        model = parallel.FSDP(
            nn.Sequential(*layers), world.default_group, sharding_strategy=strategy, unit_types={Layer}
        )
        optimizer = parallel.SGD(model, lr=0.1)
        step(model, optimizer, 0)
        before = world.statistics()
        step(model, optimizer, 1)
        model.state_dict()  # what was pulled behind the step has come
        after = world.statistics()
        return {name: after[name] - before[name] for name in before if name.endswith(("bytes_in", "bytes_out"))}


def test_the_workers_of_a_node_share_memory_with_its_servers_both_ways() -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        for result in cluster.run_workers(count_in_a_node):
            moved = result.value
            assert moved["leased_bytes_out"] == moved["bytes_out"] == 3 * (WIDTH * WIDTH + WIDTH) * 4 / 2
            assert moved["leased_bytes_in"] == moved["bytes_in"] >= moved["bytes_out"]


def count_repeated_gathers() -> Any:
    with axon_ps.World.init() as world:
        model = parallel.FSDP(
            nn.Sequential(*(Layer(nn.Linear(200, 200), nn.Tanh()) for _ in range(3))),
            world.default_group,
            unit_types={Layer},
            plan_options=PlanOptions(chunk_numel=10_000, min_slice_numel=5_000),
        )
        optimizer = parallel.SGD(model, lr=0.1)
        for _ in range(20):
            model(torch.ones(4, 200)).square().mean().backward()
            assert optimizer.step().committed
            optimizer.zero_grad()
        return world.statistics()["leased_bytes_in"], model.statistics()["gathers_repeated"]


def test_a_lease_granted_before_the_decision_need_not_be_asked_for_again() -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        for result in cluster.run_workers(count_repeated_gathers):
            leased_bytes, repeated = result.value
            assert leased_bytes > 0
            assert repeated == 0


def release(pipes: Path) -> Any:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = model_of(world)
        with torch.no_grad():
            model(torch.ones(4, WIDTH))
            assert world.statistics()["mapped_bytes_in"] > 0
            pause(pipes)
            model.release()
            refused = []
            for use in (lambda: model(torch.ones(4, WIDTH)), model.state_dict):
                try:
                    use()
                except axon_ps.errors.Misuse as error:
                    refused.append(str(error))
        pause(pipes)
        return refused


def test_a_released_model_is_refused_while_the_server_still_has_its_memory(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with LocalCluster(shards=1, world_size=1, lease_s=30.0) as cluster:
        (worker,) = cluster.start_workers(release, args=(tmp_path,))
        with paused(tmp_path):
            cluster.kill(Role.SHARD, 0, signal.SIGSTOP)
        with paused(tmp_path):
            cluster.kill(Role.SHARD, 0, signal.SIGCONT)
        result = worker.result()
    assert not result.error, result.error
    assert len(result.value) == 2
    assert all("was released" in said for said in result.value)
