"""The gradient norm of a model that is sharded over a mesh, and clipping by it: every parameter is counted once.

A parameter that is sharded over a tensor group counts with all its shards. A replicated one counts once. The stages of
a pipeline add up. Ranks of other axes (data, replicate) have the same gradients and add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.mesh import Mesh
from axon_ps.parallel.tensor.state import sharded_parameters
from axon_ps.types import ReduceOp


def grad_norm(
    module: nn.Module | Iterable[nn.Module],
    *,
    norm_type: float = 2.0,
    mesh: Mesh | None = None,
    axes: Iterable[str] = ("pipeline",),
    counted_elsewhere: Iterable[nn.Parameter] = (),
) -> torch.Tensor:
    """Return the norm of the full model's gradients, the same on every rank. Collective.

    Args:
        module: the model, or this rank's stages of it.
        norm_type: 2, another positive number, or infinity.
        mesh: the mesh that has the rest of the model; None = all of it is in the layers' own groups.
        axes: axes of the mesh whose ranks have different parameters (beside the layers' own groups); names that the
            mesh does not have are ignored.
        counted_elsewhere: parameters that another rank along the axes counts: the second of a pair that is tied across
            stages.

    Returns:
        f32[], on the device of the gradients (on the CPU if there are none).

    Raises:
        InvalidRequest: `norm_type` is not a positive number.

    After an error: no gradient was changed.
    """
    if not norm_type > 0.0:
        raise InvalidRequest(f"norm_type is {norm_type}; it must be positive, or infinity")
    modules = [module] if isinstance(module, nn.Module) else list(module)
    skipped = {id(p) for p in counted_elsewhere}
    sharded: dict[int, ProcessGroup] = {
        id(layer.get_parameter(name)): layer.group for m in modules for layer, name in sharded_parameters(m).values()
    }
    groups = {id(group): group for group in sharded.values()}
    parameters = {id(p): p for m in modules for p in m.parameters() if p.grad is not None and id(p) not in skipped}
    device = next((p.grad.device for p in parameters.values() if p.grad is not None), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float32, device=device)
    total, by_group = zero.clone(), {key: zero.clone() for key in groups}
    for key, parameter in parameters.items():
        assert parameter.grad is not None
        term = _term(parameter.grad, norm_type).to(device)
        if key in sharded:
            own = id(sharded[key])
            by_group[own] = _combined(by_group[own], term, norm_type)
        else:
            total = _combined(total, term, norm_type)
    for key, group in groups.items():  # in the order of the layers, so the same on every rank
        total = _combined(total, _over(by_group[key], group, norm_type), norm_type)
    if mesh is not None and (across := [axis for axis in axes if axis in mesh.axes]):
        total = _over(total, mesh.group(*across), norm_type)
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def clip_grad_norm(
    module: nn.Module | Iterable[nn.Module],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    mesh: Mesh | None = None,
    axes: Iterable[str] = ("pipeline",),
    counted_elsewhere: Iterable[nn.Parameter] = (),
) -> torch.Tensor:
    """Scale the gradients so that the full model's norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    Collective; call it when the gradients are complete (after DDP's reduction).

    Args:
        module: the model, or this rank's stages of it. Their gradients are scaled in place.
        max_norm: the largest norm that is left alone.
        norm_type: as for `grad_norm`.
        mesh: as for `grad_norm`.
        axes: as for `grad_norm`.
        counted_elsewhere: as for `grad_norm`. These are scaled here, too.

    Returns:
        The norm before, f32[].

    Raises:
        InvalidRequest: `norm_type` is not a positive number.

    After an error: no gradient was changed.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    norm = grad_norm(modules, norm_type=norm_type, mesh=mesh, axes=axes, counted_elsewhere=counted_elsewhere)
    nn.utils.clip_grads_with_norm_(dict.fromkeys(p for m in modules for p in m.parameters()), max_norm, norm)
    return norm


def _term(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the part of a gradient in the norm: its norm to the power, or its largest element. f32[]."""
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=grad.device)
    norm: torch.Tensor = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=torch.float32)
    return norm if math.isinf(norm_type) else norm.pow(norm_type)


def _combined(a: torch.Tensor, b: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.maximum(a, b) if math.isinf(norm_type) else a + b


def _over(value: torch.Tensor, group: ProcessGroup, norm_type: float) -> torch.Tensor:
    """Combine the value over the ranks of a group."""
    if group.world_size > 1:
        group.all_reduce(value, ReduceOp.MAX if math.isinf(norm_type) else ReduceOp.SUM)
    return value
