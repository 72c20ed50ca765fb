"""A version as it arrives: complete or refused, immutable, and unchanged units the same arrays as before."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.shard.client.assembly import ArrivingVersion, Values
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit, build_unit
from axon_ps.types import DType
from axon_ps.wire.changes import encode_changes
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.v1 import common_pb2
from engine_driver import job_of, layout_of

SPEC = job_of(layout_of([100, 60], [30]), chunk_numel=32, min_slice_numel=32)
SLICES = SPEC.plan(2).numbered  # two of unit 0, one of unit 1


def assembly(version: int = 1, base: Values | None = None) -> ArrivingVersion:
    return ArrivingVersion(SPEC, 2, DType.F32, 0, version, base)


def header(unit: int, begin: int, end: int, version: int = 1, dtype: DType = DType.F32) -> common_pb2.Chunk:
    return common_pb2.Chunk(unit=unit, offset=begin, numel=end - begin, version=version, dtype=dtype_to_proto(dtype))


def send(to: ArrivingVersion, number: int, value: float) -> None:
    s = SLICES[number]
    for begin, end in s.chunks(32):
        values = np.full(end - begin, value, np.float32)
        to.put(header(s.unit, begin, end, to.version), memoryview(values).cast("B"), [number])
    to.arrived([number])


def whole(version: int = 1) -> Values:
    made = assembly(version)
    for number in range(len(SLICES)):
        send(made, number, float(version))
    return made.finish()


def test_all_of_it_by_name_and_read_only() -> None:
    values = whole()
    parameters = values.parameters()
    assert {name: p.shape for name, p in parameters.items()} == {"u0.p0": (100,), "u0.p1": (60,), "u1.p0": (30,)}
    assert all((p == 1.0).all() for p in parameters.values())
    with pytest.raises(ValueError, match="read-only"):
        parameters["u0.p0"][0] = 2.0


def test_tensors_that_a_mesh_cuts_are_put_together() -> None:
    units = []
    for row in (1, 0):
        whole = FullTensor(name="w", shape=(2, 3), begin=(row, 0))
        parameter = Parameter(name=f"w@{row}", shape=(1, 3), offset=0, full=whole)
        units.append(Unit(name=f"u{row}", parameters=(parameter,)))
    units.append(build_unit("u", [("v", (2,), DType.F32)]))
    arrays = tuple(np.full(unit.numel, number, np.float32) for number, unit in enumerate(units))
    spec = job_of(Layout(units=tuple(units)))
    parameters = Values(spec=spec, epoch=0, version=1, dtype=DType.F32, units=arrays).parameters()
    assert {name: p.tolist() for name, p in parameters.items()} == {"w": [[1.0] * 3, [0.0] * 3], "v": [2.0] * 2}
    assert not any(p.flags.writeable for p in parameters.values())


def test_an_absent_chunk_is_refused() -> None:
    """A gradient may be absent, a parameter may not: `make lab NAME=fuzz` found a ValueError of numpy's."""
    chunk = header(0, 0, 32)
    chunk.absent = True
    with pytest.raises(InvalidRequest, match="an absent chunk came where 32 elements are needed"):
        assembly().put(chunk, memoryview(b""), [0])


def test_what_did_not_change_is_the_same_array() -> None:
    base = whole()
    made = assembly(2, base)
    send(made, 0, 2.0)
    made.arrived([1, 2])
    values = made.finish()
    assert values.units[1] is base.units[1]
    end = SLICES[0].end
    assert (values.units[0][:end] == 2.0).all()
    assert (values.units[0][end:] == 1.0).all()
    assert (base.units[0] == 1.0).all()


def test_changes_are_to_the_version_before() -> None:
    base = whole()
    new = base.units[1].copy()
    new[7] = 5.0
    payload = encode_changes(base.units[1], new)
    assert payload is not None
    made, chunk = assembly(2, base), header(1, 0, 30, 2)
    chunk.compressed = True
    assert made.put(chunk, memoryview(payload), [2]) == 1
    made.arrived([0, 1, 2])
    np.testing.assert_array_equal(made.finish().units[1], new)
    with pytest.raises(InvalidRequest, match="nothing that they could be to"):
        assembly(2).put(chunk, memoryview(payload), [2])


def test_a_slice_begins_anew_at_another_server() -> None:
    made = assembly()
    made.put(header(0, 0, 32), memoryview(bytes(128)), [0])
    with pytest.raises(InvalidRequest, match="of slice 0 came elements 0 to 32"):
        made.arrived([0])
    made.begin([0])
    send(made, 0, 3.0)
    assert made.missing == {1, 2}


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (header(2, 0, 10), "the layout has none"),
        (header(0, 160, 170), "the layout has none"),
        (header(0, 32, 40), "not its turn"),
        (header(1, 0, 30), "not its turn"),
        (header(0, 0, 0), "not its turn"),
        (header(0, 0, 96), "not its turn"),
        (header(0, 0, 32, version=2), "not asked for"),
        (header(0, 0, 32, dtype=DType.BF16), "not asked for"),
        (header(0, 0, 31), "must have 124"),
    ],
)
def test_what_was_not_asked_for_is_refused(chunk: common_pb2.Chunk, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        assembly().put(chunk, memoryview(bytes(128)), [0])


def test_nothing_sent_needs_a_version_before() -> None:
    with pytest.raises(InvalidRequest, match="of slice 2 came elements 0 to None"):
        assembly().arrived([2])
