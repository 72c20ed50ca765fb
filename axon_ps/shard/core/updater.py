"""The optimizer of a shard server: kernels, hyperparameters and moments over the trainable slices. Pure.

Owns which moments a slice has. Refuses a second optimizer: a job has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from axon_ps.errors import InternalError, InvalidRequest, StepAborted
from axon_ps.optim import registry
from axon_ps.optim.base import ServerOptimizer
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.types import Array, DType, Hyper, OptimizerSpec


class Updater:
    """Kernels and hyperparameters of one job.

    Args:
        spec: the optimizer as registered.
        num_parameters: of the layout, frozen ones included.

    Attributes:
        spec: the optimizer as registered.

    Raises:
        InvalidRequest: optimizer or hyperparameter is unknown, or the groups do not cover the layout.
    """

    def __init__(self, spec: OptimizerSpec, num_parameters: int) -> None:
        if len(spec.group_of) != num_parameters:
            raise InvalidRequest(
                f"the optimizer names the groups of {len(spec.group_of)} parameters; the layout has {num_parameters}"
            )
        self.spec = spec
        self._kernels: ServerOptimizer = registry.create(spec.name)
        self._hypers: tuple[Hyper, ...] = tuple(self._kernels.validate(group) for group in spec.groups)
        self._state_groups = self._hypers
        self._scale = 1.0

    def install(self, slices: Iterable[OwnedSlice], moments_of: str) -> None:
        """Give slices their groups and moments; those they have stay if they are of this optimizer.

        Args:
            slices: which.
            moments_of: name of the optimizer whose moments they have; empty for none.
        """
        for owned in slices:
            if owned.trainable:
                if moments_of != self.spec.name:
                    owned.forget_moments()
                owned.set_groups(self.spec.group_of)
                self._complete(owned)

    def begin_step(self, hypers: Sequence[Hyper], scale: float, slices: Iterable[OwnedSlice]) -> None:
        """Before a step is applied: its hyperparameters, and what its gradient is multiplied by.

        Args:
            hypers: per parameter group; empty = as before.
            scale: the clip factor.
            slices: get the moments that a group needs for the first time (it has turned momentum on, say).

        Raises:
            InvalidRequest: a hyperparameter is unknown or out of range.
            InternalError: there are not as many as groups.
        """
        if hypers:
            if len(hypers) != len(self.spec.groups):
                raise InternalError(
                    f"a step has hyperparameters of {len(hypers)} groups; there are {len(self.spec.groups)}"
                )
            self._hypers = tuple(self._kernels.validate(hyper) for hyper in hypers)
            groups = (*self._state_groups, *self._hypers)
            if self._kernels.state_names(groups) != self._kernels.state_names(self._state_groups):
                self._state_groups = groups
                for owned in slices:
                    if owned.trainable:
                        self._complete(owned)
        self._scale = scale

    def apply(self, owned: OwnedSlice, first: int, last: int, version: int, scratch: Array) -> None:
        """Update chunks [first, last). Any thread; see `OwnedSlice.apply`."""
        owned.apply(first, last, self._kernels, self._hypers, self._scale, version, scratch)

    def validate(self, hypers: Sequence[Hyper]) -> tuple[Hyper, ...]:
        """Check and complete the hyperparameters that a step is expected to have, for `prepare_chunk`.

        Raises:
            InvalidRequest: one is unknown or out of range, or there are not as many as groups.
            StepAborted: they need moments that do not exist yet.
        """
        if len(hypers) != len(self.spec.groups):
            raise InvalidRequest(
                f"hyperparameters of {len(hypers)} groups were given; there are {len(self.spec.groups)}"
            )
        valid = tuple(self._kernels.validate(hyper) for hyper in hypers)
        if self._kernels.state_names((*self._state_groups, *valid)) != self._kernels.state_names(self._state_groups):
            raise StepAborted("these hyperparameters need new moments; their update cannot be prepared")
        return valid

    def prepare_chunk(
        self, owned: OwnedSlice, index: int, hypers: Sequence[Hyper], version: int, scratch: Array
    ) -> bytes:
        """The frame of one chunk as an update with `hypers` would make it; see `OwnedSlice.prepare_chunk`."""
        return owned.prepare_chunk(index, self._kernels, hypers, version, scratch)

    def warm_up(self, param_dtype: DType) -> None:
        """Compile the kernels, with and without wire copy. Takes about a second the first time; any thread."""
        for wire_dtype in {None, None if param_dtype is DType.F32 else param_dtype}:
            self._kernels.warm_up(self._hypers, wire_dtype)

    def _complete(self, owned: OwnedSlice) -> None:
        """Make the moments that are missing, and put all in the order in which the kernels take them."""
        present = owned.state
        state: dict[str, Array] = {}
        for name in self._kernels.state_names(self._state_groups):
            array = present.get(name)
            if array is None:
                value = self._kernels.initial_state(name, self._state_groups)
                array = np.zeros(owned.numel, np.float32) if value == 0.0 else np.full(owned.numel, value, np.float32)
            state[name] = array
        owned.state = state
