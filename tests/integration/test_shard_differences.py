"""Parameters that travel as differences, between real clients and servers: bits, bytes, and what breaks on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

import shard_fakes
from axon_ps.compress import Int4, cast
from axon_ps.errors import StepAborted
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, Decision, DType, Hyper, Outcome
from axon_ps.wire.events import UPLOADED, RestoreOrder
from axon_ps.wire.frames import decode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2
from shard_fakes import TIMEOUT_S, Job, cutting, job, spec_of

HYPER: tuple[Hyper, ...] = ({"lr": 1.0},)
NUMELS = 3000, 200, 700


@pytest.fixture(autouse=True, params=["gRPC", "bulk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds whether chunks go over gRPC or over bulk connections."""
    monkeypatch.setattr(shard_fakes, "BULK_PORT", 0 if request.param == "bulk" else None)


def int4(*numels: int, frozen: tuple[int, ...] = (), **options: int) -> JobSpec:
    return dataclasses.replace(
        spec_of(*numels, frozen=frozen, **options), precision=WirePrecision(param_compression=Int4())
    )


SPEC = int4(*NUMELS, frozen=(2,))


def values_of(*numels: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n).astype(np.float32) for n in numels]


FIRST = values_of(*NUMELS)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 40))


async def gather(j: Job, rank: int, unit: int, dtype: Any = np.float32, **changes: Any) -> Array:
    return (await j.gather(rank, unit, dtype, **{"compressed": True, **changes}))[1]


def sent(j: Job, unit: int) -> Array:
    """What the servers remember to have sent."""
    arrays = []
    for s in j.spec.plan(len(j.shells)).slices[unit]:
        wire = j.shells[s.server].engine.slices.of(unit, s.begin).wire
        assert wire.sent is not None
        arrays.append(wire.sent.values)
    return np.concatenate(arrays)


async def step(j: Job, seed: int, *, commit: bool = True, hyper: tuple[Hyper, ...] = ()) -> None:
    """All workers push; one after the other, as replicas are summed."""
    for unit in (0, 1):
        for rank in j.workers:
            numel = j.spec.layout.units[unit].numel
            await j.push(rank, unit, np.random.default_rng(100 * seed + unit).standard_normal(numel).astype(np.float32))
    if commit:
        decide(j, hyper)


def decide(j: Job, hyper: tuple[Hyper, ...] = ()) -> None:
    """The step commits, and workers hear of it."""
    decision = Decision(
        step=j.step, generation=j.generation, outcome=Outcome.COMMIT, version=j.version + 1, hyper=hyper
    )
    j.tell(decision)
    for group in j.groups.values():
        group.settle(j.step, decision)
    j.advance()


async def applied(j: Job) -> None:
    """Wait until the servers have applied what was decided."""
    while any(s.applying for shell in j.shells for s in shell.engine.slices.values()):
        await asyncio.sleep(0.001)


async def speculative(j: Job, rank: int, unit: int) -> Array:
    out = np.empty(j.spec.layout.units[unit].numel, np.float32)
    asked: dict[str, Any] = {"step": j.step, "hyper": HYPER, "context": j.context(rank), "timeout_s": TIMEOUT_S}
    assert await j.groups[rank].gather_speculative(unit, out, **asked) == j.version + 1
    return out


def payload_bytes(j: Job, unit: int) -> int:
    chunk_numel = j.spec.options.chunk_numel
    slices = j.spec.plan(len(j.shells)).slices[unit]
    return sum(Int4().compressed_bytes(end - begin) for s in slices for begin, end in s.chunks(chunk_numel))


def test_steps_move_the_bytes_of_differences_and_who_comes_late_has_the_same_bits() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=3) as j:
            await j.upload(FIRST)
            for unit in range(3):
                assert (await gather(j, 0, unit)).tobytes() == FIRST[unit].tobytes()
            for number in range(1, 5):
                await step(j, number)
                counters = j.groups[0].statistics()
                for unit in (0, 1):
                    values = await gather(j, 0, unit)
                    assert values.tobytes() == (await gather(j, 1, unit)).tobytes() == sent(j, unit).tobytes()
                moved = j.groups[0].statistics()["bytes_in"] - counters["bytes_in"]
                assert moved == payload_bytes(j, 0) + payload_bytes(j, 1)
            counters = j.groups[0].statistics()
            for unit in range(3):
                await gather(j, 0, unit, min_version=4 if unit < 2 else 0)  # what has not changed counts as of then
            assert j.groups[0].statistics() == counters, "nothing is asked for twice"
            await gather(j, 0, 2, min_version=4)
            assert j.groups[0].statistics()["bytes_in"] == counters["bytes_in"], "a frozen unit is not sent again"
            for unit in (0, 1):
                assert (await gather(j, 2, unit)).tobytes() == sent(j, unit).tobytes(), "it comes late"
            exact = (await j.gather(0, 0))[1]
            slices = SPEC.plan(2).slices[0]
            masters = [j.shells[s.server].engine.slices.of(0, s.begin).master.values for s in slices]
            assert exact.tobytes() == np.concatenate(masters).tobytes()
            assert 0 < np.abs(exact - await gather(j, 0, 0)).max() < 2, "it is the master, within an error"
            for group in j.groups.values():
                assert group.statistics()["mismatches"] == 0
            assert j.groups[0].statistics()["received_bytes"] == 4 * sum(NUMELS)

    run(scenario())


