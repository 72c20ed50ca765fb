"""The master values of one slice with the optimizer's state, and the arithmetic that changes them. Pure.

Owns: the moments, the update count of each parameter, and the bounds of parameter groups. The new values' form on the
wire is `shard.core.wire_copy`'s. The order of calls is the engine's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest
from axon_ps.kernels.digest import READ, WRITTEN, digests_of
from axon_ps.optim.base import UpdateRule
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.digests import PARAM, ArrayDigests, Corruption, SliceDigests
from axon_ps.sharding.layout import Unit
from axon_ps.types import Array, DType, Hyper


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's work in a step.

    Attributes:
        kernels: its compiled loops.
        hypers: per parameter group, validated hyperparameters.
        scale: factor that the gradient is multiplied by.
        untouched: parameters that stay as they are, by number in the layout.
    """

    kernels: UpdateRule
    hypers: tuple[Hyper, ...]
    scale: float = 1.0
    untouched: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimizer's state of a slice.

    Attributes:
        arrays: f32[slice_numel] each, by name.
        updates: per parameter of the unit, the number of updates it has had.
        digest: of values and moments, as they were written.
    """

    arrays: dict[str, Array]
    updates: tuple[int, ...]
    digest: int | None


@dataclass(frozen=True, slots=True)
class KernelRange:
    """Elements [begin, end) of a unit that one kernel call updates: they share a parameter group and an update count.

    Parameters, slices and chunks are cut independently of each other, so a range may be a part of one parameter or span
    several. Every optimizer here is elementwise, so the cuts do not change the result.

    Attributes:
        begin: first element, counted from the unit's start.
        end: one past the last element.
        group: index of the parameter group; -1 = the optimizer does not change these elements.
        updates: number of updates they had when the unit's own counter was at 0.
    """

    begin: int
    end: int
    group: int
    updates: int


class Master:
    """Values and moments of a slice.

    Args:
        chunks: of the slice.
        unit: its parameters.
        first_parameter: number of the unit's first parameter in the layout.
        wire_dtype: dtype to which an update casts its copy.

    Attributes:
        values: f32[slice_numel].
        state: moments by name, f32[slice_numel] each.
        updates: optimizer updates since the slice was made, or since `set_updates`.
        digests: of values and moments, as they were written.
    """

    def __init__(self, chunks: Chunks, unit: Unit, first_parameter: int, wire_dtype: DType) -> None:
        self.values: Array = np.zeros(chunks.numel, np.float32)
        self.state: dict[str, Array] = {}
        self.updates = 0
        self.digests = SliceDigests(chunks)
        self._chunks = chunks
        self._unit = unit
        self._first_parameter = first_parameter
        self._wire_dtype = wire_dtype
        self._updates_before = [0] * len(unit.parameters)
        self._groups: Sequence[int] = [0] * len(unit.parameters)  # of the unit's parameters
        self._given_up: Moments | None = None
        self._ranges: tuple[KernelRange, ...] = ()

    # ------------------------------------------------------------------ the optimizer's state

    def set_groups(self, group_of: Sequence[int]) -> None:
        """Set the group of each parameter. `group_of` covers the whole layout."""
        counts = self.parameter_updates()
        self._groups = group_of[self._first_parameter : self._first_parameter + len(self._unit.parameters)]
        self._updates_before = [
            count - self.updates if group >= 0 else count for group, count in zip(self._groups, counts, strict=True)
        ]
        self._ranges = kernel_ranges(self._unit, self._groups, self._updates_before)

    def set_updates(self, updates: Sequence[int]) -> None:
        """Set the number of updates that each parameter of the unit has had. `set_groups` must follow.

        Raises:
            InvalidRequest: their number is not that of the unit's parameters.
        """
        if len(updates) != len(self._unit.parameters):
            raise InvalidRequest(
                f"unit {self._unit.name!r} has {len(self._unit.parameters)} parameters, and updates are counted of "
                f"{len(updates)}"
            )
        self._updates_before = list(updates)
        self.updates = 0

    def parameter_updates(self) -> tuple[int, ...]:
        """Return the number of updates of each parameter of the unit (torch's `step`)."""
        return tuple(
            before + self.updates if group >= 0 else before  # a parameter in no group stays at its count
            for before, group in zip(self._updates_before, self._groups, strict=True)
        )

    def forget_moments(self) -> None:
        """Reset the optimizer: drop moments and update counts. `set_groups` must follow."""
        self.digests.forget(self.state)
        self.state = {}
        self.set_updates([0] * len(self._unit.parameters))

    def begin_anew(self) -> None:
        """Do as `forget_moments`, but keep the old moments in `moments` for a snapshot of the present version."""
        self._given_up = self.moments
        self.forget_moments()

    @property
    def moments(self) -> Moments:
        """The moments of the values' version."""
        return self._given_up or Moments(self.state, self.parameter_updates(), self.digests.total)

    def settle(self) -> None:
        """Drop the old moments: no snapshot needs them any more."""
        self._given_up = None

    def add_moments(self, kernels: UpdateRule, groups: Sequence[Hyper]) -> None:
        """Make the missing moments that groups need, and put all in the order that kernels take."""
        state: dict[str, Array] = {}
        for name in kernels.state_names(groups):
            array = self.state.get(name)
            if array is None:
                value, numel = kernels.initial_state(name, groups), self.values.size
                array = np.zeros(numel, np.float32) if value == 0.0 else np.full(numel, value, np.float32)
                self.digests.record_constant(name, value)
            state[name] = array
        self.digests.forget(set(self.state).difference(state))
        self.state = state

    def arrays(self) -> dict[str, Array]:
        """Return the values and moments by name, f32[slice_numel] each."""
        return {PARAM: self.values, **self.state}

    def digests_of(self, arrays: Mapping[str, Array]) -> SliceDigests:
        """Compute the digests of new values and moments, f32[slice_numel] each, by name. Any thread may call it."""
        digests = SliceDigests(self._chunks)
        digests.record(arrays)
        return digests

    def leaves(self, untouched: Collection[int]) -> bool:
        """Return True if one of these parameters, by number in the layout, is in this unit."""
        return any(0 <= number - self._first_parameter < len(self._unit.parameters) for number in untouched)

    def begin_update(self, update: Update) -> None:
        """Prepare an update of every chunk: parameters that it leaves untouched are not in any group meanwhile."""
        if self.leaves(update.untouched):
            moved = [-1 if n in update.untouched else g for n, g in enumerate(self._groups, self._first_parameter)]
            self._ranges = kernel_ranges(self._unit, moved, self._updates_before)

    def end_update(self, update: Update) -> None:
        """Count an update of every chunk, except for parameters that it left untouched."""
        self.updates += 1
        self.settle()
        if self.leaves(update.untouched):
            before = enumerate(zip(self._updates_before, self._groups, strict=True), self._first_parameter)
            self._updates_before = [count - (n in update.untouched and group >= 0) for n, (count, group) in before]
            self._ranges = kernel_ranges(self._unit, self._groups, self._updates_before)

    # ------------------------------------------------------------------ arithmetic

    def update(
        self,
        first: int,
        last: int,
        grads: Array,
        sums: ArrayDigests,
        update: Update,
        out: Array | None,
        *,
        in_place: bool = True,
    ) -> tuple[Array, list[Corruption]]:
        """Update chunks [first, last) in one pass. Any thread may call it, each with other chunks.

        The data read is compared with the data written before. The loop that updates computes the digests of both.

        Args:
            first: number of the first chunk.
            last: one past the last; m elements in all.
            grads: f32[slice_numel], the summed gradient.
            sums: digests of the summed gradient.
            update: the optimizer's work.
            out: wire[m], gets the new values, cast; None for no copy.
            in_place: whether values and moments become the new ones. Otherwise they stay as they are.

        Returns:
            f32[m], the new values; and the corrupt blocks, because of which they are wrong.
        """
        arrays = [self.values, *self.state.values()]
        written = [self.digests[name] for name in self.arrays()]
        found = list[Corruption]()
        elements = self._chunks.run(first, last)
        target = arrays if in_place else [array[elements].copy() for array in arrays]
        shift = 0 if in_place else elements.start
        for block in self._chunks.blocks_of(first, last):
            at = self._chunks.blocks[block]
            values, *states = (array[at.start - shift : at.stop - shift] for array in target)
            copy = None if out is None else out[at.start - elements.start : at.stop - elements.start]
            taken = np.zeros((2, len(arrays) + 1), np.uint64)
            self._update(at.start, values, grads[at], states, copy, update, taken)
            for of, each in zip((*written, sums), taken[READ].tolist(), strict=True):
                found += of.check_digests((block,), (each,))
            if in_place:
                for of, each in zip(written, taken[WRITTEN, :-1].tolist(), strict=True):
                    of.record_digests((block,), (each,))
        return (self.values[elements] if in_place else target[0]), found

    def _update(
        self,
        first: int,
        values: Array,
        grad: Array,
        states: Sequence[Array],
        out: Array | None,
        update: Update,
        taken: Array,
    ) -> None:
        """Update a range, f32[m] each, that begins at element `first` of the slice; `out` as for `update`.

        The digests are added to `taken`, as by `UpdateRule.apply`.
        """
        begin = self._chunks.begin + first
        for r in cut(self._ranges, begin, begin + values.size):
            within = slice(r.begin - begin, r.end - begin)
            copy = None if out is None else out[within]
            state = tuple(array[within] for array in states)
            if r.group >= 0:
                update.kernels.apply(
                    values[within],
                    grad[within],
                    state,
                    copy,
                    self._wire_dtype,
                    update.hypers[r.group],
                    r.updates + self.updates + 1,
                    update.scale,
                    taken,
                )
                continue
            unchanged = digests_of((values[within], *state, grad[within]))
            taken[READ] += unchanged
            taken[WRITTEN, :-1] += unchanged[:-1]
            if copy is not None:
                cast.encode(values[within], copy, self._wire_dtype)

    def check(self, first: int, last: int, *, moments: bool = True) -> list[Corruption]:
        """Return the blocks of chunks [first, last) that do not hold what was written."""
        arrays = self.arrays() if moments else {PARAM: self.values}
        return self.digests.check(arrays, self._chunks.blocks_of(first, last))

    def average(self, first: int, last: int, source: Master, weight: float, out: Array | None) -> list[Corruption]:
        """Set chunks [first, last) to (1 - weight) * their values + weight * those of `source`. Moments stay.

        Raw parameters become those of `source` if the weight is 1, and else stay as they are.

        Args:
            first: number of the first chunk.
            last: one past the last; m elements in all.
            source: the same elements of another model, which do not change meanwhile.
            weight: above 0, at most 1.
            out: wire[m], gets the new values, cast; None for no copy.

        Returns:
            The corrupt blocks, of either model, because of which the values are wrong.
        """
        found = self.check(first, last, moments=False) + source.check(first, last, moments=False)
        elements = self._chunks.run(first, last)
        values, other = self.values[elements], source.values[elements]
        if weight == 1.0:
            values[:] = other
        elif not self._unit.raw:
            values *= np.float32(1.0 - weight)
            values += other * np.float32(weight)
        if out is not None:
            cast.encode(values, out, self._wire_dtype)
        self.digests[PARAM].record(self.values.view(np.uint32), self._chunks.blocks_of(first, last))
        return found


def kernel_ranges(unit: Unit, groups: Sequence[int], updates: Sequence[int]) -> tuple[KernelRange, ...]:
    """Return the ranges of a unit. Neighbours that share group and update count are joined.

    Args:
        unit: its parameters.
        groups: per parameter, its group.
        updates: per parameter, the updates it had when the unit's counter was at 0.
    """
    joined: list[KernelRange] = []
    for parameter, group, count in zip(unit.parameters, groups, updates, strict=True):
        begin = parameter.offset
        if joined and joined[-1].group == group and joined[-1].updates == count:
            begin = joined.pop().begin
        joined.append(KernelRange(begin, parameter.end, group, count))
    return tuple(joined)


def cut(ranges: Sequence[KernelRange], begin: int, end: int) -> tuple[KernelRange, ...]:
    """Return the parts of `ranges` (ascending, gapless) that lie in elements [begin, end) of the unit."""
    first = bisect_right(ranges, begin, key=lambda r: r.begin) - 1
    found: list[KernelRange] = []
    for r in ranges[first:]:
        if r.begin >= end:
            break
        found.append(KernelRange(max(r.begin, begin), min(r.end, end), r.group, r.updates))
    return tuple(found)
