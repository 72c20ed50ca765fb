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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.worker.world import world_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of one call of `fully_shard`; see there.

    Attributes:
        reshard_after_forward: of the modules given.
        mesh: sizes of the mesh; () = none was given.
        precision: dtypes of compute and wire.
        offload: the part of the model in host memory.
        ignored: parameters that stay as they are.
    """

    reshard_after_forward: bool | int | None
    mesh: tuple[int, ...]
    precision: MixedPrecision
    offload: CPUOffload
    ignored: tuple[nn.Parameter, ...]


class ComposedModel(FullyShardedDataParallel):
    """The model of a module that `fully_shard` was called on. Calling the module runs it."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        return self._run_gathered(module._run_as_before, args, kwargs)

    def run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module as its forward."""
        return self._run_gathered(method, args, kwargs)


@dataclass(eq=False)
class Mark:
    """A module that `fully_shard` was called on.

    Attributes:
        module: the module.
        options: of the call.
        around: the marked module around it, if there is one.
        model: the model, if this is its outermost module and it was used.
    """

    module: weakref.ref[nn.Module]
    options: Options
    around: Mark | None = None
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
                self.model = _build(self)
            return self.model


_MARK: Final = "_axon_mark"
"""The attribute of a marked module that has its mark."""

_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


def mark(module: nn.Module, options: Options) -> None:
    """Mark a module; those that are marked inside it become its units.

    Raises:
        InvalidRequest: it was marked before, is inside a marked one, or a module inside was used already.
    """
    new = Mark(weakref.ref(module), options)
    with _lock:
        inside = [found for child in module.modules() if (found := mark_of(child)) is not None]
        if mark_of(module) is not None:
            raise InvalidRequest(f"fully_shard was called twice on the same {_kind(module)}; call it once on a module")
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
        left = set() if module is None else wanted - {id(param) for param in module.parameters()}
        if module is None or len(left) == len(wanted):
            continue
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
    marked = {child: found.options for child in module.modules() if (found := mark_of(child)) is not None}
    units = {child: options for child, options in marked.items() if child is not module}
    group = current_group()
    _check_meshes((options.mesh for options in marked.values()), world_of(group).world_size)
    strategy, node_size = _strategy(root.options, list(units.values()))
    precision = _without_casts(root.options.precision)
    for child, options in units.items():
        if (other := _without_casts(options.precision)) != precision:
            raise InvalidRequest(
                f"mp_policy of a {_kind(child)} is {_text(other)}, and that of the model {_text(precision)}; pass the "
                "same param_dtype and reduce_dtype in every call for a model"
            )
    offload = next((o.offload for o in marked.values() if o.offload is not CPUOffload.NONE), CPUOffload.NONE)
    return ComposedModel(
        module,
        group,
        sharding_strategy=strategy,
        cpu_offload=offload,
        mixed_precision=precision,
        auto_wrap_policy=units.__contains__ if units else None,
        ignored_parameters=tuple(dict.fromkeys(p for options in marked.values() for p in options.ignored)),
        intra_node_size=node_size,
    )


def _strategy(root: Options, units: list[Options]) -> tuple[ShardingStrategy | None, int | None]:
    """Return the strategy that the options choose (None = they do not), and the workers of a node."""
    given = units or [root]
    sizes = {o.reshard_after_forward for o in given if type(o.reshard_after_forward) is int}
    sizes |= {o.mesh[1] for o in (root, *units) if len(o.mesh) > 1}
    if len(sizes) > 1:
        named = " and ".join(map(str, sorted(sizes)))
        raise InvalidRequest(f"reshard_after_forward and mesh name nodes of {named} workers; pass one size")
    if sizes:
        return ShardingStrategy.HYBRID_SHARD, sizes.pop()
    reshards = {o.reshard_after_forward for o in given}
    if units and None in reshards:
        return (ShardingStrategy.FULL_SHARD if True in reshards else None), None
    return (ShardingStrategy.FULL_SHARD if True in reshards else ShardingStrategy.SHARD_GRAD_OP), None


def _check_meshes(meshes: Iterable[tuple[int, ...]], world_size: int) -> None:
    for mesh in meshes:
        if mesh and math.prod(mesh) != world_size:
            raise InvalidRequest(
                f"mesh has {math.prod(mesh)} workers and the world {world_size}: a step on the shard servers is a step "
                "of all of them; pass a mesh of the world"
            )


def _kind(module: nn.Module | None) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _without_casts(precision: MixedPrecision) -> MixedPrecision:
    """Return a precision without the casts of inputs and outputs, which each module has as hooks."""
    return dataclasses.replace(precision, output_dtype=None, cast_forward_inputs=False)


def _text(precision: MixedPrecision) -> str:
    return f"param_dtype={precision.param_dtype}, reduce_dtype={precision.reduce_dtype}"
