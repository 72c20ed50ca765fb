"""Tensors that autograd saves of a unit's parameters: gathered again when backward reads them, not held.

Note: [Saved parameters]
    While a wrapped module's forward runs, the functions here are PyTorch's saved tensor hooks. A tensor that shares the
    memory of a unit is not saved itself: a `SavedParameter` has its position in the unit. The unit is gathered when
    backward reads the `SavedParameter`. So backward reads no freed memory, whichever way it reaches a unit: its
    outputs, an attribute, an object that forward returned, or a gradient of a gradient. All other tensors are saved as
    they are, with the check for changes in place that autograd makes without hooks.

    If other hooks are below these on PyTorch's stack (activation checkpoints, `save_on_cpu`), they get all other
    tensors. A backward that makes a graph (`create_graph=True`) saves tensors without hooks, so the units that it reads
    are held until the step has ended or gradients are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch._C import _autograd

from axon_ps.parallel.fsdp.mesh.boxes import box_of, with_spec
from axon_ps.sharding.layout import Unit

_UNIT: Final = "_axon_unit"


class Gatherer(Protocol):
    """The runtime of a model, which gathers its units; see `parallel.fsdp.runtime.Runtime`.

    Attributes:
        decisions: number of steps that have ended.
    """

    decisions: int

    def gather_saved(self, saved: SavedParameter) -> None:
        """Gather the unit of a saved parameter."""


class SavedUnit(Protocol):
    """The unit of a model; see `parallel.fsdp.flat_unit.FlatUnit`.

    Attributes:
        index: its number.
        unit: its layout.
        flat: its memory.
        values_at: (epoch, version) of the values there; None = it has none.
        runtime: returns the runtime that gathers it; None = there is none yet.
    """

    index: int
    unit: Unit
    flat: torch.Tensor
    values_at: tuple[int, int] | None
    runtime: Callable[[], Gatherer | None]

    @property
    def is_readable(self) -> bool:
        """True if the parameters have current values."""


class SavedParameter:
    """A view of a unit's memory, which is made again when it is read.

    Attributes:
        flat: the unit.
        at: (epoch, version) of its values.
        decisions: number of steps that had ended.
    """

    __slots__ = ("_dtype", "_offset", "_runtime", "_size", "_spec", "_stride", "at", "decisions", "flat")

    def __init__(self, flat: SavedUnit, runtime: Gatherer, tensor: torch.Tensor) -> None:
        self._spec = getattr(tensor, "_spec", None)  # of a DTensor
        tensor = box_of(tensor)
        self.flat = flat
        self.at = flat.values_at
        self.decisions = runtime.decisions
        self._runtime = runtime
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def read(self) -> torch.Tensor:
        """Return the view, once the unit is gathered."""
        self._runtime.gather_saved(self)
        memory = self.flat.flat
        with torch.no_grad():
            same = memory if memory.dtype == self._dtype else memory.view(self._dtype)
            view = same.as_strided(self._size, self._stride, self._offset)
            return view if self._spec is None else with_spec(view, self._spec)


def belongs(storage: torch.UntypedStorage, flat: SavedUnit) -> None:
    """Mark a storage as the memory of a unit."""
    setattr(storage, _UNIT, weakref.ref(flat))  # the garbage collector does not see a storage's attributes


def push() -> bool:
    """Push the hooks on this thread, unless they are the newest already; return True if `pop` must follow."""
    top: Any = _autograd._top_saved_tensors_default_hooks(True)
    if top is None:
        _autograd._push_saved_tensors_default_hooks(_pack, _unpack)
        return True
    if top[1] is _unpack:
        return False
    below = _Below(*top)
    _autograd._push_saved_tensors_default_hooks(below.pack, _unpack)
    return True


def pop() -> None:
    """Remove the newest hooks, after a `push` that returned True."""
    _autograd._pop_saved_tensors_default_hooks()


def _parameter(tensor: torch.Tensor) -> SavedParameter | None:
    """Return the object to save in place of a tensor that shares a unit's memory; None for any other."""
    try:
        found: Any = getattr(box_of(tensor).untyped_storage(), _UNIT, None)
    except (NotImplementedError, RuntimeError):  # sparse: it has no storage
        return None
    if found is None:
        return None
    flat: SavedUnit | None = found()
    runtime = None if flat is None else flat.runtime()
    return None if flat is None or runtime is None else SavedParameter(flat, runtime, tensor)


def _pack(tensor: torch.Tensor) -> Any:
    return _parameter(tensor) or (tensor, tensor._version)


def _unpack(saved: Any) -> torch.Tensor:
    if type(saved) is SavedParameter:
        return saved.read()
    if type(saved) is _PackedBelow:
        return saved.unpack(saved.packed)
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    found: torch.Tensor = tensor
    return found


class _PackedBelow:
    """The saved form of a tensor, made by the hooks below, and the function that undoes it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class _Below:
    """The hooks of others that were the newest before these."""

    __slots__ = ("_pack", "_unpack")

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack = pack
        self._unpack = unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        return _parameter(tensor) or _PackedBelow(self._pack(tensor), self._unpack)


__all__ = ["SavedParameter", "belongs", "pop", "push"]
