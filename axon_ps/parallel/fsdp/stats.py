"""The memory of a wrapped model on a worker: an estimate from its strategy, and types for measured values. Pure.

P    parameters of the model, T of them trainable; u the largest unit, r the root (the parameters in no unit)
c    bytes of an element in compute, w as gathered, g as a gradient is sent, m as the model was built
G    workers of a node (HYBRID_SHARD); s optimizer state per trainable parameter (8 under Adam in f32)

strategy        parameters in memory                     gradients     optimizer state
FULL_SHARD      c·(r + 2u)                               g·2u          on the servers
SHARD_GRAD_OP   c·P, + w·T if gathered into buffers      g·2u          on the servers
HYBRID_SHARD    w·P/G + c·(r + 2u)                       g·2u          on the servers
NO_SHARD        m·P, + c·(r + u) if computed in copies   m·T           s·T
+ PARAMS, FULL  w·P on the host + c·(r + u)              g·2u          on the servers

Raw parameters count as so many as take their bytes in compute. FULL_SHARD adds the bytes of frozen units that stay
(`wrap`, Note: [Frozen parameters stay]). Those that are not cast are not in r, and the others of as many units stay as
fit into 2u and an eighth of these bytes.

Values come into buffers where they are cast, decompressed, or copied to a GPU. A unit with frozen parameters is
resharded one unit later in backward. This adds c·u to the rows with c·(r + u). Under SHARD_GRAD_OP with buffers it adds
2·w·f, where f is the largest number of frozen parameters of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.sharding.layout import Layout
from axon_ps.sharding.traffic import RETAINED_PER_BYTE
from axon_ps.types import StepResult

MIB = 1 << 20

_F32_BYTES = 4 * 4
"""Bytes of a parameter: its value, gradient and two moments."""


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Memory of one worker, as estimated from the strategy; see the module for the formulas.

    Attributes:
        total_params: parameters of the model.
        param_memory_bytes: parameters in the worker's memory at the peak of a step, copies on the host included.
        grad_memory_bytes: gradients of full units at the peak of a step, on their way or waiting for the optimizer.
        optim_memory_bytes: optimizer state in the worker's memory; 0 where it is on the servers.
        world_size: workers.
        host_memory_bytes: the part of `param_memory_bytes` that is in host memory by `CPUOffload` or HYBRID_SHARD.
        replicated_memory_bytes: of a worker without sharding: parameters, gradients and two moments;
            None = that of `total_params` in f32.
    """

    total_params: int
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    host_memory_bytes: int = 0
    replicated_memory_bytes: int | None = None

    @property
    def total_memory_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    @property
    def total_memory_mb(self) -> float:
        """`total_memory_bytes` in MiB."""
        return self.total_memory_bytes / MIB

    @property
    def memory_savings(self) -> float:
        """The fraction of the memory without sharding that the strategy saves: 0 = nothing, 1 = all."""
        replicated = self.replicated_memory_bytes
        replicated = _F32_BYTES * self.total_params if replicated is None else replicated
        return 1.0 - self.total_memory_bytes / replicated if replicated else 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Memory of one worker, as measured: that of its parameters, and of gradients on their way.

    Attributes:
        peak_memory_mb: at most, since the model was wrapped, in MiB.
        current_allocation_mb: now, in MiB.
    """

    peak_memory_mb: float
    current_allocation_mb: float


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Elements of one module unit.

    Attributes:
        numel: parameters.
        trainable_numel: parameters that the optimizer updates.
        retained_numel: FULL_SHARD: frozen parameters that stay and are not cast; they are not in `numel`.
    """

    numel: int
    trainable_numel: int
    retained_numel: int = 0

    @property
    def frozen_numel(self) -> int:
        """Parameters that the optimizer does not update."""
        return self.numel - self.trainable_numel


@dataclass
class Counters:
    """The counters of `statistics()`."""

    gathers: int = 0
    host_gathers: int = 0
    gathered_bytes: int = 0
    pushed_bytes: int = 0
    gather_wait_s: float = 0.0
    push_wait_s: float = 0.0
    forwards_repeated: int = 0
    step_wait_s: float = 0.0
    steps_committed: int = 0
    steps_not_committed: int = 0

    def counted(self, result: StepResult) -> StepResult:
        """Count a step."""
        self.steps_committed += result.committed
        self.steps_not_committed += not result.committed
        return result


