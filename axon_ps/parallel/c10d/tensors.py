"""Tensors as the flat buffers that travel: one tensor or a list of them, any layout, any dtype.

Owns: flat views of tensors, copies where no view is possible, and copying results back. Refuses: any use of
the buffers.

    legend: a *flat* tensor is 1-D and contiguous, in the user's dtype; a *native* one is flat and of a dtype that
    travels (see `axon_ps.types.DType`), over the same memory

Invariant: a buffer to write to is the user's memory, or `finish` copies it there. No other memory is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from axon_ps.collectives.arrays import check_memory
from axon_ps.errors import InvalidRequest

NATIVE = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
)

Finish = Callable[[], object]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Buffer:
    """The tensors that a result goes to.

    Attributes:
        flat: T[numel]: the memory to write to.
        finish: copies it to the user's tensors, unless `flat` is their memory.
    """

    flat: Tensor
    finish: Finish = nothing


def native(flat: Tensor) -> Tensor:
    """Return the same memory as a dtype that travels: complex numbers as pairs, dtypes unknown to us as bytes."""
    if flat.dtype in NATIVE:
        return flat
    if flat.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8)


def native_numel(numel: int, dtype: torch.dtype) -> int:
    """Return the number of elements that `native` makes of `numel` elements."""
    if dtype in NATIVE:
        return numel
    return numel * (2 if dtype.is_complex else dtype.itemsize)


def readable(*tensors: Tensor) -> Tensor:
    """Return the tensors' elements one after the other: T[numel]. It is their own memory if that is contiguous."""
    plain = [_plain(t) for t in tensors]
    _same_dtype(plain)
    joined = _joined(plain)
    if joined is not None:
        return joined
    return torch.cat([t.reshape(-1) for t in plain])


def writable(*tensors: Tensor, filled: bool = False) -> Buffer:
    """Make a buffer for the elements of all tensors, one after the other. If `filled`, it has their values."""
    plain = [_own(t) for t in tensors]
    _same_dtype(plain)
    joined = _joined(plain)
    if joined is not None:
        return Buffer(joined)
    flat = readable(*tensors) if filled else plain[0].new_empty(sum(t.numel() for t in plain))

    def finish() -> None:
        for tensor, values in zip(plain, torch.split(flat, [t.numel() for t in plain]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    return Buffer(flat, finish)


def writable_rows(tensors: Sequence[Tensor], rows: int) -> Buffer:
    """Make a buffer [rows, sum(numel / rows)] whose row r is row r of every tensor: T[rows, numel / rows]."""
    if len(tensors) == 1:
        return writable(tensors[0])
    plain = [_own(t) for t in tensors]
    _same_dtype(plain)
    widths = [t.numel() // rows for t in plain]
    flat = plain[0].new_empty(rows * sum(widths))

    def finish() -> None:
        for tensor, values in zip(plain, torch.split(flat.view(rows, -1), widths, dim=1), strict=True):
            tensor.copy_(values.reshape(tensor.shape))

    return Buffer(flat, finish)


def readable_rows(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Return T[rows * sum(numel / rows)]: row r of every tensor, for each r in order."""
    if len(tensors) == 1:
        return readable(tensors[0])
    plain = [_plain(t) for t in tensors]
    _same_dtype(plain)
    return torch.cat([t.reshape(rows, t.numel() // rows) for t in plain], dim=1).view(-1)


def _own(tensor: Tensor) -> Tensor:
    """Wait for the tensor's collective if one is under way, and return the tensor outside of the graph.

    Raises:
        InvalidRequest: its elements are not in memory that can be read as bytes.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    check_memory(tensor, "a tensor of the call")
    return tensor.detach()


def _plain(tensor: Tensor) -> Tensor:
    return _own(tensor).resolve_conj().resolve_neg()


def _same_dtype(tensors: Sequence[Tensor]) -> None:
    kinds = {(t.dtype, t.device) for t in tensors}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InvalidRequest(f"the tensors of one call are {listed}; give one dtype and one device")


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat tensor over the memory of all, if they lie one after the other in one storage."""
    first = tensors[0]
    if first.is_conj() or first.is_neg():
        return None
    if len(tensors) == 1:
        return first.view(-1) if first.is_contiguous() else None
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == offset and tensor.untyped_storage().data_ptr() == storage
        if not (is_next and tensor.is_contiguous()):
            return None
        offset += tensor.numel()
    return first.as_strided((offset - first.storage_offset(),), (1,))
