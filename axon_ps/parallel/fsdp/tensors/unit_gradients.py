"""The gradients of one unit's parameters on this worker: in `param.grad`, and staged beside them.

Staged gradients are f32, and under CPUOffload.FULL in host memory. A parameter's gradient is the sum of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.mesh.boxes import gradient_of
from axon_ps.parallel.fsdp.tensors.sharded_parameter import own_grad, set_own_grad
from axon_ps.parallel.fsdp.wrap import sparse_gradient
from axon_ps.parallel.precision import scale_into
from axon_ps.sharding.layout import Unit


class UnitGradients:
    """The gradients of one unit.

    Args:
        unit: its layout.
        params: its parameters, in layout order.
        device: the device on which they compute.
        stage_device: as the attribute.

    Attributes:
        stage_device: the device of staged gradients.
    """

    def __init__(
        self, unit: Unit, params: Sequence[nn.Parameter], device: torch.device, stage_device: torch.device
    ) -> None:
        self._unit = unit
        self._params = params
        self._device = device
        self.stage_device = stage_device
        self._staged: list[torch.Tensor | None] = [None] * len(params)

    def stage(self) -> None:
        """Move the gradients of the parameters to the staged ones, in f32 on `stage_device`, and sum them there."""
        for i, param in enumerate(self._params):
            if (grad := gradient_of(own_grad(param), param)) is not None:
                set_own_grad(param, None)
                self._check_dense(i, grad)
                staged = self._staged[i]
                if staged is None:
                    self._staged[i] = grad.to(self.stage_device, torch.float32, copy=True)
                else:
                    staged.add_(grad.to(self.stage_device))

    def multiply(self, factor: float) -> None:
        """Multiply the gradients by a number; 0 drops them, even if they are not finite."""
        if not factor:
            self.pop()
            return
        for grad in (*map(own_grad, self._params), *self._staged):  # a DTensor is linear in its boxes
            if grad is not None:
                grad.mul_(factor)

    def pop(self) -> list[torch.Tensor | None]:
        """Remove the gradients from the parameters, and return them with the staged ones added."""
        grads: list[torch.Tensor | None] = []
        for i, param in enumerate(self._params):
            grad = gradient_of(own_grad(param), param)
            set_own_grad(param, None)
            staged, self._staged[i] = self._staged[i], None
            if staged is not None and grad is not None:
                staged.add_(grad.to(self.stage_device))
            grads.append(grad if staged is None else staged)
        return grads

    def drop_staged(self) -> None:
        """Forget the staged gradients."""
        self._staged = [None] * len(self._params)

    def pack(self, out: torch.Tensor, scale: float) -> list[bool]:
        """Remove the gradients, and set out: T[unit_numel] to `scale` times them, or to 0 where there is none.

        Those in device memory are assembled there, so that one copy goes to the host.

        Returns:
            By parameter, True if it had a gradient.

        Raises:
            InvalidRequest: a gradient is sparse.
        """
        grads, memory, packed = self.pop(), cuda.memory(), out
        if not memory.is_on_device(out) and any(g is not None and memory.is_on_device(g) for g in grads):
            packed = torch.empty_like(out, device=self._device)
        with torch.no_grad():
            for i, (spec, grad) in enumerate(zip(self._unit.parameters, grads, strict=True)):
                self._check_dense(i, grad)
                scale_into(packed[spec.offset : spec.end].view(spec.shape), grad, scale)
            if packed is not out:
                out.copy_(packed)
        return [grad is not None for grad in grads]

    @property
    def present(self) -> bool:
        """True if any parameter has a gradient, in `param.grad` or staged."""
        return any(own_grad(p) is not None for p in self._params) or any(s is not None for s in self._staged)

    @property
    def staged_bytes(self) -> int:
        """Memory of the staged gradients."""
        return sum(s.nbytes for s in self._staged if s is not None)

    def _check_dense(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None and grad.layout != torch.strided:
            raise InvalidRequest(sparse_gradient(self._unit.parameters[index].name, str(grad.layout)))
