"""A job inside this process with a small model that has trained a little. The targets attack it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.wire.v1 import (
    collective_pb2,
    common_pb2,
    coordinator_pb2,
    logs_pb2,
    placement_pb2,
    shard_pb2,
    status_pb2,
    trace_pb2,
    watch_pb2,
)
from axon_ps.worker.world import World
from axon_ps_lab.fuzz.grown import Facts
from axon_ps_lab.fuzz.targets.tapped import Tap

SHARDS = 2
TIMEOUT_S = 2.0
"""Deadline of a call of the worker, once it is attacked."""

START_S = 30.0
"""The deadline before that; the kernels are compiled."""


class SmallJob:
    """A job of one worker, which is this process, and two shard servers.

    Args:
        tap: tap of its channels.
        directory: directory for its checkpoints.
        world: the worker's world.

    Attributes:
        facts: the valid values of fields in this job.
    """

    def __init__(self, tap: Tap, directory: str, world: World) -> None:
        self.world = world
        self.facts = Facts(directory=directory)
        worker: Any = world._worker
        self.job: Any = worker._job  # the services
        self._tap = tap
        self.sequence = 0
        self._model = parallel.FSDP(
            nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 1)),
            world.default_group,
            plan_options=PlanOptions(chunk_numel=32, min_slice_numel=32),
        )
        self._optimizer = parallel.AdamW(self._model, lr=1e-3)

    def step(self) -> bool:
        """Make a training step; returns True if it committed."""
        self._model(torch.ones(2, 12)).sum().backward()
        self._model.clip_grad_norm(1.0)
        committed = self._optimizer.step().committed
        self._optimizer.zero_grad()
        return committed

    def refresh(self) -> None:
        """Bring the facts up to date."""
        world, facts = self.world, self.facts
        membership = world.membership
        members = (*membership.workers, *membership.shards)
        version, step = membership.version, membership.step
        models = {m.model for m in membership.models} or {0}
        for progress in membership.models:
            version, step = progress.version, progress.step
        view = world.steps.view
        facts.texts = {
            "job": [self.job_name],
            "incarnation": [m.incarnation for m in members],
            "members": [m.id for m in members],
            "node": [m.node for m in members],
            "address": [m.address for m in members],
            "models": ["model 0"],
        }
        facts.numbers = {
            "generation": [membership.generation] * 3 + [membership.generation + 1],
            "model": sorted(models),
            "unit": [0, 1],
            "slice": [0, 1, 2, 3],
            "step": [view.version, step, step + 1, view.version + 1],
            "version": [version, view.version, view.version + 1],
            "min_version": [0, view.version],
            "epoch": [view.epoch],
            "replica": [0],
            "position": [0],
            "ranks": [0],
            "placement": [0, 1, 2],
            "stripes": [1, 2],
            "stripe": [0, 1],
            "begin": [0, 32, 64],
            "offset": [0, 32, 64],
            "end": [32, 64, 75, 120, 130],
            "numel": [32, 11],
            "dtype": [1, 2, 3],
            "world_size": [0, 1],
            "requested_rank": [-1 & (1 << 64) - 1, 0],
            "chunk_numel": [32],
        }
        facts.seeds = {name: list(found) for name, found in self._tap.seeds.items()}
        for seed in self._made():
            facts.seeds.setdefault(seed.DESCRIPTOR.full_name, []).append(seed.SerializeToString())

    def _made(self) -> list[Any]:
        """Return messages that this job does not send, but another one would."""
        world = self.world
        context, me = world._coordinator.context(), world.view.me()
        server = common_pb2.CallContext(
            job=context.job, generation=context.generation, incarnation=world.membership.shards[0].incarnation
        )
        nobody = common_pb2.CallContext(job=context.job)
        first: Any = 1  # of each enum
        call = collective_pb2.Call(operation=first, dtype=first, counts=[4], op=first, root=-1)
        begin = collective_pb2.CollectiveBegin(
            context=context, group="fuzz", ranks=[0], members=[me.id], timeout_s=1.0, stripes=1
        )
        envelope = collective_pb2.Envelope(receive=True, peer=-1, dtype=first, numel=4)
        by_call, by_envelope = (collective_pb2.CollectiveBegin.FromString(begin.SerializeToString()) for _ in range(2))
        by_call.call.CopyFrom(call)
        by_envelope.envelope.CopyFrom(envelope)
        chunk = common_pb2.Chunk(
            context=server, step=world.steps.view.version, numel=32, dtype=first, payload=bytes(128)
        )
        return [
            collective_pb2.CollectiveChunk(begin=by_call, payload=bytes(16)),
            collective_pb2.CollectiveChunk(begin=by_envelope),
            chunk,
            shard_pb2.CopyRequest(context=server, version=world.steps.view.version),
            shard_pb2.SubscribeRequest(context=nobody, reserve=shard_pb2.Reserve(dtype=first)),
            shard_pb2.SubscribeRequest(
                context=nobody, pull=shard_pb2.Pull(version=world.steps.view.version, slices=[0])
            ),
            shard_pb2.StatsRequest(context=context),
            coordinator_pb2.DescribeRequest(context=nobody),
            status_pb2.StatusRequest(context=nobody),
            watch_pb2.WatchRequest(context=nobody),
            logs_pb2.LogsRequest(context=nobody),
            trace_pb2.TraceRequest(context=nobody, steps=1),
            coordinator_pb2.RestoreCheckpointRequest(context=context, uri=f"{self.facts.directory}/a"),
            placement_pb2.DrainRequest(context=nobody, rank=1),
        ]

    @property
    def job_name(self) -> str:
        """The job's name."""
        return self.world._coordinator.job

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Addresses of the services, by the name of their gRPC service."""
        job = self.job
        return {
            "Coordinator": [job.coordinator],
            "Shard": [f"{job._host(f'shard-{rank}')}:1" for rank in range(SHARDS)],
        }

    def names(self) -> dict[str, str]:
        """Return the values that are different in every such job."""
        members = (*self.world.membership.workers, *self.world.membership.shards)
        return {f"{m.role.value} {m.rank}": m.incarnation for m in members}

    def ended(self) -> list[BaseException]:
        """Return the errors by which services have ended."""
        tasks = [task for task, _ in self.job._services if task.done() and not task.cancelled()]
        return [error for task in tasks if (error := task.exception()) is not None]


@contextmanager
def small_job(tap: Tap, directory: str, timeout_s: float = TIMEOUT_S) -> Iterator[SmallJob]:
    """Make a job that has trained for a few steps, and written a checkpoint if it has a directory."""
    tap.seeds.clear()
    with tap.installed():
        world = World.mock(shards=SHARDS, timeout_s=START_S)
    try:
        job = SmallJob(tap, directory, world)
        with tap.installed():
            for _ in range(3):
                job.step()
            world.kv_put("a", b"b")
            world.barrier()
            world.new_group([0], backend="grpc").barrier()
            if directory:
                world.save_checkpoint(f"{directory}/a")
        job.refresh()
        world._timeout_s = world.view.timeout_s = timeout_s
        yield job
    finally:
        with contextlib.suppress(Exception):
            world.close()
