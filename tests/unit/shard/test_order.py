"""Replica order: whatever order chunks arrive in, the sum is that of replicas 0, 1, 2, ... and bitwise the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.compress import cast
from axon_ps.shard.core.gradients import Push
from axon_ps.types import Array, DType
from engine_driver import Servers, cast_to, commit_of, job_of, layout_of, one_group


def gradients(numels: list[int], replicas: int, seed: int) -> list[list[Array]]:
    """Per replica and unit; of very different sizes, so that the order of additions shows."""
    rng = np.random.default_rng(seed)
    return [
        [(rng.standard_normal(n) * 10.0 ** rng.integers(-4, 5, n)).astype(np.float32) for n in numels]
        for _ in range(replicas)
    ]


def numpy_sum(grads: list[list[Array]], unit: int, dtype: DType) -> Array:
    """The oracle: f32 additions in replica order of what travelled."""
    total = np.zeros(grads[0][unit].size, np.float32)
    for replica, of_replica in enumerate(grads):
        travelled = np.empty_like(total)
        cast.decode(cast_to(of_replica[unit], dtype), travelled, dtype)
        total = travelled.copy() if replica == 0 else (total + travelled).astype(np.float32)
    return total


@settings(max_examples=60)
@given(data=st.data())
def test_every_interleaving_gives_the_same_bits(data: st.DataObject) -> None:
    units = data.draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=3), min_size=1, max_size=3), "units")
    replicas = data.draw(st.integers(1, 4), "replicas")
    dtype = data.draw(st.sampled_from([DType.F32, DType.BF16, DType.F16]), "dtype")
    layout = layout_of(*units)
    spec = job_of(layout, chunk_numel=data.draw(st.integers(1, 64), "chunk_numel"), grad=dtype)
    queue_bytes = data.draw(st.sampled_from([0, 100, 1 << 20]), "queue_bytes")
    servers = Servers(spec, data.draw(st.integers(1, 3), "servers"), replicas=replicas, queue_bytes=queue_bytes)
    servers.upload([np.zeros(u.numel, np.float32) for u in layout.units])
    grads = gradients([u.numel for u in layout.units], replicas, seed=7)
    if dtype is DType.F16:
        grads = [[np.clip(g, -6e4, 6e4) for g in of_replica] for of_replica in grads]

    # Each (replica, unit, owner) is a stream that sends its chunks in order; any stream may go next, and may send its
    # last chunk again.
    streams = [
        (replica, unit, s.server, list(s.chunks(spec.options.chunk_numel)))
        for replica in range(replicas)
        for unit in range(len(units))
        for s in servers.plan.slices[unit]
    ]
    random = data.draw(st.randoms(use_true_random=False), "order")
    while streams:
        stream = random.choice(streams)
        replica, unit, server, chunks = stream
        begin, end = chunks[0]
        engine = servers.engines[server]
        wire = cast_to(grads[replica][unit], dtype)[begin:end]
        owned = engine.slices.of(unit, begin)
        before = owned.accumulators[0].summed[owned.chunks.index_of(begin)]
        queue = servers.queues[server]
        fits = 0 < queue.queued_bytes + wire.nbytes <= queue_bytes
        done = engine.gradients.push(1, unit, begin, replica, dtype, wire)
        assert done is (Push.SUMMED if before == replica else Push.QUEUED if fits else Push.WAIT)
        if done is not Push.WAIT:
            if random.random() < 0.3:
                assert engine.gradients.push(1, unit, begin, replica, dtype, wire) is Push.DUPLICATE
                assert engine.gradients.resume_offset(1, unit, begin, replica) == end
            chunks.pop(0)
            if not chunks:
                streams.remove(stream)
        elif random.random() < 0.5:
            assert engine.gradients.resume_offset(1, unit, begin, replica) == begin
    assert [queue.queued_bytes for queue in servers.queues] == [0] * len(servers.queues)

    total = 0.0
    for unit in range(len(units)):
        expected = numpy_sum(grads, unit, dtype)
        for s in servers.plan.slices[unit]:
            got = servers.slice_of(s).accumulators[0].array
            assert got is not None
            assert got.tobytes() == expected[s.begin : s.end].tobytes()
        total += float(np.sum(expected.astype(np.float64) ** 2))
    sums = [e.gradients.ready() for e in servers.engines]
    owners = {s.server for slices in servers.plan.slices for s in slices}
    assert [x is not None for x in sums] == [rank in owners for rank in range(len(sums))]
    assert np.isclose(sum(x for of_server in sums for x in of_server or ()), total, rtol=1e-12)


@settings(max_examples=25)
@given(order=st.permutations(range(12)), length=st.integers(1, 8), dtype=st.sampled_from([DType.F32, DType.BF16]))
def test_chunks_may_be_applied_in_any_order_and_in_runs(order: list[int], length: int, dtype: DType) -> None:
    layout = layout_of([100, 20], [60])
    spec = job_of(layout, chunk_numel=16, param=dtype)
    rng = np.random.default_rng(3)
    first = [rng.standard_normal(u.numel).astype(np.float32) for u in layout.units]
    grads = [[rng.standard_normal(u.numel).astype(np.float32) for u in layout.units]]
    results = []
    for run, numbers in ((length, list(range(12))), (1, order)):
        servers = Servers(spec, optimizer=one_group(layout, "adamw", lr=0.1))
        servers.upload(first)
        for unit in range(2):
            servers.push(unit, 0, grads[0][unit])
        (engine,) = servers.engines
        slices = engine.decide(commit_of(engine))
        chunks = [(owned, index) for owned in slices for index in range(len(owned.chunks.bounds))]
        assert len(chunks) == 12
        for owned, index in (chunks[number] for number in numbers):
            if index % run == 0:
                owned.change.apply(index, min(index + run, len(owned.chunks.bounds)), engine.scratch(run))
        for owned in slices:
            owned.finish()
        results.append([servers.values(unit).tobytes() for unit in range(2)])
    assert results[0] == results[1]
