"""DiLoCo with a quorum: a slow worker comes to the outer step with what it has trained, and counts for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.testing import LocalCluster
from deadlines import HANG_S
from parity_model import Block, Values, batch, build
from test_diloco import OPTIONS, adamw, values_of

INNER, ROUNDS, WORKERS = 4, 3, 3
DONE = 2
"""Inner steps that the slow worker of a round has made when it comes."""


def steps_of(rank: int, round_: int) -> int:
    """Inner steps of a worker before an outer step; in each round another one is slow."""
    return DONE if rank == round_ % WORKERS else INNER


def simulate() -> Values:
    """The same in plain torch."""
    shared = build()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [build() for _ in range(WORKERS)]
    inner = [adamw(model) for model in models]
    for round_ in range(ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            for i in range(steps_of(rank, round_)):
                model(batch(round_ * INNER + i, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            weights = [steps_of(rank, round_) for rank in range(WORKERS)]
            for param, *copies in zip(shared.parameters(), *(m.parameters() for m in models), strict=True):
                progress = [w * (param - copy) for w, copy in zip(weights, copies, strict=True)]
                param.grad = torch.stack(progress).sum(0) / sum(weights)
        outer.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
    return values_of(shared)


def wait_until_requested(world: axon_ps.World, diloco: parallel.DiLoCo) -> None:
    """Another's outer step waits for this worker."""
    world.models.client(0).view.job.wait_until(
        lambda: diloco._outer.vote_requested() or None, 30.0, lambda: "nobody waits"
    )


def train() -> dict[str, Any]:
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = build()
        inner = adamw(model)
        with pytest.raises(InvalidRequest, match="quorum is 1.5"):
            parallel.DiLoCo(model, inner, world, inner_steps=INNER, quorum=1.5)
        with pytest.raises(InvalidRequest, match="grace_s is -1"):
            parallel.DiLoCo(model, inner, world, inner_steps=INNER, quorum=0.5, grace_s=-1.0)
        with pytest.raises(InvalidRequest, match="no quorum"):
            parallel.DiLoCo(model, inner, world, inner_steps=INNER, grace_s=1.0)
        diloco = parallel.DiLoCo(
            model, inner, world, inner_steps=INNER, quorum=0.6, unit_types={Block}, plan_options=OPTIONS
        )
        world.barrier("begin")
        for round_ in range(ROUNDS):
            count = steps_of(world.rank, round_)
            for i in range(count):
                if i + 1 == count < INNER:
                    wait_until_requested(world, diloco)
                model(batch(round_ * INNER + i, world.rank)).backward()
                result = diloco.step()
                inner.zero_grad()
                assert (result is not None) == (i + 1 == count)
            assert result is not None
            assert result.committed
        return {"values": values_of(model), "statistics": diloco.statistics()}


def test_a_slow_worker_counts_for_what_it_has_trained_as_in_a_simulation() -> None:
    with LocalCluster(shards=2, world_size=WORKERS) as cluster:
        results = [r.value for r in cluster.run_workers(train)]
    for name, value in simulate().items():
        for result in results:
            np.testing.assert_allclose(result["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for rank, result in enumerate(results):
        statistics = result["statistics"]
        slow = [round_ for round_ in range(ROUNDS) if steps_of(rank, round_) == DONE]
        assert statistics["outer_steps_due"] == len(slow) == 1
        assert statistics["inner_steps"] == ROUNDS * INNER - len(slow) * (INNER - DONE)
        assert statistics["inner_steps_committed"] == pytest.approx(statistics["inner_steps"])


def train_streamed() -> dict[str, Any]:
    """Worker 0 makes at most two inner steps where the others make four, until it was asked as often as they come."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = build()
        inner = adamw(model)
        diloco = parallel.LocalSGD(
            model, inner, world, inner_steps=8, fragments=2, overlap_steps=2, quorum=0.5, unit_types={Block}
        )  # fmt: skip
        world.barrier("begin")
        for step in range(4 * ROUNDS if world.rank else 2 * ROUNDS):
            if not world.rank and diloco.statistics()["outer_steps_due"] == ROUNDS:
                break  # others that were far ahead had it come after one step
            if not world.rank and step % 2:
                wait_until_requested(world, diloco)
            model(batch(step, world.rank)).backward()
            diloco.step()
            inner.zero_grad()
        assert all(result.committed for result in diloco.sync())
        return {"values": values_of(model), "statistics": diloco.statistics()}


def test_fragments_are_due_one_after_the_other_and_all_agree_in_the_end() -> None:
    with LocalCluster(shards=2, world_size=WORKERS) as cluster:
        slow, *others = (r.value for r in cluster.run_workers(train_streamed))
    assert slow["statistics"]["outer_steps_due"] == ROUNDS
    for result in (slow, *others):
        statistics = result["statistics"]
        assert statistics["inner_steps_committed"] == pytest.approx(statistics["inner_steps"])
        assert statistics["outer_steps_not_committed"] == 0
        for name, value in result["values"].items():
            np.testing.assert_array_equal(value, slow["values"][name])


def train_with_little_memory() -> dict[str, Any]:
    """The others wait for room for their second push, which they get only once worker 0, who is slow, has pushed."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = build()
        inner = adamw(model)
        diloco = parallel.DiLoCo(model, inner, world, inner_steps=INNER, quorum=0.6, unit_types={Block})
        diloco._outer.out = BufferPool(1, Meter())
        world.barrier("begin")
        result = None
        for i in range(INNER):
            if world.rank == 0 and i + 1 == DONE:
                wait_until_requested(world, diloco)
            model(batch(i, world.rank)).backward()
            result = diloco.step()
            inner.zero_grad()
            if result is not None:
                break
        assert result is not None
        assert result.committed
        return {"inner_steps": i + 1, "values": values_of(model)}


def test_who_waits_for_room_has_come() -> None:
    with LocalCluster(shards=1, world_size=WORKERS, plugins=["no_queue"]) as cluster:
        slow, *others = (r.value for r in cluster.run_workers(train_with_little_memory))
    assert slow["inner_steps"] == DONE
    for other in others:
        assert other["inner_steps"] == INNER
        for name, value in other["values"].items():
            np.testing.assert_array_equal(value, slow["values"][name])
