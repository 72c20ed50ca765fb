"""Ranges of a unit with the same parameter group and update count. Pure.

One kernel call updates one range of elements that share a parameter group and an update count. Parameters, slices and
chunks are cut independently of each other, so a range may be a part of one parameter or span several. Every optimizer
here is elementwise, so the cuts do not change the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from axon_ps.sharding.layout import Unit


@dataclass(frozen=True, slots=True)
class KernelRange:
    """Elements [begin, end) of a unit that one kernel call updates.

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


def kernel_ranges(unit: Unit, groups: Sequence[int], updates: Sequence[int]) -> tuple[KernelRange, ...]:
    """Return the ranges of a unit; neighbours that share group and update count are joined.

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
