"""Steps in virtual time: bytes by the formulas that real steps are held to, times by hand where they can be had so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.compress.registry import compressor
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import MixedPrecision, ShardingStrategy, estimate
from axon_ps_lab.simulate.profile import Profile, WireCost
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.step import StepTimes, play

BLOCKS, BLOCK, ROOT = 8, 1 << 21, 1 << 16
NUMEL = BLOCKS * BLOCK + ROOT
LINE = 1e9 / 8 * 1448 / 1514
"""Payload bytes a second of a card of 1 Gbit/s."""
NOTHING = 1e-15
COST = WireCost(**{field.name: NOTHING for field in dataclasses.fields(WireCost)})
FREE = Profile(
    cores=64,
    worker_call_s=NOTHING,
    server_call_s=NOTHING,
    decision_s=NOTHING,
    update_s={"adamw": NOTHING, "sgd": NOTHING},
    wires=dict.fromkeys(("float32", "bfloat16", "int8", "int4"), COST),
)
"""Of a machine whose processors take no time."""


def scenario(strategy: str, compute_s: float = 1e-6, **tables: Any) -> Scenario:
    """Four workers and four servers, f32, unless told otherwise."""
    job = {"strategy": strategy, "compute": "float32", "replication": 1, **tables.pop("job", {})}
    workers = {"count": 4, "device": "emulated", "compute_s": compute_s, **tables.pop("workers", {})}
    return Scenario.of(
        {
            "model": {"blocks": BLOCKS, "block_numel": BLOCK, "root_numel": ROOT},
            "job": job,
            "workers": [workers],
            "servers": {"count": 4, **tables.pop("servers", {})},
            "network": {"rtt_ms": 0.0, **tables.pop("network", {})},
        }
    )


def played(strategy: str, compute_s: float = 1e-6, **tables: Any) -> StepTimes:
    return play(scenario(strategy, compute_s, **tables), FREE)


@pytest.mark.parametrize(
    ("strategy", "received"),
    [
        ("full_shard", 2 * NUMEL - ROOT - 2 * BLOCK),  # the root stays, and the last two blocks
        ("shard_grad_op", NUMEL),
        ("hybrid_shard", NUMEL),
    ],
)
def test_a_step_moves_the_bytes_of_the_formulas(strategy: str, received: int) -> None:
    step = played(strategy)
    assert step.received_bytes == pytest.approx(4 * received)
    assert step.sent_bytes == pytest.approx(4 * NUMEL)
    kept = played("full_shard", job={"offload_params": True})
    assert kept.received_bytes == pytest.approx(4 * NUMEL)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize(("compute", "wire"), [("float32", ""), ("float32", "bfloat16"), ("bfloat16", "int8")])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
def test_a_step_moves_what_is_estimated_of_such_a_model(strategy: str, compute: str, wire: str, device: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(BLOCK, 1, bias=False) for _ in range(BLOCKS)))
        model.register_parameter("root", nn.Parameter(torch.empty(ROOT)))
    precision = MixedPrecision(
        param_dtype=getattr(torch, compute), wire_dtype={"": None, "bfloat16": torch.bfloat16}.get(wire, wire)
    )
    expected = estimate(
        model, workers=4, nodes=4, unit_types={nn.Linear}, mixed_precision=precision, gpus=device == "gpu"
    )
    row = expected.of(ShardingStrategy[strategy.upper()])
    step = played(strategy, job={"compute": compute, "wire": wire}, workers={"device": device})
    assert step.received_bytes == pytest.approx(row.received_bytes)
    assert step.sent_bytes == pytest.approx(row.sent_bytes)


def test_between_two_hosts_with_the_servers_what_comes_last_is_computed_with_last() -> None:
    """All bytes share a card, which is idle only while the first units are computed: the last come meanwhile."""
    compute_s = 0.3
    step = played("shard_grad_op", compute_s, workers={"count": 2}, servers={"count": 0})
    line_s = step.sent_bytes / LINE
    assert line_s < step.step_s < line_s + compute_s / 4


def test_compressed_bytes_are_the_compressors() -> None:
    step = played("shard_grad_op", job={"wire": "int8", "reduce": "int4"})
    for found, name in ((step.received_bytes, "int8"), (step.sent_bytes, "int4")):
        how = compressor(name)
        assert found == pytest.approx(BLOCKS * how.compressed_bytes(BLOCK) + how.compressed_bytes(ROOT))


def test_a_line_that_is_never_idle_bounds_a_step() -> None:
    """Under FULL_SHARD parameters come for two passes less what stays; the rest of a step is its ends."""
    unit_s, step = 4 * BLOCK / LINE, played("full_shard")
    assert 1.0 <= step.step_s / (step.received_bytes / LINE) < 1.0 + 2 * unit_s / (step.received_bytes / LINE)
    both_ways = played("shard_grad_op")
    assert 4 * NUMEL / LINE <= both_ways.step_s < 4 * NUMEL / LINE + 2 * unit_s, "pushed and gathered at once"
    own = played("shard_grad_op", servers={"count": 0})
    assert 1.5 * 4 * NUMEL / LINE <= own.step_s < 1.5 * 4 * NUMEL / LINE + 2 * unit_s, "3/4 of 2 P through each card"


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_communication_hides_behind_compute(strategy: str) -> None:
    unit_s, compute_s = 4 * BLOCK / LINE, 30.0
    step = played(strategy, compute_s)
    assert compute_s + unit_s <= step.step_s < compute_s + 3 * unit_s, "the last gradients hide behind nothing"


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
def test_half_the_rate_is_twice_the_time(strategy: str) -> None:
    half = played(strategy, workers={"rate_mbit": 500.0}, servers={"rate_mbit": 500.0})
    assert half.step_s == pytest.approx(2 * played(strategy).step_s, rel=1e-3)


def test_more_servers_help_until_the_workers_cards_are_full() -> None:
    times = [played("shard_grad_op", servers={"count": count}).step_s for count in (1, 2, 4, 8)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.05)
    assert times[1] == pytest.approx(2 * times[2], rel=0.1)
    assert times[2] == pytest.approx(times[3], rel=0.15), "slices are of one chunk then, and the last one is late"


def test_what_gradients_are_clipped_to_is_known_late() -> None:
    for strategy in ("full_shard", "shard_grad_op"):
        assert played(strategy, 1.0, job={"clip": True}).step_s > played(strategy, 1.0).step_s


def test_a_long_line_costs_round_trips_and_not_one_a_unit() -> None:
    near, far = (played("full_shard", 1.0, network={"rtt_ms": ms}).step_s for ms in (0.0, 50.0))
    assert near < far < near + 0.25


def test_backups_take_bandwidth_between_servers() -> None:
    one, two = (played("shard_grad_op", job={"replication": r}).step_s for r in (1, 2))
    assert one < two < 1.5 * one


def test_the_slowest_workers_set_the_pace() -> None:
    alike = scenario("shard_grad_op", 1.0)
    slow = dataclasses.replace(alike.workers[0], count=2, compute_s=2.0)
    mixed = dataclasses.replace(alike, workers=(dataclasses.replace(alike.workers[0], count=2), slow))
    step = play(mixed, FREE)
    assert step.step_s == pytest.approx(played("shard_grad_op", 2.0).step_s, rel=0.02)
    assert step.decision_wait_s < 0.01
    assert step.compute_s == 2.0


def test_a_processor_that_is_too_slow_bounds_a_step_and_shared_cores_are_shared() -> None:
    by_element = 1e-8
    slow = dataclasses.replace(FREE, wires={"float32": dataclasses.replace(COST, worker_push_s=by_element)})
    times = play(scenario("shard_grad_op", workers={"count": 1}), slow)
    assert times.step_s >= by_element * NUMEL
    shared = scenario("shard_grad_op", workers={"count": 4}, network={"rtt_ms": 0.0, "shared_cores": 2})
    assert play(shared, slow).step_s >= 4 * by_element * NUMEL / 2
    on_cpu = scenario("shard_grad_op", 1.0, workers={"device": "cpu"}, network={"rtt_ms": 0.0, "shared_cores": 2})
    assert play(on_cpu, FREE).step_s >= 4 * 1.0 / 2


def test_servers_on_the_workers_hosts_take_as_much_of_a_machine_that_all_share() -> None:
    slow = dataclasses.replace(
        FREE, wires={"float32": dataclasses.replace(COST, server_push_s=1e-8, worker_push_s=1e-8)}
    )
    fast = {"rate_mbit": 1e6}
    shared = {"rtt_ms": 0.0, "shared_cores": 2}
    own, other = (
        play(scenario("shard_grad_op", workers=fast, servers={"count": count, **fast}, network=shared), slow).step_s
        for count in (0, 4)
    )
    assert own >= 4 * 2e-8 * NUMEL / 2
    assert own == pytest.approx(other, rel=0.01)


@pytest.mark.timeout(20)
def test_a_step_of_months_is_played_as_one_of_seconds() -> None:
    assert played("full_shard", 1e8).step_s >= 1e8


def test_local_steps_wait_for_an_outer_step_unless_it_hides() -> None:
    job = {"inner_steps": 20, "fragments": 4}
    transfer_s = 2 * 4 * NUMEL / 4 / LINE
    whole = played("local_steps", 0.1, job=job)
    assert whole.step_s == pytest.approx((5 * 0.1 + transfer_s) / 5, rel=0.05)
    width = played("local_steps", 0.1, job={**job, "overlap_steps": 4})
    assert width.step_s == pytest.approx(0.1, rel=0.01)
    assert width.received_bytes == pytest.approx(4 * NUMEL / 20, rel=0.01)


def test_a_profile_without_what_is_needed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no cost of 'lion'"):
        play(scenario("full_shard", job={"optimizer": "lion"}), FREE)
    with pytest.raises(InvalidRequest, match="no costs of 'float16'"):
        play(scenario("full_shard", job={"wire": "float16"}), FREE)


@pytest.mark.parametrize(
    ("compute_s", "tables", "bottleneck"),
    [
        (100.0, {}, "the compute of a worker"),
        (1e-6, {"workers": {"count": 4}, "servers": {"count": 1}}, "the card of a server, "),
        (1e-6, {"workers": {"count": 1}, "servers": {"count": 4}}, "the card of a worker host, "),
        (1e-6, {"network": {"rtt_ms": 5000.0}}, "waits; most in use: "),
    ],
)
def test_the_bottleneck_is_named(compute_s: float, tables: dict[str, Any], bottleneck: str) -> None:
    step = played("shard_grad_op", compute_s, **tables)
    assert step.bottleneck.startswith(bottleneck)
    assert max(step.in_use.values()) == pytest.approx(step.in_use[next(iter(step.in_use))])
    assert all(0.0 <= share <= 1.0 + 1e-6 for share in step.in_use.values()), "nothing is used more than there is"
