"""A job in processes that trains adapters on a frozen base: the base's bits stay while servers die, and are published.

The oracle is the same job undisturbed, and the base as it was built.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import axon_ps
from adapted_model import BLOCKS, Adapted, Base, adapter_bytes, batch, build, frozen_bits
from axon_ps import parallel
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from axon_ps_lab.campaigns.ended_job import EndedJob, Trained, assert_same_bits
from deadlines import HANG_S

STEPS = 20

SENT = {"AXON_PS_DIRECT_MEMORY": "0"}
"""All values go through sockets."""


def train(base: Base, end: Path) -> Trained:
    """Train until the version in the file `end`, at least `STEPS` versions; return the adapters."""
    torch.set_num_threads(1)
    trained = Trained()
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        module = build(base)
        wanted = frozen_bits(module.state_dict())
        model = parallel.FSDP(module, world, unit_types={Adapted}, sharding_strategy="FULL_SHARD")
        optimizer = parallel.AdamW(model, lr=0.01)
        last = 0
        while not last or world.version < last:
            model(batch(world.version)).square().mean().backward()
            result = optimizer.step()
            optimizer.zero_grad()
            if not result.committed:
                trained.aborted.append(result.reason)
            if not last and end.exists():
                last = max(STEPS, int(end.read_text() or 0))
        trained.version = world.version
        state = model.state_dict()
        assert frozen_bits(state) == wanted
        trained.values = {n: v.numpy().copy() for n, v in state.items() if v.dtype is torch.float32}
    return trained


@pytest.mark.parametrize("environment", [{}, SENT], ids=["mapped", "sent"])
@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_a_server_dies_and_the_base_stays(base: Base, environment: dict[str, str], tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2, replication=2, environment=environment) as cluster:
        job = EndedJob(cluster, train, base, tmp_path / "end")
        with _subscribed(cluster) as subscription:
            weights = subscription.latest()
            assert frozen_bits(_tensors(weights)) == frozen_bits(build(base).state_dict())
            exported = subscription.export(tmp_path)
            cluster.kill(Role.SHARD, 0)
            job.go_on()
            cluster.restart(Role.SHARD, 0)
            job.settle(2)
            cluster.kill(Role.SHARD, 1)
            job.go_on()
            later = subscription.latest()
            assert later.version > weights.version
            assert frozen_bits(_tensors(later)) == frozen_bits(build(base).state_dict())
        assert exported.exists()
        found = job.finish()
    assert_same_bits(found, train, base, tmp_path, replication=2)


def _subscribed(cluster: LocalCluster) -> axon_ps.Subscription:
    security = Security(token=cluster.observer_token)
    return axon_ps.subscribe(coordinator=cluster.address, job=cluster.job, security=security, dtype="bf16")


def _tensors(weights: axon_ps.Weights) -> dict[str, torch.Tensor]:
    module = build("4bit") if weights.parameters["0.weight"].dtype == "uint8" else build("bf16")
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    parallel.load_weights(module, weights)
    return module.state_dict()


def steps_of(base: Base, face: str) -> Any:
    """Return the bytes that this worker received and sent in each step, those of what it trains, and the servers'."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        module: Any = build(base)
        wanted = adapter_bytes(module)
        if face == "FSDP":
            model = whole = parallel.FSDP(module, world, unit_types={Adapted}, sharding_strategy="FULL_SHARD")
            optimizer: Any = parallel.AdamW(model, lr=0.01)
        else:
            for block in module[:BLOCKS]:
                parallel.fully_shard(block)
            model = parallel.fully_shard(module)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            whole = parallel.sharded_model(model)
        received, sent = [], []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            world.barrier("gathered")
            received.append(world.statistics()["bytes_in"])
            whole.clip_grad_norm(1e9)  # so that nothing is gathered before the step is decided
            optimizer.step()
            optimizer.zero_grad()
            sent.append(world.statistics()["bytes_out"])
        unchanged = frozen_bits(whole.state_dict()) == frozen_bits(build(base).state_dict())
        return received, sent, wanted, unchanged


@pytest.mark.parametrize("face", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_from_the_second_step_on_only_adapters_are_moved(base: Base, face: str) -> None:
    with LocalCluster(shards=2, world_size=2, environment=SENT) as cluster:
        results: list[Any] = [result.value for result in cluster.run_workers(steps_of, args=(base, face))]
    for received, sent, wanted, unchanged in results:
        assert unchanged
        for counted in (received, sent):
            each = [after - before for before, after in itertools.pairwise(counted)]
            assert each == pytest.approx([wanted] * len(each), rel=0.01)
