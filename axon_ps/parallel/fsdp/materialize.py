"""The upload of first values to the shard servers, one unit at a time, also of a module on the meta device.

Only the values of the worker of lowest rank are used. The same holds for buffers (`checkpoints.buffers`). A worker
whose own values differ logs a warning. It compares their digest with the uploader's, which is in the job's key-value
store.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.checkpoints.buffers import ServedBuffers, listed
from axon_ps.parallel.fsdp.mesh.boxes import box_of
from axon_ps.parallel.fsdp.wrap import WrappedUnit, module_of, name_in_states
from axon_ps.parallel.precision import view_of
from axon_ps.sharding.job import JobSpec
from axon_ps.texts import value_of_json
from axon_ps.types import Array
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.world import World

_KEY = "axon_ps/first_values/{}"
"""Key of the digest of a model's first values, by its number."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers in which the bits of an element are summed, by the element's bytes."""

_logger = logging.getLogger(__name__)


def register(
    world: World,
    spec: JobSpec,
    name: str,
    module: nn.Module,
    wrapped_units: tuple[WrappedUnit, ...],
    init: Callable[[nn.Module], None] | None,
    buffers: ServedBuffers | None = None,
    *,
    line: int = 0,
) -> StepClient:
    """Give the job a model's layout, and the servers first values if this worker is to upload them.

    Args:
        world: the worker.
        spec: the layout.
        name: the model's name in the job.
        module, wrapped_units, init: as for `upload`.
        buffers: the model's; None = each worker has its own.
        line: number of this worker's line of a mesh.

    Returns:
        This worker's part in the model's steps.

    Raises:
        LayoutMismatch: another worker has registered another layout by that name.
        Timeout: the servers got no values, usually because the worker of lowest rank does not wrap the model.
        Busy: a server has no memory for them.
        InvalidRequest: as of `upload`, or buffers cannot be saved or sent.
    """
    initialized = uploaded = False
    of_line = f"/{line}" if line else ""
    while not initialized:
        if buffers is not None:
            buffers.prepare()
        steps, registered = world.models.register(spec, name)
        if registered.upload:
            uploaded = True
            if world.world_size > 1:
                own = {"rank": world.rank, "digest": digest(wrapped_units)}
                world.kv_put(_KEY.format(steps.view.model) + of_line, json.dumps(own).encode())
            if buffers is not None:
                buffers.give()
            upload(module, wrapped_units, steps, init)
        initialized = steps.view.wait_initialized(registered)
    differ = [] if buffers is None else buffers.begin(steps.view, given=uploaded)
    rank = 0
    if not uploaded and world.world_size > 1 and steps.view.latest == (0, 0):
        stored = world.kv_get(_KEY.format(steps.view.model) + of_line) or b"{}"
        given = value_of_json(stored, "what the first worker has stored")
        rank, own_digest = given.get("rank", 0), digest(wrapped_units)
        if own_digest and given.get("digest", "") not in ("", own_digest):
            differ.insert(0, "parameters")
    warn(world.rank, name, differ, rank)
    return steps


def digest(wrapped_units: Sequence[WrappedUnit]) -> str:
    """Return a digest of all values, the same on any device; empty if a parameter is on the meta device."""
    total = hashlib.sha256()
    for wrapped in wrapped_units:
        for spec, param in zip(wrapped.unit.parameters, map(box_of, wrapped.params), strict=True):
            if param.is_meta:
                return ""
            bits = param.detach().reshape(-1).view(_BITS.get(param.element_size(), torch.int64))
            total.update(f"{spec.name} {int(bits.sum(dtype=torch.int64))}\n".encode())
    return total.hexdigest()


def warn(rank: int, name: str, differ: Sequence[str], first: int) -> None:
    """Warn if some of this worker's own values differed from those of rank `first`."""
    if differ:
        _logger.warning(
            "the values that rank %d has given model %r are not used (%s): they differ from those of rank %d, which "
            "every model begins with; load weights on that rank, or seed every rank alike",
            rank,
            name,
            listed(differ),
            first,
        )


