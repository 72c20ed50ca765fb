"""The modules that `fully_shard` was called on, and the model that they become.

Note: [Built at the first use]
    `fully_shard` is called on units first and on the model last, and no call knows if it is the last one. So a call
    only marks its module. At the first use of any of them, the outermost marked module becomes the model, and the
    others its units. Until then parameters have their values, and the program may change, move or load them.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.flat_unit import ModuleUnit
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.gathering import ordinary_tensors
from axon_ps.parallel.fsdp.hooks import run_unit
from axon_ps.parallel.fsdp.runtime import Runtime, refuse_transforms
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.fsdp.tensors.sharded_parameter import in_backward
from axon_ps.parallel.fsdp.wrap import Slot, slots
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.worker.world import current_or_launched, world_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of one call of `fully_shard`; see there.

    Attributes:
        reshard_after_forward: of the modules given.
        mesh: sizes of the mesh; () = none was given.
        line: if the mesh has more axes, the ranks of torch's that are replicas of each other; see `mesh.union`.
        axis: that mesh.
        precision: dtypes of compute and wire.
        offload: the part of the model in host memory.
        ignored: parameters that stay as they are.
        retain_frozen: True if frozen units stay in memory.
    """

    reshard_after_forward: bool | int | None
    mesh: tuple[int, ...]
    line: tuple[int, ...]
    axis: Any
    precision: MixedPrecision
    offload: CPUOffload
    ignored: tuple[nn.Parameter, ...]
    retain_frozen: bool = True


