"""What a wrapped model is made of, by its strategy: first values, units, sources of parameters, the runtime.

The one place that knows which strategy takes which source and which runtime; from then on nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import LayoutMismatch
from axon_ps.host import fork
from axon_ps.parallel.dtypes import TORCH_DTYPES, MixedPrecision, dtype_from_torch
from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit
from axon_ps.parallel.fsdp.hybrid.node import NodeSteps
from axon_ps.parallel.fsdp.hybrid.node_groups import WorldNodeGroups
from axon_ps.parallel.fsdp.hybrid.node_runtime import NodeRuntime
from axon_ps.parallel.fsdp.memory import BufferPool, Meter, host_empty
from axon_ps.parallel.fsdp.no_shard.replicated import ReplicatedRuntime, ReplicatedUnit
from axon_ps.parallel.fsdp.runtime import BUFFERS
from axon_ps.parallel.fsdp.server_runtime import ServerRuntime
from axon_ps.parallel.fsdp.sources import HostCopySource, MappedSource, NodeSource, ParameterSource, RemoteSource
from axon_ps.parallel.fsdp.stats import Counters
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Unit
from axon_ps.types import DType
from axon_ps.worker.step_client import StepClient
from axon_ps.worker.world import world_of

WrappedUnits = tuple[wrap.WrappedUnit, ...]
Init = Callable[[nn.Module], None] | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is wrapped.

    Attributes:
        group: the workers that train it.
        strategy: which parameters stay on a worker.
        offload: what is in host memory.
        precision: dtypes of compute and wire.
        spec: what the model is registered with.
        device: where parameters compute.
        built: the dtype that the model was built in.
        node_size: workers of a node.
        prefetch: gather units before they are needed.
        meter: counts the bytes of parameters.
        counters: those of `statistics()`.
    """

    group: ProcessGroup
    strategy: ShardingStrategy
    offload: CPUOffload
    precision: MixedPrecision
    spec: JobSpec
    device: torch.device
    built: torch.dtype
    node_size: int
    prefetch: bool
    meter: Meter = field(default_factory=Meter)
    counters: Counters = field(default_factory=Counters)

    def compute_of(self, unit: Unit) -> torch.dtype:
        """What the parameters of a unit compute in."""
        return self.precision.compute(TORCH_DTYPES[unit.parameters[0].dtype])

    def wire_of(self, compute: torch.dtype) -> DType:
        """What is gathered as: the job's wire dtype, or what is computed in where that is decompressed."""
        wire = self.spec.precision
        return wire.param if wire.param_compression is None else dtype_from_torch(compute, "param_dtype")

    @property
    def on_device(self) -> bool:
        """Whether parameters compute on a GPU."""
        return cuda.memory().is_device(self.device)


def broadcast_values(plan: Plan, module: nn.Module, wrapped_units: WrappedUnits, init: Init) -> list[torch.Tensor]:
    """The first worker's values of every unit, f32, once all are found to have the same layout (NO_SHARD).

    Raises:
        LayoutMismatch: a worker wraps another model.
    """
    group = plan.group
    digest = torch.frombuffer(bytearray.fromhex(plan.spec.layout.digest), dtype=torch.uint8)
    everybody = group.all_gather(digest).view(group.world_size, -1)
    for rank, theirs in zip(group.ranks, everybody, strict=True):
        if not torch.equal(theirs, everybody[0]):
            raise LayoutMismatch(
                f"worker {rank} wraps another model than worker {group.ranks[0]}; all must build the same"
            )
    values = []
    for wrapped in wrapped_units:
        first = group.rank == 0
        value = materialize.values_of(module, wrapped, init) if first else torch.zeros(wrapped.unit.numel)
        values.append(group.broadcast(value))
    return values


def replicated_runtime(
    plan: Plan, module: nn.Module, wrapped_units: WrappedUnits, values: list[torch.Tensor]
) -> ReplicatedRuntime:
    """The runtime of NO_SHARD, with these first values, f32 by unit."""
    master_device = plan.device if plan.offload is CPUOffload.NONE else torch.device("cpu")

    def make(index: int, wrapped: wrap.WrappedUnit) -> FlatUnit:
        options = _unit_options(plan, wrapped.unit)
        flat = ReplicatedUnit(index, wrapped.unit, wrapped.params, master_device=master_device, **options)
        flat.master.copy_(values[index])
        return flat

    units = _module_units(module, wrapped_units, make)
    return ReplicatedRuntime(
        plan.group, units, grad_wire=plan.spec.precision.grad, meter=plan.meter, counters=plan.counters
    )


