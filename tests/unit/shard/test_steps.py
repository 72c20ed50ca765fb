"""The life of a step in the engine: duplicates, resuming, generations, decisions, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from axon_ps.errors import InternalError, InvalidRequest, Misuse, SliceMoved, StepAborted
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.gradients import Push
from axon_ps.types import Array, Decision, DType, OptimizerSpec, Outcome
from engine_driver import Servers, apply, commit_of, job_of, layout_of, one_group

LAYOUT = layout_of([100], [40], [30], frozen=[2])
SPEC = job_of(LAYOUT, chunk_numel=32)
ONES = [np.ones(u.numel, np.float32) for u in LAYOUT.units]


def servers(replicas: int = 1, num_servers: int = 1) -> Servers:
    made = Servers(SPEC, num_servers, replicas=replicas)
    made.upload(ONES)
    return made


def push(engine: ShardEngine, offset: int = 0, *, unit: int = 0, replica: int = 0, step: int = 1) -> Push:
    numel = min(32, LAYOUT.units[unit].numel - offset)
    return engine.gradients.push(step, unit, offset, replica, DType.F32, np.ones(numel, np.float32))


def push_all(engine: ShardEngine, replicas: int = 1, step: int = 1) -> None:
    for unit in (0, 1):
        for replica in range(replicas):
            for offset, _ in engine.slices[unit].chunks.bounds:
                assert push(engine, offset, unit=unit, replica=replica, step=step) is Push.SUMMED


# ---------------------------------------------------------------------- chunks


def test_a_chunk_that_came_before_is_a_duplicate() -> None:
    (engine,) = servers(2).engines
    assert push(engine) is Push.SUMMED
    assert push(engine) is Push.DUPLICATE
    assert push(engine, replica=1) is Push.SUMMED
    assert push(engine, replica=0) is Push.DUPLICATE
    assert engine.statistics()["duplicates"] == 2


def test_a_replica_waits_for_the_one_before_it() -> None:
    (engine,) = servers(3).engines
    assert push(engine, replica=1) is Push.WAIT
    assert push(engine, replica=0) is Push.SUMMED
    assert push(engine, replica=2) is Push.WAIT
    assert push(engine, replica=1) is Push.SUMMED
    assert push(engine, replica=2) is Push.SUMMED
    assert engine.statistics()["waits"] == 2


def test_resume_names_the_first_missing_chunk() -> None:
    (engine,) = servers(2).engines
    for offset in (0, 32):
        assert push(engine, offset) is Push.SUMMED
    assert engine.gradients.resume_offset(1, 0, 0, 0) == 64
    assert engine.gradients.resume_offset(1, 0, 64, 0) == 64
    assert engine.gradients.resume_offset(1, 0, 0, 1) == 0
    for offset in (64, 96):
        assert push(engine, offset) is Push.SUMMED
    assert engine.gradients.resume_offset(1, 0, 0, 0) == 100  # the slice's end: nothing is missing
    with pytest.raises(InvalidRequest, match="no chunk of unit 0 begins at element 5"):
        engine.gradients.resume_offset(1, 0, 5, 0)


def test_ready_comes_with_the_last_chunk_and_not_before() -> None:
    (engine,) = servers(2).engines
    for unit, offsets in ((0, (0, 32, 64, 96)), (1, (0, 32))):
        for replica in (0, 1):
            for offset in offsets:
                assert engine.gradients.ready() is None
                push(engine, offset, unit=unit, replica=replica)
    assert engine.gradients.ready() == (4.0 * 100, 4.0 * 40)


def test_a_server_without_trainable_slices_is_never_ready() -> None:
    made = Servers(job_of(layout_of([10], frozen=[0])), 1)
    made.upload([np.zeros(10, np.float32)])
    assert made.engines[0].gradients.ready() is None


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unit": 7}, "there is no unit 7; the layout has 3"),
        ({"replica": 2}, "there is no replica 2; generation 1 has 2"),
        ({"offset": 7}, "no chunk of unit 0 begins at element 7"),
        ({"offset": 128}, "no chunk of unit 0 begins at element 128"),
        ({"offset": 1 << 62}, "no chunk of unit 0 begins at element"),
        ({"dtype": DType.BF16}, "travels as bf16; the job's is f32"),
        ({"grad": np.ones(31, np.float32)}, "has 31 elements; it must have 32"),
        ({"grad": np.ones(33, np.float32)}, "has 33 elements; it must have 32"),
    ],
)
def test_a_wrong_chunk_is_refused_and_changes_nothing(change: dict[str, object], words: str) -> None:
    (engine,) = servers(2).engines
    values: dict[str, object] = {
        "step": 1, "unit": 0, "offset": 0, "replica": 0, "dtype": DType.F32, "grad": np.ones(32, np.float32),
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=words):
        engine.gradients.push(**{**values, **change})  # type: ignore[arg-type]
    assert engine.slices[0].accumulators[0].summed == [0, 0, 0, 0]
    assert engine.gradients.push(**values) is Push.SUMMED  # type: ignore[arg-type]


def test_a_frozen_unit_takes_no_gradients() -> None:
    (engine,) = servers().engines
    with pytest.raises(Misuse, match="unit 2 is frozen"):
        push(engine, unit=2)


def test_nothing_works_before_the_layout() -> None:
    engine = ShardEngine()
    for call in (
        lambda: push(engine),
        lambda: engine.parameters.upload(0, 0, ONES[0], engine.version),
        lambda: engine.parameters.frames(0, 0, 100),
        lambda: engine.parameters.available(0, 0, 0),
        lambda: engine.gradients.resume_offset(0, 0, 0, 0),
    ):
        with pytest.raises(Misuse, match="no layout yet"):
            call()
    with pytest.raises(Misuse, match="before the layout"):
        engine.optimizer.set(one_group(LAYOUT))
    assert not engine.configured
    assert not engine.parameters.initialized


def test_what_another_server_owns_is_refused() -> None:
    made = Servers(job_of(layout_of([10], [10]), min_slice_numel=100), 2)
    with pytest.raises(SliceMoved, match="does not hold the slice of unit 1 with element 0"):
        made.engines[0].parameters.available(1, 0, 0)
    with pytest.raises(InvalidRequest, match="there is no unit 2; the layout has 2"):
        made.engines[0].parameters.available(2, 0, 0)


def test_a_second_spec_or_optimizer_is_refused() -> None:
    (engine,) = servers().engines
    engine.configure(SPEC, 0, 1)
    engine.optimizer.set(one_group(LAYOUT, lr=0.1))
    with pytest.raises(Misuse, match="configured for another job spec: chunk_numel"):
        engine.configure(job_of(LAYOUT, chunk_numel=16), 0, 1)
    with pytest.raises(Misuse, match="one optimizer"):
        engine.optimizer.set(one_group(LAYOUT, "adam"))


def test_groups_must_cover_the_layout() -> None:
    engine = ShardEngine()
    engine.configure(SPEC, 0, 1)
    with pytest.raises(InvalidRequest, match="groups of 2 parameters; the layout has 3"):
        engine.optimizer.set(OptimizerSpec(name="sgd", groups=({},), group_of=(0, 0)))


# ---------------------------------------------------------------------- first values


def test_first_values_may_come_in_any_order_and_twice() -> None:
    engine = ShardEngine()
    engine.configure(SPEC, 0, 1)
    values = np.arange(100, dtype=np.float32)
    for offset in (64, 0, 64, 96):
        assert not engine.parameters.upload(0, offset, values[offset : offset + 32], engine.version)
        assert not engine.parameters.available(0, 0, 0)
    assert not engine.parameters.upload(0, 32, values[32:64], engine.version)
    assert engine.parameters.available(0, 0, 0)
    assert not engine.parameters.upload(2, 0, np.zeros(30, np.float32), engine.version)
    assert not engine.parameters.upload(1, 32, np.zeros(8, np.float32), engine.version)
    assert engine.parameters.upload(1, 0, np.zeros(32, np.float32), engine.version)
    assert engine.parameters.initialized
    assert engine.parameters.upload(0, 0, np.zeros(32, np.float32), engine.version)  # a retry: acknowledged, not stored
    assert engine.slices[0].master.values.tobytes() == values.tobytes()


def test_first_values_after_a_step_are_refused() -> None:
    made = servers()
    made.train_step([ONES])
    with pytest.raises(Misuse, match="restore a checkpoint"):
        made.engines[0].parameters.upload(0, 0, np.zeros(32, np.float32), made.version)


def test_first_values_of_a_wrong_length_are_refused() -> None:
    engine = ShardEngine()
    engine.configure(SPEC, 0, 1)
    with pytest.raises(InvalidRequest, match="have 33 elements; they must have 32"):
        engine.parameters.upload(0, 0, np.zeros(33, np.float32), engine.version)


# ---------------------------------------------------------------------- decisions


def test_a_commit_moves_version_and_step() -> None:
    made = servers()
    made.train_step([ONES])
    assert (made.version, made.step) == (1, 2)
    assert np.allclose(made.values(0), 0.9)
    assert np.allclose(made.values(2), 1.0)


def test_a_unit_is_served_as_soon_as_its_own_apply_is_done() -> None:
    (engine,) = servers().engines
    push_all(engine)
    assert engine.decide(commit_of(engine)) == [engine.slices[0], engine.slices[1]]
    assert not engine.parameters.available(0, 0, 1)
    assert engine.parameters.available(0, 0, 0)  # the old frames are still there for those who want no later version
    for index in range(4):
        engine.slices[0].change.apply(index, index + 1, engine.scratch())
    engine.slices[0].finish()
    assert engine.parameters.available(0, 0, 1)
    assert not engine.parameters.available(1, 0, 1)
    assert engine.parameters.available(2, 0, 1)  # frozen: at every version


def test_who_reads_frames_reads_one_version() -> None:
    made = servers()
    (engine,) = made.engines
    before = engine.parameters.frames(0, 0, 100)
    copy = tuple(bytes(f) for f in before)
    made.train_step([ONES])
    assert before == copy
    assert engine.parameters.frames(0, 0, 100) != before


def test_pushes_of_the_next_step_wait_for_the_decision_and_for_the_units_apply() -> None:
    (engine,) = servers().engines
    push_all(engine)
    assert push(engine, step=2) is Push.WAIT
    engine.decide(commit_of(engine))
    assert push(engine, step=2) is Push.WAIT
    for index in range(4):
        engine.slices[0].change.apply(index, index + 1, engine.scratch())
    engine.slices[0].finish()
    assert push(engine, step=2) is Push.SUMMED
    assert push(engine, unit=1, step=2) is Push.WAIT


def test_pushes_of_a_committed_step_are_duplicates() -> None:
    made = servers()
    made.train_step([ONES])
    assert push(made.engines[0], step=1) is Push.DUPLICATE


@pytest.mark.parametrize(("outcome", "late"), [(Outcome.SKIP, Push.DUPLICATE), (Outcome.ABORT, None)])
def test_a_dropped_step_leaves_everything_as_it_was(outcome: Outcome, late: Push | None) -> None:
    made = servers()
    (engine,) = made.engines
    push_all(engine)
    made.end(outcome)
    assert (made.version, made.step) == (0, 2)
    if late is None:
        with pytest.raises(StepAborted, match="step 1 is over and did not commit"):
            push(engine, step=1)
    else:
        assert push(engine, step=1) is late
    assert engine.gradients.ready() is None
    made.train_step([ONES])
    assert np.allclose(made.values(0), 0.9)


def test_a_decision_is_taken_once() -> None:
    made = servers()
    (engine,) = made.engines
    push_all(engine)
    decision = commit_of(engine)
    apply(engine, decision)
    push_all(engine, step=2)
    assert engine.decide(decision) == []
    assert (engine.version, engine.step) == (1, 2)
    assert engine.gradients.ready() is not None


def test_a_commit_without_all_gradients_is_a_bug() -> None:
    (engine,) = servers().engines
    push(engine)
    with pytest.raises(InternalError, match="with 5 chunks missing"):
        engine.decide(commit_of(engine))


def test_a_commit_without_an_optimizer_is_a_bug() -> None:
    engine = ShardEngine()
    engine.configure(SPEC, 0, 1)
    engine.membership(1, 1, 0, 1)
    push_all(engine)
    with pytest.raises(InternalError, match="no optimizer"):
        engine.decide(commit_of(engine))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_shows_in_ready(poison: float) -> None:
    made = servers(2)
    (engine,) = made.engines
    bad = np.ones(100, np.float32)
    bad[77] = poison
    made.push(0, 0, ONES[0])
    made.push(0, 1, bad)
    made.push(1, 0, ONES[1])
    made.push(1, 1, ONES[1])
    total, other = engine.gradients.ready() or ()
    assert not math.isfinite(total)
    assert other == 4.0 * 40


def test_opposite_infinities_are_not_finite() -> None:
    made = servers(2)
    for replica, value in ((0, np.inf), (1, -np.inf)):
        made.push(0, replica, np.full(100, value, np.float32))
        made.push(1, replica, np.full(40, value, np.float32))
    sums = made.engines[0].gradients.ready()
    assert sums is not None
    assert len(sums) == 2
    assert all(map(math.isnan, sums))


# ---------------------------------------------------------------------- membership


def test_a_new_generation_drops_what_was_summed() -> None:
    made = servers(2)
    (engine,) = made.engines
    push(engine)
    push(engine, 32)
    engine.membership(2, 2, 0, 1)
    assert engine.slices[0].accumulators[0].summed == [0, 0, 0, 0]
    assert push(engine, step=2) is Push.SUMMED
    with pytest.raises(StepAborted):
        push(engine, step=1)
    push_rest(engine)
    assert engine.gradients.ready() == (100.0, 40.0)  # of the new generation's only replica


def push_rest(engine: ShardEngine) -> None:
    for unit in (0, 1):
        for offset, _ in engine.slices[unit].chunks.bounds:
            push(engine, offset, unit=unit, step=engine.step)


def test_the_same_generation_again_changes_nothing() -> None:
    (engine,) = servers().engines
    push(engine)
    engine.membership(1, 1, 0, 1)
    assert engine.slices[0].accumulators[0].summed == [1, 0, 0, 0]


def test_a_generation_that_begins_while_units_are_applied_lets_them_finish() -> None:
    made = servers()
    (engine,) = made.engines
    push_all(engine)
    slices = engine.decide(commit_of(engine))
    engine.membership(2, 3, 1, 1)
    assert push(engine, step=3) is Push.WAIT
    for owned in slices:
        for index in range(len(owned.chunks.bounds)):
            owned.change.apply(index, index + 1, engine.scratch())
        owned.finish()
    assert push(engine, step=3) is Push.SUMMED
    assert np.allclose(made.values(0), 0.9)


def test_a_missed_commit_is_noticed() -> None:
    (engine,) = servers().engines
    with pytest.raises(InternalError, match="missed a commit"):
        engine.membership(2, 5, 3, 1)


def test_a_server_without_values_may_be_behind() -> None:
    engine = ShardEngine()
    engine.configure(SPEC, 0, 1)
    engine.membership(2, 5, 3, 1)
    assert engine.step == 5


# ---------------------------------------------------------------------- absence


def test_an_absent_replica_passes_its_turn() -> None:
    made = servers(3)
    grads: list[Array | None] = [None, ONES[0], None]
    for replica, grad in enumerate(grads):
        made.push(0, replica, grad)
    for replica in range(3):
        made.push(1, replica, ONES[1])
    assert made.engines[0].gradients.ready() == (100.0, 9.0 * 40)
    made.commit()
    assert np.allclose(made.values(0), 0.9)


def test_a_unit_that_is_absent_everywhere_is_not_touched_and_says_its_old_version() -> None:
    made = Servers(SPEC, 2, replicas=2, optimizer=one_group(LAYOUT, "adamw", lr=0.1, weight_decay=0.5))
    made.upload(ONES)
    for replica in (0, 1):
        made.push(0, replica, None)
        made.push(1, replica, ONES[1])
    made.commit()
    for engine in made.engines:
        for owned in engine.slices.values():
            unit = owned.chunks.unit
            assert owned.reached == 1 or unit == 2
            assert owned.changed == (1 if unit == 1 else 0)
            assert engine.parameters.available(unit, owned.chunks.begin, 1)
            if unit == 0:
                assert owned.master.updates == 0
                assert not any(s.any() for s in owned.master.state.values())
    assert np.array_equal(made.values(0), ONES[0])
    assert not np.array_equal(made.values(1), ONES[1])


def test_absence_in_one_range_only_counts_as_zero() -> None:
    (engine,) = servers().engines
    for offset, grad in ((0, np.ones(32, np.float32)), (32, None), (64, np.ones(32, np.float32)), (96, None)):
        engine.gradients.push(1, 0, offset, 0, DType.F32, grad)
    for offset, _ in engine.slices[1].chunks.bounds:
        engine.gradients.push(1, 1, offset, 0, DType.F32, None)
    apply(engine, commit_of(engine))
    got = engine.slices[0].master.values
    assert np.allclose(got[:32], 0.9)
    assert np.array_equal(got[32:64], np.ones(32, np.float32))


# ---------------------------------------------------------------------- frames


def test_frames_of_a_range() -> None:
    (engine,) = servers().engines
    whole = engine.parameters.frames(0, 0, 100)
    assert len(whole) == 4
    assert engine.parameters.frames(0, 32, 100) == whole[1:]
    assert engine.parameters.frames(0, 32, 64) == whole[1:2]
    assert engine.parameters.frames(0, 0, 100) is whole  # served to everybody, encoded once
    for begin, end in ((1, 100), (0, 99), (0, 200), (64, 32), (0, 0)):
        with pytest.raises(InvalidRequest):
            engine.parameters.frames(0, begin, end)


def test_a_skip_is_not_a_commit() -> None:
    (engine,) = servers().engines
    push_all(engine)
    engine.decide(Decision(step=1, generation=1, outcome=Outcome.SKIP, version=0, grad_norm=math.inf))
    values = engine.statistics()
    assert values["steps_skipped"] == 1
    assert values["steps_committed"] == 0
    assert values["version"] == 0
