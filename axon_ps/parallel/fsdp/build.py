"""What a wrapped model is made of, by its strategy: first values, units, sources of parameters, the runtime.

The one place that knows which strategy takes which source and which runtime; from then on nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.world import world_of

WrappedUnits: TypeAlias = tuple[wrap.WrappedUnit, ...]
Init: TypeAlias = Callable[[nn.Module], None] | None


@dataclass(frozen=True, kw_only=True)
class Wrapping:
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


def broadcast_values(
    wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, init: Init
) -> list[torch.Tensor]:
    """The first worker's values of every unit, f32, once all are found to have the same layout (NO_SHARD).

    Raises:
        LayoutMismatch: a worker wraps another model.
    """
    group = wrapping.group
    digest = torch.frombuffer(bytearray.fromhex(wrapping.spec.layout.digest), dtype=torch.uint8)
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
    wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, values: list[torch.Tensor]
) -> ReplicatedRuntime:
    """The runtime of NO_SHARD, with these first values, f32 by unit."""
    master_device = wrapping.device if wrapping.offload is CPUOffload.NONE else torch.device("cpu")

    def make(index: int, wrapped: wrap.WrappedUnit) -> FlatUnit:
        options = _unit_options(wrapping, wrapped.unit)
        flat = ReplicatedUnit(index, wrapped.unit, wrapped.params, master_device=master_device, **options)
        flat.master.copy_(values[index])
        return flat

    units = _module_units(module, wrapped_units, make)
    return ReplicatedRuntime(
        wrapping.group, units, grad_wire=wrapping.spec.precision.grad, meter=wrapping.meter, counters=wrapping.counters
    )


def server_runtime(
    wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, client: StepClient, wrapper: nn.Module
) -> ServerRuntime:
    """The runtime of the strategies that use the shard servers; what it starts ends with `wrapper`."""
    node = None
    if wrapping.strategy is ShardingStrategy.HYBRID_SHARD:
        node = _node_steps(wrapping, client)
        fork.finalize(wrapper, node.close)
    has_host_copies = wrapping.offload.offloads_params and node is None
    resident = wrapping.strategy is ShardingStrategy.SHARD_GRAD_OP and not has_host_copies
    in_node = None if node is None else node.device
    wires = [(w.unit, wrapping.wire_of(wrapping.compute_of(w.unit))) for w in wrapped_units]
    limit_bytes = BUFFERS * max(unit.numel * wire.itemsize for unit, wire in wires)
    limit_bytes += sum(unit.numel * wire.itemsize for unit, wire in wires if resident and unit.trainable)
    pool = BufferPool(limit_bytes, wrapping.meter, pinned=wrapping.on_device, device=in_node)

    def source_of(unit: Unit, dtype: torch.dtype, wire: DType) -> ParameterSource:
        same_memory = not wrapping.on_device or in_node is not None
        buffered = resident or not same_memory or TORCH_DTYPES[wire] != dtype
        if node is not None:
            return NodeSource(node, pool, buffered=buffered, on_device=in_node is not None)
        if has_host_copies:
            copy = host_empty(unit.numel, TORCH_DTYPES[wire], pinned=wrapping.on_device)
            wrapping.meter.add(copy.nbytes)
            return HostCopySource(client, copy)
        remote = RemoteSource(client, pool, buffered=buffered)
        return remote if buffered else MappedSource(client, remote)

    def make(index: int, wrapped: wrap.WrappedUnit) -> FlatUnit:
        options = _unit_options(wrapping, wrapped.unit)
        source = source_of(wrapped.unit, options["dtype"], options["wire"])
        return FlatUnit(index, wrapped.unit, wrapped.params, source, resident=resident, **options)

    options: dict[str, Any] = {
        "grad_wire": wrapping.spec.precision.grad,
        "meter": wrapping.meter,
        "counters": wrapping.counters,
        "pinned": wrapping.on_device,
        "stage_grads": wrapping.offload.stages_grads,
        "prefetch": wrapping.prefetch,
    }
    units = _module_units(module, wrapped_units, make)
    if node is not None:
        return NodeRuntime(node, client, units, pool, **options)
    return ServerRuntime(client, units, pool, make=None if wrapping.on_device else client.gradients.buffer, **options)


def _node_steps(wrapping: Wrapping, client: StepClient) -> NodeSteps:
    world = world_of(wrapping.group)
    return NodeSteps(
        client,
        WorldNodeGroups(world, wrapping.node_size),
        wrapping.spec,
        wrapping.wire_of(wrapping.precision.compute(wrapping.built)),
        world.num_shards,
        device=wrapping.device if wrapping.on_device else None,
        retain_on_device=not wrapping.offload.offloads_params,
        meter=wrapping.meter,
    )


def _unit_options(wrapping: Wrapping, unit: Unit) -> dict[str, Any]:
    """What all kinds of flat units take."""
    dtype = wrapping.compute_of(unit)
    return {
        "device": wrapping.device,
        "dtype": dtype,
        "wire": wrapping.wire_of(dtype),
        "meter": wrapping.meter,
        "counters": wrapping.counters,
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
