"""Kernel ranges: parameter groups cut across chunks cover every element once, with the right group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from axon_ps.shard.core.master import KernelRange, cut, kernel_ranges
from axon_ps.sharding.layout import build_unit
from axon_ps.types import DType

UNIT = build_unit("u", [("a", (10,), DType.F32), ("b", (5,), DType.F32), ("c", (7,), DType.F32)])


def test_neighbours_of_one_group_and_count_are_joined() -> None:
    assert kernel_ranges(UNIT, (0, 0, 1), (0, 0, 0)) == (KernelRange(0, 15, 0, 0), KernelRange(15, 22, 1, 0))
    assert kernel_ranges(UNIT, (0, 0, 0), (0, 3, 3)) == (KernelRange(0, 10, 0, 0), KernelRange(10, 22, 0, 3))


def test_cut_takes_the_parts_inside() -> None:
    ranges = kernel_ranges(UNIT, (0, 1, 0), (0, 0, 0))
    assert cut(ranges, 0, 10) == (KernelRange(0, 10, 0, 0),)
    assert cut(ranges, 8, 16) == (KernelRange(8, 10, 0, 0), KernelRange(10, 15, 1, 0), KernelRange(15, 16, 0, 0))


@given(
    numels=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    groups=st.lists(st.integers(-1, 2), min_size=8, max_size=8),
    updates=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    chunk_numel=st.integers(1, 50),
)
def test_chunks_cover_every_element_once(
    numels: list[int], groups: list[int], updates: list[int], chunk_numel: int
) -> None:
    unit = build_unit("u", [(f"p{i}", (n,), DType.F32) for i, n in enumerate(numels)])
    wanted = [(g, c) for p, g, c in zip(unit.parameters, groups, updates, strict=False) for _ in range(p.numel)]
    ranges = kernel_ranges(unit, groups[: len(numels)], updates[: len(numels)])
    got: list[tuple[int, int]] = []
    for begin in range(0, unit.numel, chunk_numel):
        for s in cut(ranges, begin, min(begin + chunk_numel, unit.numel)):
            assert s.begin == len(got)
            got += [(s.group, s.updates)] * (s.end - s.begin)
    assert got == wanted