class ComposedModel(FullyShardedDataParallel):
    """The model of a module that `fully_shard` was called on. Calling the module runs it."""

    _with_tied: frozenset[nn.Module] = frozenset()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        return self._run_gathered(module._run_as_before, args, kwargs)

    def note_tied(self, marked: Iterable[nn.Module]) -> None:
        """Note the root, and the modules that have parameters of its unit, as tied ones are."""
        of_root = {param for flat in self.runtime.units[0].flats for param in flat.params}
        tied = {module for module in marked if not of_root.isdisjoint(module.parameters())}
        self._with_tied = frozenset(tied | {self.module})

    def set_syncing(self) -> None:
        """Let the gradients of those units be sent whose marks say so."""
        marked = {child: found for child in self.module.modules() if (found := mark_of(child)) is not None}
        accumulation = self.runtime.accumulation
        accumulation.syncing = any(found.syncing for found in marked.values())
        local = [child for child, found in marked.items() if accumulation.syncing and not found.syncing]
        flats = (flat for child in local for unit in units_of(self.runtime, child) for flat in unit.flats)
        accumulation.local = frozenset(flat.index for flat in flats)

    @property
    def awaits_all_reduce(self) -> bool:
        """True if there are gradients on a mesh of nodes that are to be summed over the nodes later."""
        marked = filter(None, map(mark_of, self.module.modules()))
        return self.runtime.has_gradients and any(not m.reducing and len(m.options.mesh) > 1 for m in marked)

    def run_inside(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module inside; by itself as a forward of the model if it needs the root's parameters."""
        if module not in self._with_tied or self.runtime.units[0].depth or in_backward():
            return run(*args, **kwargs)
        return self._run_gathered(run, args, kwargs)

    def run_method(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module, or of one inside, like its forward."""
        unit = next((unit for unit in self.runtime.units[1:] if unit.module is module), None)
        run = method if unit is None else partial(run_unit, self.runtime, unit, method)
        return self.run_inside(module, run, *args, **kwargs)


@dataclass(eq=False)
class Mark:
    """A module that `fully_shard` was called on.

    Attributes:
        module: the module.
        options: of the call.
        tied: by parameter, the entries that had it at the call, if there were several.
        ignored: the entries that had the parameters to be ignored.
        around: the marked module around it, if there is one.
        syncing: True if the unit's gradients are to be sent; see `FSDPModule.set_requires_gradient_sync`.
        reducing: True if those of all nodes are to be summed; see `FSDPModule.set_requires_all_reduce`.
        model: the model, if this is its outermost module and it was used.
    """

    module: weakref.ref[nn.Module]
    options: Options
    tied: tuple[tuple[Slot, ...], ...]
    ignored: tuple[Slot, ...]
    around: Mark | None = None
    syncing: bool = True
    reducing: bool = True
    model: ComposedModel | None = None
    _building: threading.RLock = field(default_factory=threading.RLock)

    @property
    def outermost(self) -> Mark:
        """The outermost marked module around this one."""
        mark = self
        while mark.around is not None:
            mark = mark.around
        return mark

    def built(self) -> ComposedModel:
        """Return the model of an outermost module; make it at the first call."""
        with self._building:
            if self.model is None:
                refuse_transforms()
                with ordinary_tensors():
                    self.model = _build(self)
                self.model.set_syncing()
            return self.model

    def tie(self) -> None:
        """Tie the parameters again that were tied; `to_empty()` and `load_state_dict(assign=True)` part them."""
        for first, *others in self.tied:
            for slot in others if first.now is not None else ():
                slot.holder[slot.key] = first.now


_MARK: Final = "_axon_mark"
"""The attribute of a marked module that has its mark."""

_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


def mark(module: nn.Module, options: Options) -> None:
    """Mark a module; those that are marked inside it become its units.

    Raises:
        InvalidRequest: it was marked before, is inside a marked one, or a module inside was used already.
    """
    tied, ignored = _slots(module, options.ignored)
    new = Mark(weakref.ref(module), options, tied, ignored)
    with _lock:
        inside = [found for child in module.modules() if (found := mark_of(child)) is not None]
        if mark_of(module) is not None:
            raise InvalidRequest(f"fully_shard was called twice on the same {_kind(module)}; call it once on a module")
        if outer := next((m for m in _marked if any(child is module for child in m.modules())), None):
            raise InvalidRequest(
                f"fully_shard was called on a {_kind(module)} after the {_kind(outer)} around it; call it on the units "
                "first, then on the model"
            )
        if used := next((found for found in inside if found.outermost.model is not None), None):
            raise InvalidRequest(
                f"fully_shard was called on a {_kind(module)} after a {_kind(used.module())} inside it was used; call "
                "it on the units first, then on the model, and use the model after that"
            )
        module.__dict__[_MARK] = new
        _marked.add(module)
    for found in inside:
        if found.around is None:
            found.around = new


def mark_of(module: nn.Module) -> Mark | None:
    """Return the mark of a module; None = it is not marked."""
    return module.__dict__.get(_MARK)


def checked_mark(module: Any) -> Mark:
    """Return the mark of a module.

    Raises:
        InvalidRequest: `fully_shard` was not called on it.
    """
    if (found := mark_of(module)) is None:
        raise InvalidRequest(f"fully_shard was not called on this {type(module).__name__}; call it first")
    return found


def units_of(runtime: Runtime, module: nn.Module) -> list[ModuleUnit]:
    """Return the units that have the parameters of a marked module, but not of marked ones inside.

    It is one unit as a rule. Tied parameters are of the root, and the module may have no parameters.
    """
    inside = [child for child in module.modules() if child is not module and mark_of(child) is not None]
    params = set(module.parameters()) - {param for child in inside for param in child.parameters()}
    return [unit for unit in runtime.units if any(not params.isdisjoint(flat.params) for flat in unit.flats)]


def root_with(params: Iterable[torch.Tensor]) -> Mark | None:
    """Return the outermost marked module that has these parameters; None if no marked one has any of them.

    Raises:
        InvalidRequest: it has some of them, and not the others.
    """
    wanted = {id(param) for param in params}
    with _lock:
        roots = {found.outermost for module in _marked if (found := mark_of(module)) is not None}
    for root in roots:
        module = root.module()
        if module is None:
            continue
        ignored = {id(param) for param in _ignored(module)}
        left = wanted - {id(param) for param in module.parameters()} | wanted & ignored
        if len(left) == len(wanted):
            continue
        if left & ignored:
            raise InvalidRequest(
                f"{len(left & ignored)} of {len(wanted)} parameters are ignored_params of the {_kind(module)} that "
                "fully_shard was called on; make an optimizer for the others, and if these are to be trained, by each "
                "worker for itself, one for these"
            )
        if left:
            raise InvalidRequest(
                f"{len(left)} of {len(wanted)} parameters are not of the {_kind(module)} that fully_shard was called "
                "on; call it on the model that has all of them, after its units; or make an optimizer for the others"
            )
        return root
    return None


def _build(root: Mark) -> ComposedModel:
    module = root.module()
    assert module is not None
    root.tie()
    marked = {child: found.options for child in module.modules() if (found := mark_of(child)) is not None}
    units = {child: options for child, options in marked.items() if child is not module}
    group = current_group(current_or_launched())
    line = _line(marked.values(), world_of(group).world_size)
    strategy, node_size = _strategy(root.options, list(units.values()))
    precision = _without_casts(root.options.precision)
    for child, options in units.items():
        if (other := _without_casts(options.precision)) != precision:
            raise InvalidRequest(
                f"mp_policy of a {_kind(child)} is {_text(other)}, and that of the model {_text(precision)}; pass the "
                "same param_dtype and reduce_dtype in every call for a model"
            )
    offload = next((o.offload for o in marked.values() if o.offload is not CPUOffload.NONE), CPUOffload.NONE)
    model = ComposedModel(
        module,
        group,
        sharding_strategy=strategy,
        cpu_offload=offload,
        mixed_precision=precision,
        auto_wrap_policy=units.__contains__ if units else None,
        ignored_parameters=_ignored(module),
        retain_frozen=all(options.retain_frozen for options in marked.values()),
        intra_node_size=node_size,
        **({"device_mesh": root.options.axis} if line else {}),
    )
    model.note_tied(marked)
    return model


def _strategy(root: Options, units: list[Options]) -> tuple[ShardingStrategy | None, int | None]:
    """Return the strategy that the options choose (None = they do not), and the workers of a node."""
    given = units or [root]
    sizes = {o.reshard_after_forward for o in given if type(o.reshard_after_forward) is int}
    sizes |= {o.mesh[1] for o in (root, *units) if len(o.mesh) > 1 and not o.line}
    if len(sizes) > 1:
        named = " and ".join(map(str, sorted(sizes)))
        raise InvalidRequest(f"reshard_after_forward and mesh name nodes of {named} workers; pass one size")
    if sizes:
        return ShardingStrategy.HYBRID_SHARD, sizes.pop()
    reshards = {o.reshard_after_forward for o in given}
    if units and None in reshards:
        return (ShardingStrategy.FULL_SHARD if True in reshards else None), None
    return (ShardingStrategy.FULL_SHARD if True in reshards else ShardingStrategy.SHARD_GRAD_OP), None


def _line(marked: Collection[Options], world_size: int) -> tuple[int, ...]:
    """Return the ranks on the axis that the options give as mesh; () = it is all workers.

    Raises:
        InvalidRequest: they give several, or some workers without the axes of the others.
    """
    for mesh in (options.mesh for options in marked if not options.line):
        if mesh and math.prod(mesh) != world_size:
            raise InvalidRequest(
                f"mesh has {math.prod(mesh)} workers and the world {world_size}: a step on the shard servers is a step "
                "of all of them; pass a mesh of the world, or an axis of one"
            )
    lines = {options.line for options in marked}
    if len(lines) > 1:
        raise InvalidRequest(
            f"mesh has the ranks {' and '.join(str(list(line) or 'of all workers') for line in sorted(lines))} in "
            "calls for one model; pass the same axis in all of them"
        )
    return lines.pop() if lines else ()


def _slots(
    module: nn.Module, ignored: Collection[nn.Parameter]
) -> tuple[tuple[tuple[Slot, ...], ...], tuple[Slot, ...]]:
    """Return the entries of tied parameters, and of ignored ones."""
    by_param: dict[nn.Parameter, list[Slot]] = {}
    for slot in slots(module, set(module.parameters())):
        by_param.setdefault(slot.param, []).append(slot)
    tied = tuple(tuple(found) for found in by_param.values() if len(found) > 1)
    return tied, tuple(slot for param in ignored for slot in by_param.get(param, ()))


def _ignored(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters that are ignored, as they are now, by a call for a module or one inside."""
    found = [mark for child in module.modules() if (mark := mark_of(child)) is not None]
    now = (slot.now for mark in found for slot in mark.ignored)
    return tuple(dict.fromkeys(param for param in now if param is not None))


def _kind(module: nn.Module | None) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _without_casts(precision: MixedPrecision) -> MixedPrecision:
    """Return a precision without the casts of inputs and outputs, which each module has as hooks."""
    return dataclasses.replace(precision, output_dtype=None, cast_forward_inputs=False)


def _text(precision: MixedPrecision) -> str:
    texts = (f"param_dtype={precision.param_dtype}", f"reduce_dtype={precision.reduce_dtype}")
    return ", ".join(texts if precision.wire_dtype is None else (*texts, f"wire_dtype={precision.wire_dtype}"))
