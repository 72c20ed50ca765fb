"""The shard servers' optimizers on masters in this process: NO_SHARD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from axon_ps.errors import InvalidRequest
from axon_ps.optim.registry import create
from axon_ps.parallel.fsdp.no_shard.replicated_unit import ReplicatedUnit
from axon_ps.types import Array, DType, Hyper, OptimizerSpec


class LocalOptimizer:
    """The servers' kernels on masters in this process: moments in host memory.

    Args:
        spec: optimizer and groups.
        flats: every unit, in layout order.
        before: the optimizer whose moments it takes over, if they are of the same kind.

    Attributes:
        spec: optimizer, and groups with the hyperparameters of the newest step.
        state: per trainable unit, moments by name, f32[unit_numel].
        updates: per trainable unit, per parameter, the number of its updates.

    Raises:
        InvalidRequest: a hyperparameter is out of range, or a master is not f32 in host memory.
    """

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[ReplicatedUnit], before: LocalOptimizer | None = None
    ) -> None:
        self.spec = spec
        self._kernels = create(spec.name)
        self._needed = tuple(self._kernels.validate(g) for g in (*spec.groups, *spec.moments))
        self._flats = [f for f in flats if f.trainable]
        group_of = iter(spec.group_of)
        self._group_of = {f.index: tuple(islice(group_of, len(f.params))) for f in flats}
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        self.updates: dict[int, list[int]] = {}
        for flat in self._flats:
            if flat.master.dtype != torch.float32 or flat.master.device.type != "cpu":
                raise InvalidRequest(
                    f"unit {flat.unit.name!r} has masters of {flat.master.dtype} on {flat.master.device}; this "
                    "optimizer runs in host memory on f32: build the model in f32 with "
                    "cpu_offload=CPUOffload.OPTIMIZER_STATES, or use an optimizer of torch.optim"
                )
            self.updates[flat.index] = [0] * len(flat.params)
        if before is not None and before.spec.name == spec.name:
            self.updates.update(before.updates)
            self.state.update(before.state)
            self._needed += before._needed
        self._make_moments()

    def need(self, hyper: Sequence[Hyper]) -> None:
        """Make the moments that steps with these hyperparameters need."""
        names = self._kernels.state_names
        if names((*self._needed, *hyper)) != names(self._needed):
            self._needed = (*self._needed, *map(dict, hyper))
            self._make_moments()

    def _make_moments(self) -> None:
        names = self._kernels.state_names(self._needed)
        for flat in self._flats:
            there = self.state.get(flat.index, {})
            self.state[flat.index] = {
                name: there[name]
                if name in there
                else torch.full(
                    (flat.unit.numel,),
                    self._kernels.initial_state(name, self._needed),
                    dtype=torch.float32,
                    device="cpu",
                )
                for name in names
            }

    def _parameters(self) -> Iterator[tuple[ReplicatedUnit, int, torch.Tensor, slice]]:
        for flat in self._flats:
            for i, (spec, param) in enumerate(zip(flat.unit.parameters, flat.params, strict=True)):
                yield flat, i, param, slice(spec.offset, spec.end)

    def states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of each updated parameter in the form of torch's optimizers. Moments share our memory."""
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for flat, i, param, elements in self._parameters():
            if self.updates[flat.index][i] and self._group_of[flat.index][i] >= 0:
                found[param] = {name: s[elements].view(param.shape) for name, s in self.state[flat.index].items()}
                found[param]["step"] = torch.tensor(
                    float(self.updates[flat.index][i]), dtype=torch.float32, device="cpu"
                )
        return found

    def load_states(self, states: Mapping[torch.Tensor, Mapping[str, Any]], hyper: Sequence[Hyper]) -> None:
        """Set the state from `states()`, or from an optimizer of torch. Parameters that it lacks begin anew.

        Raises:
            InvalidRequest: it has a state that this optimizer does not have.
        """
        self.need(hyper)
        for flat, i, param, elements in self._parameters():
            given = {name: value for name, value in states.get(param, {}).items() if value is not None}
            count = given.pop("step", 1.0 if given else 0.0)
            if unknown := sorted(given.keys() - self.state[flat.index].keys()):
                raise InvalidRequest(
                    f"the state dict has {unknown[0]!r} of a parameter, which {self.spec.name} with these "
                    "hyperparameters has not; load the state dict of an optimizer of the same type"
                )
            self.updates[flat.index][i] = int(count)
            for name, array in self.state[flat.index].items():
                if name in given:
                    array[elements].view(param.shape).copy_(given[name])
                else:
                    array[elements].fill_(self._kernels.initial_state(name, self._needed))

    def apply(self, hyper: Sequence[Hyper]) -> None:
        """Update every parameter that has a gradient and a group."""
        self.need(hyper)
        self.spec = replace(self.spec, groups=tuple(hyper), moments=self._needed)
        for flat in self._flats:
            master = _f32(flat.master)
            states = {name: _f32(s) for name, s in self.state[flat.index].items()}
            for i, (spec, param) in enumerate(zip(flat.unit.parameters, flat.params, strict=True)):
                if param.grad is None or self._group_of[flat.index][i] < 0:
                    continue
                elements = slice(spec.offset, spec.end)
                self.updates[flat.index][i] += 1
                self._kernels.apply(
                    master[elements],
                    _f32(param.grad.reshape(-1)),
                    tuple(s[elements] for s in states.values()),
                    None,
                    DType.F32,
                    hyper[self._group_of[flat.index][i]],
                    self.updates[flat.index][i],
                    1.0,
                )

    def nbytes(self) -> int:
        """Return the bytes of the moments."""
        return sum(s.nbytes for states in self.state.values() for s in states.values())


def _f32(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().contiguous().numpy()
    assert array.dtype == np.float32
    return array
