"""Values that a worker uploads in the place of others: taken at any version, served when all are there.

Tests of `shard/core/parameters.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.errors import Misuse
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.types import DType

NUMEL = 150
SPEC = JobSpec(
    layout=Layout(units=(build_unit("u", [("p", (NUMEL,), DType.F32)]),)),
    options=PlanOptions(chunk_numel=100, min_slice_numel=64),
)


def upload(engine: ShardEngine, value: float) -> list[bool]:
    return [
        engine.parameters.upload(0, begin, np.full(end - begin, value, np.float32), engine.version)
        for begin, end in ((0, 100), (100, NUMEL))
    ]


def make() -> ShardEngine:
    engine = ShardEngine()
    engine.configure(SPEC, 0, 1)
    assert upload(engine, 1.0) == [False, True]
    engine.version = 3
    return engine


def test_other_values_are_taken_at_any_version_and_moments_stay() -> None:
    engine = make()
    moment = np.ones(NUMEL, np.float32)
    engine.slices[0].master.state = {"exp_avg": moment}
    engine.parameters.begin_restore(uploaded=True)
    assert not engine.parameters.replacing  # the old values are still being read
    engine.parameters.withdraw()
    assert engine.parameters.replacing
    assert not engine.parameters.available(0, 0, 0)
    assert upload(engine, 2.0) == [False, True]
    assert not engine.parameters.available(0, 0, 0)
    engine.parameters.restored()
    assert engine.parameters.serving
    assert engine.parameters.available(0, 0, 3)
    assert engine.version == 3
    assert np.array_equal(engine.slices[0].master.values, np.full(NUMEL, 2.0))
    assert engine.slices[0].master.state["exp_avg"] is moment


def test_nobody_uploads_over_values_that_were_trained() -> None:
    engine = make()
    with pytest.raises(Misuse, match="version 3"):
        upload(engine, 2.0)
    engine.parameters.begin_restore()  # from a checkpoint
    engine.parameters.withdraw()
    with pytest.raises(Misuse, match="version 3"):
        upload(engine, 2.0)


def test_a_job_that_begins_again_begins_at_its_first_version() -> None:
    """Also on a server that holds values of a later one; else it would end, since the job is at version 0."""
    engine = make()
    engine.parameters.begin_restore(uploaded=True)
    engine.withdraw(0)
    assert engine.version == 0
    assert upload(engine, 2.0) == [False, True]
    engine.parameters.restored()
    assert engine.parameters.available(0, 0, 0)
