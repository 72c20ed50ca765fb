"""Workers expect one step, all of them the same, until it is decided. Tests of `shard/core/expected_step.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.shard.core.engine import ShardEngine
from engine_driver import Servers, apply, commit_of, job_of, layout_of

LAYOUT = layout_of([100], [40], frozen=(1,))
HYPER = ({"lr": 0.5},)


def made() -> tuple[Servers, ShardEngine]:
    """A model whose only replica has pushed."""
    servers = Servers(job_of(LAYOUT))
    servers.upload([np.zeros(100, np.float32), np.zeros(40, np.float32)])
    servers.push(0, 0, np.ones(100, np.float32))
    return servers, servers.engines[0]


def prepare(engine: ShardEngine, step: int, lr: float = 0.5, unit: int = 0) -> bytes | None:
    return engine.expected.prepare_chunk(step, engine.slices[unit], 1, ({"lr": lr},), engine.scratch())


def test_a_step_is_met_by_a_decision_with_what_the_first_worker_expects() -> None:
    _, engine = made()
    decision = commit_of(engine, HYPER)
    assert not engine.expected.is_met_by(decision), "nothing is expected yet"
    frame = prepare(engine, 1)
    assert engine.expected.is_met_by(decision)
    assert not engine.expected.is_met_by(commit_of(engine, ({"lr": 0.25},)))
    assert not engine.expected.is_met_by(replace(decision, clip_factor=0.5))
    with pytest.raises(InvalidRequest, match="workers expect different hyperparameters for step 1"):
        prepare(engine, 1, lr=0.25)
    apply(engine, decision)
    assert prepare(engine, 1) == frame == engine.slices[0].wire.frames[1]
    with pytest.raises(StepAborted, match="step 1 did not commit as expected"):
        prepare(engine, 1, lr=0.25)
    assert prepare(engine, 2) is None, "nothing was pushed yet"


def test_nothing_is_expected_after_the_sums_were_dropped() -> None:
    servers, engine = made()
    prepare(engine, 1)
    engine.set_replicas(1)
    assert prepare(engine, 1) is None
    servers.push(0, 0, np.ones(100, np.float32))
    assert prepare(engine, 1, lr=0.25) is not None


def test_a_frozen_unit_is_not_changed_by_a_step() -> None:
    _, engine = made()
    with pytest.raises(Misuse, match="unit 1 is frozen or there is no optimizer yet"):
        prepare(engine, 1, unit=1)
