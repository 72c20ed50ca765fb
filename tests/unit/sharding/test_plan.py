"""Plans: every element has one owner, servers are balanced, and resharding moves each element to its new place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, Unit, build_unit
from axon_ps.sharding.plan import ALIGN_NUMEL, PlanOptions, make_plan, num_slices
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType

F32 = DType.F32

shapes = st.lists(st.lists(st.integers(1, 40), max_size=2).map(tuple), min_size=1, max_size=4)
options_strategy = st.builds(PlanOptions, chunk_numel=st.integers(1, 100), min_slice_numel=st.integers(1, 200))


def with_float8(unit: Unit, names: Collection[str]) -> Unit:
    return replace(unit, parameters=tuple(replace(p, float8=p.name in names) for p in unit.parameters))


@st.composite
def layouts(draw: st.DrawFn, *, float8: bool = False) -> Layout:
    units: list[Unit] = []
    for i in range(draw(st.integers(1, 5))):
        parameters = [(f"{i}.{j}", shape, F32) for j, shape in enumerate(draw(shapes))]
        unit = build_unit(f"u{i}", parameters, trainable=draw(st.booleans()))
        units.append(with_float8(unit, {p.name for p in unit.parameters if draw(st.booleans())}) if float8 else unit)
    return Layout(units=tuple(units))


@given(st.one_of(layouts(), layouts(float8=True)), st.integers(1, 6), options_strategy)
def test_slices_cover_each_unit_exactly_and_chunks_each_slice(
    layout: Layout, servers: int, options: PlanOptions
) -> None:
    plan = make_plan(layout, servers, options)
    for index, (unit, slices) in enumerate(zip(layout.units, plan.slices, strict=True)):
        assert [s.begin for s in slices] == [0, *(s.end for s in slices[:-1])]
        assert slices[-1].end == unit.numel
        assert len({s.server for s in slices}) == len(slices)
        for s in slices:
            assert plan.slice_of(index, s.server) == s
            bounds = list(s.chunks(options.chunk_numel))
            assert [b for b, _ in bounds] == [s.begin, *(e for _, e in bounds[:-1])]
            assert bounds[-1][1] == s.end
    assert sum(s.numel for owned in plan.by_server for s in owned) == layout.numel
    assert num_slices(layout, servers, options) == len(plan.numbered)


@given(layouts(float8=True), st.integers(1, 6), options_strategy)
def test_a_parameter_that_travels_as_float8_is_on_one_server(
    layout: Layout, servers: int, options: PlanOptions
) -> None:
    plan = make_plan(layout, servers, options)
    for index, p in layout.parameters():
        holders = [s for s in plan.slices[index] if s.begin < p.end and p.offset < s.end]
        assert len(holders) == 1 or not p.float8


def test_units_of_float8_are_spread_evenly_over_servers() -> None:
    sizes = [(1024, 1024), (256, 1024), (256, 1024), (1024, 1024), *[(1024, 2816)] * 3]  # as of a Llama's block
    blocks = [build_unit(f"b{i}", [(f"{i}.{j}", shape, F32) for j, shape in enumerate(sizes)]) for i in range(32)]
    layout = Layout(units=tuple(with_float8(unit, {p.name for p in unit.parameters}) for unit in blocks))
    for servers, most in ((2, 1.01), (4, 1.05), (8, 1.05), (16, 1.15)):
        owned = [sum(s.numel for s in slices) for slices in make_plan(layout, servers).by_server]
        assert max(owned) < most * layout.numel / servers


@given(layouts(), st.integers(1, 6), options_strategy)
def test_no_slice_is_much_shorter_than_asked(layout: Layout, servers: int, options: PlanOptions) -> None:
    for unit, slices in zip(layout.units, make_plan(layout, servers, options).slices, strict=True):
        for s in slices:
            assert s.numel + ALIGN_NUMEL > min(options.min_slice_numel, unit.numel)


def test_small_units_go_round_the_servers() -> None:
    layout = Layout(units=tuple(build_unit(f"u{i}", [(f"w{i}", (10,), F32)]) for i in range(6)))
    plan = make_plan(layout, 3)
    assert [sum(s.numel for s in owned) for owned in plan.by_server] == [20, 20, 20]


def test_a_large_unit_is_cut_evenly_on_cache_lines() -> None:
    plan = make_plan(Layout(units=(build_unit("u", [("w", (1_000_003,), F32)]),)), 4)
    sizes = [s.numel for s in plan.slices[0]]
    assert max(sizes) - min(sizes) <= 2 * ALIGN_NUMEL
    assert all(s.begin % ALIGN_NUMEL == 0 for s in plan.slices[0])


def test_nonsense_is_refused() -> None:
    layout = Layout(units=(build_unit("u", [("w", (4,), F32)]),))
    with pytest.raises(InvalidRequest, match="at least one shard server"):
        make_plan(layout, 0)
    with pytest.raises(InvalidRequest, match="chunk_numel is 0"):
        PlanOptions(chunk_numel=0)
    with pytest.raises(InvalidRequest, match="min_slice_numel"):
        PlanOptions(min_slice_numel=0)
    with pytest.raises(InvalidRequest, match="the wire dtype of gradients is 'i64'"):
        JobSpec(layout=layout, precision=WirePrecision(grad=DType.I64))


def test_the_difference_of_job_specs_is_text() -> None:
    layout = Layout(units=(build_unit("u", [("w", (4,), F32)]),))
    spec = JobSpec(layout=layout)
    assert spec.difference(JobSpec(layout=layout)) == ""
    other = JobSpec(layout=layout, precision=WirePrecision(grad=DType.BF16))
    assert spec.difference(other) == "wire dtype of gradients is f32 here and bf16 in the job"
    assert spec.plan(3) is spec.plan(3)
