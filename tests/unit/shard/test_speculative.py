"""Speculative updates: frames of an undecided step equal those it commits, and are discarded if it ends otherwise.

Tests of `shard/core/speculative.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.types import Array, DType, Hyper, Outcome
from axon_ps.wire.frames import decode_chunk
from engine_driver import Servers, apply, commit_of, job_of, layout_of, one_group

N, FROZEN = 300, 100
LAYOUT = layout_of([N - 20, 20], [FROZEN], frozen=[1])
ADAMW: Hyper = {"lr": 0.1, "weight_decay": 0.01}


def servers(param: DType = DType.BF16, replicas: int = 2) -> Servers:
    made = Servers(job_of(LAYOUT, param=param), replicas=replicas, optimizer=one_group(LAYOUT, "adamw", **ADAMW))
    rng = np.random.default_rng(1)
    made.upload([rng.random(u.numel, np.float32) for u in LAYOUT.units])
    return made


def grad(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def prepare(engine: ShardEngine, hyper: Hyper = ADAMW, step: int | None = None) -> tuple[bytes | None, ...]:
    step = engine.step if step is None else step
    scratch = engine.scratch()
    owned = engine.slices[0]
    return tuple(
        engine.expected.prepare_chunk(step, owned, i, (hyper,), scratch) for i in range(len(owned.chunks.bounds))
    )


def frame_bytes(engine: ShardEngine) -> float:
    return engine.statistics()["frame_bytes"]


@pytest.mark.parametrize("param", [DType.F32, DType.BF16, DType.F16])
def test_prepared_frames_are_those_the_commit_makes(param: DType) -> None:
    speculative, plain = servers(param), servers(param)
    for step in range(3):
        for made in (speculative, plain):
            made.push(0, 0, grad(step))
            made.push(0, 1, grad(10 + step))
        (engine,) = speculative.engines
        prepared = prepare(engine)
        assert None not in prepared
        made_once = engine.statistics()["encodings"]
        assert prepare(engine) == prepared
        assert engine.statistics()["encodings"] == made_once
        for made in (speculative, plain):
            made.commit([ADAMW])
        assert engine.parameters.frames(0, 0, N) == prepared == plain.engines[0].parameters.frames(0, 0, N)
        np.testing.assert_array_equal(engine.slices[0].master.values, plain.engines[0].slices[0].master.values)
        assert {decode_chunk(f)[0].version for f in prepared if f} == {step + 1}
        assert prepare(engine, step=engine.step - 1) == prepared  # who asks late gets the same


def test_a_chunk_is_prepared_when_every_replica_is_in() -> None:
    made = servers()
    (engine,) = made.engines
    made.push(0, 0, grad(0))
    assert set(prepare(engine)) == {None}
    made.push(0, 1, grad(1))
    assert None not in prepare(engine)
    assert set(prepare(engine, step=engine.step + 1)) == {None}


@pytest.mark.parametrize("how", ["skip", "abort", "clip", "hyper", "generation"])
def test_a_step_that_ends_otherwise_leaves_no_trace(how: str) -> None:
    made, plain = servers(), servers()
    (engine,) = made.engines
    for m in (made, plain):  # Adam's first step would not show a clip factor
        m.train_step([[grad(5), None], [grad(6), None]], [ADAMW])
    before = engine.parameters.frames(0, 0, N)
    for m in (made, plain):
        m.push(0, 0, grad(0))
        m.push(0, 1, grad(1))
    prepared, step = prepare(engine), engine.step
    hyper, clip_factor = ({"lr": 0.2}, 1.0) if how == "hyper" else (ADAMW, 0.5)
    if how in ("skip", "abort"):
        made.end(Outcome[how.upper()])
    elif how == "generation":
        engine.membership(2, step + 1, 1, 2)
    else:
        for m in (made, plain):
            m.commit([hyper], clip_factor)
        assert engine.parameters.frames(0, 0, N) == plain.engines[0].parameters.frames(0, 0, N) != prepared
    if how in ("skip", "abort", "generation"):
        assert engine.parameters.frames(0, 0, N) == before  # encoded again
    with pytest.raises(StepAborted, match="did not commit as expected"):
        prepare(engine, step=step)


def test_there_is_one_wire_copy_all_the_same() -> None:
    made = servers()
    (engine,) = made.engines
    usual = frame_bytes(engine)
    made.push(0, 0, grad(0))
    made.push(0, 1, grad(1))
    prepare(engine)
    assert frame_bytes(engine) == pytest.approx(usual, rel=0.02)  # headers name another version
    assert engine.parameters.available(0, 0, 0)
    assert engine.parameters.frames(0, 0, N)  # a joiner wants the version that counts: encoded for it


def test_what_cannot_be_prepared_says_so() -> None:
    made = servers(replicas=1)
    (engine,) = made.engines
    made.push(0, 0, None)
    with pytest.raises(StepAborted, match="no replica has a gradient"):
        prepare(engine)
    made.end(Outcome.ABORT)
    made.push(0, 0, grad(0))
    with pytest.raises(InvalidRequest, match="lr"):
        prepare(engine, {"lr": -1.0})
    prepare(engine)
    with pytest.raises(InvalidRequest, match="expect different"):
        prepare(engine, {"lr": 0.2})
    with pytest.raises(Misuse, match="frozen"):
        engine.expected.prepare_chunk(engine.step, engine.slices[1], 0, (ADAMW,), engine.scratch())
    made = servers(replicas=1)
    (engine,) = made.engines
    made.push(0, 0, grad(0))
    with pytest.raises(InvalidRequest, match="2 groups"):
        engine.expected.prepare_chunk(engine.step, engine.slices[0], 0, (ADAMW, ADAMW), engine.scratch())


def test_what_was_prepared_of_a_slice_is_discarded_if_one_of_its_parameters_is_left_alone() -> None:
    speculative, plain = servers(), servers()
    for made in (speculative, plain):
        for replica in (0, 1):
            made.push(0, replica, grad(replica))
    (engine,) = speculative.engines
    prepared = prepare(engine)
    for made in (speculative, plain):
        (each,) = made.engines
        apply(each, dataclasses.replace(commit_of(each, [ADAMW]), untouched=(1,)))
    assert engine.parameters.frames(0, 0, N) != prepared
    assert engine.parameters.frames(0, 0, N) == plain.engines[0].parameters.frames(0, 0, N)
    with pytest.raises(StepAborted, match="did not commit as expected"):
        prepare(engine, step=engine.step - 1)
