"""A model of which one process has all values: written and read as shard servers do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from axon_ps.errors import CheckpointNotFound
from axon_ps.shard.full_model import FullModel
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.manifest import Manifest, read_manifest, write_manifest
from axon_ps.types import DType, OptimizerSpec

SPEC = JobSpec(
    layout=Layout(
        units=(
            build_unit("frozen", [("f", (3,), DType.F32)], trainable=False),
            build_unit("u", [("w", (2, 2), DType.F32), ("b", (1,), DType.F32)]),
        )
    ),
    options=PlanOptions(),
)
SGD = OptimizerSpec(name="sgd", groups=({"lr": 0.1, "momentum": 0.9},), group_of=(-1, 0, 0))


def test_what_was_written_is_read_by_another(tmp_path: Path) -> None:
    uri, values, momentum = str(tmp_path), np.arange(5, dtype=np.float32), np.full(5, 7.0, np.float32)
    model = FullModel(SPEC)
    model.set(0, np.ones(3, np.float32), 4)
    model.set(1, values, 4)
    model.set_moments(1, {"momentum_buffer": momentum}, [4, 3])
    entry = model.write(uri, 4)
    manifest = Manifest(
        job="one",
        version=4,
        layout=SPEC.layout,
        optimizer=SGD,
        num_servers=1,
        options=SPEC.options,
        files=(entry,),
        extra={},
        created="2026-01-01T00:00:00+00:00",
        uri=uri,
    )
    write_manifest(uri, manifest)
    other = FullModel(SPEC)
    found = other.read(read_manifest(uri).section(""))
    assert (found.version, found.optimizer) == (4, SGD)
    np.testing.assert_array_equal(other.values(0), np.ones(3, np.float32))
    np.testing.assert_array_equal(other.values(1), values)
    moments, updates = other.moments(1)
    np.testing.assert_array_equal(moments["momentum_buffer"], momentum)
    assert list(updates) == [4, 3]


def test_what_is_not_there_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        FullModel(SPEC).read(read_manifest(str(tmp_path)).section(""))


def test_two_processes_write_a_file_of_some_units_each(tmp_path: Path) -> None:
    entries = []
    for number, unit in enumerate(SPEC.layout.units):
        part = FullModel(SPEC, [number])
        part.set(number, np.full(unit.numel, number + 1.0, np.float32), 4)
        if unit.trainable:
            part.set_moments(number, {"momentum_buffer": np.full(unit.numel, 7.0, np.float32)}, [4, 3])
        entries.append(part.write(str(tmp_path), 4))
    manifest = Manifest(
        job="one",
        version=4,
        layout=SPEC.layout,
        optimizer=SGD,
        num_servers=1,
        options=SPEC.options,
        files=tuple(entries),
        slices_in=(0, 1),
    )
    write_manifest(str(tmp_path), manifest)
    again = FullModel(SPEC)
    again.read(read_manifest(str(tmp_path)))
    assert again.values(0).tolist() == [1.0] * 3
    assert again.values(1).tolist() == [2.0] * 5
    moments, updates = again.moments(1)
    assert moments["momentum_buffer"].tolist() == [7.0] * 5
    assert tuple(updates) == (4, 3)
