"""A model begins with values and buffers of the lowest rank, as torch's DDP does; one whose differ says so."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.coordinator import attachments
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import DDP, FSDP, AdamW, DiLoCo, ShardingStrategy
from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.testing import LocalCluster, run_threads

LIMIT_S = 300.0
"""For a hang: compiled loops may be cold, and others busy."""

pytestmark = pytest.mark.timeout(600)

SERVED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD]


def module(value: float, **where: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3, **where), nn.Tanh(), nn.Linear(3, 2, **where))
    for p in made.parameters():
        if not p.is_meta:
            nn.init.constant_(p, value)
    return made


def rank_0_comes_last(world: World, others_register: threading.Barrier) -> None:
    """Rank 0 registers when all others do."""
    register = world.models.register

    def late(*args: Any) -> Any:
        world.models.register = register  # type: ignore[method-assign]
        others_register.wait(LIMIT_S)
        reply = register(*args)
        assert reply[1].upload == (world.rank == 0)
        return reply

    world.models.register = late  # type: ignore[method-assign]


class Buffered(nn.Module):
    """One parameter, the same on every rank, and buffers of every kind."""

    def __init__(self, fill: float, where: str = "cpu") -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(2, 2, device=where), nn.BatchNorm1d(2, device=where)
        self.register_buffer("mean", torch.full((2,), fill))
        self.register_buffer("count", torch.tensor(int(fill)))
        self.register_buffer("mask", torch.full((3,), bool(fill)), persistent=False)
        self.register_buffer("phase", torch.full((2,), complex(fill, 1)), persistent=False)
        self.register_buffer("rows", torch.full((1,), fill).expand(3), persistent=False)
        if where != "meta":
            for p in self.parameters():
                nn.init.constant_(p, 0.5)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == materialize.__name__ and r.levelno == logging.WARNING]


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_rank_0_counts_when_it_comes_last(strategy: ShardingStrategy, caplog: pytest.LogCaptureFixture) -> None:
    barrier = threading.Barrier(3)

    def worker(world: World) -> list[torch.Tensor]:
        if strategy is not ShardingStrategy.NO_SHARD:
            rank_0_comes_last(world, barrier)
        made = FSDP(module(float(world.rank)), sharding_strategy=strategy, unit_types={nn.Linear})
        return list(made.state_dict().values())

    for values in run_threads(worker, 3, timeout_s=LIMIT_S):
        assert all(bool((v == 0.0).all()) for v in values)
    if strategy in SERVED:
        told = warnings_of(caplog)
        assert len(told) == 2, "one on each rank whose values are dropped"
        for rank in (1, 2):
            assert any(f"rank {rank} has given model 'model 0'" in text and "of rank 0" in text for text in told)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_buffers_of_rank_0_count_persistent_or_not(
    strategy: ShardingStrategy, offload: bool, caplog: pytest.LogCaptureFixture
) -> None:
    want = Buffered(0.0).values()
    barrier = threading.Barrier(3)

    def worker(world: World) -> dict[str, torch.Tensor]:
        made = Buffered(float(world.rank))
        if world.rank:  # a buffer that shares its memory can be read, and not be written
            made.rows = torch.full((3,), float(world.rank))
        if strategy is not ShardingStrategy.NO_SHARD:
            rank_0_comes_last(world, barrier)
        FSDP(made, sharding_strategy=strategy, cpu_offload=offload, unit_types={nn.Linear})
        return made.values()

    for values in run_threads(worker, 3, timeout_s=LIMIT_S):
        assert values.keys() == want.keys()
        assert all(torch.equal(values[name], want[name]) for name in want)
    told = warnings_of(caplog)
    for rank in (1, 2):
        (text,) = [text for text in told if f"rank {rank} has given" in text]
        assert "not used (mean, count, mask, phase, rows)" in text
        assert "of rank 0" in text


def test_own_ddp_begins_with_buffers_of_rank_0() -> None:
    def worker(world: World) -> dict[str, torch.Tensor]:
        made = Buffered(float(world.rank))
        made.rows = made.rows.clone()
        DDP(made)
        return made.values()

    first, second = run_threads(worker, 2, timeout_s=LIMIT_S)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert not first["mask"].any()


def test_equal_buffers_are_not_touched_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def worker(world: World) -> None:
        for strategy in ShardingStrategy:
            made = Buffered(2.0)  # rows of which share one element
            versions = {name: buffer._version for name, buffer in made.named_buffers()}
            FSDP(made, sharding_strategy=strategy, name=strategy.name)
            assert {name: buffer._version for name, buffer in made.named_buffers()} == versions

    run_threads(worker, 2, timeout_s=LIMIT_S)
    assert not warnings_of(caplog)


def test_buffers_that_are_too_large_to_be_sent_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_BYTES", 1 << 10)

    class Large(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            noise = torch.rand(1 << 10, generator=torch.Generator().manual_seed(seed))
            self.register_buffer("noise", noise, persistent=False)

    def worker(world: World) -> str:
        FSDP(Large(7), name="equal")
        try:
            FSDP(Large(world.rank), name="different")
        except InvalidRequest as error:
            return str(error)
        return ""

    first, second = run_threads(worker, 2, timeout_s=LIMIT_S)
    assert not first
    assert (
        "the buffers 'noise' of model 'different' differ between this rank and the lowest, and are too large" in second
    )


def test_a_model_that_resumes_takes_saved_buffers_of_the_checkpoint_and_others_of_rank_0(tmp_path: Path) -> None:
    def train(world: World) -> None:
        model = FSDP(Buffered(7.0))
        model.save_checkpoint(str(tmp_path), AdamW(model.parameters()))

    run_threads(train, 1, timeout_s=LIMIT_S)
    with LocalCluster(shards=1, world_size=2, resume=str(tmp_path)) as cluster:
        for result in cluster.run_workers(resumed_buffers):
            assert result.value == {"mean": 7.0, "count": 7.0, "mask": 0.0, "rows": 0.0}


def resumed_buffers() -> dict[str, float]:
    with World.init(timeout_s=LIMIT_S) as world:
        made = Buffered(float(world.rank))
        made.rows = made.rows.clone()
        FSDP(made)
        world.barrier()
        return {name: float(made.get_buffer(name).reshape(-1)[0]) for name in ("mean", "count", "mask", "rows")}


def test_the_outer_model_of_diloco_too() -> None:
    barrier = threading.Barrier(2)

    def worker(world: World) -> list[torch.Tensor]:
        rank_0_comes_last(world, barrier)
        made = module(float(world.rank))
        DiLoCo(made, torch.optim.SGD(made.parameters(), lr=0.1), inner_steps=2)
        return list(made.state_dict().values())

    for values in run_threads(worker, 2, timeout_s=LIMIT_S):
        assert all(bool((v == 0.0).all()) for v in values)


@pytest.mark.parametrize("kind", ["equal", "on the meta device", "in bf16"])
def test_equal_values_and_none_at_all_are_no_reason_to_warn(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def worker(world: World) -> None:
        if kind == "on the meta device" and world.rank:
            FSDP(module(1.0, device="meta"))
        else:
            FSDP(module(1.0, dtype=torch.bfloat16 if kind == "in bf16" else torch.float32))

    run_threads(worker, 2, timeout_s=LIMIT_S)
    assert not warnings_of(caplog)


def test_a_single_element_makes_a_difference() -> None:
    def digest(change: float = 0.0) -> str:
        made = module(1.0)
        with torch.no_grad():
            made[2].weight[1, 2] += change  # type: ignore[index, operator]
        return materialize.digest(wrap.partition(made, lambda child: False, ()))

    assert digest() == digest() != digest(1e-6)
