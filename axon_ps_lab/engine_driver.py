"""Drives shard engines without a network: it runs the loops of servicer, shell and workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_ps.compress import cast
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.gradients import Push
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.core.wire_copy import MappedMemory
from axon_ps.shard.same_host.mapped_units import filled_copy, may_map
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions, Slice
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerSpec, Outcome
from axon_ps.wire.frames import decode_chunk, payload_array


def layout_of(*units: Sequence[int], frozen: Sequence[int] = ()) -> Layout:
    """Return a layout with the numels of each unit's parameters; parameter j of unit i is called "u{i}.p{j}"."""
    return Layout(
        units=tuple(
            build_unit(
                f"u{i}", [(f"u{i}.p{j}", (n,), DType.F32) for j, n in enumerate(numels)], trainable=i not in frozen
            )
            for i, numels in enumerate(units)
        )
    )


def job_of(
    layout: Layout,
    *,
    chunk_numel: int = 64,
    min_slice_numel: int = 8,
    param: DType = DType.F32,
    grad: DType = DType.F32,
) -> JobSpec:
    """Return a job with small chunks."""
    return JobSpec(
        layout=layout,
        precision=WirePrecision(param=param, grad=grad),
        options=PlanOptions(chunk_numel=chunk_numel, min_slice_numel=min_slice_numel),
    )


def one_group(layout: Layout, name: str = "sgd", **hyper: float) -> OptimizerSpec:
    """Return an optimizer with every trainable parameter in its only group."""
    return OptimizerSpec(
        name=name,
        groups=(hyper,),
        group_of=tuple(0 if layout.units[u].trainable else -1 for u, _ in layout.parameters()),
    )


def map_unit(engine: ShardEngine, owned: OwnedSlice) -> MappedMemory | None:
    """Return a slice's wire copy in memory that workers map, as `ModelShell.mapped` does; None if there is none."""
    if owned.wire.mapped is None and may_map(owned):
        memory = filled_copy(owned, engine.precision.param)
        if memory is not None:
            owned.map(memory)
    return owned.wire.mapped


class Servers:
    """All shard servers of a job."""

    def __init__(
        self,
        spec: JobSpec,
        num_servers: int = 1,
        *,
        replicas: int = 1,
        optimizer: OptimizerSpec | None = None,
        queue_bytes: int = 0,
    ) -> None:
        self.spec = spec
        self.plan = spec.plan(num_servers)
        self.queues = [QueueLimit(queue_bytes) for _ in range(num_servers)]
        self.engines = [ShardEngine(queue) for queue in self.queues]
        for rank, engine in enumerate(self.engines):
            engine.configure(spec, rank, num_servers)
            engine.optimizer.set(optimizer or one_group(spec.layout, lr=0.1))
            engine.membership(1, 1, 0, replicas)

    @property
    def step(self) -> int:
        """The step attempt that all are at."""
        (step,) = {e.step for e in self.engines}
        return step

    @property
    def version(self) -> int:
        """The version that all are at."""
        (version,) = {e.version for e in self.engines}
        return version

    def upload(self, values: Sequence[Array]) -> None:
        """Upload first values: f32[unit_numel] for each unit."""
        for unit, unit_values in enumerate(values):
            for engine, begin, end in self.chunks(unit):
                engine.parameters.upload(unit, begin, unit_values[begin:end], engine.version)

    def chunks(self, unit: int) -> list[tuple[ShardEngine, int, int]]:
        """Return every chunk of a unit, with the engine that has it."""
        return [
            (self.engines[s.server], begin, end)
            for s in self.plan.slices[unit]
            for begin, end in s.chunks(self.spec.options.chunk_numel)
        ]

    def slice_of(self, s: Slice) -> OwnedSlice:
        """Return a slice of the plan from the server that the plan names."""
        return self.engines[s.server].slices.of(s.unit, s.begin)

    def push(self, unit: int, replica: int, grad: Array | None) -> None:
        """Push one replica's gradient of a unit (f32, cast here); replicas must push in order."""
        dtype = self.spec.precision.grad
        wire = None if grad is None else cast_to(grad, dtype)
        for engine, begin, end in self.chunks(unit):
            chunk_values = None if wire is None else wire[begin:end]
            assert engine.gradients.push(engine.step, unit, begin, replica, dtype, chunk_values) is Push.SUMMED

    def commit(self, hyper: Sequence[Hyper] = (), clip_factor: float = 1.0) -> None:
        """Apply a decision to commit on all servers, with the chunks in order."""
        for engine in self.engines:
            apply(engine, commit_of(engine, hyper, clip_factor))

    def end(self, outcome: Outcome) -> None:
        """Apply a decision that drops the step."""
        for engine in self.engines:
            decision = Decision(step=engine.step, generation=engine.generation, outcome=outcome, version=engine.version)
            assert engine.decide(decision) == []

    def train_step(self, grads: Sequence[Sequence[Array | None]], hyper: Sequence[Hyper] = ()) -> None:
        """Push the gradients (by replica and unit; None for a frozen unit), and commit."""
        for unit, u in enumerate(self.spec.layout.units):
            if u.trainable:
                for replica, of_replica in enumerate(grads):
                    self.push(unit, replica, of_replica[unit])
        self.commit(hyper)

    def values(self, unit: int) -> Array:
        """Return the unit as a worker would gather it, in the wire's storage dtype."""
        dtype = self.spec.precision.param
        out = np.empty(self.spec.layout.units[unit].numel, dtype.numpy)
        for s in self.plan.slices[unit]:
            for frame in self.engines[s.server].parameters.frames(unit, s.begin, s.end):
                header, payload = decode_chunk(frame)
                out[header.offset : header.offset + header.numel] = payload_array(header, payload, s.numel)
        return out


def cast_to(values: Array, dtype: DType) -> Array:
    """Convert f32 values to a wire dtype."""
    if dtype is DType.F32:
        return values
    out = np.empty(values.size, dtype.numpy)
    cast.encode(values, out, dtype)
    return out


def commit_of(engine: ShardEngine, hyper: Sequence[Hyper] = (), clip_factor: float = 1.0) -> Decision:
    """Return the decision that commits the engine's current step."""
    return Decision(
        step=engine.step,
        generation=engine.generation,
        outcome=Outcome.COMMIT,
        version=engine.version + 1,
        clip_factor=clip_factor,
        hyper=tuple(hyper),
    )


def apply(engine: ShardEngine, decision: Decision) -> None:
    """Apply a decision, two chunks at a time."""
    scratch = engine.scratch(2)
    for owned in engine.decide(decision):
        chunks = len(owned.chunks.bounds)
        for first in range(0, chunks, 2):
            assert owned.change is not None
            owned.change.apply(first, min(first + 2, chunks), scratch)
        owned.finish()
