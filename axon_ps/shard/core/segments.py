"""Where parameter groups and update counts change inside a unit. Pure.

A kernel call covers one run of elements that share a parameter group and an update count. Parameters, slices and chunks
are cut independently of each other, so a run may be a piece of one parameter or span several; every optimizer here is
elementwise, and so the cuts do not show in the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from axon_ps.sharding.layout import Unit


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [begin, end) of a unit that one kernel call updates.

    Attributes:
        begin: first element, counted from the unit's start.
        end: one past the last element.
        group: index of the parameter group; -1 = the optimizer does not move these elements.
        updates: how many updates they had when the unit's own counter was at 0.
    """

    begin: int
    end: int
    group: int
    updates: int


def unit_segments(unit: Unit, groups: Sequence[int], updates: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of a whole unit, neighbours that share group and update count joined.

    Args:
        unit: its parameters.
        groups: per parameter, its group.
        updates: per parameter, the updates it had when the unit's counter was at 0.
    """
    joined: list[Segment] = []
    for parameter, group, count in zip(unit.parameters, groups, updates, strict=True):
        begin = parameter.offset
        if joined and joined[-1].group == group and joined[-1].updates == count:
            begin = joined.pop().begin
        joined.append(Segment(begin, parameter.end, group, count))
    return tuple(joined)


def cut(segments: Sequence[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """The parts of `segments` (ascending, gapless) that lie in elements [begin, end) of the unit."""
    first = bisect_right(segments, begin, key=lambda s: s.begin) - 1
    parts: list[Segment] = []
    for s in segments[first:]:
        if s.begin >= end:
            break
        parts.append(Segment(max(s.begin, begin), min(s.end, end), s.group, s.updates))
    return tuple(parts)
