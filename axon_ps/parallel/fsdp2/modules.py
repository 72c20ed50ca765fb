"""`FSDPModule`: the class that a module gets from `fully_shard`, with the methods of torch's `FSDPModule`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self, cast, overload

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from axon_ps.collectives.functional import current_group
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.flat_unit import ModuleUnit
from axon_ps.parallel.fsdp.forwards import check_idle
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp2.marks import Mark, checked_mark, mark_of, units_of
from axon_ps.parallel.wrapper import Uncopied
from axon_ps.worker.world import world_of


class UnshardHandle:
    """The result of `FSDPModule.unshard(async_op=True)`: parameters are there when it is returned."""

    def wait(self) -> None:
        """Return at once."""


class FSDPModule(Uncopied):
    """A module that `fully_shard` was called on. It stays of its own class, too, and keeps all its names.

    Its methods are those of torch's `FSDPModule`. Those that choose when bytes are moved, or in which memory, change no
    value and have no effect: here that is chosen by the order in which units are used. Those that change what is
    communicated are refused (`InvalidRequest`). `sharded_model(module)` has everything else: versions, checkpoints,
    full parameters.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the class as it was; slices of an `nn.Sequential` are made so."""
        plain: Any = cls.__bases__[1]
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mark = checked_mark(self)
        model = mark.outermost.built()
        if mark.around is None:
            return model(*args, **kwargs)
        own: Any = self
        return model.run_inside(own, self._run_as_before, *args, **kwargs)

    def _run_as_before(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs)

    # ------------------------------------------------------------------ values

    @overload
    def unshard(self, async_op: Literal[False] = False) -> None: ...
    @overload
    def unshard(self, async_op: Literal[True]) -> UnshardHandle: ...
    @overload
    def unshard(self, async_op: bool) -> UnshardHandle | None: ...
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Give the parameters of this unit their values, until `reshard()` or the end of its next forward or backward.

        Args:
            async_op: True to get a handle to wait for.
        """
        runtime, units = self._units()
        if any(unit.depth for unit in runtime.units):
            runtime.gathering.gather(units)
        else:
            runtime.gather(units)
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free the memory of this unit's parameters.

        Raises:
            Misuse: its forward is under way.
        """
        runtime, units = self._units()
        check_idle(units, "reshard")
        for unit in units:
            runtime.gathering.reshard(unit)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load values as `FullyShardedDataParallel.load_state_dict` does; before the first use as `nn.Module` does."""
        mark = checked_mark(self)
        if mark.around is not None or mark.model is None:
            keys: _IncompatibleKeys = super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
            if mark.outermost.model is None:
                mark.tie()
            return keys
        return mark.model.load_state_dict(state_dict, strict, assign)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that were sent too."""
        mark = checked_mark(self)
        if mark.around is not None or mark.model is None:
            super().zero_grad(set_to_none)  # type: ignore[misc]
        else:
            mark.model.zero_grad(set_to_none)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        mark = checked_mark(self)
        model = mark.outermost.model
        if model is None:
            applied: Self = super()._apply(fn, recurse)  # type: ignore[misc]
            mark.tie()
            return applied
        model._apply(fn)
        return self

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Send the gradients of the backwards to come (True), or leave them in `param.grad` to be added to (False).

        Gradients that are sent in several backwards before a step are added up on the servers.

        Args:
            requires_gradient_sync: whether to send those of this unit.
            recurse: whether it is for the units inside, too.
        """
        mark = checked_mark(self)
        for found in self._marked(recurse=recurse):
            found.syncing = requires_gradient_sync
        if mark.outermost.model is not None:
            mark.outermost.model.set_syncing()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum the gradients of all nodes after the backwards to come (True), or leave that to a later one (False).

        Here all are summed at once in any case. A step on a mesh of nodes is refused before it is True again, since
        torch would not apply the gradients.
        """
        for found in self._marked(recurse=recurse):
            found.reducing = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: the units of a step are known from `set_requires_gradient_sync`."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Accept the number of workers, by which gradients are divided.

        Raises:
            InvalidRequest: it is another number.
        """
        workers = world_of(current_group()).world_size
        if factor != workers:
            self._refuse(f"set_gradient_divide_factor({factor})", f"multiply the loss by {workers} / {factor}")

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    # ------------------------------------------------------------------ no effect on values

    def reset_iter_state(self) -> None:
        """Forget a forward or a backward that was broken off."""
        if (model := checked_mark(self).outermost.model) is not None:
            model.runtime.reset()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Do nothing: units that backward needs soon stay in memory, within a budget of two units."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Do nothing: units that the next forward needs first stay in memory, within the same budget."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Do nothing: the next units are gathered in the order of the last step.

        Raises:
            InvalidRequest: one of them is not a module that `fully_shard` was called on.
        """
        _check_modules("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Do nothing, and raise, as `set_modules_to_forward_prefetch`."""
        _check_modules("set_modules_to_backward_prefetch", modules)

    def set_post_optim_event(self, event: object) -> None:
        """Do nothing: the servers make the step."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: the servers sum in f32, then divide."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Do nothing: backward gathers the units that it reads."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: units are received in their own memory."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: the gradients of a unit are sent together."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: gradients under way take at most the memory of two units."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: gathers and pushes have connections of their own."""

    # ------------------------------------------------------------------ refused

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Raise `InvalidRequest`: shard servers send the parameters."""
        self._refuse("set_custom_all_gather", "give a compressor as mixed_precision of axon_ps.parallel.FSDP")

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Raise `InvalidRequest`: shard servers sum the gradients."""
        self._refuse("set_custom_reduce_scatter", "give a compressor as mixed_precision of axon_ps.parallel.FSDP")

    def set_all_reduce_hook(self, hook: object, *, stream: object = None) -> NoReturn:
        """Raise `InvalidRequest`: gradients are summed on the servers, where no function of the program runs."""
        self._refuse("set_all_reduce_hook", "change gradients with param.register_hook before they are sent")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise `InvalidRequest`: gathers come over the network."""
        self._refuse("set_symm_mem_for_comm", "leave it out")

    def _refuse(self, call: str, do: str) -> NoReturn:
        raise InvalidRequest(f"{call} has no meaning for parameters on shard servers; {do}")

    def _units(self) -> tuple[Runtime, list[ModuleUnit]]:
        """Return the model's runtime, and the units of this module. See `units_of`."""
        runtime, own = checked_mark(self).outermost.built().runtime, cast(nn.Module, self)
        return runtime, units_of(runtime, own)

    def _marked(self, *, recurse: bool) -> list[Mark]:
        """Return the marks of this module, and of those inside if `recurse`."""
        own: Any = self
        found = [mark_of(module) for module in own.modules()] if recurse else [checked_mark(self)]
        return [mark for mark in found if mark is not None]


def _check_modules(call: str, modules: Sequence[object]) -> None:
    if other := next((m for m in modules if not isinstance(m, FSDPModule)), None):
        raise InvalidRequest(f"{call} was given a {type(other).__name__}; give modules that fully_shard was called on")


def convert(module: nn.Module) -> None:
    """Give a module the class that is both its own and `FSDPModule`."""
    kind: Any = type(module)
    module.__class__ = _joined(kind)


@functools.cache
def _joined(kind: Any) -> Any:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})


__all__ = ["FSDPModule", "UnshardHandle", "convert"]
