"""The hooks by which autograd and modules call the runtime.

Under `torch.compile` of a wrapped model each hook is a break between graphs: parameters are gathered and freed in
Python, and the computation with them is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from axon_ps.host import fork
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.fsdp.flat_unit import ModuleUnit
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.tensors import saved_tensors
from axon_ps.parallel.fsdp.tensors.sharded_parameter import in_backward
from axon_ps.parallel.wrapper import Uncopied


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def attach(runtime: Runtime, wrapper: nn.Module) -> None:
    """Register the hooks of modules and parameters. The root's forward is called by the wrapper itself.

    Hooks of parameters end with `wrapper`, and refer to it by weak references: Python's garbage collector does not see
    the objects to which a tensor's hooks refer.
    """
    for unit in runtime.units:
        if not unit.is_root:
            if unit.has_frozen:
                unit.module.register_forward_pre_hook(
                    partial(_watch_inputs, runtime, unit), prepend=True, with_kwargs=True
                )
            unit.module.register_forward_pre_hook(partial(_begin_saving, unit, False), prepend=True)
            unit.module.register_forward_pre_hook(partial(runtime.before_forward, unit), prepend=True)
            unit.module.register_forward_hook(partial(_after_forward, runtime, unit), always_call=True)
        unit.module.register_forward_pre_hook(partial(_begin_saving, unit, True))
        unit.module.register_forward_hook(partial(_end_saving, unit), prepend=True, always_call=True)
        hooks = unit.watch_gradients(_GradReady(runtime, unit))
        fork.finalize(wrapper, _remove, hooks)


class _GradReady(Uncopied):
    """The hook of a parameter: its gradient is there."""

    def __init__(self, runtime: Runtime, unit: ModuleUnit) -> None:
        self._runtime, self._unit = weakref.ref(runtime), weakref.ref(unit)

    def __call__(self, param: nn.Parameter) -> None:
        if (runtime := self._runtime()) is not None and (unit := self._unit()) is not None:
            runtime.grad_ready(unit, param)


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


@uncompiled
def _watch_inputs(
    runtime: Runtime, unit: ModuleUnit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Finish a unit with frozen parameters when the gradients of its inputs are there."""
    if torch.is_grad_enabled() and not in_backward():
        inputs = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
        missing = itertools.cycle(range(len(inputs) - 1, -1, -1))  # a retained graph is traversed again

        def come(_: torch.Tensor) -> None:
            if not next(missing):
                runtime.inputs_done(unit)

        for tensor in inputs:
            tensor.register_hook(come)  # type: ignore[no-untyped-call]


@uncompiled
def _begin_saving(unit: ModuleUnit, again: bool, *_: object) -> None:
    """Begin a forward: `saved_tensors` handles what autograd saves of it.

    A hook of the program may have pushed others since (`torch.distributed._composable.checkpoint` does), so this comes
    `again` after them. A recomputation has those below ours, and must save as many tensors.
    """
    unit.pushes.append((threading.get_ident(), again, saved_tensors.push()))


@uncompiled
def _end_saving(unit: ModuleUnit, *_: object) -> None:
    """End what came `again`."""
    _pop(unit, again=True)


def _pop(unit: ModuleUnit, *, again: bool) -> bool:
    """End a saving; return False if it did not begin, in this thread."""
    if not unit.pushes or unit.pushes[-1][:2] != (threading.get_ident(), again):
        return False
    if unit.pushes.pop()[2]:
        saved_tensors.pop()
    return True


@uncompiled
def _after_forward(runtime: Runtime, unit: ModuleUnit, module: nn.Module, args: Any, output: Any) -> None:
    """End a forward, also if it raised. Do nothing if it was refused, in this thread, before it began."""
    if not _pop(unit, again=False):
        return
    watch_outputs(runtime, unit, output)
    runtime.after_forward(unit)


def run_unit(runtime: Runtime, unit: ModuleUnit, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of a unit's module like its forward, without the module's own hooks."""
    if unit.has_frozen:
        _watch_inputs(runtime, unit, unit.module, args, kwargs)
    runtime.before_forward(unit)
    _begin_saving(unit, False)
    output = None
    try:
        output = method(*args, **kwargs)
    finally:
        _after_forward(runtime, unit, unit.module, args, output)
    return output


@uncompiled
def before_root(runtime: Runtime) -> bool:
    """Prepare for the wrapper to run the module inside, and return True if `saved_tensors.pop` must follow.

    Raises:
        Misuse: this process is a fork of a worker.
    """
    fork.check()
    runtime.before_forward(runtime.units[0])
    return saved_tensors.push()


@uncompiled
def end_root(pushed: bool) -> None:
    """End the saving of tensors: the module inside has run, or has raised."""
    if pushed:
        saved_tensors.pop()


@uncompiled
def after_root(runtime: Runtime, output: Any) -> None:
    """End the root's forward: the module inside has run."""
    watch_outputs(runtime, runtime.units[0], output)
    runtime.after_forward(runtime.units[0])


@uncompiled
def again(runtime: Runtime) -> bool:
    """Return True if the module inside must run once more, since its parameters changed meanwhile."""
    return runtime.one_version.again()


def watch_outputs(runtime: Runtime, unit: ModuleUnit, output: Any) -> None:
    """Gather the unit again when the gradient of any of its outputs arrives."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(runtime.before_backward, unit))  # type: ignore[no-untyped-call]
