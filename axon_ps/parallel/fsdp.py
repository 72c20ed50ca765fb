"""`FullyShardedDataParallel`: a module whose parameters live on the shard servers.

Terms, used here and in the modules below as the design defines them: *unit* (parameters gathered together), *slice*
(what one server owns of a unit), *replica* (what contributes one gradient per step), *version* (committed steps).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from axon_ps.collectives.group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import hooks, materialize, wrap
from axon_ps.parallel.dtypes import TORCH_DTYPES, MixedPrecision
from axon_ps.parallel.flat import FlatUnit
from axon_ps.parallel.memory import Meter
from axon_ps.parallel.runtime import ModuleUnit, Runtime
from axon_ps.parallel.strategy import ShardingStrategy
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.types import WirePrecision


class FullyShardedDataParallel(nn.Module):
    """Wrap a module so that its parameters and optimizer state live on the shard servers of the job.

    Use it like the module. Parameters are gathered before a unit's forward and backward and freed after; gradients are
    averaged over the replicas on the servers while backward runs; `optimizer.step()` of one of our optimizers applies
    them there. `param.grad` is gone once it was sent. Every worker must build the same module and wrap it the same way.

    Args:
        module: the user's module, on the CPU, a GPU or the meta device. Its first values come from the worker of
            lowest rank that registers first; those of the others are dropped.
        group: the workers that train it; the whole world.
        sharding_strategy: what a worker keeps between uses.
        mixed_precision: dtypes of compute and wire.
        unit_types: module classes that become units.
        auto_wrap_policy: says of a module whether it becomes a unit; instead of `unit_types`.
        param_init_fn: gives a submodule on the meta device its values; None = its own `reset_parameters()`.
        plan_options: how finely units are cut.
        device: where parameters compute; None = where the module is (the CPU for the meta device).

    Raises:
        LayoutMismatch: another worker wrapped another module; the message says where they differ.
        InvalidRequest: the module cannot be sharded; the message says which parameter and why.

    After an error: the module may have lost its values; build it again.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        *,
        sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        mixed_precision: MixedPrecision | None = None,
        unit_types: Collection[type[nn.Module]] = (),
        auto_wrap_policy: Callable[[nn.Module], bool] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        plan_options: PlanOptions | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if unit_types and auto_wrap_policy is not None:
            raise InvalidRequest("both unit_types and auto_wrap_policy were given; pass one of them")
        if len(group.ranks) != group.world.world_size:
            raise InvalidRequest(
                f"the group has {len(group.ranks)} of the world's {group.world.world_size} workers; parameters are "
                "sharded over the whole world, pass world.default_group"
            )
        self._group = group
        self._strategy = sharding_strategy
        self._precision = mixed_precision or MixedPrecision()
        kinds = tuple(unit_types)
        parts = wrap.partition(module, auto_wrap_policy or (lambda child: isinstance(child, kinds)))
        built = TORCH_DTYPES[parts[0].unit.parameters[0].dtype]
        wire = self._precision.wire(built)
        self._spec = JobSpec(layout=wrap.layout_of(parts), precision=wire, options=plan_options or PlanOptions())
        steps = group.world.steps
        initialized = False
        while not initialized:
            registered = steps.register(self._spec)
            if registered.upload:
                materialize.upload(module, parts, steps, param_init_fn)
            initialized = steps.wait_initialized(registered)
        where = torch.device(device) if device is not None else _device_of(parts)
        parts = materialize.replace_meta(module, parts)
        self.module = module
        self._runtime = self._build(parts, where, wire)
        hooks.attach(self._runtime)

    def _build(self, parts: tuple[wrap.Part, ...], device: torch.device, wire: WirePrecision) -> Runtime:
        meter = Meter()
        units: dict[str, ModuleUnit] = {"": ModuleUnit(number=0, name="", module=self.module, flats=[])}
        for index, part in enumerate(parts):
            if part.owner not in units:
                child = self.module.get_submodule(part.owner)
                units[part.owner] = ModuleUnit(number=len(units), name=part.owner, module=child, flats=[])
            flat = FlatUnit(
                index,
                part.unit,
                part.params,
                device=device,
                dtype=self._precision.compute(TORCH_DTYPES[part.unit.parameters[0].dtype]),
                wire=wire.param,
                resident=self._strategy is ShardingStrategy.SHARD_GRAD_OP,
                meter=meter,
            )
            for param in part.params:
                param._axon_owner = weakref.ref(self)  # type: ignore[attr-defined]  # how an optimizer finds us
            units[part.owner].flats.append(flat)
        return Runtime(
            self._group.world.steps,
            list(units.values()),
            grad_wire=wire.grad,
            meter=meter,
            pinned=device.type == "cuda",
        )

    # ------------------------------------------------------------------ as a module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its parameters gathered unit by unit."""
        runtime = self._runtime
        root = runtime.units[0]
        runtime.before_forward(root)
        if self._precision.param_dtype is not None and self._precision.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self._precision.param_dtype)
        output = self.module(*args, **kwargs)
        if self._precision.output_dtype is not None:
            output = _cast(output, self._precision.output_dtype)
        hooks.watch_outputs(runtime, root, output)
        runtime.after_forward(root)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy."""
        return self._strategy

    @property
    def process_group(self) -> ProcessGroup:
        """The workers that train it."""
        return self._group

    @property
    def spec(self) -> JobSpec:
        """What the job was registered with: layout, wire dtypes, chunk sizes."""
        return self._spec

    def unwrap(self) -> nn.Module:
        """The user's module; its parameters are whole only inside `summon_full_params()`."""
        return self.module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients in `param.grad`, to be added to the next backward outside."""
        before, self._runtime.syncing = self._runtime.syncing, False
        try:
            yield
        finally:
            self._runtime.syncing = before

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip the gradients of the coming step to a global L2 norm, as `torch.nn.utils.clip_grad_norm_` does.

        The norm is that of the averaged gradients of the whole model over all replicas; it is known when the step is
        decided and comes back as `StepResult.grad_norm`.

        Args:
            max_norm: the norm, above 0.

        Raises:
            InvalidRequest: it is not above 0.
        """
        if not max_norm > 0.0:
            raise InvalidRequest(f"max_norm is {max_norm}; it must be above 0 (leave the call out to not clip)")
        self._runtime.max_norm = float(max_norm)

    # ------------------------------------------------------------------ whole parameters

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Inside, every parameter holds its current value, in compute dtype. Changes made to them are lost.

        Raises:
            Misuse: a forward or backward is under way.
        """
        if any(u.depth for u in self._runtime.units):
            raise Misuse("summon_full_params() was called inside a forward; call it between steps")
        runtime = self._runtime
        try:
            for unit in runtime.units:
                for flat in unit.flats:
                    flat.unshard(self._group.world.steps, runtime.gather_buffers)
            yield
        finally:
            runtime.reset()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter as f32, exactly as the servers hold it, one after the other; memory of one unit at a time."""
        steps = self._group.world.steps
        for index, unit in enumerate(self._spec.layout.units):
            values = torch.empty(unit.numel, dtype=torch.float32)
            steps.gather(index, values.numpy()).wait()
            for spec in unit.parameters:
                yield spec.name, values[spec.offset : spec.end].view(spec.shape)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Every parameter in the dtype it was built with, and every buffer, by the names of the user's module.

        Each worker gets all of it; for models too big for that use `world.save_checkpoint` and
        `axon-ps checkpoint export`.
        """
        if args or kwargs.get("destination") is not None:
            raise InvalidRequest(
                "state_dict() of a sharded model takes no destination; update your dict with its result"
            )
        state: OrderedDict[str, Any] = OrderedDict()
        values: dict[str, torch.Tensor] = {}
        by_name = {p.name: p for _, p in self._spec.layout.parameters()}
        for name, value in self.full_parameters():
            spec = by_name[name]
            kept = value.to(TORCH_DTYPES[spec.dtype], copy=True)
            for alias in (name, *spec.aliases):
                values[alias] = kept
        persistent = self.module.state_dict(keep_vars=True)
        for name, tensor in persistent.items():
            state[prefix + name] = values[name] if name in values else tensor.detach().clone()
        return cast(dict[str, Any], state)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not possible: the values live on the servers.

        Raises:
            Misuse: always; the message says what to do instead.
        """
        raise Misuse(
            "the parameters of a sharded model live on the servers; load a state dict into the module before wrapping "
            "it, or restore a checkpoint with world.restore_checkpoint(uri)"
        )

    # ------------------------------------------------------------------ what it costs

    def statistics(self) -> dict[str, float]:
        """Counters and memory of this worker: bytes, seconds, steps; with the data plane's as `wire_*`."""
        wire = {f"wire_{k}": v for k, v in self._group.world.steps.statistics().items()}
        return {**self._runtime.statistics(), **wire}

    @property
    def runtime(self) -> Runtime:
        """What drives it; for optimizers."""
        return self._runtime


def _device_of(parts: tuple[wrap.Part, ...]) -> torch.device:
    devices = {p.device for part in parts for p in part.params if not p.is_meta}
    if len(devices) > 1:
        raise InvalidRequest(f"the module is spread over {sorted(map(str, devices))}; move it to one device first")
    return devices.pop() if devices else torch.device("cpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast_one(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    return torch.utils._pytree.tree_map(cast_one, value)
