"""The master values of one slice with the optimizer's state, and the arithmetic that changes them. Pure.

Owns: which moments there are, how often each parameter was updated, and where parameter groups change. What becomes of
the new values on the wire is `shard.core.wire_copy`'s; who may call what when is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest
from axon_ps.optim.base import UpdateRule
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.kernel_ranges import KernelRange, cut, kernel_ranges
from axon_ps.sharding.layout import Unit
from axon_ps.types import Array, DType, Hyper


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer does in a step.

    Attributes:
        kernels: its compiled loops.
        hypers: per parameter group, validated hyperparameters.
        scale: what the gradient is multiplied by.
    """

    kernels: UpdateRule
    hypers: tuple[Hyper, ...]
    scale: float = 1.0


class Master:
    """Values and moments of a slice.

    Args:
        chunks: of the slice.
        unit: its parameters.
        first_parameter: number of the unit's first parameter in the layout.
        wire_dtype: what an update casts its copy to.

    Attributes:
        values: f32[slice_numel].
        state: moments by name, f32[slice_numel] each.
        updates: optimizer updates since the slice was made or restored.
    """

    def __init__(self, chunks: Chunks, unit: Unit, first_parameter: int, wire_dtype: DType) -> None:
        self.values: Array = np.zeros(chunks.numel, np.float32)
        self.state: dict[str, Array] = {}
        self.updates = 0
        self._begin = chunks.begin
        self._unit = unit
        self._first_parameter = first_parameter
        self._wire_dtype = wire_dtype
        self._updates_before = [0] * len(unit.parameters)
        self._ranges: tuple[KernelRange, ...] = ()

    # ------------------------------------------------------------------ the optimizer's state

    def set_groups(self, group_of: Sequence[int]) -> None:
        """Set the group of each parameter; `group_of` covers the whole layout."""
        groups = group_of[self._first_parameter : self._first_parameter + len(self._unit.parameters)]
        self._ranges = kernel_ranges(self._unit, groups, self._updates_before)

    def set_updates(self, updates: Sequence[int]) -> None:
        """Set how many updates each parameter of the unit has had; `set_groups` must follow.

        Raises:
            InvalidRequest: they are not those of this unit.
        """
        if len(updates) != len(self._unit.parameters):
            raise InvalidRequest(
                f"unit {self._unit.name!r} has {len(self._unit.parameters)} parameters, and updates are counted of "
                f"{len(updates)}"
            )
        self._updates_before = list(updates)
        self.updates = 0

    def parameter_updates(self) -> tuple[int, ...]:
        """Per parameter of the unit, how many updates it has had (torch's `step`)."""
        return tuple(before + self.updates for before in self._updates_before)

    def forget_moments(self) -> None:
        """Start the optimizer anew: no moments, no updates counted; `set_groups` must follow."""
        self.state = {}
        self.set_updates([0] * len(self._unit.parameters))

    def add_moments(self, kernels: UpdateRule, groups: Sequence[Hyper]) -> None:
        """Make the moments that groups need and that are missing, and put all in the order that kernels take."""
        state: dict[str, Array] = {}
        for name in kernels.state_names(groups):
            array = self.state.get(name)
            if array is None:
                value, numel = kernels.initial_state(name, groups), self.values.size
                array = np.zeros(numel, np.float32) if value == 0.0 else np.full(numel, value, np.float32)
            state[name] = array
        self.state = state

    # ------------------------------------------------------------------ arithmetic

    def update(
        self, elements: slice, grads: Array, update: Update, out: Array | None, *, in_place: bool = True
    ) -> Array:
        """One update of a range in one pass. Any thread; ranges of different threads must not overlap.

        Args:
            elements: the range, m elements.
            grads: f32[slice_numel], the summed gradient.
            update: what the optimizer does.
            out: wire[m], gets the new values, cast; None for no copy.
            in_place: whether values and moments become the new ones; otherwise they stay as they are.

        Returns:
            f32[m], the new values.
        """
        values, states = self.values[elements], tuple(state[elements] for state in self.state.values())
        if not in_place:
            values, states = values.copy(), tuple(state.copy() for state in states)
        grad = grads[elements]
        begin = self._begin + elements.start
        for r in cut(self._ranges, begin, begin + values.size):
            within = slice(r.begin - begin, r.end - begin)
            copy = None if out is None else out[within]
            if r.group >= 0:
                update.kernels.apply(
                    values[within],
                    grad[within],
                    tuple(state[within] for state in states),
                    copy,
                    self._wire_dtype,
                    update.hypers[r.group],
                    r.updates + self.updates + 1,
                    update.scale,
                )
            elif copy is not None:
                cast.encode(values[within], copy, self._wire_dtype)
        return values

    def average(self, elements: slice, source: Array, weight: float, out: Array | None) -> None:
        """Elements become (1 - weight) * their values + weight * those of `source`; moments stay.

        Args:
            elements: the range, m elements.
            source: f32[slice_numel], which does not change meanwhile.
            weight: above 0, at most 1.
            out: wire[m], gets the new values, cast; None for no copy.
        """
        values, other = self.values[elements], source[elements]
        if weight == 1.0:
            values[:] = other
        else:
            values *= np.float32(1.0 - weight)
            values += other * np.float32(weight)
        if out is not None:
            cast.encode(values, out, self._wire_dtype)