def server_runtime(
    plan: Plan, module: nn.Module, wrapped_units: WrappedUnits, client: StepClient, wrapper: nn.Module
) -> ServerRuntime:
    """The runtime of the strategies that use the shard servers; what it starts ends with `wrapper`."""
    node = None
    if plan.strategy is ShardingStrategy.HYBRID_SHARD:
        node = _node_steps(plan, client)
        fork.finalize(wrapper, node.close)
    has_host_copies = plan.offload.offloads_params and node is None
    resident = plan.strategy is ShardingStrategy.SHARD_GRAD_OP and not has_host_copies
    in_node = None if node is None else node.device
    wires = [(w.unit, plan.wire_of(plan.compute_of(w.unit))) for w in wrapped_units]
    limit_bytes = BUFFERS * max(unit.numel * wire.itemsize for unit, wire in wires)
    limit_bytes += sum(unit.numel * wire.itemsize for unit, wire in wires if resident and unit.trainable)
    pool = BufferPool(limit_bytes, plan.meter, pinned=plan.on_device, device=in_node)

    def source_of(unit: Unit, dtype: torch.dtype, wire: DType) -> ParameterSource:
        same_memory = not plan.on_device or in_node is not None
        buffered = resident or not same_memory or TORCH_DTYPES[wire] != dtype
        if node is not None:
            return NodeSource(node, pool, buffered=buffered, on_device=in_node is not None)
        if has_host_copies:
            copy = host_empty(unit.numel, TORCH_DTYPES[wire], pinned=plan.on_device)
            plan.meter.add(copy.nbytes)
            return HostCopySource(client, copy)
        remote = RemoteSource(client, pool, buffered=buffered)
        return remote if buffered else MappedSource(client, remote)

    def make(index: int, wrapped: wrap.WrappedUnit) -> FlatUnit:
        options = _unit_options(plan, wrapped.unit)
        source = source_of(wrapped.unit, options["dtype"], options["wire"])
        return FlatUnit(index, wrapped.unit, wrapped.params, source, resident=resident, **options)

    options: dict[str, Any] = {
        "grad_wire": plan.spec.precision.grad,
        "meter": plan.meter,
        "counters": plan.counters,
        "pinned": plan.on_device,
        "stage_grads": plan.offload.stages_grads,
        "prefetch": plan.prefetch,
    }
    units = _module_units(module, wrapped_units, make)
    if node is not None:
        return NodeRuntime(node, client, units, pool, **options)
    return ServerRuntime(client, units, pool, make=None if plan.on_device else client.buffer, **options)


def _node_steps(plan: Plan, client: StepClient) -> NodeSteps:
    world = world_of(plan.group)
    return NodeSteps(
        client,
        WorldNodeGroups(world, plan.node_size),
        plan.spec,
        plan.wire_of(plan.precision.compute(plan.built)),
        world.num_shards,
        device=plan.device if plan.on_device else None,
        retain_on_device=not plan.offload.offloads_params,
        meter=plan.meter,
    )


def _unit_options(plan: Plan, unit: Unit) -> dict[str, Any]:
    """What all kinds of flat units take."""
    dtype = plan.compute_of(unit)
    return {
        "device": plan.device,
        "dtype": dtype,
        "wire": plan.wire_of(dtype),
        "meter": plan.meter,
        "counters": plan.counters,
    }


def _module_units(
    module: nn.Module, wrapped_units: WrappedUnits, make: Callable[[int, wrap.WrappedUnit], FlatUnit]
) -> list[ModuleUnit]:
    """The module units of a module, the root first, with flat units that `make` makes."""
    units: dict[str, ModuleUnit] = {"": ModuleUnit(number=0, name="", module=module, flats=[])}
    for index, wrapped in enumerate(wrapped_units):
        if wrapped.owner not in units:
            child = module.get_submodule(wrapped.owner)
            units[wrapped.owner] = ModuleUnit(number=len(units), name=wrapped.owner, module=child, flats=[])
        units[wrapped.owner].flats.append(make(index, wrapped))
    return list(units.values())