@pytest.mark.parametrize(("begin", "end"), [(0, 3000), (10, 20), (250, 260), (1499, 1501), (2990, 3000)])
def test_ranges_in_the_callers_dtype(begin: int, end: int) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            for number in range(3):
                for dtype, kind in ((np.uint16, DType.BF16), (np.float16, DType.F16), (np.float32, DType.F32)):
                    out = np.zeros(end - begin, dtype)
                    asked: dict[str, Any] = {"min_version": j.version, "context": j.context(), "timeout_s": TIMEOUT_S}
                    await j.groups[0].gather(0, out, begin=begin, end=end, compressed=True, **asked)
                    expected = np.zeros(end - begin, dtype)
                    if kind is DType.F32:
                        expected[:] = sent(j, 0)[begin:end]
                    else:
                        cast.encode(sent(j, 0)[begin:end], expected, kind)
                    assert out.tobytes() == expected.tobytes()
                await step(j, number)

    run(scenario())


@pytest.mark.parametrize("expected", [True, False])
def test_a_speculative_gather_is_the_next_one(expected: bool) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            with pytest.raises(StepAborted, match="has no version of all of unit 0"):
                await speculative(j, 0, 0)
            await gather(j, 0, 0)
            for number in range(1, 4):
                await step(j, number, commit=False)
                before = sent(j, 0)
                early = await speculative(j, 0, 0)
                assert sent(j, 0).tobytes() == before.tobytes()
                decide(j, HYPER if expected else ({"lr": 0.5},))
                counters = j.groups[0].statistics()
                values = await gather(j, 0, 0)
                await applied(j)
                assert values.tobytes() == sent(j, 0).tobytes()
                assert (values.tobytes() == early.tobytes()) == expected
                more = {k: v - counters[k] for k, v in j.groups[0].statistics().items()}
                assert more["gathers"] == (0 if expected else 2)
                assert more["bytes_in"] == (0 if expected else payload_bytes(j, 0))
            assert j.groups[0].statistics()["mismatches"] == 0

    run(scenario())


def test_an_aborted_step_moves_nothing() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            await gather(j, 0, 0)
            await step(j, 1)
            before = await gather(j, 0, 0)
            await step(j, 2, commit=False)
            await speculative(j, 0, 0)
            j.decide(Outcome.ABORT)
            aborted = Decision(step=j.step, generation=j.generation, outcome=Outcome.ABORT, version=j.version)
            j.groups[0].settle(j.step, aborted)
            j.step += 1
            assert (await gather(j, 0, 0)).tobytes() == before.tobytes()
            await step(j, 3)
            assert (await gather(j, 0, 0)).tobytes() == sent(j, 0).tobytes()

    run(scenario())


