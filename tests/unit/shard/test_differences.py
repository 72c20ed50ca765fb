"""Parameters that travel as differences: what servers send, against numpy, through everything that can happen.

Tests of `shard/core/differences.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from axon_ps.compress import Int4
from axon_ps.errors import InvalidRequest, StepAborted
from axon_ps.kernels.digest import digest
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Asynchronous, BoundedStaleness, LocalSteps, Policy
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, CopyFrom, Hyper, Outcome
from axon_ps.wire.frames import decode_chunk
from engine_driver import Servers, commit_of, job_of, layout_of, one_group

LAYOUT = layout_of((300, 41), (50,), (90,), frozen=(2,))
C = Int4()
HYPER: tuple[Hyper, ...] = ({"lr": 0.1},)


def normals(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def job(policy: Policy | None = None) -> JobSpec:
    spec = JobSpec(
        layout=LAYOUT,
        precision=WirePrecision(param_compression=C),
        options=PlanOptions(chunk_numel=64, min_slice_numel=8),
    )
    return spec if policy is None else dataclasses.replace(spec, policy=policy)


def servers() -> Servers:
    made = Servers(job(), 2, optimizer=one_group(LAYOUT, lr=0.1))
    made.upload([normals(u.numel, i) for i, u in enumerate(LAYOUT.units)])
    return made


def grads(step: int) -> list[Array | None]:
    return [normals(341, 10 * step), normals(50, 10 * step + 1), None]


class Worker:
    """What a worker does, in numpy: adds differences to what it has.

    Attributes:
        units: f32[unit_numel] each.
        kinds: of what came last, by unit: "full", "same" or "difference".
    """

    def __init__(self) -> None:
        self.units = [np.zeros(u.numel, np.float32) for u in LAYOUT.units]
        self.kinds = [""] * len(self.units)
        self._versions: list[dict[int, int]] = [{} for _ in self.units]

    def gather(self, made: Servers, unit: int) -> Array:
        kinds = set()
        for s in made.plan.slices[unit]:
            engine = made.engines[s.server]
            since = self._versions[unit].get(s.begin)
            frames = engine.parameters.since(unit, s.begin, s.end, since)
            if not frames:
                owned = engine.slices.of(unit, s.begin)
                frames = tuple(engine.parameters.full(owned, i) for i in range(len(owned.chunks.bounds)))
            for frame in frames:
                kinds.add(self._take(frame, unit, since))
            self._versions[unit][s.begin] = decode_chunk(frames[-1])[0].version
        (self.kinds[unit],) = kinds
        return self.units[unit]

    def _take(self, frame: bytes, unit: int, since: int | None) -> str:
        header, payload = decode_chunk(frame)
        values = self.units[unit][header.offset : header.offset + header.numel]
        if header.compressed:
            assert header.base == since
            assert payload.nbytes == C.compressed_bytes(header.numel)
            difference = np.empty(header.numel, np.float32)
            C.decompress(np.frombuffer(payload, np.uint8), difference)
            values += difference
        elif not header.absent:
            values[:] = np.frombuffer(payload, np.float32)
        assert header.digest == digest(values.view(np.uint32), 0, values.size)
        return "difference" if header.compressed else "same" if header.absent else "full"


def sent(made: Servers, unit: int) -> Array:
    arrays = []
    for s in made.plan.slices[unit]:
        wire = made.slice_of(s).wire
        assert wire.sent is not None
        arrays.append(wire.sent.values)
    return np.concatenate(arrays)


def master(made: Servers, unit: int) -> Array:
    return np.concatenate([made.slice_of(s).master.values for s in made.plan.slices[unit]])


def error_of(difference: Array) -> float:
    """Twice the error of a block in the root mean square, for the largest difference there is."""
    return 2 * float(np.abs(difference).max()) * np.sqrt(32) / 15


def test_workers_have_the_bits_that_the_server_remembers_and_stay_close_to_the_master() -> None:
    made, worker = servers(), Worker()
    for unit in range(3):
        assert np.array_equal(worker.gather(made, unit), master(made, unit)), "first values travel exactly"
        assert worker.kinds[unit] == "full"
    for step in range(12):
        before = [master(made, unit) for unit in (0, 1)]
        made.train_step([grads(step)])
        for unit in (0, 1):
            assert worker.gather(made, unit).tobytes() == sent(made, unit).tobytes()
            assert worker.kinds[unit] == "difference"
            lost = np.abs(worker.units[unit] - master(made, unit)).max()
            assert lost < error_of(master(made, unit) - before[unit]), f"step {step}: no error adds up"
        worker.gather(made, 2)
        assert worker.kinds[2] == "same", "frozen"
    assert made.engines[0].statistics()["residual_bytes"] == 4.0 * sum(
        s.chunks.numel for s in made.engines[0].slices.values() if s.trainable
    )


def test_who_joins_late_has_the_bits_of_the_others() -> None:
    made, early, late = servers(), Worker(), Worker()
    for step in range(5):
        made.train_step([grads(step)])
        for unit in (0, 1):
            early.gather(made, unit)
            if step in (2, 4):  # it misses some, too
                assert late.gather(made, unit).tobytes() == early.units[unit].tobytes()
                assert late.kinds[unit] == "full"
    assert late.gather(made, 0).tobytes() == sent(made, 0).tobytes()
    assert late.kinds[0] == "same"


def test_a_step_without_a_gradient_or_a_commit_changes_nothing() -> None:
    made, worker = servers(), Worker()
    made.train_step([grads(1)])
    worker.gather(made, 0)
    worker.gather(made, 1)
    before = worker.units[0].copy(), worker.units[1].copy()
    made.push(0, 0, normals(341, 77))
    made.end(Outcome.ABORT)
    assert worker.gather(made, 0).tobytes() == before[0].tobytes()
    made.train_step([[grads(2)[0], None, None]])
    assert worker.gather(made, 1).tobytes() == before[1].tobytes()
    assert worker.kinds[:2] == ["same", "same"]
    assert worker.gather(made, 0).tobytes() == sent(made, 0).tobytes()
    made.train_step([grads(3)])
    assert worker.gather(made, 1).tobytes() == sent(made, 1).tobytes()
    assert worker.kinds[:2] == ["difference", "difference"]


def prepared(engine: ShardEngine) -> dict[tuple[int, int], bytes]:
    frames = {}
    for number, owned in engine.slices.items():
        for index in range(len(owned.chunks.bounds) if owned.trainable else 0):
            frame = engine.expected.prepare_chunk(engine.step, owned, index, HYPER, engine.scratch())
            assert frame is not None
            frames[number, index] = frame
    return frames


@pytest.mark.parametrize("outcome", ["as expected", "clipped", "aborted"])
def test_speculative_differences_are_those_of_the_commit(outcome: str) -> None:
    made, plain, worker = servers(), servers(), Worker()
    for each in (made, plain):
        each.train_step([grads(1)])
    worker.gather(made, 0)
    before = sent(made, 0).tobytes()
    for unit in (0, 1):
        made.push(unit, 0, grads(2)[unit])
        plain.push(unit, 0, grads(2)[unit])
    frames = [prepared(engine) for engine in made.engines]
    assert sent(made, 0).tobytes() == before, "nothing moves before the decision"
    if outcome == "aborted":
        made.end(Outcome.ABORT)
        plain.end(Outcome.ABORT)
    else:
        for each in (made, plain):
            each.commit(HYPER, 0.5 if outcome == "clipped" else 1.0)
    for engine, of_engine, other in zip(made.engines, frames, plain.engines, strict=True):
        for number, owned in engine.slices.items():
            assert owned.wire.frames == other.slices[number].wire.frames
            if outcome == "as expected" and owned.trainable:
                assert list(owned.wire.frames) == [of_engine[number, i] for i in range(len(owned.wire.frames))]
    for unit in (0, 1):
        assert sent(made, unit).tobytes() == sent(plain, unit).tobytes()
    assert worker.gather(made, 0).tobytes() == sent(made, 0).tobytes()
    for each in (made, plain):
        each.train_step([grads(3)])
    assert sent(made, 0).tobytes() == sent(plain, 0).tobytes()


def test_a_restore_begins_with_all_values() -> None:
    made, worker = servers(), Worker()
    made.train_step([grads(1)])
    worker.gather(made, 0)
    for engine in made.engines:
        for owned in engine.slices.values():
            owned.withdraw()
            owned.master.values[:] = normals(owned.chunks.numel, 5)
            owned.publish(9)
    assert worker.gather(made, 0).tobytes() == master(made, 0).tobytes()
    assert worker.kinds[0] == "full"
    for engine in made.engines:
        engine.version = 9
    made.train_step([grads(2)])
    assert worker.gather(made, 0).tobytes() == sent(made, 0).tobytes()
    assert worker.kinds[0] == "difference"


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_values_of_another_model_travel_exactly(weight: float) -> None:
    made, other, worker = servers(), Servers(job_of(LAYOUT), 2), Worker()
    other.upload([normals(u.numel, 7) for u in LAYOUT.units])
    made.train_step([grads(1)])
    for unit in range(3):
        worker.gather(made, unit)
    for engine, theirs in zip(made.engines, other.engines, strict=True):
        decision = dataclasses.replace(commit_of(engine), copy=CopyFrom(source=1, weight=weight))
        for owned in engine.decide(decision):
            source, scratch = theirs.slices[owned.number], engine.scratch()
            assert engine.parameters.since(owned.chunks.unit, owned.chunks.begin, owned.chunks.end, 7) == ()
            for index in range(len(owned.chunks.bounds)):
                owned.change.copy(index, index + 1, source, weight, scratch)
            owned.finish()
    for unit in range(3):
        assert worker.gather(made, unit).tobytes() == master(made, unit).tobytes()
        assert worker.kinds[unit] == "full"
    made.train_step([grads(2)])
    for unit in (0, 1):
        assert worker.gather(made, unit).tobytes() == sent(made, unit).tobytes()
        assert worker.kinds[unit] == "difference"


def test_what_a_replaced_unit_was_expected_to_become_is_gone() -> None:
    made = servers()
    made.train_step([grads(1)], HYPER)
    engine, owned = made.engines[0], made.engines[0].slices[0]
    assert engine.expected.prepare_chunk(1, owned, 0, HYPER, engine.scratch()) == owned.wire.frames[0]
    owned.publish(1)
    with pytest.raises(StepAborted, match="was replaced after step 1"):
        engine.expected.prepare_chunk(1, owned, 0, HYPER, engine.scratch())


def test_a_number_that_is_none_reaches_the_workers() -> None:
    made, worker = servers(), Worker()
    worker.gather(made, 0)
    bad = normals(341, 1)
    bad[3] = np.nan
    made.train_step([[bad, normals(50), None]])
    assert np.isnan(worker.gather(made, 0)[:32]).all()
    assert np.isfinite(worker.units[0][32:]).all()


def test_only_ranges_of_chunks_are_sent_and_only_differences_that_were_asked_for() -> None:
    made = servers()
    made.train_step([grads(1)])
    engine, owned = made.engines[0], made.engines[0].slices[0]
    assert len(engine.parameters.since(0, 0, 64, 0)) == 1
    assert engine.parameters.since(0, 0, 64, None) == engine.parameters.since(0, 0, 64, 7) == ()
    with pytest.raises(InvalidRequest):
        engine.parameters.since(0, 1, 64, 0)
    decision = commit_of(engine, HYPER)
    for unit in (0, 1):
        made.push(unit, 0, grads(2)[unit])
    engine.decide(decision)
    assert owned.applying
    assert len(engine.parameters.since(0, 0, 64, 0)) == 1, "the frames of before are served while a step is applied"
    assert engine.parameters.since(0, 0, 64, 1) == (), "nor is anything said of values that are changing"


@pytest.mark.parametrize("when", ["before a step", "before a speculation", "after it", "before a full gather"])
def test_memory_that_fails_is_found_before_it_is_used(when: str) -> None:
    made, worker, late = servers(), Worker(), Worker()
    made.train_step([grads(1)])
    worker.gather(made, 0)
    owned = made.engines[0].slices[0]
    assert owned.wire.sent is not None

    def flip() -> None:
        assert owned.wire.sent is not None
        owned.wire.sent.values.view(np.uint32)[70] ^= 1 << 30

    if when in ("before a step", "before a full gather"):
        flip()
    if when == "before a full gather":
        late.gather(made, 0)
        assert np.abs(late.units[0] - master(made, 0)).max() < 1
    for unit in (0, 1):
        made.push(unit, 0, grads(2)[unit])
    if "it" in when or "speculation" in when:
        if when == "before a speculation":
            flip()
        prepared(made.engines[0])
        if when == "after it":
            flip()
    made.commit(HYPER)
    frames = owned.wire.frames
    bases = [decode_chunk(frame)[0].HasField("base") for frame in frames]
    assert bases == [True, when == "before a full gather", *[True] * (len(bases) - 2)]
    if when != "before a full gather":  # else that worker's digest does not fit, and it gathers in full
        for s in made.plan.slices[0]:
            for frame in made.engines[s.server].parameters.since(0, s.begin, s.end, 1):
                worker._take(frame, 0, 1)
        assert worker.units[0].tobytes() == sent(made, 0).tobytes()
    assert np.abs(sent(made, 0) - master(made, 0)).max() < 1


@pytest.mark.parametrize("flipped", [False, True])
def test_another_holder_goes_on_from_what_it_was_given_if_it_has_kept_it(flipped: bool) -> None:
    made, other = servers(), servers()
    made.train_step([grads(1)])
    theirs, mine = made.engines[0].slices[0], other.engines[0].slices[0]
    mine.master.values[:] = theirs.master.values
    mine.wire.feedback["sent"][:] = theirs.wire.feedback["sent"]
    mine.copied_from_primary(1, 1, 0, theirs.wire.frames, mine.digests_of_copy(mine.master.arrays()))
    if flipped:
        mine.wire.feedback["sent"].view(np.uint32)[70] ^= 1 << 30
    assert mine.wire.frames_since(0, 0, 9) == theirs.wire.frames_since(0, 0, 9) != ()
    for each, owned in ((made, theirs), (other, mine)):
        assert owned.wire.sent is not None
        values, scratch = owned.master.values[64:128], each.engines[0].scratch()
        header, _ = decode_chunk(owned.wire.sent.frame(1, 2, values + np.float32(0.1), scratch))
        assert header.HasField("base") == (each is made or not flipped)
        assert len(owned.wire.sent.corruptions) == (each is other and flipped)


@pytest.mark.parametrize("policy", [Asynchronous(), BoundedStaleness(max_staleness=2)])
def test_where_replicas_step_asynchronously_there_are_no_differences(policy: Policy) -> None:
    with pytest.raises(InvalidRequest, match=r"others commit any number of versions .* use int8 or a dtype"):
        job(policy)
    assert job(LocalSteps(inner_steps=4)).precision.differs


def test_two_thread_orders_of_an_update_give_the_same_bits() -> None:
    made, other = servers(), servers()
    for each in (made, other):
        for unit in (0, 1):
            each.push(unit, 0, grads(1)[unit])
    made.commit(HYPER)
    for engine in other.engines:
        scratch = engine.scratch()
        for owned in engine.decide(commit_of(engine, HYPER)):
            for index in reversed(range(len(owned.chunks.bounds))):
                owned.change.apply(index, index + 1, scratch)
            owned.finish()
    for mine, theirs in zip(made.engines, other.engines, strict=True):
        assert all(s.wire.frames == theirs.slices[n].wire.frames for n, s in mine.slices.items())
