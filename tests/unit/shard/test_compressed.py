"""Compressed parameters and gradients on the shard servers: sums, frames, residuals, refusals, exact sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from axon_ps.compress import Compressor, Float8, Int4, Int8, TopK
from axon_ps.coordinator.core.records import (
    ParameterState,
    job_record,
    load,
    members_record,
    parameters_record,
    progress_record,
    spec_record,
)
from axon_ps.errors import InvalidRequest
from axon_ps.shard.core.gradients import Push
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType, Membership, ModelProgress, Outcome
from axon_ps.wire.codec import job_spec_from_proto, job_spec_to_proto
from axon_ps.wire.frames import decode_chunk, payload_array
from axon_ps.wire.v1 import common_pb2
from engine_driver import Servers, apply, commit_of, layout_of, one_group

LAYOUT = layout_of((300, 41), (50,), (90,), frozen=(2,))
PARAMS = Int8(16)


def normals(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def job(param: Int8 | None = PARAMS, grad: Compressor | None = None) -> JobSpec:
    return JobSpec(
        layout=LAYOUT,
        precision=WirePrecision(param_compression=param, grad_compression=grad),
        options=PlanOptions(chunk_numel=64, min_slice_numel=8),
    )


def servers(spec: JobSpec, *, replicas: int = 1, lr: float = 0.1) -> Servers:
    made = Servers(spec, 2, replicas=replicas, optimizer=one_group(LAYOUT, lr=lr))
    made.upload([normals(u.numel, i) for i, u in enumerate(LAYOUT.units)])
    return made


def master(made: Servers, unit: int) -> Array:
    return np.concatenate([made.slice_of(s).master.values for s in made.plan.slices[unit]])


def gathered(made: Servers, unit: int) -> Array:
    """What a worker makes of the unit's frames."""
    c = PARAMS
    out = np.empty(LAYOUT.units[unit].numel, np.float32)
    for s in made.plan.slices[unit]:
        for frame in made.engines[s.server].parameters.frames(unit, s.begin, s.end):
            header, payload = decode_chunk(frame)
            assert header.compressed
            data = payload_array(header, payload, s.numel, c.compressed_bytes)
            c.decompress(data, out[header.offset : header.offset + header.numel])
    return out


def push(made: Servers, unit: int, replica: int, grad: Array, c: Compressor) -> Array:
    """Push a gradient without residuals; returns what arrived."""
    arrived = np.empty_like(grad)
    for engine, begin, end in made.chunks(unit):
        data = np.empty(c.compressed_bytes(end - begin), np.uint8)
        c.compress(grad[begin:end], data)
        c.decompress(data, arrived[begin:end])
        assert engine.gradients.push(engine.step, unit, begin, replica, DType.U8, data) is Push.SUMMED
    return arrived


def quantum(values: Array) -> float:
    return float(np.abs(values).max()) / 127