def upload(
    module: nn.Module,
    wrapped_units: tuple[WrappedUnit, ...],
    steps: StepClient,
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Send every unit's values as f32 (words, of raw parameters), one unit after the other.

    Args:
        module: the user's module.
        wrapped_units: its units.
        steps: sends them.
        init: gives a submodule on the meta device its values; None = its own `reset_parameters()`.

    Raises:
        InvalidRequest: a submodule on the meta device has no way to get values.
    """
    for wrapped in (w for w in wrapped_units if w.pushes):
        array: Array = values_of(module, wrapped, init).numpy()
        steps.parameters.upload(wrapped.number, array, epoch=steps.view.epoch)
        del array  # before the next one is made


def values_of(module: nn.Module, wrapped: WrappedUnit, init: Callable[[nn.Module], None] | None) -> torch.Tensor:
    """Return the first values of a unit, f32[unit_numel] on the host; arguments and errors as of `upload`."""
    values = torch.zeros(wrapped.unit.numel, dtype=torch.float32, device="cpu")  # some words may be unused
    made = _meta_values(module, wrapped, init)
    with torch.no_grad():
        for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
            view_of(values, spec).copy_(box_of(made.get(spec.name, param)))
    return values


def _meta_values(
    module: nn.Module, wrapped: WrappedUnit, init: Callable[[nn.Module], None] | None
) -> dict[str, torch.Tensor]:
    """Return values for the parameters of a unit that are on the meta device, from their own submodules."""
    values: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
        holder = spec.name.rpartition(".")[0]
        if not param.is_meta or holder in done:
            continue
        done.add(holder)
        child = module_of(module, holder)
        saved = dict(child._parameters)
        try:
            for name, p in saved.items():
                if p is not None and p.is_meta:
                    child._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
            _initialize(child, holder, init)
            for name, p in child._parameters.items():
                if p is not None:
                    values[f"{holder}.{name}" if holder else name] = p.detach()
        finally:
            child._parameters.update(saved)
    return values


def _initialize(child: nn.Module, name: str, init: Callable[[nn.Module], None] | None) -> None:
    if init is not None:
        init(child)
        return
    reset = getattr(child, "reset_parameters", None)
    if reset is None:
        raise InvalidRequest(
            f"submodule {name or '(root)'!r} ({type(child).__name__}) is on the meta device and has no "
            "reset_parameters(); pass param_init_fn, or build it on the CPU"
        )
    reset()


def make_buffers(module: nn.Module, init: Callable[[nn.Module], None] | None, device: torch.device) -> None:
    """Give buffers on the meta device memory and values, from the initialisation of their submodules.

    Raises:
        InvalidRequest: a submodule with such a buffer has no way to get values.
    """
    for name, child in module.named_modules():
        if not any(b is not None and b.is_meta for b in child._buffers.values()):
            continue
        saved = dict(child._parameters)
        try:
            for key, p in saved.items():
                if p is not None:
                    child._parameters[key] = nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
            for key, b in child._buffers.items():
                if b is not None and b.is_meta:
                    child._buffers[key] = torch.empty_like(b, device="cpu")
            _initialize(child, name, init)
        finally:
            child._parameters.update(saved)
        for key, b in child._buffers.items():
            if b is not None:
                child._buffers[key] = b.to(device)


def cast_buffers(
    module: nn.Module, dtype: torch.dtype | None, uncast_types: tuple[type[nn.Module], ...] = ()
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers to `dtype`, except in modules of `uncast_types`.

    Returns the previous dtypes of those that changed, by name.
    """
    before: dict[str, torch.dtype] = {}
    for prefix, child in module.named_modules():
        if isinstance(child, uncast_types):
            continue
        for key, b in child._buffers.items():
            if dtype is not None and b is not None and b.is_floating_point() and b.dtype != dtype:
                before[name_in_states(f"{prefix}.{key}" if prefix else key)] = b.dtype
                child._buffers[key] = b.to(dtype)
    return before


def leave_meta(wrapped_units: Sequence[WrappedUnit]) -> None:
    """Make empty ones of parameters on the meta device, whose data cannot be set.

    Each stays the object that it is, of its class and with its attributes.
    """
    for param in (param for wrapped in wrapped_units for param in wrapped.params if param.is_meta):
        empty = nn.Parameter(torch.empty(0, dtype=param.dtype, device="cpu"), param.requires_grad)
        empty.__class__, attributes = type(param), dict(vars(param))
        torch.utils.swap_tensors(param, empty)  # type: ignore[no-untyped-call]
        vars(param).update(attributes)
