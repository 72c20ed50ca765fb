"""The box of a parameter on this worker: of a DTensor the local tensor, else the parameter itself.

torch's class is not imported: a program without DTensors does not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

Extent: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The ranks of torch's among which a tensor is divided, its shape, and the index of the box's first element in it."""


def is_divided(tensor: Any) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "_local_tensor")


def box_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that are on this worker."""
    box: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return box


def extent_of(tensor: Any, neighbours: Sequence[int]) -> Extent:
    """Return the place of a parameter's box.

    Args:
        tensor: the parameter.
        neighbours: the ranks of torch's that have a plain tensor like it.
    """
    if not is_divided(tensor):
        return tuple(neighbours), tuple(tensor.shape), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    _, begin = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return ranks_of(tensor), tuple(tensor.shape), tuple(begin)


def ranks_of(tensor: Any) -> tuple[int, ...]:
    """Return the ranks of torch's among which a DTensor is divided, ascending."""
    return tuple(sorted(map(int, tensor.device_mesh.mesh.flatten().tolist())))


def like(tensor: Any, box: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these values on this worker, divided like another one if that is a DTensor."""
    if not is_divided(tensor):
        return box
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        box, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def with_spec(box: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor of a box."""
    from torch.distributed.tensor import DTensor

    return DTensor(box, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def box_in(value: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return the box of a full value, or of a DTensor, that a parameter has on this worker.

    A DTensor that is divided otherwise is divided anew, for which all workers of its mesh call this.
    """
    if not is_divided(tensor):
        return value.full_tensor() if is_divided(value) else value  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        _, _, begin = extent_of(tensor, ())
        shape = box_of(tensor).shape
        return value[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]
    if value.placements != tensor.placements:
        value = value.redistribute(placements=tensor.placements)
    return value.to_local()


def gradient_of(grad: Any, tensor: Any) -> Any:
    """Return the box of a parameter's gradient, once it is divided as the parameter is.

    The gradient of a replicated parameter comes as a sum to be made (`Partial`). Then all workers of its mesh call it.
    """
    if not is_divided(grad):
        return grad
    if is_divided(tensor) and grad.placements != tensor.placements:
        grad = grad.redistribute(placements=tensor.placements)
    from torch.distributed._functional_collectives import wait_tensor

    local = grad._local_tensor
    return wait_tensor(local) if hasattr(local, "trigger_wait") else local  # type: ignore[no-untyped-call]


def recast(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter that is a DTensor; it stays the object that it is. Its values are lost."""
    if is_divided(param) and param.dtype != dtype:
        other = nn.Parameter(like(param, torch.empty_like(box_of(param), dtype=dtype)), param.requires_grad)
        torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]
