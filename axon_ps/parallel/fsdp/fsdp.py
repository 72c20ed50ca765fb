"""`FullyShardedDataParallel`: a module whose parameters live on the shard servers.

These terms are used here and in the modules below: *unit* (parameters gathered together), *slice* (the part of a unit
that one server owns), *replica* (the source of one gradient per step), *version* (the number of committed steps).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.observe.metrics.sources import register
from axon_ps.parallel.checkpoints import buffers
from axon_ps.parallel.fsdp import arguments, build, hooks, materialize, stats, wrap
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.stats import FSDPMemoryStats, MemoryStats, UnitBytes
from axon_ps.parallel.fsdp.strategy import (
    CPUOffload,
    ShardingStrategy,
    check_sub_group,
    checked_node_size,
    checked_policy,
)
from axon_ps.parallel.fsdp.tensors.sent_gradients import Home, PendingNorm
from axon_ps.parallel.fsdp.values import ShardedValues
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.partitions import even_options
from axon_ps.sharding.plan import PlanOptions, default_options
from axon_ps.sharding.policy import Policy
from axon_ps.texts import value_of_json
from axon_ps.types import StepResult
from axon_ps.worker.world import World, world_of


class FullyShardedDataParallel(ShardedValues):
    """Wrap a module so that its parameters and optimizer state live on the shard servers of the job.

    Use it like the module. Parameters are gathered before a unit's forward and backward and freed after; gradients are
    averaged over the replicas on the servers while backward runs; `optimizer.step()` of one of our optimizers applies
    them there. Between uses a parameter has a shape and no values, and reading it is an error (`Misuse`) outside
    `summon_full_params()`; once its gradient was sent, so is reading `param.grad`. Every worker must build the same
    module and wrap it the same way. A job may have several models, by name; each has its own layout, optimizer, version
    and steps.
    Under NO_SHARD the servers are not used: gradients are averaged between the workers and stay there, and the step is
    local.

    Args:
        module: the user's module, on the CPU, a GPU or the meta device. First values and buffers are those of the
            worker of lowest rank (in a job that resumes, those of the checkpoint); the others' are dropped, with a
            warning if they differ.
        group: the workers that train it: a world, or its default group; None = the current world. Under NO_SHARD it may
            be any group of the world.
        sharding_strategy: the part of the model that stays in a worker's memory between uses; its name and torch's
            `ShardingStrategy` are accepted, too.
        cpu_offload: the part of that in host memory; torch's `CPUOffload` is accepted, too, and True for FULL.
        mixed_precision: dtypes of compute and wire; a dtype for `MixedPrecision(param_dtype=...)`, True for bfloat16,
            or torch's `MixedPrecision`.
        unit_types: module classes that become units, or one class.
        auto_wrap_policy: returns True for a module that becomes a unit; instead of `unit_types`. Torch's
            `ModuleWrapPolicy` and `transformer_auto_wrap_policy` are accepted, too.
        ignored_parameters: parameters that stay unchanged: each worker's own, not averaged.
        intra_node_size: HYBRID_SHARD: the workers of a node, G; None = as many as this node has.
        prefetch: gather the next units before they are needed; else only `prefetch_forward_params()` does.
        param_init_fn: gives a submodule on the meta device its values; None = its own `reset_parameters()`.
        plan_options: the sizes in which units are cut; None = chunks of about 2^18 elements (2^19 if all values are
            sent compressed), of a length that cuts the largest units evenly.
        device: the device on which parameters compute; None = the module's (the CPU for the meta device).
        policy: the way in which replicas wait for each other between steps: `Synchronous()` (None),
            `BoundedStaleness(...)`, `Asynchronous()`.
        name: the job's name for the model; None = "model 0", "model 1" and so on, in the order in which this process
            wraps models. Workers find each other's models by it.

    Raises:
        LayoutMismatch: another worker wrapped another module by that name; the message names the difference.
        Misuse: this process has wrapped a model by that name already; the message names both.
        InvalidRequest: the module cannot be sharded; the message names the parameter and the reason. Or the group is
            not all workers of the world, since a step commits for all of them. Or the policy does not go with the
            strategy: where replicas step asynchronously, others change the parameters between forward and backward, so
            this worker must retain those that forward read.

    After an error: the module may have lost its values; build it again.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | World | None = None,
        *,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | bool | str = CPUOffload.NONE,
        mixed_precision: MixedPrecision | torch.dtype | bool | None = None,
        unit_types: Collection[type[nn.Module]] | type[nn.Module] = (),
        auto_wrap_policy: Callable[..., bool] | None = None,
        ignored_parameters: Iterable[nn.Parameter] = (),
        intra_node_size: int | None = None,
        prefetch: bool = True,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        plan_options: PlanOptions | None = None,
        device: torch.device | str | None = None,
        policy: Policy | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        given = arguments.checked(
            module=module,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            unit_types=unit_types,
            auto_wrap_policy=auto_wrap_policy,
            ignored_parameters=ignored_parameters,
            intra_node_size=intra_node_size,
            prefetch=prefetch,
            param_init_fn=param_init_fn,
            plan_options=plan_options,
            device=device,
            policy=policy,
            name=name,
        )
        strategy, mixed, group = given.sharding_strategy, given.mixed_precision, current_group(group)
        if not group.is_world and len(group.ranks) != world_of(group).world_size:  # it may change at any moment
            check_sub_group(len(group.ranks), world_of(group).world_size, strategy)
        world = world_of(group)
        replicated = strategy is ShardingStrategy.NO_SHARD
        policy = checked_policy(given.policy, strategy, given.cpu_offload)
        node_size = checked_node_size(given.intra_node_size, strategy, world.membership.workers)
        wrap.refuse_wrapped(module, "FSDP")
        wrap.refuse_sparse(module, given.ignored_parameters)
        is_unit = given.auto_wrap_policy or (lambda child: isinstance(child, given.unit_types))
        wrapped_units = wrap.partition(module, is_unit, given.ignored_parameters)
        wrap.refuse_shared_memory(module, wrapped_units)
        built = wrap.widest_dtype(wrapped_units)
        layout = wrap.layout_of(wrapped_units)
        precision = mixed.wire(built)
        if replicated and (precision.param_compression or precision.grad_compression):
            raise InvalidRequest(
                "NO_SHARD moves nothing to the shard servers that could be compressed; give MixedPrecision dtypes, or "
                "use DistributedDataParallel with a compressing communication hook"
            )
        spec = JobSpec(
            layout=layout,
            precision=precision,
            options=plan_options or even_options(layout, world.num_shards, node_size, default_options(precision)),
            replica_is_node=strategy is ShardingStrategy.HYBRID_SHARD,
            policy=policy,
            model=type(module).__qualname__,
        )
        with contextlib.ExitStack() as stack:
            if not replicated:
                name = stack.enter_context(world.models.names.claiming(name, spec.described))
            self._wrapping = Wrapping(
                group=group,
                strategy=strategy,
                offload=given.cpu_offload,
                precision=mixed,
                spec=spec,
                name=name or "",
                device=given.device or _device_of(wrapped_units),
                built=built,
                node_size=node_size,
                prefetch=prefetch,
            )
            self._make(module, wrapped_units, param_init_fn)

    # ------------------------------------------------------------------ wrapping

    def _make(self, module: nn.Module, wrapped_units: build.WrappedUnits, init: build.Init) -> None:
        """Register the model or join its broadcast, and wrap the user's module."""
        wrapping = self._wrapping
        values: list[torch.Tensor] = []
        materialize.make_buffers(module, init, wrapping.device)
        self._buffer_dtypes = materialize.cast_buffers(module, wrapping.precision.buffer_dtype)
        module_buffers = buffers.ModuleBuffers(module, self._buffer_dtypes)
        if wrapping.replicated:
            values = build.broadcast_values(wrapping, module, wrapped_units, init, module_buffers)
        else:
            world = world_of(self.process_group)
            if any(True for _ in module.buffers()):
                self._served_buffers = buffers.ServedBuffers(world, self.name, module_buffers)
            self._steps = materialize.register(
                world, self.spec, self.name, module, wrapped_units, init, self._served_buffers
            )
        wrapped_units = materialize.replace_meta(module, wrapped_units)
        self._wrap(module)
        self._runtime = (
            build.replicated_runtime(wrapping, module, wrapped_units, values)
            if wrapping.replicated
            else build.server_runtime(wrapping, module, wrapped_units, self._steps, self)
        )
        self._runtime.buffers = module_buffers
        if self._served_buffers is not None:
            self._runtime.on_commit = self._served_buffers.offer
        register("fsdp", self, model=self.name or "")
        self._tag_parameters()
        self._hook_state_dicts()
        hooks.attach(self._runtime, self)

    def _tag_parameters(self) -> None:
        for flat in self._runtime.flats:
            for spec, param in zip(flat.unit.parameters, flat.params, strict=True):
                param._axon_home = Home(weakref.ref(self), spec.name, flat.index, self._runtime.sent)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ as a module

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its parameters gathered unit by unit.

        A forward whose parameters changed meanwhile (this worker was frozen or cut off, and the job went on) is run
        again: its result is of one version.

        Raises:
            StepAborted: the parameters change faster than it can read them, since this worker is not a member.
            Misuse: this process is a fork of a worker.
        """
        while True:
            output = self._run_once(args, kwargs)
            if not hooks.again(self._runtime):
                return output

    def _run_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime, precision = self._runtime, self._wrapping.precision
        self._follow_restores()
        pushed = hooks.before_root(runtime)
        try:
            if precision.param_dtype is not None and precision.cast_forward_inputs:
                args, kwargs = _cast((args, kwargs), precision.param_dtype)
            output = self.module(*args, **kwargs)
        finally:
            hooks.end_root(pushed)
        if precision.output_dtype is not None:
            output = _cast(output, precision.output_dtype)
        hooks.after_root(runtime, output)
        return output

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy."""
        return self._wrapping.strategy

    @property
    def process_group(self) -> ProcessGroup:
        """The workers that train it."""
        return self._wrapping.group

    @property
    def spec(self) -> JobSpec:
        """The spec with which the model was registered: layout, wire dtypes, chunk sizes."""
        return self._wrapping.spec

    @property
    def name(self) -> str:
        """The job's name for the model; under NO_SHARD, of which the job does not know, the name that was given."""
        return self._wrapping.name

    @property
    def version(self) -> int:
        """Committed steps of the model, copies from others included, as this worker knows it."""
        return self._runtime.version

    @property
    def committed(self) -> dict[str, Any]:
        """The newest values that were committed with its steps, by name; see `ServerOptimizer.step`.

        They are those of the version that the model is at: after a restore, those of the checkpoint. {} under NO_SHARD.
        """
        return {
            name: value_of_json(value, f"the committed value {name!r}")
            for name, value in self._runtime.committed.items()
        }

    def copy_from(self, other: FullyShardedDataParallel, weight: float = 1.0) -> StepResult:
        """Move the values towards another model's, on the servers: (1 - weight) * these + weight * the other's.

        It serves target networks and averages of weights. It is a step of this model, with the other's version at that
        moment. Every worker calls it. All of them see the result from their next forward on, and it commits for all or
        for none. The optimizer's state stays as it is. Only votes and decisions are sent.

        Args:
            other: a model whose module is built and wrapped alike.
            weight: above 0, at most 1.

        Returns:
            The result, as of `optimizer.step()`. If it did not commit (a worker left or joined), the values are as they
            were; go on as after any step that did not commit.

        Raises:
            InvalidRequest: the weight is out of range, the other has another layout, or one of the two is asynchronous.
            Misuse: gradients were sent for the step under way, a forward is under way, or a model was released.
            Timeout: no decision came in time.

        After an error: it may or may not have committed; `version` tells.
        """
        if not 0.0 < weight <= 1.0:
            raise InvalidRequest(f"weight is {weight}; it must be above 0 and at most 1")
        if other is self:
            raise InvalidRequest("copy_from was given the model itself; give another one")
        self._check_idle("copy_from")
        if self._wrapping.replicated != other._wrapping.replicated:
            raise InvalidRequest("copy_from needs both models on the servers, or both under NO_SHARD")
        if difference := self.spec.cut_difference(other.spec):
            raise InvalidRequest(f"model {self.name!r} cannot take the values of {other.name!r}: {difference}")
        return self._runtime.copy_from(other.runtime, weight)

    def release(self) -> None:
        """Have the servers forget the model and free its memory; every worker calls it, and none uses it again.

        Its name may be used for another model then. Checkpoints that have it stay as they are.

        Raises:
            Busy: a checkpoint is being written.
            GenerationChanged, Timeout: as of `World.barrier`; nothing has changed then.

        After an error: the model may be gone; releasing it again is harmless.
        """
        self._runtime.reset()
        self._runtime.release()
        if self._served_buffers is not None:
            self._served_buffers.release()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backwards inside in `param.grad`; the next backward outside adds its own to them.

        A step without such a backward sends them too. Under NO_SHARD of several workers it is refused (`Misuse`).
        """
        before, self._runtime.accumulation.syncing = self._runtime.accumulation.syncing, False
        try:
            yield
        finally:
            self._runtime.accumulation.syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `optimizer.zero_grad()` of one of our optimizers does."""
        if self._runtime.zero_grad(set_to_none=set_to_none):
            super().zero_grad(set_to_none)

    def clip_grad_norm(self, max_norm: float) -> float | None:
        """Clip the gradients of the coming step to a global L2 norm, as `torch.nn.utils.clip_grad_norm_` does.

        The norm is that of the averaged gradients of the full model over all replicas. With servers it is known when
        the step is decided and comes back as `StepResult.grad_norm`; under NO_SHARD the gradients are clipped at once.

        Args:
            max_norm: the norm, above 0; inf measures only. Of several calls before a step the smallest counts.

        Returns:
            Under NO_SHARD the norm before clipping, else None.

        Raises:
            InvalidRequest: it is not above 0.
        """
        norm = self.clip_grad_norm_(max_norm)
        return None if isinstance(norm, PendingNorm) else float(norm)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as `clip_grad_norm` does, by the name and with the result of torch's FSDP.

        accelerate and Lightning call it.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` does the same.

        Args:
            max_norm: as of `clip_grad_norm`.
            norm_type: 2.

        Returns:
            The norm before clipping. With servers it can be read after `optimizer.step()`; before, reading it is an
            error (`Misuse`).

        Raises:
            InvalidRequest: `max_norm` is not above 0, or `norm_type` is not 2.
        """
        if float(norm_type) != 2.0:
            raise InvalidRequest(f"norm_type is {norm_type}; the L2 norm is computed, pass 2")
        return self._runtime.clip(float(max_norm))

    # ------------------------------------------------------------------ by hand

    def gather_parameters(self) -> None:
        """Unshard every parameter, as `summon_full_params()` does, until `reshard_parameters()` or a backward.

        Raises:
            Misuse: a forward is under way.
        """
        self._check_idle("gather_parameters")
        self._runtime.gather_all()

    def reshard_parameters(self) -> None:
        """Free the memory of every parameter that the strategy reshards, and of prefetched units.

        Raises:
            Misuse: a forward is under way.
        """
        self._check_idle("reshard_parameters")
        self._runtime.reset()

    def sync_gradients(self) -> None:
        """Send (NO_SHARD: average) the gradients accumulated inside `no_sync()`, without another backward."""
        self._runtime.push_accumulated()

    def prefetch_forward_params(self) -> None:
        """Begin to gather the parameters that the next forward needs first; with `prefetch=True` a step's end does so.

        Raises:
            Misuse: it was called before and no forward has come since, or the strategy does not reshard parameters.
        """
        if self.strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            raise Misuse(
                f"prefetch_forward_params() has nothing to gather: {self.strategy.name} does not reshard parameters"
            )
        if self._runtime.gathering.prefetched:
            raise Misuse("prefetch_forward_params() was called twice; run a forward before you call it again")
        self._check_idle("prefetch_forward_params")
        self._runtime.prefetch()

    def has_pending_prefetch(self) -> bool:
        """Return True if `prefetch_forward_params()` was called and no forward has come since."""
        return self._runtime.gathering.prefetched

    def broadcast_updated_params(self) -> None:
        """Bring the parameters that stay on this worker up to the current version now, not at the next forward.

        Under SHARD_GRAD_OP these are the full parameters, under HYBRID_SHARD this worker's shard. Under NO_SHARD every
        worker's parameters become those of the first. Under FULL_SHARD none stay, and nothing happens.
        """
        if self.strategy is ShardingStrategy.SHARD_GRAD_OP:
            self._runtime.gather_all()
            self._runtime.reset()
        else:
            self._runtime.refresh()

    # ------------------------------------------------------------------ measures

    def statistics(self) -> dict[str, float]:
        """Return counters and memory of this worker: bytes, seconds, steps; the data plane's are `wire_*`."""
        return self._runtime.statistics()

    def memory_estimate(self) -> FSDPMemoryStats:
        """Estimate the memory of this worker at the peak of a step, by strategy; `stats` has the formulas."""
        runtime, wrapping, layout = self._runtime, self._wrapping, self.spec.layout
        built, compute = wrapping.built, wrapping.precision.compute(wrapping.built)
        trainable, state_bytes = max(1, layout.trainable_numel), runtime.optimizer_bytes
        return stats.estimate(
            layout,
            [
                UnitBytes(
                    numel=sum(f.unit.numel for f in u.flats),
                    trainable_numel=sum(f.unit.numel for f in u.flats if f.trainable),
                )
                for u in runtime.units
            ],
            strategy=self.strategy,
            offload=wrapping.offload,
            compute_bytes=compute.itemsize,
            wire_bytes=wrapping.wire.itemsize,
            grad_bytes=self.spec.precision.grad.itemsize,
            built_bytes=built.itemsize,
            shard_numel=runtime.shard_numel,
            state_bytes=2 * built.itemsize if state_bytes is None else state_bytes // trainable,
            copied=any(flat.swapped for flat in runtime.flats),
            buffered=any(f.source.buffered for f in runtime.flats),
            world_size=self.process_group.world_size,
        )

    def memory_stats(self) -> MemoryStats:
        """Return the memory of the parameters, and of gradients on their way, in this worker: current and peak."""
        s = self._runtime.statistics()
        return MemoryStats(
            peak_memory_mb=s["peak_memory_bytes"] / stats.MIB,
            current_allocation_mb=(s["param_memory_bytes"] + s["grad_buffer_bytes"]) / stats.MIB,
        )

    @property
    def runtime(self) -> Runtime:
        """The runtime that drives it; for optimizers."""
        return self._runtime


def _device_of(wrapped_units: tuple[wrap.WrappedUnit, ...]) -> torch.device:
    devices = {p.device for wrapped in wrapped_units for p in wrapped.params if not p.is_meta}
    if len(devices) > 1:
        raise InvalidRequest(f"the module is spread over {sorted(map(str, devices))}; move it to one device first")
    return devices.pop() if devices else torch.device("cpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast_one(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    return torch.utils._pytree.tree_map(cast_one, value)
