"""The parts of a wrapped model, by its strategy: options, first values, units, sources of parameters, the runtime.

Only here are the source and the runtime of each strategy chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.host import fork
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers, ServedBuffers
from axon_ps.parallel.ddp import replicas
from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.parallel.fsdp.arguments import Arguments
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit
from axon_ps.parallel.fsdp.hybrid.node import NodeRuntime, NodeSteps
from axon_ps.parallel.fsdp.hybrid.node_groups import WorldNodeGroups
from axon_ps.parallel.fsdp.memory import BufferPool, host_empty
from axon_ps.parallel.fsdp.mesh.boxes import recast
from axon_ps.parallel.fsdp.mesh.groups import OptimizerGroups
from axon_ps.parallel.fsdp.mesh.joining import check_divided, is_divided_model, joined
from axon_ps.parallel.fsdp.mesh.lines import meet
from axon_ps.parallel.fsdp.no_shard.replicated import ReplicatedRuntime
from axon_ps.parallel.fsdp.no_shard.replicated_unit import ReplicatedUnit
from axon_ps.parallel.fsdp.on_servers import traffic
from axon_ps.parallel.fsdp.on_servers.server_runtime import ServerRuntime
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.sources import HostCopySource, MappedSource, NodeSource, ParameterSource, RemoteSource
from axon_ps.parallel.fsdp.strategy import (
    ShardingStrategy,
    check_sub_group,
    checked_node_size,
    checked_policy,
    grouping_of,
)
from axon_ps.parallel.fsdp.tensors import float8_weights
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.precision import TORCH_DTYPES, CastForF32, view_of
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Unit
from axon_ps.sharding.partitions import even_options
from axon_ps.sharding.plan import default_options
from axon_ps.sharding.traffic import BUFFERS
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.world import World, world_of

_logger = logging.getLogger(__name__)

_BUFFERS_NAMED: Final = 3

WrappedUnits: TypeAlias = tuple[wrap.WrappedUnit, ...]
Init: TypeAlias = Callable[[nn.Module], None] | None


@contextmanager
def prepared(given: Arguments, group: ProcessGroup | World | None) -> Iterator[tuple[Wrapping, WrappedUnits]]:
    """Check the arguments against each other and the job, and yield the options and the module's units.

    Except under NO_SHARD the model's name is claimed. It is free again if the block raises.

    Raises:
        Misuse, InvalidRequest: as of `FullyShardedDataParallel`.
    """
    module, group = given.module, current_group(group)
    mixed = float8_weights.precision_for(module, given.mixed_precision)
    world = world_of(group)
    members = world.membership.workers
    wrap.refuse_wrapped(module, "FSDP")
    float8_weights.make_plain(module)
    wrap.refuse_sparse(module, given.ignored_parameters)
    wrapped_units, mixed, uncast = wrap.divide(
        module, given.auto_wrap_policy, given.unit_types, mixed, given.ignored_parameters
    )
    device = given.device or _device_of(wrapped_units)
    strategy, why = traffic.strategy_for(given, members, device)
    if not group.is_world and len(group.ranks) != world.world_size:  # it may change at any moment
        check_sub_group(len(group.ranks), world.world_size, strategy)
    line = given.line if len(given.line) < world.world_size or is_divided_model(wrapped_units) else ()
    check_divided(wrapped_units, line, strategy)
    replicated = strategy is ShardingStrategy.NO_SHARD
    policy = checked_policy(given.policy, strategy, given.cpu_offload)
    node_size = checked_node_size(given.intra_node_size, strategy, members)
    wrap.refuse_shared_memory(module, wrapped_units)
    built = wrap.widest_dtype(wrapped_units)
    precision = mixed.wire(built)
    if precision.by_tensor:
        wrapped_units = float8_weights.marked(module, wrapped_units)
    layout = wrap.layout_of(wrapped_units)
    if replicated and (precision.param_compression or precision.grad_compression):
        raise InvalidRequest(
            "NO_SHARD moves nothing to the shard servers that could be compressed; give MixedPrecision dtypes, or "
            "use DistributedDataParallel with a compressing communication hook"
        )
    spec = JobSpec(
        layout=layout,
        precision=precision,
        options=given.plan_options or even_options(layout, world.num_shards, node_size, default_options(precision)),
        grouping=grouping_of(strategy, node_size, members),
        policy=policy,
        model=type(module).__qualname__,
    )
    with ExitStack() as stack:
        name = given.name
        if not replicated:
            name = stack.enter_context(world.models.names.claiming(name, spec.described))
        lines = None
        if line:
            lines = meet(world, name or "", line, world.view.timeout_s)
            model, layout, wrapped_units = joined(lines, spec.model, wrapped_units)
            options = given.plan_options or even_options(layout, world.num_shards, 1, default_options(precision))
            spec = replace(spec, layout=layout, options=options, grouping=lines.grouping, model=model)
        wrapping = Wrapping(
            group=group,
            strategy=strategy,
            offload=given.cpu_offload,
            precision=mixed,
            spec=spec,
            name=name or "",
            device=device,
            built=built,
            node_size=node_size,
            prefetch=given.prefetch,
            lines=lines,
            groups=None if lines is None else OptimizerGroups(lines, layout),
            retain_frozen=given.retain_frozen,
            uncast=frozenset(w.unit.name for w in wrapped_units if w.owner in uncast),
        )
        traffic.log_choice(wrapping, wrapped_units, world.membership, why)
        yield wrapping, wrapped_units


@dataclass(frozen=True, kw_only=True)
class Made:
    """The parts of a wrapped model.

    Attributes:
        runtime: its runtime.
        buffer_dtypes: by name, the dtypes in which buffers were built, if they compute in another one.
        served_buffers: its buffers on the servers, if it has any there.
    """

    runtime: Runtime
    buffer_dtypes: Mapping[str, torch.dtype]
    served_buffers: ServedBuffers | None


def made(wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, init: Init, wrapper: nn.Module) -> Made:
    """Register a model or join its broadcast, and make its parts. All that they start ends with `wrapper`."""
    materialize.make_buffers(module, init, wrapping.device)
    uncast_types = wrapping.precision.uncast_types
    buffer_dtypes = materialize.cast_buffers(module, wrapping.precision.buffer_dtype, uncast_types)
    for child in module.modules():
        if isinstance(child, uncast_types):
            CastForF32().register(child)
    buffers = ModuleBuffers(module, buffer_dtypes)
    served: ServedBuffers | None = None
    runtime: Runtime
    if wrapping.replicated:
        values = broadcast_values(wrapping, module, wrapped_units, init, buffers)
        materialize.leave_meta(wrapped_units)
        runtime = replicated_runtime(wrapping, module, wrapped_units, values)
    else:
        world = world_of(wrapping.group)
        if any(True for _ in module.buffers()):
            if wrapping.lines is None:
                served = ServedBuffers(world, wrapping.name, buffers)
            elif saved := [name for name, _ in buffers.named()]:
                _logger.warning(
                    "model %r: buffers of a mesh stay on their workers; the servers' checkpoints and exports are "
                    "without %s. Save them with state_dict()",
                    wrapping.name,
                    ", ".join(saved[:_BUFFERS_NAMED]) + (" ..." if len(saved) > _BUFFERS_NAMED else ""),
                )
        client = materialize.register(
            world,
            wrapping.spec,
            wrapping.name,
            module,
            wrapped_units,
            init,
            served,
            line=0 if wrapping.lines is None else wrapping.lines.own,
        )
        materialize.leave_meta(wrapped_units)
        for wrapped in wrapped_units:
            for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                recast(param, wrapping.compute_of(wrapped.unit, spec))
        runtime = server_runtime(wrapping, module, wrapped_units, client, wrapper)
    runtime.buffers = buffers
    if served is not None:
        runtime.on_commit = served.offer
    return Made(runtime=runtime, buffer_dtypes=buffer_dtypes, served_buffers=served)


def broadcast_values(
    wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, init: Init, buffers: ModuleBuffers
) -> list[torch.Tensor]:
    """Return the first worker's values of every unit, f32, once all are found to have the same layout (NO_SHARD).

    The buffers become that worker's.

    Raises:
        LayoutMismatch: a worker wraps another model.
    """
    group = wrapping.group
    parameters = [f"{w.unit.name}: {p}" for w in wrapped_units for p in w.unit.parameters]
    replicas.check_same(group, [*parameters, *buffers.described()])
    values = [
        materialize.values_of(module, w, init)
        if group.rank == 0
        else torch.zeros(w.unit.numel, dtype=torch.float32, device="cpu")
        for w in wrapped_units
    ]
    replicas.broadcast(group, values)
    others = any(
        not param.is_meta and not _are_same(view_of(value, p).to(param), param)
        for value, w in zip(values, wrapped_units, strict=True)
        for p, param in zip(w.unit.parameters, w.params, strict=True)
    )
    first = group.ranks[0]
    differ = [*(["parameters"] if others else ()), *buffers.broadcast(group)]
    materialize.warn(group.ranks[group.rank], wrapping.name or wrapping.spec.model, differ, first)
    return values


def replicated_runtime(
    wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, values: list[torch.Tensor]
) -> ReplicatedRuntime:
    """Make the runtime of NO_SHARD, with these first values, f32 by unit."""
    flats = [ReplicatedUnit(wrapped, wrapping) for wrapped in wrapped_units]
    for flat, value in zip(flats, values, strict=True):
        flat.master.copy_(value)
    return ReplicatedRuntime(wrapping, _module_units(module, wrapped_units, flats), flats)


def server_runtime(
    wrapping: Wrapping, module: nn.Module, wrapped_units: WrappedUnits, client: StepClient, wrapper: nn.Module
) -> ServerRuntime:
    """Make the runtime of the strategies that use the shard servers. All that it starts ends with `wrapper`."""
    node = None
    if wrapping.strategy is ShardingStrategy.HYBRID_SHARD:
        node = _node_steps(wrapping, client)
        fork.finalize(wrapper, node.close)
    has_host_copies = wrapping.offload.offloads_params and node is None
    resident = wrapping.strategy is ShardingStrategy.SHARD_GRAD_OP and not has_host_copies
    in_node = None if node is None else node.device

    def is_buffered(unit: Unit) -> bool:
        return not wrapping.gathers_directly(unit) or (wrapping.on_device and in_node is None)

    def size_bytes(unit: Unit) -> int:
        return unit.numel * wrapping.wire_of(unit).itemsize

    beside = [w for w in wrapped_units if resident and w.unit.trainable and is_buffered(w.unit)]
    limit_bytes = BUFFERS * max(size_bytes(w.unit) for w in wrapped_units) + sum(size_bytes(w.unit) for w in beside)
    pool = BufferPool(limit_bytes, wrapping.meter, pinned=wrapping.on_device, device=in_node)

    def stays(unit: Unit) -> bool:
        return wrapping.retains(unit) and not (has_host_copies or is_buffered(unit))

    def source_of(unit: Unit) -> ParameterSource:
        buffered = is_buffered(unit)
        if node is not None:
            return NodeSource(node, pool, buffered=buffered, on_device=in_node is not None)
        if has_host_copies or (buffered and wrapping.retains(unit)):
            copy = host_empty(unit.numel, TORCH_DTYPES[wrapping.wire_of(unit)], pinned=wrapping.on_device)
            wrapping.meter.add(copy.nbytes)
            return HostCopySource(client, copy)
        remote = RemoteSource(client, pool, buffered=buffered)
        return remote if buffered else MappedSource(client, remote)

    flats = [FlatUnit(w, source_of(w.unit), wrapping, resident=resident or stays(w.unit)) for w in wrapped_units]
    units = _module_units(module, wrapped_units, flats)
    if node is not None:
        return NodeRuntime(node, wrapping, client, units, pool)
    return ServerRuntime(wrapping, client, units, pool)


def _node_steps(wrapping: Wrapping, client: StepClient) -> NodeSteps:
    world = world_of(wrapping.group)
    return NodeSteps(
        client,
        WorldNodeGroups(world, wrapping.node_size, wrapping.spec.grouping),
        wrapping.spec,
        [wrapping.wire_of(unit) for unit in wrapping.spec.layout.units],
        world.num_shards,
        device=wrapping.device if wrapping.on_device else None,
        retain_on_device=not wrapping.offload.offloads_params,
        meter=wrapping.meter,
    )


def _module_units(module: nn.Module, wrapped_units: WrappedUnits, flats: Sequence[FlatUnit]) -> list[ModuleUnit]:
    """Return the module units of a module, the root first, with these flat units."""
    units: dict[str, ModuleUnit] = {"": ModuleUnit(number=0, name="", module=module, flats=[])}
    for wrapped, flat in zip(wrapped_units, flats, strict=True):
        if wrapped.owner not in units:
            child = module.get_submodule(wrapped.owner)
            units[wrapped.owner] = ModuleUnit(number=len(units), name=wrapped.owner, module=child, flats=[])
        units[wrapped.owner].flats.append(flat)
    owners = {param: unit for unit in units.values() for flat in unit.flats for param in flat.params}
    for slot in wrap.slots(module, owners):
        owners[slot.param].slots.append(slot)
    units[""].tree = wrap.Tree(module, owners)
    for unit in units.values():
        unit.expected = sum(len(flat.params) for flat in unit.trained)
    return list(units.values())


def _are_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if two tensors of the same dtype have the same values; those that torch cannot compare, bits."""
    if ours.is_floating_point() and ours.dtype.itemsize > 1:
        return torch.equal(ours, theirs)
    return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def _device_of(wrapped_units: tuple[wrap.WrappedUnit, ...]) -> torch.device:
    devices = {p.device for wrapped in wrapped_units for p in wrapped.params if not p.is_meta}
    if len(devices) > 1:
        raise InvalidRequest(f"the module is spread over {sorted(map(str, devices))}; move it to one device first")
    return devices.pop() if devices else torch.device("cpu")
