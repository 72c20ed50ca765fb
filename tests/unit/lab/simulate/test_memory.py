"""The simulator's memory is what `parallel.fsdp.stats` estimates, to which real jobs are held, and servers count."""

from __future__ import annotations

import pytest

from axon_ps.parallel.fsdp.stats import UnitBytes, estimate
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps_lab.simulate.memory import gradient_bytes, parameter_bytes, server_bytes, worker_bytes
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.tables import DTYPES

BLOCKS, BLOCK, ROOT = 6, 100_000, 5_000
NUMEL = BLOCKS * BLOCK + ROOT


def scenario(strategy: str, compute: str, wire: str, device: str = "cpu", **job: object) -> Scenario:
    devices = 4 if strategy == "hybrid_shard" else 1
    return Scenario.of(
        {
            "model": {"blocks": BLOCKS, "block_numel": BLOCK, "root_numel": ROOT},
            "job": {"strategy": strategy, "compute": compute, "wire": wire, **job},
            "workers": [{"count": 2, "compute_s": 0.1, "device": device, "devices": devices}],
            "servers": {"count": 3},
        }
    )


@pytest.mark.parametrize(("compute", "wire"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "int8")])
@pytest.mark.parametrize(
    ("strategy", "kept"),
    [("full_shard", False), ("full_shard", True), ("shard_grad_op", False), ("hybrid_shard", False)],
)
def test_a_worker_takes_what_its_statistics_estimate(strategy: str, compute: str, wire: str, kept: bool) -> None:
    made = scenario(strategy, compute, wire, offload_params=kept)
    expected = estimate(
        made.spec.layout,
        [UnitBytes(numel=u.numel, trainable_numel=u.numel) for u in made.spec.layout.units],
        strategy=ShardingStrategy[strategy.upper()],
        offload=CPUOffload.PARAMS if kept else CPUOffload.NONE,
        compute_bytes=DTYPES[compute].itemsize,
        wire_bytes=made.gathered_as.itemsize,
        grad_bytes=made.spec.precision.grad.itemsize,
        built_bytes=4,
        shard_numel=-(-NUMEL // 4),
        state_bytes=8,
        copied=False,
        buffered=made.buffered(made.workers[0]),
        world_size=2,
    )
    assert parameter_bytes(made, made.workers[0]) == expected.param_memory_bytes
    residuals = 0 if wire in DTYPES else 4 * NUMEL // made.workers[0].devices
    assert gradient_bytes(made, made.workers[0]) == expected.grad_memory_bytes + residuals
    assert worker_bytes(made) > expected.param_memory_bytes + expected.grad_memory_bytes


def test_servers_take_masters_sums_moments_and_what_travels() -> None:
    """`docs/sizing.md`: (16 + b) n for Adam and a wire of b bytes, times the copies."""
    for replication in (1, 2):
        found = server_bytes(scenario("full_shard", "float32", "bfloat16", replication=replication))
        assert found == pytest.approx((16 + 2) * NUMEL * replication / 3, rel=0.02)


def test_of_hosts_that_differ_the_one_that_needs_most_counts() -> None:
    few, many = ({"count": 1, "compute_s": 0.1, "devices": devices} for devices in (1, 8))
    both = [
        worker_bytes(
            Scenario.of(
                {
                    "model": {"blocks": BLOCKS, "block_numel": BLOCK},
                    "job": {"strategy": "hybrid_shard"},
                    "workers": groups,
                }
            )
        )
        for groups in ([few, many], [many, few])
    ]
    assert both[0] == both[1]
