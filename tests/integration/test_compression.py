"""Compressed parameters and gradients between real workers and servers: loss, bytes, and what skipped steps lose."""

from __future__ import annotations

import math
import os
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import axon_ps
import tables
from axon_ps import parallel
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.partitions import partition_bounds
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from axon_ps.worker.steps.client import StepClient
from deadlines import HANG_S
from parity_model import BATCH, CONTEXT, VOCAB, Block, build
from tables import Record

STEPS, BAD_STEP, LAST = 30, 12, 10
OPTIONS = PlanOptions(chunk_numel=512, min_slice_numel=128)


def sequences(step: int, replica: int) -> torch.Tensor:
    """tokens: i64[BATCH, CONTEXT + 1] that can be learnt: each is the one before times 3, plus a little noise."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
    for _ in range(CONTEXT):
        noise = torch.randint(0, 2, (BATCH, 1), generator=generator)
        tokens = torch.cat([tokens, (3 * tokens[:, -1:] + noise) % VOCAB], dim=1)
    return tokens


@cache
def plain_losses(replicas: int) -> list[float]:
    """Plain torch in f32 on the joined batch; the loss of every step."""
    torch.set_num_threads(1)
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(STEPS):
        loss = model(torch.cat([sequences(step, r) for r in range(replicas)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def count_calls(steps: StepClient) -> tuple[Counter[int], Counter[int]]:
    """From now on, how often each unit, or the worker's part of it, is gathered and pushed."""
    gathers: Counter[int] = Counter()
    pushes: Counter[int] = Counter()
    gather, push = steps.parameters.gather, steps.gradients.push

    def counting_gather(unit: int, *args: Any, **kwargs: Any) -> Any:
        gathers[unit] += 1
        return gather(unit, *args, **kwargs)

    def counting_push(unit: int, *args: Any, **kwargs: Any) -> Any:
        pushes[unit] += 1
        return push(unit, *args, **kwargs)

    steps.parameters.gather = counting_gather  # type: ignore[method-assign]
    steps.gradients.push = counting_push  # type: ignore[method-assign]
    return gathers, pushes


def train_compressed(per_node: int, wire_dtype: str, reduce_dtype: str) -> Any:
    """One worker's losses, traffic, and final values, with parameters as int8 or int4.

    Several workers of a node share their units (HYBRID_SHARD).
    """
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if per_node > 1:
        os.environ |= {"AXON_PS_NODE": f"node-{rank // per_node}", "LOCAL_RANK": str(rank % per_node)}
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    with axon_ps.World.init(timeout_s=HANG_S, join_timeout_s=HANG_S) as world:
        gathers, pushes = count_calls(world.steps)
        model = parallel.FSDP(
            build(),
            world.default_group,
            sharding_strategy=parallel.ShardingStrategy["HYBRID_SHARD" if per_node > 1 else "FULL_SHARD"],
            intra_node_size=per_node if per_node > 1 else None,
            mixed_precision=parallel.MixedPrecision(wire_dtype=wire_dtype, reduce_dtype=reduce_dtype),
            unit_types={Block},
            plan_options=OPTIONS,
            prefetch=False,  # so that every gather that begins is waited for, and its bytes are counted
        )
        optimizer = parallel.AdamW(model, lr=6e-3)
        before = model.statistics()
        losses: list[float] = []
        while len(losses) < STEPS:
            loss = model(sequences(len(losses), rank))
            model.clip_grad_norm(1e9)  # clips nothing; without it a node pulls its parts speculatively
            if len(losses) == BAD_STEP and not pushes[-1]:
                (loss * (math.nan if rank else 1.0)).backward()
                pushes[-1] += 1  # not again
                result = optimizer.step()
                optimizer.zero_grad()
                assert not result.committed
                assert "finite" in result.reason
                continue
            loss.backward()
            assert optimizer.step().committed
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        del pushes[-1]
        with torch.no_grad():
            model(sequences(0, rank))  # so that what the last step pulled has come
        traffic = {k: model.statistics()[k] - before[k] for k in ("wire_bytes_in", "wire_bytes_out")}
        counts = dict(gathers), dict(pushes)
        memory = model.statistics()["wire_residual_bytes"]
        values = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        world.barrier("done")
        return losses, traffic, counts, memory, values, model.spec


def chunks_of(spec: JobSpec, unit: int, servers: int, per_node: int, rank: int) -> list[int]:
    """Elements of the chunks of a unit that this worker moves: all, or those of its part."""
    slices = spec.plan(servers).slices[unit]
    bounds = partition_bounds(slices, spec.options.chunk_numel, per_node)
    low, high = bounds[rank % per_node], bounds[rank % per_node + 1]
    return [
        end - begin for s in slices for begin, end in s.chunks(spec.options.chunk_numel) if low <= begin < end <= high
    ]


SENT = {
    "int8": lambda numel: numel + 4 * math.ceil(numel / 256),
    "int4": lambda numel: 17 * math.ceil(numel / 32) + 4 * math.ceil(numel / 1024),
}
"""Bytes of a chunk by what gradients travel as."""


