"""A `load_state_dict` that fails on one rank: every rank is told before anything is replaced, and training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.errors import CheckpointError, CheckpointNotFound, Disagreement, InvalidRequest
from axon_ps.parallel import FSDP, SGD, ShardingStrategy
from axon_ps.testing import run_threads
from axon_ps.worker.world import World


def quantised() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch will remove them
        return torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.quint8)


BAD: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(2, device="meta"),
    "numpy": lambda: np.zeros(2, np.float32),
    "none": lambda: None,
    "shape": lambda: torch.zeros(3),
    "complex": lambda: torch.zeros(2, dtype=torch.complex64),
    "quantised": quantised,
}


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_every_rank_is_told_and_nothing_has_changed(strategy: ShardingStrategy) -> None:
    def body(world: World) -> None:
        torch.manual_seed(0)
        model = FSDP(make(), world.default_group, sharding_strategy=strategy)
        optimizer = SGD(model.parameters(), lr=0.1)
        before = model.state_dict()
        other = {name: torch.ones_like(value) for name, value in before.items()}
        for kind, bad in BAD.items():
            failing = len(kind) % 2  # either rank
            mine = other | {"0.bias": bad()} if world.rank == failing else other
            with pytest.raises(InvalidRequest, match=r"'0\.bias'") as raised:
                model.load_state_dict(mine)
            assert (type(raised.value) is Disagreement) == (world.rank != failing), kind
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), kind
        with pytest.raises(InvalidRequest, match=r"update_shards\(\) was given"):
            model.update_shards(["not a number"])
        model(torch.ones(3, 4)).square().sum().backward()
        assert optimizer.step().committed
        model.load_state_dict(other)
        model.update_shards(list(range(14)))
        assert model.state_dict()["0.bias"].tolist() == [8.0, 9.0]

    run_threads(body, 2)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD]
)
def test_a_checkpoint_that_fails_on_the_worker_that_writes_it_fails_on_all(
    strategy: ShardingStrategy, tmp_path: Path
) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("no directory", encoding="utf-8")

    def body(world: World) -> None:
        model = FSDP(make(), world.default_group, sharding_strategy=strategy)
        optimizer = SGD(model.parameters(), lr=0.1)
        told = "file|JSON" if world.rank == 0 else "failed on rank 0: "
        with pytest.raises(CheckpointError, match=told):
            model.save_checkpoint(str(nowhere), optimizer)
        with pytest.raises(InvalidRequest, match=told):
            model.save_checkpoint(str(tmp_path / "extra"), optimizer, extra={"no JSON": object()})
        with pytest.raises(CheckpointNotFound):
            model.load_checkpoint(str(tmp_path / "none"), optimizer)
        model(torch.ones(3, 4)).square().sum().backward()
        assert optimizer.step().committed

    run_threads(body, 2, timeout_s=240.0)  # for a hang


def test_a_relative_path_is_of_the_workers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    save = CoordinatorClient.save_checkpoint

    async def saving(client: CoordinatorClient, uri: str, *args: Any, **options: Any) -> Any:
        asked.append(uri)
        return await save(client, uri, *args, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CoordinatorClient, "save_checkpoint", saving)
    with World.mock():
        written = FSDP(make()).save_checkpoint("here")
    assert written is not None
    assert asked == [written.uri] == [str(tmp_path / "here")], "servers may have another one"


def test_a_first_worker_that_fails_midway_tells_the_others() -> None:
    def body(world: World) -> str:
        model = FSDP(make(), world.default_group, name="m")

        def units() -> Any:
            raise KeyError("the values are nowhere")
            yield

        with pytest.raises(Exception, match="the values are nowhere") as raised:
            world.replace_parameters(units(), model="m", timeout_s=20.0)
        model.load_state_dict(make().state_dict())
        return type(raised.value).__name__

    assert run_threads(body, 2) == ["KeyError", "Broken"]
