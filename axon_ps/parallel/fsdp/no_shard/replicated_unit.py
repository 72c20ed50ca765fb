"""One unit of a model of which every worker has all parameters: its masters, and the copy that the module uses."""

from __future__ import annotations

from typing import Any

import torch

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, UnitState
from axon_ps.parallel.fsdp.sources import GatheredUnit, ParameterSource, PendingGather
from axon_ps.parallel.fsdp.steps import Position
from axon_ps.parallel.fsdp.strategy import CPUOffload
from axon_ps.parallel.fsdp.wrap import WrappedUnit, Wrapping
from axon_ps.parallel.precision import TORCH_DTYPES, view_of, views_of

_ALWAYS: Position = (0, 0)
"""(epoch, version) of the values of a unit that is always current."""


class LocalSource(ParameterSource):
    """The values are the unit's masters, which are always current."""

    def __init__(self, master: torch.Tensor) -> None:
        """Store `master`, which has the values. There are no steps on servers, and so no versions."""
        self._master = master

    def wanted(self, flat: GatheredUnit) -> Position:
        return _ALWAYS

    def is_remote(self, at: Position) -> bool:
        return False

    def gather_bytes(self, flat: GatheredUnit) -> int:
        return 0

    def start(self, flat: GatheredUnit, at: Position) -> PendingGather:
        return PendingGather(at)

    def finish(self, flat: GatheredUnit, pending: PendingGather, result: Any) -> bool:
        flat.fill(self._master, non_blocking=True)
        return True


class ReplicatedUnit(FlatUnit):
    """One unit that every worker has in full.

    Args:
        wrapped, wrapping: as for `FlatUnit`.

    Note: [Values that the user sets]
        Parameters are views of the masters, so a change of one in place is in the master. `param.data = t`
        (`vector_to_parameters` does so) gives a parameter memory of its own. Before the values are read or updated
        they are copied into the master, and the parameter is its view again. So optimizer, `state_dict` and forward
        have the same values.
    """

    sharded = False

    def __init__(self, wrapped: WrappedUnit, wrapping: Wrapping) -> None:
        unit, device = wrapped.unit, wrapping.device
        master_device = device if wrapping.offload is CPUOffload.NONE else torch.device("cpu")
        built = torch.float32 if unit.raw else TORCH_DTYPES[unit.parameters[0].dtype]
        casts = wrapping.computed(unit) is not unit or built != wrapping.flat_of(unit)
        self.swapped = casts or master_device.type != device.type
        self._master = torch.zeros(unit.numel if self.swapped else 0, dtype=built, device=master_device)
        super().__init__(wrapped, LocalSource(self._master), wrapping, resident=not self.swapped)
        self.grads.stage_device = master_device
        self._master_grads: list[torch.Tensor | None] = [None] * len(self.params)
        if self.swapped:
            wrapping.meter.add(self._master.nbytes)
            self._sharded_data = views_of(self._master, self.unit)
            self._set_data(self._sharded_data)
            self._set_readable(False)  # writes between uses go to the masters
        else:
            self.allocate()
            self._master = self.flat
            self._set_data(self._views)
            self.state, self.values_at = UnitState.UNSHARDED, _ALWAYS

    @property
    def master(self) -> torch.Tensor:
        """built_dtype[unit_numel]; the values that the optimizer updates. See Note: [Values that the user sets].

        Those of raw parameters are words, f32[unit_numel].
        """
        self.take_over()
        return self._master

    def take_over(self) -> None:
        """Take over the values of parameters that have memory of their own.

        Raises:
            InvalidRequest: a parameter was given a tensor of another shape, dtype or device.
        """
        views = self._views if self.state.has_values else self._sharded_data
        for spec, param, view in zip(self.unit.parameters, self.params, views, strict=True):
            if param.data_ptr() == view.data_ptr() and param.shape == view.shape and param.stride() == view.stride():
                continue
            given = param.data
            if (given.shape, given.dtype, given.device) != (view.shape, view.dtype, view.device):
                raise InvalidRequest(
                    f"the data of parameter {spec.name!r} was set to {given.dtype}{list(given.shape)} on "
                    f"{given.device}; a wrapped parameter stays {view.dtype}{list(view.shape)} on {view.device}"
                )
            view.copy_(given)
            if self.swapped and self.state.has_values:
                view_of(self._master, spec).copy_(given)
            param.data = view

    def unshard(self) -> None:
        """Copy the masters for use, if the module computes with a copy, and set the masters' gradients aside."""
        self.take_over()
        if self.is_current:
            return
        for i, param in enumerate(self.params):
            self._master_grads[i], param.grad = param.grad, None
        super().unshard()

    def reshard(self) -> None:
        """Free the copy."""
        self.take_over()
        if self.resident or not self.state.has_values:
            self.abandon()
            return
        self.grads.stage()  # a gradient that was not reduced is still the copy's
        super().reshard()
        for i, param in enumerate(self.params):
            param.grad, self._master_grads[i] = self._master_grads[i], None

    def set_grads(self, reduced: torch.Tensor) -> None:
        """Add the reduced gradients, in the masters' dtype, to those in `param.grad`.

        Args:
            reduced: wire[unit_numel + parameters]: the average, and the number of workers that have a gradient of each
                parameter.
        """
        average = reduced[: self.unit.numel].to(self.master.device, self.master.dtype)
        counts = reduced[self.unit.numel :].tolist()
        for spec, param, count in zip(self.unit.parameters, self.params, counts, strict=True):
            if not count:
                continue
            grad = average[spec.offset : spec.end].view(spec.shape)
            param.grad = grad if param.grad is None else param.grad + grad