@pytest.mark.parametrize(
    ("workers", "per_node", "params", "grads"),
    [
        (2, 1, "int8", "int8"),
        (4, 2, "int8", "int8"),
        (2, 1, "int8", "int4"),
        (2, 1, "int4", "int4"),
        (4, 2, "int4", "int4"),
    ],
    ids=["FULL_SHARD", "HYBRID_SHARD", "FULL_SHARD, int4 gradients", "FULL_SHARD, int4", "HYBRID_SHARD, int4"],
)
def test_it_learns_as_f32_does_and_moves_what_the_formula_says(
    workers: int, per_node: int, params: str, grads: str, record_property: Record
) -> None:
    with LocalCluster(shards=2, world_size=workers) as cluster:
        results = [r.value for r in cluster.run_workers(train_compressed, args=(per_node, params, grads))]
    expected = np.mean(plain_losses(workers)[-LAST:])
    got = np.mean([np.mean(losses[-LAST:]) for losses, *_ in results])
    assert abs(got / expected - 1) < 0.01, f"loss {got} with {params} and gradients as {grads}, {expected} in f32"
    for rank, (_, traffic, (gathers, pushes), memory, values, spec) in enumerate(results):
        units = range(len(spec.layout.units))
        chunks = {u: chunks_of(spec, u, 2, per_node, rank) for u in units}
        received, sent = ({u: sum(map(SENT[how], chunks[u])) for u in units} for how in (params, grads))
        moved = [u for u in units if chunks[u]]
        assert pushes == dict.fromkeys(moved, STEPS + 1)
        if per_node > 1:  # once, and again when it has changed: in the node, units are gathered from its workers
            assert gathers == dict.fromkeys(moved, STEPS + 1)
        expected_in = sum(n * received[u] for u, n in gathers.items())
        if (
            params == "int4"
        ):  # first values in full, then each step's difference: what a worker has comes no second time
            expected_in = sum(4 * sum(chunks[u]) + STEPS * received[u] for u in units)
        expected_out = sum(n * sent[u] for u, n in pushes.items())
        tables.add(
            record_property,
            f"Payload bytes of a worker in {STEPS + 1} steps, parameters as {params}",
            wrapper=f"FSDP {'HYBRID_SHARD' if per_node > 1 else 'FULL_SHARD'}",
            gradients=grads,
            rank=rank,
            received=int(traffic["wire_bytes_in"]),
            by_formula=expected_in,
            sent=int(traffic["wire_bytes_out"]),
            by_the_formula=expected_out,
        )
        assert traffic["wire_bytes_in"] == expected_in
        assert traffic["wire_bytes_out"] == expected_out
        assert memory == 8 * sum(sum(numels) for numels in chunks.values())
        assert all(np.array_equal(value, results[0][4][name]) for name, value in values.items())
    out = [traffic["wire_bytes_out"] for _, traffic, *_ in results]
    assert sum(out[:per_node]) == sum(out[-per_node:])  # a node sends what a worker alone would


class Sum(torch.nn.Module):
    """Its gradients are the data."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, numel))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return (self.weight * data).sum()


def gradient(step: int, replica: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(100 * step + replica))


def train_top_k() -> Any:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = parallel.FSDP(
            Sum(1000),
            world.default_group,
            sharding_strategy=parallel.ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=parallel.MixedPrecision(wire_dtype=parallel.Int8(64), reduce_dtype=parallel.TopK(0.05)),
            plan_options=PlanOptions(chunk_numel=100, min_slice_numel=64),
        )
        optimizer = parallel.SGD(model, lr=1.0)
        for step in range(30):
            bad = step % 10 == 7  # one replica's gradient is lost for all: the step is skipped
            with model.no_sync():
                model(gradient(step, world.replica) * 0.5).backward()
            model(gradient(step, world.replica) * (math.nan if bad and world.replica == 1 else 0.5)).backward()
            assert optimizer.step().committed == (not bad)
            optimizer.zero_grad()
        with model.summon_full_params():
            seen = next(model.parameters()).detach().numpy().copy()
        value = model.state_dict()["weight"].numpy().copy()
        owed = world.steps._shards._feedback.open(0, 0, 1000, -1)[0].copy()
        world.barrier("done")
        return value, seen, owed, model.statistics()["wire_bytes_out"]


def test_top_k_owes_what_it_has_not_sent_and_skipped_steps_owe_nothing() -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        results = [r.value for r in cluster.run_workers(train_top_k)]
    expected = Sum(1000).weight.detach().numpy().astype(np.float64)
    for step in range(30):
        if step % 10 != 7:
            expected -= (gradient(step, 0) + gradient(step, 1)).numpy() / 2
    value, seen, _, _ = results[0]
    owed = sum(r[2] for r in results)
    assert np.abs(value - owed - expected).max() < 1e-4
    assert np.abs(owed).max() > 0.1  # it is much, so the test means something
    assert np.abs(seen - value).max() <= 1.01 * np.abs(value).max() / 127
    assert results[1][0].tobytes() == value.tobytes()
    chunks = [
        (begin, end)
        for low, high in ((0, 448), (448, 1000))
        for begin in range(low, high, 100)
        for end in [min(begin + 100, high)]
    ]
    sent = sum(8 * math.ceil(0.05 * (end - begin)) for begin, end in chunks)
    assert min(r[3] for r in results) == 30 * sent
