"""The bytes of a node and step by strategy, as estimated and as counted, and the strategy that is chosen.

Tests of `parallel/fsdp/on_servers/traffic.py`.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import (
    FSDP,
    SGD,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrafficEstimate,
    estimate,
    fully_shard,
    sharded_model,
)
from axon_ps.parallel.fsdp.on_servers import traffic
from axon_ps.parallel.fsdp.on_servers.traffic import NodeTraffic
from axon_ps.testing import run_threads
from composed_model import INPUTS, TARGETS, Block, Model

FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD


def step_bytes(world: World, **options: Any) -> tuple[int, int]:
    """Bytes that this worker exchanged with servers in its last step."""
    model = FSDP(Model(), world, unit_types={Block}, prefetch=False, **options)
    optimizer = SGD(model.parameters(), lr=0.1)
    counted: list[tuple[float, float]] = []
    for step in range(4):
        nn.functional.mse_loss(model(INPUTS[step]), TARGETS[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = model.statistics()
        counted.append((numbers["wire_bytes_in"], numbers["wire_bytes_out"]))
    (gathered, pushed), (before, pushed_before) = counted[-1], counted[-2]
    return int(gathered - before), int(pushed - pushed_before)


@pytest.mark.parametrize("precision", [{}, {"wire_dtype": torch.bfloat16}, {"wire_dtype": "int8"}])
def test_units_that_need_buffers_stay_in_smaller_number(precision: dict[str, Any]) -> None:
    options = {"mixed_precision": MixedPrecision(**precision), "unit_types": {Block}}

    def run(world: World) -> tuple[tuple[int, int], TrafficEstimate]:
        return step_bytes(world, sharding_strategy=FULL, mixed_precision=options["mixed_precision"]), estimate(
            Model(), world, **options
        )

    [((received, sent), expected)] = run_threads(run, 1)
    assert received == pytest.approx(expected.of(FULL).received_bytes, rel=0.02)
    assert sent == pytest.approx(expected.of(FULL).sent_bytes, rel=0.02)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize(
    ("strategy", "offload"),
    [(FULL, CPUOffload.NONE), (FULL, CPUOffload.PARAMS), (GRAD_OP, CPUOffload.NONE), (HYBRID, CPUOffload.NONE)],
)
def test_a_node_moves_what_was_estimated(strategy: ShardingStrategy, offload: CPUOffload, nodes: int) -> None:
    def run(world: World) -> tuple[int, int, TrafficEstimate]:
        expected = estimate(Model(), world, unit_types={Block}, cpu_offload=offload)
        return *step_bytes(world, sharding_strategy=strategy, cpu_offload=offload), expected

    results = run_threads(run, 4, nodes=nodes)
    node = results[: 4 // nodes]
    expected = node[0][2].of(strategy)
    assert sum(sent for _, sent, _ in node) == expected.sent_bytes
    assert sum(received for received, _, _ in node) == expected.received_bytes


@pytest.mark.parametrize("wire", ["int8", "int4", "float8_e4m3"])
def test_compressed_bytes_are_estimated_too(wire: str) -> None:
    def run(world: World) -> tuple[int, int, NodeTraffic]:
        precision = MixedPrecision(wire_dtype=wire, reduce_dtype=wire)
        expected = estimate(Model(), world, unit_types={Block}, mixed_precision=precision).of(FULL)
        return *step_bytes(world, sharding_strategy=FULL, mixed_precision=precision), expected

    received, sent, expected = run_threads(run, 1)[0]
    assert (received, sent) == pytest.approx((expected.received_bytes, expected.sent_bytes), rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "gpus", "cupy", "strategy", "why"),
    [
        ([8, 8], True, True, HYBRID, "each node has 8 workers with GPUs"),
        ([8, 8], True, False, FULL, "cupy is not installed"),
        ([8, 8], False, True, FULL, "the model is not on GPUs"),
        ([8, 4], True, True, FULL, "nodes have 4 and 8 workers"),
        ([1, 1, 1], True, True, FULL, "each node has one worker"),
    ],
)
def test_the_default(
    sizes: list[int], gpus: bool, cupy: bool, strategy: ShardingStrategy, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: cupy or None)
    assert traffic.chosen(sizes, gpus=gpus)[0] is strategy
    assert why in traffic.chosen(sizes, gpus=gpus)[1]


def test_an_estimate_is_a_table_before_a_job_runs() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(8)))
    made = estimate(model, workers=16, nodes=2, unit_types={nn.Linear}, mixed_precision=torch.bfloat16)
    numels = 8 * (2 * 8 - 1) * 10**6, 8 * 8 * 10**6
    assert (made.of(FULL).received_bytes, made.of(FULL).sent_bytes) == (2 * numels[0], 2 * numels[1])
    assert (made.of(HYBRID).received_bytes, made.of(HYBRID).sent_bytes) == (16 * 10**6, 16 * 10**6)
    assert "FULL_SHARD          240 MB    128 MB" in str(made)
    assert str(made).splitlines()[-1].startswith("chosen: ")
    assert estimate(model, workers=16, nodes=2, unit_types={nn.Linear}, gpus=False).of(FULL).received_bytes == (
        4 * 8 * (2 * 8 - 2) * 10**6
    ), "values that come into no buffers leave memory for one more unit"
    with pytest.raises(InvalidRequest, match="workers is 3 and nodes 2"):
        estimate(model, workers=3, nodes=2)


def test_the_choice_is_logged_with_its_reason_and_bytes(caplog: pytest.LogCaptureFixture) -> None:
    def run(world: World) -> None:
        model = Model()
        for block in model.blocks:
            fully_shard(block)
        assert sharded_model(fully_shard(model)).strategy is FULL
        assert FSDP(Model(), world).strategy is FULL

    with caplog.at_level(logging.INFO, logger=traffic.__name__):
        run_threads(run, 2)
    said = [r.getMessage() for r in caplog.records if r.name == traffic.__name__]
    assert len(said) == 4
    assert all("FULL_SHARD, since the model is not on GPUs. A node and step: FULL_SHARD" in line for line in said)


def test_a_strategy_that_moves_many_more_bytes_than_another_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def run(world: World) -> None:
        FSDP(Model(), world, sharding_strategy="full_shard")

    run_threads(run, 4, nodes=2)
    said = [r.getMessage() for r in caplog.records if r.name == traffic.__name__]
    assert len(said) == 4
    assert "a node of 2 workers moves FULL_SHARD" in said[0]
    assert "with sharding_strategy='hybrid_shard' HYBRID_SHARD" in said[0]
    caplog.clear()
    run_threads(run, 2, nodes=2)
    assert not [r for r in caplog.records if r.name == traffic.__name__]