def measured(counters: Counters, repeated: int, parameters: Meter, gradients: Meter) -> dict[str, float]:
    """Return counters and memory of a worker by name; bytes and seconds.

    Args:
        counters: the model's counters.
        repeated: gathers that were begun again.
        parameters: memory of parameters.
        gradients: memory of gradients.
    """
    return {
        **{k: float(v) for k, v in vars(counters).items()},
        "gathers_repeated": float(repeated),
        "param_memory_bytes": float(parameters.current_bytes),
        "peak_param_memory_bytes": float(parameters.peak_bytes),
        "grad_buffer_bytes": float(gradients.current_bytes),
        "peak_grad_buffer_bytes": float(gradients.peak_bytes),
        "peak_memory_bytes": float(parameters.peak_bytes + gradients.peak_bytes),
    }


def estimate(
    layout: Layout,
    units: Sequence[UnitBytes],
    *,
    strategy: ShardingStrategy,
    offload: CPUOffload,
    compute_bytes: int,
    wire_bytes: int,
    grad_bytes: int,
    built_bytes: int,
    shard_numel: int,
    state_bytes: int,
    copied: bool,
    buffered: bool,
    world_size: int,
    retained_bytes: int = 0,
) -> FSDPMemoryStats:
    """Compute one row of the table in the module's docstring.

    Args:
        layout: the model's layout.
        units: module units, the root first.
        strategy: the sharding strategy.
        offload: the part that is on the host.
        compute_bytes: c.
        wire_bytes: w.
        grad_bytes: g.
        built_bytes: m, of the dtype the model was built in.
        shard_numel: HYBRID_SHARD: elements of this worker's shards.
        state_bytes: NO_SHARD: optimizer state per trainable parameter, in bytes.
        copied: NO_SHARD: True if the module computes with copies of the masters.
        buffered: True if values are gathered into buffers.
        world_size: workers.
        retained_bytes: FULL_SHARD: frozen units that stay in memory.
    """
    total = sum(u.numel + u.retained_numel for u in units)  # of this worker
    trainable = sum(u.trainable_numel for u in units)
    inner = units[1:]
    one = max((u.numel for u in inner), default=0)
    budget = 2 * max((u.numel + u.retained_numel for u in inner), default=0) + (
        retained_bytes // RETAINED_PER_BYTE // compute_bytes
    )
    prefetched = compute_bytes * (units[0].numel + min(budget, sum(u.numel for u in inner)))
    frozen = max((u.frozen_numel for u in inner), default=0)
    copies = prefetched if frozen else compute_bytes * (units[0].numel + one)
    pushed = grad_bytes * min(2 * max(u.trainable_numel for u in units), trainable)
    grads, optim, host = pushed, 0, 0
    if strategy is ShardingStrategy.NO_SHARD:
        params = built_bytes * total + (copies if copied else 0)
        host = built_bytes * total if offload is not CPUOffload.NONE else 0
        grads, optim = built_bytes * trainable, state_bytes * trainable
    elif strategy is ShardingStrategy.HYBRID_SHARD:
        params = wire_bytes * shard_numel + prefetched
        host = wire_bytes * shard_numel
    elif offload.offloads_params:
        params = wire_bytes * total + copies
        host = wire_bytes * total
    elif strategy is ShardingStrategy.SHARD_GRAD_OP:
        params = compute_bytes * total + (wire_bytes * (trainable + 2 * frozen) if buffered else 0)
    else:
        params = prefetched + retained_bytes
    return FSDPMemoryStats(
        total_params=layout.count,
        param_memory_bytes=params,
        grad_memory_bytes=grads,
        optim_memory_bytes=optim,
        world_size=world_size,
        host_memory_bytes=host,
        replicated_memory_bytes=built_bytes * total + (built_bytes + 8) * trainable,
    )