@pytest.mark.parametrize("where", ["worker", "server"])
def test_a_changed_bit_on_either_side_is_found_and_healed(where: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=2) as j:
            await j.upload(FIRST)
            await gather(j, 0, 0)
            await gather(j, 1, 0)
            owned = j.shells[0].engine.slices.of(0, 0)
            assert owned.wire.sent is not None
            values = j.groups[0]._received.values(0, 0, 256) if where == "worker" else owned.wire.sent.values
            values.view(np.uint32)[77] ^= 1 << 30  # far off: four bits would not correct it
            await step(j, 1)
            counters = [j.groups[rank].statistics()["bytes_in"] for rank in (0, 1)]
            got = [await gather(j, rank, 0) for rank in (0, 1)]
            assert got[0].tobytes() == got[1].tobytes() == sent(j, 0).tobytes()
            found = [j.groups[rank].statistics()["mismatches"] for rank in (0, 1)]
            assert found == [1 if where == "worker" else 0, 0]
            again = (4 * owned.chunks.numel, 0) if where == "worker" else (4 * 256 - Int4().compressed_bytes(256),) * 2
            for rank in (0, 1):
                assert j.groups[rank].statistics()["bytes_in"] - counters[rank] == payload_bytes(j, 0) + again[rank]
            assert j.statistics("corruptions") == (0 if where == "worker" else 1)
            master = (await j.gather(0, 0))[1]
            assert np.abs(got[0] - master).max() < 2
            await step(j, 2)
            got = [await gather(j, rank, 0) for rank in (0, 1)]
            assert got[0].tobytes() == got[1].tobytes() == sent(j, 0).tobytes()
            assert [j.groups[rank].statistics()["mismatches"] for rank in (0, 1)] == found

    with caplog.at_level(logging.WARNING):
        run(scenario())
    words = [r.getMessage() for r in caplog.records if "in full" in r.getMessage()]
    assert len(words) == 1


def test_a_stream_that_breaks_midway_leaves_what_had_come() -> None:
    async def scenario() -> None:
        async with job(int4(200_000, 100, chunk_numel=4096)) as j:
            await j.upload(values_of(200_000, 100))
            await gather(j, 0, 0)
            async with cutting(j) as proxy:
                for number in range(3):
                    await step(j, number)
                    proxy._limits["down"][:] = [40_000, 20_000]
                    assert (await gather(j, 0, 0)).tobytes() == sent(j, 0).tobytes()
                assert proxy.cuts >= 3
            counters = j.groups[0].statistics()
            assert counters["mismatches"] == 0
            assert counters["bytes_in"] < 4 * 200_000 + 3 * 3 * payload_bytes(j, 0), "nothing comes in full again"

    run(scenario())


def test_other_values_in_place_of_all_are_gathered_whole() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            await step(j, 1)
            for unit in range(3):
                await gather(j, 0, unit)
            others = values_of(*NUMELS, seed=9)
            j.tell(RestoreOrder(epoch=1, uri=UPLOADED, version=1))
            await j.upload(others, epoch=1)
            for unit in range(3):  # of the same version as before, in another epoch
                assert (await gather(j, 0, unit)).tobytes() == others[unit].tobytes()
            await step(j, 2)
            assert (await gather(j, 0, 0)).tobytes() == sent(j, 0).tobytes()
            j.groups[0].forget_residuals()
            assert j.groups[0].statistics()["received_bytes"] == 0
            assert (await gather(j, 0, 0)).tobytes() == sent(j, 0).tobytes()

    run(scenario())


@pytest.mark.parametrize("since", [None, 0, 1, 2, 3, (1 << 64) - 1])
def test_whatever_a_caller_says_to_have_it_gets_what_leads_to_the_present(since: int | None) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            await step(j, 1)
            await step(j, 2)
            await gather(j, 0, 0)
            request = shard_pb2.AllGatherRequest(
                context=j.context()(),
                end=3000,
                min_version=2,
                dtype=common_pb2.D_TYPE_F32,
                compressed=True,
                since=since,
            )
            async with await j.raw().open_bulk("AllGather") as stream:
                await stream.write(request)
                header, payload = decode_chunk(await stream.read())
            assert header.version == 2
            if since == 2:
                assert header.absent
                assert (header.numel, payload.nbytes) == (3000, 0)
            elif since == 1:
                assert header.base == 1
                assert payload.nbytes == Int4().compressed_bytes(256)
            else:
                assert not header.HasField("base")
                assert bytes(payload) == sent(j, 0)[:256].tobytes()

    run(scenario())


@pytest.mark.parametrize("replication", [2])
def test_a_backup_goes_on_from_the_same_bits(replication: int) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=2, replication=replication) as j:
            await j.upload(FIRST)
            for number in range(1, 4):
                await step(j, number, commit=False)
                for report in j.reports:
                    while not any(by[1] == j.step for by in report.ready_by):
                        await asyncio.sleep(0.001)
                decide(j)
                for unit in (0, 1):
                    await gather(j, 0, unit)
                for s in j.spec.plan(2).slices[0]:
                    await applied(j)
                    wires = [shell.engine.slices.of(0, s.begin).wire for shell in j.shells]
                    assert wires[0].sent is not None
                    assert wires[1].sent is not None
                    assert wires[0].sent.values.tobytes() == wires[1].sent.values.tobytes()
                    assert wires[0].frames == wires[1].frames

    run(scenario())