@pytest.mark.parametrize("grad", [Int8(16), Int4(), TopK(0.2)], ids=["int8", "int4", "top_k"])
def test_compressed_gradients_are_summed_in_f32_in_replica_order(grad: Compressor) -> None:
    made, c = servers(job(None, grad), replicas=3), grad
    before = [master(made, unit) for unit in (0, 1)]
    totals = []
    for unit in (0, 1):
        total = np.zeros(LAYOUT.units[unit].numel, np.float32)
        for replica in range(3):
            total += push(made, unit, replica, normals(total.size, 10 + replica), c)
        totals.append(total)
    squares = [x for e in made.engines for x in e.gradients.ready() or ()]
    assert math.isclose(sum(squares), sum(float((t**2).sum()) for t in totals), rel_tol=1e-5)
    made.commit()
    for unit in (0, 1):
        expected = before[unit] - np.float32(0.1) * totals[unit]
        np.testing.assert_allclose(master(made, unit), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("grad", [Int8(16), Int4(), TopK(0.05)], ids=["int8", "int4", "top_k"])
def test_a_nan_reaches_the_vote(grad: Compressor) -> None:
    made, c = servers(job(None, grad)), grad
    bad = normals(341)
    bad[17] = math.nan
    push(made, 0, 0, bad, c)
    push(made, 1, 0, normals(50), c)
    assert any(math.isnan(x) for e in made.engines for x in e.gradients.ready() or ())


def test_frames_are_within_a_quantum_and_right_on_average() -> None:
    made = servers(job(), lr=1e-6)  # steps far below a quantum
    for unit in range(3):
        assert np.abs(gathered(made, unit) - master(made, unit)).max() <= 0.51 * quantum(master(made, unit))
    total, masters = np.zeros(341), np.zeros(341)
    for step in range(64):
        made.train_step([[normals(341, step), normals(50, step), None]])
        seen = gathered(made, 0)
        assert np.abs(seen - master(made, 0)).max() <= 1.01 * quantum(master(made, 0))
        total, masters = total + seen, masters + master(made, 0)
    assert np.abs(total - masters).max() / 64 <= 0.6 * quantum(master(made, 0)) / 32  # 1 / 64 of a residual or two
    assert made.engines[0].statistics()["residual_bytes"] == 4.0 * sum(
        s.chunks.numel for s in made.engines[0].slices.values() if s.trainable
    )


def test_a_step_that_does_not_commit_moves_no_residual() -> None:
    made, other = servers(job()), servers(job())
    for step in range(3):
        grads = [[normals(341, step), normals(50, step), None]]
        made.push(0, 0, normals(341, 77))  # a step that is dropped
        made.end(Outcome.ABORT)
        made.train_step(grads)
        other.train_step(grads)
        for unit in range(3):
            assert gathered(made, unit).tobytes() == gathered(other, unit).tobytes()


@pytest.mark.parametrize("commits", [True, False])
def test_speculative_frames_are_those_of_the_commit(commits: bool) -> None:
    made, other = servers(job()), servers(job())
    made.train_step([[normals(341, 1), normals(50, 1), None]])
    other.train_step([[normals(341, 1), normals(50, 1), None]])
    hyper = (
        tuple(made.engines[0].optimizer.updater.expected(({"lr": 0.1},)).hypers)
        if made.engines[0].optimizer.updater
        else ()
    )
    grads = [normals(341, 2), normals(50, 2)]
    for unit in (0, 1):
        made.push(unit, 0, grads[unit])
    speculative = {}
    for engine in made.engines:
        for number, owned in engine.slices.items():
            for index in range(len(owned.chunks.bounds) if owned.trainable else 0):
                speculative[number, index] = engine.expected.prepare_chunk(
                    engine.step, owned, index, hyper, engine.scratch()
                )
    if commits:
        for engine in made.engines:
            apply(engine, commit_of(engine, hyper))
        for engine in made.engines:
            for number, owned in engine.slices.items():
                if owned.trainable:
                    assert owned.wire.frames
                    assert list(owned.wire.frames) == [speculative[number, i] for i in range(len(owned.wire.frames))]
        other.train_step([[*grads, None]], hyper)
    else:
        made.end(Outcome.ABORT)
    for unit in range(3):
        assert gathered(made, unit).tobytes() == gathered(other, unit).tobytes()


def test_a_restore_starts_without_residuals() -> None:
    made = servers(job())
    made.train_step([[normals(341, 1), normals(50, 1), None]])
    owned = made.engines[0].slices[0]
    values, residual = owned.master.values.copy(), owned.wire.residual
    assert residual is not None
    assert residual.any()
    owned.publish(5)
    first = owned.wire.frames
    owned.publish(5)
    assert owned.wire.frames == first
    assert np.abs(residual).max() <= 0.51 * quantum(values)


def test_sizes_are_the_formula_exactly() -> None:
    made = servers(job(PARAMS, Int8(256)))
    for unit in range(3):
        for s in made.plan.slices[unit]:
            for frame, (begin, end) in zip(
                made.engines[s.server].parameters.frames(unit, s.begin, s.end), s.chunks(64), strict=True
            ):
                _, payload = decode_chunk(frame)
                numel = end - begin
                assert payload.nbytes == numel + 4 * math.ceil(numel / 16)


def test_what_does_not_fit_the_job_is_refused() -> None:
    made = servers(job(None, Int8(16)))
    engine, begin, end = made.chunks(0)[0]
    for dtype, grad in (
        (DType.F32, normals(end - begin)),
        (DType.U8, np.zeros(end - begin, np.uint8)),
        (DType.U8, np.zeros(end - begin + 4096, np.uint8)),
    ):
        with pytest.raises(InvalidRequest):
            engine.gradients.push(engine.step, 0, begin, 0, dtype, grad)
    c = Int8(16)
    header = common_pb2.Chunk(numel=1 << 40, dtype=common_pb2.D_TYPE_F32, compressed=True)
    for numel, size, sizes in ((1 << 40, 100, c.compressed_bytes), (64, 79, c.compressed_bytes), (64, 80, None)):
        header.numel = numel
        with pytest.raises(InvalidRequest):
            payload_array(header, memoryview(bytes(size)), 1 << 22, sizes)
    header.dtype = common_pb2.D_TYPE_BF16
    with pytest.raises(InvalidRequest, match="compressed"):
        payload_array(header, memoryview(bytes(80)), 64, c.compressed_bytes)


@pytest.mark.parametrize("grad", [None, Int8(64), Int4(), TopK(0.25)])
def test_the_spec_travels_and_differs_in_words(grad: Compressor | None) -> None:
    spec = job(PARAMS, grad)
    assert job_spec_from_proto(job_spec_to_proto(spec)) == spec
    assert "compression of parameters is int8 in blocks of 16 here" in spec.difference(job(None, grad))
    assert "compression of gradients" in spec.difference(job(PARAMS, TopK(0.5)))


def test_specs_that_cannot_work_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bf16 was given beside"):
        JobSpec(layout=LAYOUT, precision=WirePrecision(param=DType.BF16, param_compression=Int8()))
    message = job_spec_to_proto(job())
    message.param_compression.Clear()
    message.param_compression.name = "top_k"
    with pytest.raises(InvalidRequest, match="parameters cannot travel as .*, which leaves elements out"):
        job_spec_from_proto(message)
    message.param_compression.name = "int8"
    message.param_compression.options["block_numel"] = 3
    with pytest.raises(InvalidRequest, match="from 16 to 65536"):
        job_spec_from_proto(message)
    message.param_compression.options["block_numel"] = 16.5
    with pytest.raises(InvalidRequest, match="must be an integer"):
        job_spec_from_proto(message)
    message.param_compression.options["blocks"] = 16
    with pytest.raises(InvalidRequest, match="'int8' does not take blocks; its options are block_numel"):
        job_spec_from_proto(message)
    message.param_compression.name = "zip"
    with pytest.raises(InvalidRequest, match="compressor 'zip' is unknown; use one of .*int8, .* --plugins MODULE"):
        job_spec_from_proto(message)
    message.param_compression.Clear()
    with pytest.raises(InvalidRequest, match="a compression's name is empty"):
        job_spec_from_proto(message)


@pytest.mark.parametrize("grad", [None, Int8(64), Int4(), TopK(0.25)])
def test_a_restarted_coordinator_knows_the_compression(grad: Compressor | None) -> None:
    spec = job(PARAMS, grad)
    nobody = Membership(generation=1, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=False)
    records = [
        job_record("id", "test", 1, 1),
        members_record(nobody, was_complete=False, vacant=0, draining=(), needed_shards=1),
        progress_record(ModelProgress(model=0, step=1, version=0)),
        parameters_record(0, ParameterState()),
        spec_record(0, spec),
    ]
    durable = load({r.key: r.value for r in records if r.value is not None})
    assert durable is not None
    assert durable.models[0].spec == spec


def test_float8_frames_have_one_scale_a_tensor_at_every_version() -> None:
    flagged = tuple(
        replace(u, parameters=tuple(replace(p, float8=p.numel > 45) for p in u.parameters)) for u in LAYOUT.units
    )
    spec = JobSpec(
        layout=replace(LAYOUT, units=flagged),
        precision=WirePrecision(param_compression=Float8(rest_bits=32)),
        options=PlanOptions(chunk_numel=64, min_slice_numel=8),
    )
    assert job_spec_from_proto(job_spec_to_proto(spec)) == spec
    assert "parameter 'u0.p0' travels as float8 here" in spec.difference(replace(spec, layout=LAYOUT))
    made = servers(spec)
    assert all(not owned.wire.feedback for engine in made.engines for owned in engine.slices.values())

    def check() -> None:
        for unit, of in enumerate(flagged):
            how, out = spec.precision_of(of).param_compression, np.empty(of.numel, np.float32)
            assert how is not None
            for s in made.plan.slices[unit]:
                for frame in made.engines[s.server].parameters.frames(unit, s.begin, s.end):
                    header, payload = decode_chunk(frame)
                    begin, end = header.offset, header.offset + header.numel
                    sizes = how.within(begin, end).compressed_bytes
                    how.within(begin, end).decompress(payload_array(header, payload, s.numel, sizes), out[begin:end])
            expected = master(made, unit).copy()
            for p in of.parameters:
                if p.float8:
                    tensor, data = expected[p.offset : p.end], np.empty(p.numel + 4, np.uint8)
                    Float8().compress(tensor.copy(), data)
                    Float8().decompress(data, tensor)
            assert out.tobytes() == expected.tobytes()

    check()
    for seed in range(2):
        made.train_step([[normals(341, seed), normals(50, seed), None]])
        check()
    made.push(0, 0, normals(341, 7))
    made.end(Outcome.ABORT)
    check()
    for engine in made.engines:
        for owned in engine.slices.values():
            owned.wire.drop_frames()
    check()
