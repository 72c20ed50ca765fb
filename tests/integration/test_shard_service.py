"""The shard service over real gRPC: gather, reduce, upload, fencing, resuming, and what is refused.

Tests of `shard/client/client.py` and `shard/server/servicer.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shard_fakes
from axon_ps.aggregation.client.peers import Peers
from axon_ps.errors import (
    Broken,
    Busy,
    CheckpointCorrupt,
    CheckpointNotFound,
    Closed,
    GenerationChanged,
    InternalError,
    InvalidRequest,
    Misuse,
    PermissionDenied,
    StepAborted,
    Timeout,
)
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.rpc.service import Stub
from axon_ps.shard.client import transfers
from axon_ps.shard.client.line import Rate
from axon_ps.shard.same_host import leases
from axon_ps.shard.server import servicer
from axon_ps.shard.server.calls import fence
from axon_ps.sharding.placement import Server, new_placement
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.manifest import Manifest, read_manifest, write_manifest
from axon_ps.types import Array, DType, Grouping, OptimizerSpec, Outcome
from axon_ps.wire.events import UPLOADED, JobState, RestoreOrder, SnapshotOrder
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2, lease_pb2, shard_pb2
from shard_fakes import TIMEOUT_S, CuttingProxy, Job, cutting, job, spec_of

SPEC = spec_of(3000, 200, 700, frozen=[2])


@pytest.fixture(autouse=True, params=["sent", "bulk", "parts", "leased"])
def chunks_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything here holds whether chunks go over gRPC, over bulk connections, or are read from memory.

    Parts are of a long line: each transfer takes several connections.
    """
    monkeypatch.setattr(shard_fakes, "BULK_PORT", 0 if request.param in ("bulk", "parts") else None)
    if request.param == "parts":
        monkeypatch.setattr(Peers, "rtt_s", lambda peers, server: 0.1)
        monkeypatch.setattr(Rate, "in_flight_bytes", lambda rate, rtt_s: 16 << 20)
        monkeypatch.setattr(transfers, "MIN_SPLIT_BYTES", 256)
    if request.param == "leased":
        monkeypatch.setattr(shard_fakes, "WORKERS_NODE", "n")
        for module in (servicer, transfers):
            monkeypatch.setattr(module, "MIN_LEASED_BYTES", 1)
    return str(request.param)


SENT = pytest.mark.parametrize("chunks_are", ["sent"], indirect=True)
"""Of calls and of bytes on a connection: they are others when chunks are leased."""

AS_ONE = pytest.mark.parametrize("chunks_are", ["sent", "bulk", "leased"], indirect=True)
"""Of how many calls there are."""

ON_ONE_CONNECTION = pytest.mark.parametrize("chunks_are", ["sent", "bulk"], indirect=True)

THROUGH_SOCKETS = pytest.mark.parametrize("chunks_are", ["sent", "bulk", "parts"], indirect=True)


def values_of(*numels: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n).astype(np.float32) for n in numels]


FIRST = values_of(3000, 200, 700)
GRADS = [values_of(3000, 200, seed=s) for s in (1, 2)]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something that must happen has happened (the test's own time-out is the limit)."""
    while not condition():
        await asyncio.sleep(0)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 40))


# ---------------------------------------------------------------------- memory of the same host

LEASED = pytest.mark.parametrize("chunks_are", ["leased"], indirect=True)


def shared(values: Array) -> Array:
    """As `axon_ps.empty_shared` makes it, and `ShardGroup.buffer`."""
    array = shared_arrays.empty(values.shape, DType.F32)
    array[:] = values
    return array


@LEASED
def test_leased_chunks_go_through_no_socket() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            assert (await j.gather(0, 0))[1].tobytes() == FIRST[0].tobytes()
            await j.push(0, 0, shared(GRADS[0][0]))
            counters = j.groups[0].statistics()
            assert counters["leased_bytes_in"] == counters["bytes_in"] == FIRST[0].nbytes
            assert counters["leased_bytes_out"] == GRADS[0][0].nbytes
            assert j.statistics("leased_bytes_in") == counters["leased_bytes_out"]
            assert j.statistics("leased_bytes_out") == counters["leased_bytes_in"]

    run(scenario())


@LEASED
def test_a_range_is_near_if_every_server_that_has_some_of_it_is_on_this_host() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            here, away = j.membership.shards
            shards = (here, dataclasses.replace(away, node="elsewhere"))
            j.groups[0].set_members(dataclasses.replace(j.membership, shards=shards))
            near = j.groups[0].routes.is_near
            first, second = SPEC.plan(2).slices[0]
            assert not near(0, first.begin, first.end)  # nothing is known of either yet
            await j.gather(0, 0)
            assert near(0, first.begin, first.end)
            assert near(0, first.begin + 1, first.end - 1)
            assert not near(0, second.begin, second.end)
            assert not near(0, first.end - 1, second.begin + 1)
            assert not near(0)

    run(scenario())


@LEASED
def test_gradients_are_added_where_they_lie_and_sent_where_they_do_not_lie_in_shared_memory() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            await j.push(0, 0, shared(GRADS[0][0]))
            await j.push(0, 1, GRADS[0][1])
            assert j.statistics("mapped_bytes_in") == j.statistics("leased_bytes_in") == GRADS[0][0].nbytes
            j.commit()
            for unit in range(2):
                assert (await j.gather(0, unit))[1].tobytes() == (FIRST[unit] - GRADS[0][unit]).tobytes()

    run(scenario())


@LEASED
def test_a_lease_that_was_revoked_before_it_was_read_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    view, late = leases.view, []

    def slow(peer: HostPeer, lease: lease_pb2.Lease) -> leases.Leased:
        """The server changes the values before the first reader has copied them."""
        found = view(peer, lease)
        if late:
            late.pop().withdraw()
        return found

    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            assert (await j.gather(0, 0))[1].tobytes() == FIRST[0].tobytes()
            mapped = j.shells[0].engine.slices[0].wire.mapped
            assert mapped is not None
            late.append(mapped)
            monkeypatch.setattr(leases, "view", slow)
            assert (await j.gather(0, 0))[1].tobytes() == FIRST[0].tobytes()
            assert j.groups[0].statistics()["retries"] == 1
            assert not late

    run(scenario())


@LEASED
def test_a_push_whose_lease_is_refused_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    view, refused = leases.view, []

    def refuse(peer: HostPeer, lease: lease_pb2.Lease) -> leases.Leased:
        if not refused:
            refused.append(lease)
            raise Broken("the segment is closed")
        return view(peer, lease)

    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            monkeypatch.setattr(leases, "view", refuse)
            for unit in range(2):
                await j.push(0, unit, shared(GRADS[0][unit]))
            assert j.groups[0].statistics()["retries"] == 1
            j.commit()
            for unit in range(2):
                assert (await j.gather(0, unit))[1].tobytes() == (FIRST[unit] - GRADS[0][unit]).tobytes()

    run(scenario())


# ---------------------------------------------------------------------- the way of a step


@pytest.mark.parametrize("servers", [1, 3])
def test_a_step_from_first_values_to_the_next_version(servers: int) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=servers, workers=2) as j:
            await j.upload(FIRST)
            assert [r.initialized_at for r in j.reports] == [[(0, 0)]] * servers
            for unit in range(3):
                version, got = await j.gather(1, unit)
                assert version == 0
                assert got.tobytes() == FIRST[unit].tobytes()
            await asyncio.gather(*(j.push(rank, unit, GRADS[rank][unit]) for rank in (1, 0) for unit in (1, 0)))
            total = sum(r.ready_for[0][2] for r in j.reports if r.ready_for)
            summed = [GRADS[0][u] + GRADS[1][u] for u in (0, 1)]
            assert np.isclose(total, sum(np.sum(s.astype(np.float64) ** 2) for s in summed))
            assert {(g, s) for r in j.reports for g, s, _ in r.ready_for} == {(1, 1)}
            j.commit()
            for unit in range(2):
                version, got = await j.gather(0, unit)
                assert version == 1
                assert got.tobytes() == (FIRST[unit] - summed[unit]).tobytes()
            assert await j.gather(0, 2) != (0, None)
            assert (await j.gather(0, 2))[1].tobytes() == FIRST[2].tobytes()

    run(scenario())


@AS_ONE
def test_four_gatherers_cost_one_encoding() -> None:
    async def scenario() -> None:
        async with job(SPEC, workers=4) as j:
            await j.upload(FIRST)
            before = j.statistics("encodings")
            assert before == 12 + 1 + 3
            await asyncio.gather(*(j.gather(rank, unit) for rank in range(4) for unit in range(3)))
            assert j.statistics("encodings") == before
            assert j.statistics("gathers") == 12
            assert j.statistics("chunks_out") == 4 * before
            payload = 4 * 4 * (3000 + 200 + 700)
            assert payload < j.statistics("bytes_out") < payload + 40 * 4 * before
            assert sum(g.statistics()["bytes_in"] for g in j.groups.values()) == payload

    run(scenario())


@pytest.mark.parametrize(("param", "storage"), [(DType.BF16, np.uint16), (DType.F16, np.float16)])
def test_parameters_travel_in_the_jobs_dtype_or_in_the_callers(param: DType, storage: Any) -> None:
    async def scenario() -> None:
        async with job(spec_of(3000, 200, 700, frozen=[2], param=param)) as j:
            await j.upload(FIRST)
            before = j.statistics("encodings")
            _, exact = await j.gather(0, 0)
            assert exact.tobytes() == FIRST[0].tobytes()
            assert j.statistics("encodings") == before + 12  # on demand
            _, wire = await j.gather(0, 0, storage)
            assert j.statistics("encodings") == before + 12
            rounded = (wire.astype(np.uint32) << 16).view(np.float32) if param is DType.BF16 else wire
            assert np.allclose(rounded, FIRST[0], rtol=1e-2)
            assert (wire.nbytes, exact.nbytes) == (6000, 12000)

    run(scenario())


@pytest.mark.parametrize(("begin", "end"), [(0, 3000), (5, 6), (250, 260), (999, 2001), (1000, 3000), (0, 1)])
def test_any_range_of_a_unit(begin: int, end: int) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=3) as j:
            await j.upload(FIRST)
            out = np.zeros(end - begin, np.float32)
            await j.groups[0].gather(
                0, out, min_version=0, context=j.context(), timeout_s=TIMEOUT_S, begin=begin, end=end
            )
            assert out.tobytes() == FIRST[0][begin:end].tobytes()

    run(scenario())


def test_two_workers_of_one_replica_push_their_parts() -> None:
    """What HYBRID_SHARD does: ranges that begin and end where chunks do."""

    async def scenario() -> None:
        async with job(spec_of(2048)) as j:
            await j.upload(values_of(2048))
            grad = values_of(2048, seed=9)[0]
            await j.push(0, 0, grad[1024:], begin=1024, end=2048)
            assert not j.reports[0].ready_for
            await j.push(0, 0, grad[:1024], begin=0, end=1024)
            assert len(j.reports[0].ready_for) == 1
            j.commit()
            assert (await j.gather(0, 0))[1].tobytes() == (values_of(2048)[0] - grad).tobytes()

    run(scenario())


def test_a_replica_waits_for_its_turn_without_blocking_others() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=3) as j:
            await j.upload(FIRST)
            ahead = [asyncio.create_task(j.push(rank, 0, GRADS[0][0])) for rank in (2, 1)]
            await until(lambda: j.statistics("waits") >= 4)
            assert not any(t.done() for t in ahead)
            assert (await j.gather(2, 0))[0] == 0  # another connection: gathers go on
            await j.push(0, 0, GRADS[0][0])
            await asyncio.gather(*ahead)
            assert j.statistics("duplicates") == 0

    run(scenario())


@pytest.mark.parametrize("replication", [1, 2])
def test_a_replica_that_is_ahead_is_done_before_the_others_come(replication: int) -> None:
    """It may use its buffer for something else then; sums go to the backups when they are complete."""

    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=3, replication=replication, queue_bytes=1 << 20) as j:
            await j.upload(FIRST)
            for rank in (2, 1):
                grad = shared(GRADS[rank - 1][0])
                await j.push(rank, 0, grad)
                await j.push(rank, 1, GRADS[rank - 1][1])
                grad[:] = 0.0
            queued = 2 * sum(g.nbytes for g in GRADS[0])
            assert j.statistics("queued_bytes") == sum(shell.queue.queued_bytes for shell in j.shells) == queued
            assert j.statistics("waits") == 0
            assert not any(reports.ready_for for reports in j.reports)
            for unit in (0, 1):
                await j.push(0, unit, GRADS[0][unit])
            await until(lambda: all(reports.ready_for for reports in j.reports))
            assert j.statistics("queued_bytes") == 0
            j.commit()
            for unit in (0, 1):
                total = GRADS[0][unit] + GRADS[0][unit] + GRADS[1][unit]
                assert (await j.gather(0, unit, min_version=1))[1].tobytes() == (FIRST[unit] - total).tobytes()

    run(scenario())


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("replication", "queue_bytes"), [(1, 0), (2, 0), (2, 1 << 20)])
def test_addends_are_added_up_in_order_on_every_copy(replication: int, queue_bytes: int, at_once: bool) -> None:
    """If they come at once, sums are forwarded to the backups while the next addend is being added to them."""
    count = 4

    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=2, replication=replication, queue_bytes=queue_bytes) as j:
            await j.upload(FIRST)
            pushes = []
            for addend in range(count):
                for unit in (0, 1):
                    for rank in (0, 1):
                        grad = shared(float(addend + 1) * GRADS[rank][unit])
                        pushes.append(asyncio.create_task(j.push(rank, unit, grad, addend=addend)))
                if not at_once:
                    await asyncio.gather(*pushes)
            await asyncio.gather(*pushes)
            await until(lambda: all(count - 1 in reports.addends for reports in j.reports))
            assert all(reports.addends == sorted(reports.addends) for reports in j.reports)
            assert j.statistics("corruptions") == j.statistics("queued_bytes") == 0
            j.commit()
            for unit in (0, 1):
                total = np.zeros_like(GRADS[0][unit])
                for addend in range(count):
                    for rank in (0, 1):
                        total += float(addend + 1) * GRADS[rank][unit]
                assert (await j.gather(0, unit, min_version=1))[1].tobytes() == (FIRST[unit] - total).tobytes()
            slices = [owned for shell in j.shells for owned in shell.engine.slices.values()]
            await until(lambda: not any(owned.applying for owned in slices))
            digests = [shell.engine.digests() for shell in j.shells]
            assert digests[0] == digests[1], "copies are equal"

    run(scenario())


def test_a_gather_waits_for_its_version_and_is_served_unit_by_unit() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            waiting = asyncio.create_task(j.gather(0, 0, min_version=1))
            await j.push(0, 0, GRADS[0][0])
            await j.push(0, 1, GRADS[0][1])
            assert not waiting.done()
            j.commit()
            version, got = await waiting
            assert version == 1
            assert got.tobytes() == (FIRST[0] - GRADS[0][0]).tobytes()

    run(scenario())


def test_owners_that_disagree_are_asked_again_for_the_later_version() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            await j.push(0, 0, GRADS[0][0])
            await j.push(0, 1, GRADS[0][1])
            j.decide(servers=[0])
            await until(lambda: j.shells[0].engine.parameters.available(0, 0, 1))
            gathering = asyncio.create_task(j.gather(0, 0))
            await until(lambda: j.groups[0].statistics()["retries"] > 0)
            j.decide(servers=[1])
            j.advance()
            version, got = await gathering
            assert version == 1
            assert got.tobytes() == (FIRST[0] - GRADS[0][0]).tobytes()

    run(scenario())


@pytest.mark.parametrize("servers", [1, 3])
def test_moments_are_gathered_at_one_version(servers: int) -> None:
    """A server that has not committed yet is waited for. What the optimizer lacks leaves the array as it is."""
    momentum = OptimizerSpec(name="sgd", groups=({"lr": 1.0, "momentum": 0.5},), group_of=(0, 0, -1))

    async def scenario() -> None:
        async with job(SPEC, servers=servers, optimizer=momentum) as j:
            await j.upload(FIRST)
            for grads in GRADS:
                for unit in range(2):
                    await j.push(0, unit, grads[unit])
                j.decide(servers=range(1, servers))
                if grads is GRADS[0]:
                    j.decide(servers=[0])
                    j.advance()
            updates: list[int] = []
            gathering = asyncio.ensure_future(j.gather(0, 0, moment="momentum_buffer", updates=updates))
            for _ in range(20):
                await asyncio.sleep(0)
            j.decide(servers=[0])
            version, found = await gathering
            expected = {1: GRADS[0][0], 2: 0.5 * GRADS[0][0] + GRADS[1][0]}
            assert version == updates[0]
            np.testing.assert_array_equal(found, expected[version])
            j.advance()
            version, found = await j.gather(0, 0, moment="momentum_buffer", updates=updates)
            assert (version, updates) == (2, [2])
            np.testing.assert_array_equal(found, expected[2])
            part = np.zeros(300, np.float32)
            arguments = {
                "context": j.context(),
                "timeout_s": TIMEOUT_S,
                "moment": "momentum_buffer",
                "updates": updates,
            }
            await j.groups[0].gather(0, part, begin=1000, end=1300, min_version=2, **arguments)
            np.testing.assert_array_equal(part, expected[2][1000:1300])
            _, found = await j.gather(0, 0, moment="exp_avg", updates=updates)
            np.testing.assert_array_equal(found, np.full(3000, 7, np.float32))
            with pytest.raises(InvalidRequest, match="unit 2 is frozen; it has no moment 'momentum_buffer'"):
                await j.gather(0, 2, moment="momentum_buffer", updates=updates, min_version=0)

    run(scenario())


def test_a_server_that_does_not_know_moments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    make = shard_pb2.AllGatherRequest

    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            monkeypatch.setattr(shard_pb2, "AllGatherRequest", lambda moment, **fields: make(**fields))
            with pytest.raises(InvalidRequest, match="has sent parameters, not 'exp_avg'; upgrade it first"):
                await j.gather(0, 0, moment="exp_avg", updates=[])

    run(scenario())


def test_absent_gradients_leave_a_unit_alone() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2, workers=2) as j:
            await j.upload(FIRST)
            for rank in (0, 1):
                await j.push(rank, 0, None)
                await j.push(rank, 1, GRADS[rank][1] if rank else None)
            assert all(r.ready_for for r in j.reports)
            j.commit()
            assert await j.gather(0, 0) == (1, pytest.approx(FIRST[0]))
            assert (await j.gather(0, 0))[1].tobytes() == FIRST[0].tobytes()
            assert (await j.gather(0, 1))[1].tobytes() == (FIRST[1] - GRADS[1][1]).tobytes()
            assert j.groups[0].statistics()["bytes_out"] == sum(v.nbytes for v in FIRST)  # the upload alone

    run(scenario())


def test_a_skipped_step_can_be_followed_by_another() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            for unit in (0, 1):
                await j.push(0, unit, np.full(SPEC.layout.units[unit].numel, np.nan, np.float32))
            assert np.isnan(j.reports[0].ready_for[0][2])
            j.decide(Outcome.SKIP)
            j.step += 1
            for unit in (0, 1):
                await j.push(0, unit, GRADS[0][unit])
            j.commit()
            assert (await j.gather(0, 0))[1].tobytes() == (FIRST[0] - GRADS[0][0]).tobytes()

    run(scenario())


# ---------------------------------------------------------------------- fences


def changed(j: Job, **changes: Any) -> Callable[[], common_pb2.CallContext]:
    def make() -> common_pb2.CallContext:
        context = j.context()()
        for name, value in changes.items():
            setattr(context, name, value)
        return context

    return make


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job": "other"}, "serves job 'j', not 'other'"),
        ({"incarnation": "stranger"}, "'stranger' is not a worker of generation 1"),
        ({"incarnation": ""}, "is not a worker"),
        ({"incarnation": "shard-0"}, "is not a worker"),
    ],
)
def test_strangers_are_refused(change: dict[str, str], words: str) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            context = changed(j, **change)
            with pytest.raises(PermissionDenied, match=words):
                await j.gather(0, 0, context=context)
            with pytest.raises(PermissionDenied, match=words):
                await j.push(0, 0, GRADS[0][0], context=context)
            with pytest.raises(PermissionDenied, match=words):
                await j.groups[0].upload(0, FIRST[0], context=context, timeout_s=TIMEOUT_S)

    run(scenario())


def test_a_push_of_an_older_generation_is_told_the_new_one() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            old = changed(j, generation=1)
            j.regenerate()
            with pytest.raises(GenerationChanged, match="generation 1 is over") as raised:
                await j.push(0, 0, GRADS[0][0], context=old)
            assert raised.value.generation == 2

    run(scenario())


@SENT
def test_a_gather_of_an_older_generation_is_repeated_with_the_new_context() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            asked = []

            def late() -> common_pb2.CallContext:
                """The session is late: two calls are made with the old generation."""
                asked.append(1)
                context = j.context()()
                context.generation = 1 if len(asked) <= 2 else 2
                return context

            j.regenerate()
            version, got = await j.gather(0, 0, context=late)
            assert version == 0
            assert got.tobytes() == FIRST[0].tobytes()
            assert j.groups[0].statistics()["retries"] == 2

    run(scenario())


def test_a_caller_that_is_ahead_waits_for_the_servers_own_session() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            ahead = asyncio.create_task(j.gather(0, 0, context=changed(j, generation=2)))
            with pytest.raises(Timeout):
                await j.gather(0, 0, context=changed(j, generation=2), timeout_s=0.05)
            assert not ahead.done()
            j.regenerate()
            assert (await ahead)[0] == 0

    run(scenario())


def test_a_caller_that_is_far_ahead_is_refused_and_no_call_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            for what in ("generation", "placement"):
                context = changed(j)()
                setattr(context, what, 1 << 62)
                stream = j.raw().open("AllGather")
                await stream.write(shard_pb2.AllGatherRequest(context=context, begin=0, end=1))
                with pytest.raises(
                    InvalidRequest, match=f"{what} {1 << 62} is none of this job's; this server knows 1"
                ):
                    await stream.read()
            with pytest.raises(InvalidRequest, match=f"version {1 << 62} of model .* was asked for; it is at 0"):
                await j.gather(0, 0, min_version=1 << 62)
            monkeypatch.setattr(fence, "FENCE_S", 0.05)
            request = shard_pb2.AllGatherRequest(context=changed(j, generation=2)(), begin=0, end=1)
            stream = j.raw().open("AllGather")
            await stream.write(request)
            with pytest.raises(Broken, match=r"has not heard of generation 2 .* within 0\.05 s; it knows generation 1"):
                await stream.read()
            assert (await j.gather(0, 0))[0] == 0, "others are served"

    run(scenario())


@AS_ONE
def test_one_worker_has_so_many_calls_under_way_at_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "MAX_MEMBER_CALLS", 2)

    async def scenario() -> None:
        async with job(SPEC, workers=2) as j:
            await j.upload(FIRST)
            waiting = [asyncio.create_task(j.gather(0, 0, min_version=1)) for _ in range(2)]
            await until(lambda: j.shells[0].fence._calls["worker-0"] == 2)
            with pytest.raises(
                Busy, match="'worker-0' has 2 gathers and pushes under way at this server, which is the most"
            ):
                await j.gather(0, 0)
            assert (await j.gather(1, 0))[0] == 0, "another worker is served"
            j.regenerate()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: not j.shells[0].fence._calls)

    run(scenario())


def test_a_new_generation_ends_waits_for_values() -> None:
    """Of a gather in a dtype that is made on demand, and of first values that came before the order to replace them."""

    async def run() -> None:
        async with job(SPEC) as j:
            shell = j.shells[0].model()
            waits = [asyncio.create_task(w) for w in (shell.reads.unchanging(0, 0, 1), shell.wait_withdrawn(1, 1))]
            await asyncio.sleep(0)
            j.regenerate()
            for wait in waits:
                with pytest.raises(GenerationChanged, match="generation 1 is over"):
                    await asyncio.wait_for(wait, TIMEOUT_S)

    asyncio.run(run())


def test_a_new_generation_ends_open_pushes() -> None:
    """One stream waits for its turn, another for its client's next chunk; both learn of it at once."""

    async def scenario() -> None:
        async with job(SPEC, workers=2) as j:
            await j.upload(FIRST)
            waiting = asyncio.create_task(j.push(1, 0, GRADS[0][0]))
            stream = j.raw().open("ReduceScatter", timeout_s=TIMEOUT_S)
            await stream.write(first_chunk(j, 0))
            await until(lambda: j.statistics("waits") >= 1 and j.statistics("chunks_in") >= 18)
            j.regenerate()
            with pytest.raises(GenerationChanged) as raised:
                await waiting
            assert raised.value.generation == 2
            with pytest.raises(GenerationChanged):
                await stream.read()
            await j.push(0, 0, GRADS[0][0])
            await j.push(1, 0, GRADS[1][0])
            accumulator = j.shells[0].engine.slices[0].accumulators[0].array
            assert accumulator is not None
            assert accumulator.tobytes() == (GRADS[0][0] + GRADS[1][0]).tobytes()

    run(scenario())


def first_chunk(j: Job, of_unit: int, **changes: Any) -> bytes:
    """The first chunk of worker 0's gradient of a unit, as a client would begin its stream."""
    numel = min(256, SPEC.layout.units[of_unit].numel)
    fields = {
        "context": j.context()(), "step": j.step, "unit": of_unit, "offset": 0, "numel": numel,
        "end": SPEC.layout.units[of_unit].numel,
        "dtype": common_pb2.D_TYPE_F32, "replica": 0,
    }  # fmt: skip
    payload = changes.pop("payload", np.ones(numel, np.float32))
    return encode_chunk(common_pb2.Chunk(**{**fields, **changes}), payload)


def test_a_gather_that_waits_goes_on_in_the_new_generation() -> None:
    async def scenario() -> None:
        async with job(SPEC, workers=2) as j:
            await j.upload(FIRST)
            waiting = asyncio.create_task(j.gather(0, 0, min_version=1))
            await until(lambda: j.groups[0].statistics()["gathers"] >= 1)
            j.regenerate([0])
            await j.push(0, 0, GRADS[0][0])
            await j.push(0, 1, GRADS[0][1])
            j.commit()
            assert (await waiting)[0] == 1

    run(scenario())


def test_late_pushes_of_an_aborted_step_are_told() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            j.decide(Outcome.ABORT)
            with pytest.raises(StepAborted, match="step 1 is over"):
                await j.push(0, 0, GRADS[0][0])

    run(scenario())


# ---------------------------------------------------------------------- broken connections


@ON_ONE_CONNECTION
def test_a_push_is_resumed_where_the_server_says() -> None:
    async def scenario() -> None:
        async with job(spec_of(200_000, chunk_numel=4096), workers=2) as j:
            first = values_of(200_000)
            grads = [values_of(200_000, seed=s)[0] for s in (1, 2)]
            await j.upload(first)
            async with cutting(j, up=[300_000, 150_000]) as proxy:
                await j.push(0, 0, grads[0])
                assert proxy.cuts == 2
            statistics = j.groups[0].statistics()
            assert statistics["retries"] >= 2
            # Only what the server lacked was sent again: less than three times the whole, nothing was summed twice.
            assert statistics["bytes_out"] - 800_000 < 3 * 800_000 - 2 * 250_000 - 100_000
            await j.push(1, 0, grads[1])
            accumulator = j.shells[0].engine.slices[0].accumulators[0].array
            assert accumulator is not None
            assert accumulator.tobytes() == (grads[0] + grads[1]).tobytes()

    run(scenario())


@ON_ONE_CONNECTION
def test_a_gather_and_an_upload_are_repeated() -> None:
    async def scenario() -> None:
        async with job(spec_of(200_000, chunk_numel=4096)) as j:
            first = values_of(200_000)
            async with cutting(j, up=[300_000], down=[10**9]) as proxy:
                await j.upload(first)
                proxy._limits["down"][:] = [300_000, 100_000]
                _, got = await j.gather(0, 0)
                assert got.tobytes() == first[0].tobytes()
                assert proxy.cuts == 3

    run(scenario())


def test_a_server_that_moved_is_found_at_its_new_address() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            right, j.addresses[0] = j.addresses[0], "127.0.0.1:1"
            j.groups[0].set_members(j.membership)
            gathering = asyncio.create_task(j.gather(0, 0))
            await until(lambda: j.groups[0].statistics()["retries"] > 0)
            j.addresses[0] = right
            j.groups[0].set_members(j.membership)
            assert (await gathering)[1].tobytes() == FIRST[0].tobytes()

    run(scenario())


def test_calls_under_way_survive_that_their_server_moves() -> None:
    async def scenario() -> None:
        async with job(SPEC, workers=2) as j:
            await j.upload(FIRST)
            gathering = asyncio.create_task(j.gather(1, 0, min_version=1))
            pushing = asyncio.create_task(j.push(1, 0, GRADS[1][0]))
            waiting = j.shells[0].model()._waiters._units
            await until(lambda: sum(map(len, waiting.values())) >= 2)  # on a long line several of each
            async with CuttingProxy(j.addresses[0]) as proxy:
                j.addresses[0] = proxy.address
                j.groups[1].set_members(j.membership)
                await until(lambda: j.groups[1].statistics()["retries"] >= 2)  # before either can end
                await j.push(0, 0, GRADS[0][0])
                await pushing
                for rank in (0, 1):
                    await j.push(rank, 1, GRADS[rank][1])
                j.commit()
                assert (await gathering)[0] == 1

    run(scenario())


def test_nobody_there_is_a_timeout_that_says_why() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            j.addresses[0] = "127.0.0.1:1"
            j.groups[0].set_members(j.membership)
            with pytest.raises(Timeout, match=r"gave up after 2 s; the last attempt failed: nobody answers at"):
                await j.gather(0, 0, timeout_s=2.0)

    run(scenario())


def test_pushing_twice_changes_nothing() -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            for _ in range(2):
                for unit in (0, 1):
                    await j.push(0, unit, GRADS[0][unit])
            assert j.statistics("duplicates") == sum(
                len(s.chunks.bounds) for x in j.shells for s in x.engine.slices.values() if s.trainable
            )
            assert [len(r.ready_for) for r in j.reports] == [1, 1]
            j.commit()
            assert (await j.gather(0, 0))[1].tobytes() == (FIRST[0] - GRADS[0][0]).tobytes()
            await j.push(0, 0, GRADS[0][0], step=1)  # the reply to a committed step was lost: acknowledged
            j.step = 1
            with contextlib.suppress(StepAborted):
                await j.push(0, 1, None)
            assert (await j.gather(0, 0))[1].tobytes() == (FIRST[0] - GRADS[0][0]).tobytes()

    run(scenario())


def test_a_cancelled_call_leaves_the_server_well() -> None:
    async def scenario() -> None:
        async with job(SPEC, workers=2) as j:
            await j.upload(FIRST)
            calls = [
                asyncio.create_task(j.push(1, 0, GRADS[1][0])),
                asyncio.create_task(j.gather(1, 0, min_version=1)),
            ]
            await until(lambda: j.statistics("waits") >= 1)
            for call in calls:
                call.cancel()
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*calls, return_exceptions=True)
            )
            for rank in (0, 1):
                await j.push(rank, 0, GRADS[rank][0])
                await j.push(rank, 1, GRADS[rank][1])
            j.commit()
            assert (await j.gather(0, 0))[0] == 1
            await until(lambda: not any(x.model()._waiters._units for x in j.shells))

    run(scenario())


# ---------------------------------------------------------------------- servers that are not as others


def test_a_server_that_owns_nothing_takes_part() -> None:
    async def scenario() -> None:
        async with job(spec_of(40), servers=2) as j:
            assert [r.initialized_at for r in j.reports] == [[], [(0, 0)]]
            values = values_of(40)
            await j.upload(values)
            for number in range(2):
                await j.push(0, 0, np.ones(40, np.float32))
                j.commit()
                assert (await j.gather(0, 0))[0] == number + 1
            assert [len(r.ready_for) for r in j.reports] == [2, 0]
            assert [x.engine.version for x in j.shells] == [2, 2]

    run(scenario())


def test_a_server_that_missed_a_commit_gives_up_loudly() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            j.version = 3
            j.regenerate()
            failure = j.shells[0].failure
            with pytest.raises(InternalError, match="missed a commit"):
                await failure
            await j.shells.pop().close()

    run(scenario())


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": common_pb2.D_TYPE_BF16, "payload": np.ones(256, np.uint16)}, InvalidRequest, "travels as bf16"),
        ({"dtype": 0}, InvalidRequest, "dtype is unset"),
        ({"dtype": 99}, InvalidRequest, "number 99"),
        ({"offset": 3}, InvalidRequest, "no chunk of unit 0 begins at element 3"),
        ({"offset": 1 << 63}, InvalidRequest, "no chunk of unit 0 begins"),
        ({"end": 0}, InvalidRequest, "elements 0 to 0 of unit 0 were announced; this server has 0 to 3000"),
        ({"end": 3001}, InvalidRequest, "elements 0 to 3001 of unit 0 were announced"),
        ({}, InvalidRequest, "ended before everything had come that its first message announced"),
        ({"numel": 255}, InvalidRequest, "payload of 1024 bytes; it must have 1020"),
        ({"numel": 257}, InvalidRequest, "payload of 1024 bytes; it must have 1028"),
        ({"payload": np.ones(255, np.float32), "numel": 255}, InvalidRequest, "255 elements; it must have 256"),
        ({"replica": 1}, InvalidRequest, "worker 0 contributes to replica 0, not 1"),
        ({"unit": 77}, InvalidRequest, "there is no unit 77; the layout has 3"),
        ({"unit": 2, "end": 700}, Misuse, "unit 2 is frozen"),
        ({"context": None}, InvalidRequest, "must have a context"),
        ({"absent": True, "payload": None, "numel": 77}, InvalidRequest, "no chunk of unit 0 begins at element 77"),
        ({"absent": True, "payload": None, "offset": 256, "numel": 1 << 60}, InvalidRequest, "no chunk of unit 0"),
    ],
)
def test_bad_gradient_chunks(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            stream = j.raw().open("ReduceScatter", timeout_s=TIMEOUT_S)
            await stream.write(first_chunk(j, 0, **changes))
            await stream.done_writing()
            with pytest.raises(error, match=words):
                await stream.read()
            await j.push(0, 0, GRADS[0][0])
            assert j.statistics("duplicates") == (0 if changes else 1)

    run(scenario())


def test_a_push_of_a_worker_in_no_replica() -> None:
    async def scenario() -> None:
        async with job(dataclasses.replace(SPEC, grouping=Grouping(rows=((0, 1), (2, 3)))), workers=3) as j:
            await j.upload(FIRST)
            with pytest.raises(InvalidRequest, match=r"worker 2 is in no replica.* ranks \(0, 1\), \(2, 3\), and one"):
                await j.push(2, 0, GRADS[0][0], replica=0)
            await j.push(0, 0, GRADS[0][0], replica=0)
            await j.push(1, 1, GRADS[0][1], replica=0)
            j.commit()
            for unit in range(2):
                assert (await j.gather(2, unit))[1].tobytes() == (FIRST[unit] - GRADS[0][unit]).tobytes()

    run(scenario())


@pytest.mark.parametrize("method", ["ReduceScatter", "Upload"])
@pytest.mark.parametrize("message", [b"\xff\xff\xff", b""])
def test_bytes_that_are_no_chunk(method: str, message: bytes) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            stream = j.raw().open(method, timeout_s=TIMEOUT_S)
            await stream.write(message)
            with pytest.raises(InvalidRequest):
                await stream.read()

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "words"), [({"step": 7}, "one step, one replica and one addend"), ({"numel": 0}, "0 elements")]
)
def test_chunks_that_follow_are_of_the_same_push(fields: dict[str, int], words: str) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            stream = j.raw().open("ReduceScatter", timeout_s=TIMEOUT_S)
            await stream.write(first_chunk(j, 0))
            await stream.write(first_chunk(j, 0, **{"offset": 256, **fields}))
            with pytest.raises(InvalidRequest, match=words):
                await stream.read()

    run(scenario())


@AS_ONE
def test_streams_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    stub_open = Stub.open_bulk

    async def counted(self: Stub, method: str) -> Any:
        opened[method] += 1
        return await stub_open(self, method)

    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            for number in range(5):
                for unit in (0, 1):
                    await j.push(0, unit, GRADS[0][unit])
                j.commit()
                assert (await j.gather(0, 0))[0] == number + 1
            with pytest.raises(Timeout, match="AllGather at .* did not answer within 0.05 s"):
                await j.gather(0, 1, min_version=6, timeout_s=0.05)
            for unit in (0, 1):
                await j.gather(0, unit)
            for epoch in (1, 0):
                for shell in j.shells:
                    shell.model().values.served = epoch
                if epoch == 1:
                    with pytest.raises(StepAborted):
                        await j.gather(0, 0)
            await j.gather(0, 0)

    monkeypatch.setattr(Stub, "open_bulk", counted)
    run(scenario())
    assert opened == {"ReduceScatter": 2, "Upload": 2, "AllGather": 6}  # one a server, and another after each error


def test_a_stream_is_of_one_unit() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            stream = j.raw().open("ReduceScatter", timeout_s=TIMEOUT_S)
            await stream.write(first_chunk(j, 0))
            await stream.write(first_chunk(j, 1))
            with pytest.raises(
                InvalidRequest, match="200 elements at 0 of unit 1 came; expected .* from 256 of unit 0"
            ):
                await stream.read()

    run(scenario())


def test_bad_uploads() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            for changes, words in (
                ({"dtype": common_pb2.D_TYPE_BF16, "payload": np.ones(256, np.uint16)}, "first values travel as f32"),
                ({"offset": 1}, "no chunk"),
                ({"payload": np.ones(9, np.float32), "numel": 9}, "have 9 elements"),
            ):
                stream = j.raw().open("Upload", timeout_s=TIMEOUT_S)
                await stream.write(first_chunk(j, 0, **changes))
                with pytest.raises(InvalidRequest, match=words):
                    await stream.read()
            await j.upload(FIRST)
            for unit in (0, 1):
                await j.push(0, unit, GRADS[0][unit])
            j.commit()
            with pytest.raises(Misuse, match="restore a checkpoint"):
                await j.groups[0].upload(0, FIRST[0], context=j.context(), timeout_s=TIMEOUT_S)

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unit": 3}, "no unit 3"),
        ({"begin": 1}, "no chunk of unit 0 begins at element 1"),
        ({"end": 2999}, "no chunk of unit 0 begins at element 2999"),
        ({"begin": 256, "end": 256}, "empty range"),
        ({"dtype": common_pb2.D_TYPE_I64}, "the wire dtype of parameters is 'i64'"),
        ({"dtype": 0}, "unset"),
    ],
)
def test_bad_gathers(changes: dict[str, Any], words: str) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            fields = {"context": j.context()(), "unit": 0, "begin": 0, "end": 3000, "dtype": common_pb2.D_TYPE_F32}
            stream = j.raw().open("AllGather", timeout_s=TIMEOUT_S)
            await stream.write(shard_pb2.AllGatherRequest(**{**fields, **changes}))
            with pytest.raises(InvalidRequest, match=words):
                await stream.read()

    run(scenario())


def test_the_clients_own_refusals() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            group = j.groups[0]
            call: dict[str, Any] = {"context": j.context(), "timeout_s": TIMEOUT_S}
            for out, words in (
                (np.zeros(2999, np.float32), "contiguous 1-D array of 3000"),
                (np.zeros((3000, 1), np.float32), "contiguous 1-D array of 3000"),
                (np.zeros(6000, np.float32)[::2], "contiguous 1-D array of 3000"),
                (np.zeros(3000, np.float64), "element type float64"),
            ):
                with pytest.raises(InvalidRequest, match=words):
                    await group.gather(0, out, min_version=0, **call)
            with pytest.raises(InvalidRequest, match="not a range of unit 0"):
                await group.gather(0, np.zeros(10, np.float32), min_version=0, begin=2995, end=3005, **call)
            with pytest.raises(InvalidRequest, match="gradients travel as f32 here"):
                await group.reduce_scatter(0, np.zeros(3000, np.uint16), step=1, replica=0, **call)
            with pytest.raises(InvalidRequest, match="they travel as float32"):
                await group.upload(0, np.zeros(3000, np.float64), **call)
            with pytest.raises(InvalidRequest, match="there is no unit 9"):
                await group.upload(9, np.zeros(3000, np.float32), **call)
            await group.close()
            with pytest.raises(Closed):
                await group.upload(0, np.zeros(3000, np.float32), **call)

    run(scenario())


def test_a_client_that_knows_no_members_times_out() -> None:
    async def scenario() -> None:
        from axon_ps.rpc.security import Security
        from axon_ps.shard.client.client import ShardGroup

        group = ShardGroup(Security())
        call: dict[str, Any] = {"context": common_pb2.CallContext, "timeout_s": 0.05, "min_version": 0}
        with pytest.raises(Timeout, match="layout did not become known"):
            await group.gather(0, np.zeros(1, np.float32), **call)
        group.set_spec(SPEC)
        group.set_placement(new_placement(SPEC.plan(1), [Server(0)], 1))
        with pytest.raises(Timeout, match="shard server 0 was not there"):
            await group.gather(0, np.zeros(SPEC.layout.units[0].numel, np.float32), **call)
        await group.close()

    run(scenario())


def test_stats_over_the_wire() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            operator = changed(j, incarnation="")
            values = await j.groups[0].stats(0, context=operator)
            assert values == j.shells[0].statistics() | j.shells[0].collectives.engine.statistics()
            assert values["master_bytes"] == 4 * 3900
            with pytest.raises(PermissionDenied):
                await j.groups[0].stats(0, context=changed(j, job="other"))

    run(scenario())


# ---------------------------------------------------------------------- checkpoints


async def save(j: Job, uri: str, order: int) -> None:
    """A snapshot order and what the coordinator makes of the answers."""
    version = j.version
    j.tell(SnapshotOrder(id=order, uri=uri, version=version))
    files = []
    for reports in j.reports:
        number, written, error = await reports.snapshots.get()
        assert (number, error) == (order, None)
        files += [FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f in written]
    engine = j.shells[0].engine
    assert engine.optimizer.updater is not None
    manifest = Manifest(
        job="j", version=version, layout=j.spec.layout, optimizer=engine.optimizer.updater.spec,
        num_servers=len(j.shells), options=j.spec.options, files=tuple(files),
    )  # fmt: skip
    await asyncio.to_thread(write_manifest, uri, manifest)


def test_snapshot_beside_training_and_restore(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(SPEC, servers=2) as j:
            await j.upload(FIRST)
            uri = str(tmp_path / "c")
            saving = None
            for number in range(3):
                for unit in (0, 1):
                    await j.push(0, unit, GRADS[0][unit])
                j.commit()
                if number == 0:
                    saving = asyncio.create_task(save(j, uri, 1))
                    await asyncio.sleep(0)  # the order is out before the next step is decided
            assert saving is not None
            await saving
            assert np.allclose((await j.gather(0, 0))[1], FIRST[0] - 3 * GRADS[0][0], atol=1e-5)
            waiting = asyncio.create_task(j.gather(0, 0, min_version=4))
            await until(lambda: all(x.model()._waiters._units for x in j.shells))
            j.tell(RestoreOrder(epoch=1, uri=uri, version=1))
            for reports in j.reports:
                while await reports.restores.get() != 1:  # the first answer was to the upload
                    pass
                assert reports.initialized_at[-1] == (1, 1)
            for asked in (waiting, j.gather(0, 0), j.gather(0, 0, min_version=1)):
                with pytest.raises(StepAborted, match="restored: the parameters are of epoch 1, no longer 0"):
                    await asked
            j.version, j.epoch = 1, 1
            version, got = await j.gather(0, 0)
            assert version == 1
            assert got.tobytes() == (FIRST[0] - GRADS[0][0]).tobytes()
            assert (await j.gather(0, 2))[1].tobytes() == FIRST[2].tobytes()

    run(scenario())


def test_who_has_heard_of_a_restore_first_waits_for_what_was_restored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            uri = str(tmp_path / "c")
            await save(j, uri, 0)
            for unit in (0, 1):
                await j.push(0, unit, GRADS[0][unit])
            j.commit()
            assert np.allclose((await j.gather(0, 0))[1], FIRST[0] - GRADS[0][0], atol=1e-5)
            j.version, j.epoch = 0, 1  # the worker has heard of it; the servers, at version 1 of before, have not
            asked = [asyncio.create_task(j.gather(0, unit)) for unit in (0, 2)]
            await until(lambda: any(x.model()._waiters._units for x in j.shells))
            j.tell(RestoreOrder(epoch=1, uri=uri, version=0))
            for task, first in zip(asked, (FIRST[0], FIRST[2]), strict=True):
                assert (await task)[1].tobytes() == first.tobytes()

    run(scenario())


def test_a_restore_that_cannot_be_leaves_what_was_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            assert await j.reports[0].restores.get() == 0
            j.tell(RestoreOrder(epoch=1, uri=str(tmp_path / "nowhere"), version=4))
            assert isinstance(await j.reports[0].restores.get(), CheckpointNotFound)
            j.epoch = 1  # as the coordinator tells workers
            assert (await j.gather(0, 0))[1].tobytes() == FIRST[0].tobytes()

    run(scenario())


@SENT
@pytest.mark.parametrize("damage", ["counts below zero", "a header that is none", "a moment too short"])
def test_a_restore_of_what_fits_its_hashes_alone_leaves_what_was_there(tmp_path: Path, damage: str) -> None:
    """Nothing is withdrawn before everything was read and checked."""

    def spoil(uri: str) -> None:
        manifest = read_manifest(uri)
        path = tmp_path / "c" / manifest.files[0].name
        tensors = {name: array.copy() for name, array in load_file(path).items()}
        if damage == "counts below zero":
            tensors["0.0.updates"][:] = -1
        elif damage == "a moment too short":
            tensors["0.0.exp_avg"] = np.zeros(1, np.float32)
        save_file(tensors, path)
        if damage == "a header that is none":
            path.write_bytes(path.read_bytes()[:8] + b"[" + path.read_bytes()[9:])
        content = path.read_bytes()
        entry = FileEntry(name=path.name, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
        write_manifest(uri, dataclasses.replace(manifest, files=(entry, *manifest.files[1:])))

    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            assert await j.reports[0].restores.get() == 0
            uri = str(tmp_path / "c")
            await save(j, uri, 0)
            await asyncio.to_thread(spoil, uri)
            j.tell(RestoreOrder(epoch=1, uri=uri, version=0))
            error = await j.reports[0].restores.get()
            assert isinstance(error, CheckpointCorrupt)
            assert str(tmp_path / "c" / "shard-") in str(error)
            j.epoch = 1
            for unit in (0, 1):
                assert (await j.gather(0, unit))[1].tobytes() == FIRST[unit].tobytes()

    run(scenario())


def test_replaced_values_that_come_before_the_order_wait_for_it() -> None:
    """The worker that brings them may hear of the order first, and one of an earlier epoch may be late."""

    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            for unit in (0, 1):
                await j.push(0, unit, GRADS[0][unit])
            j.commit()
            assert (await j.gather(0, 0))[0] == 1
            j.tell(JobState(version=1, epoch=1, initialized=False))
            replacing = asyncio.create_task(j.upload([2 * values for values in FIRST], epoch=1))
            await until(lambda: bool(j.shells[0].model()._waiters._units))
            assert not replacing.done()
            j.tell(RestoreOrder(epoch=1, uri=UPLOADED, version=1))
            await replacing
            await j.upload([3 * values for values in FIRST], epoch=0)  # acknowledged and dropped
            assert j.reports[0].initialized_at == [(0, 0), (1, 1)]
            for unit, values in enumerate(FIRST):
                assert (await j.gather(0, unit))[1].tobytes() == (2 * values).tobytes()

    run(scenario())


def test_late_first_values_do_not_get_into_what_is_being_replaced() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            j.tell(RestoreOrder(epoch=1, uri=UPLOADED, version=0))
            late = [np.full_like(values, 9) for values in FIRST]
            await j.upload(late, epoch=0)
            await j.upload(FIRST[:2], epoch=1)
            await j.upload(late, epoch=0)
            assert j.reports[0].initialized_at == [(0, 0)]
            await j.upload(FIRST, epoch=1)
            for unit, values in enumerate(FIRST):
                assert (await j.gather(0, unit))[1].tobytes() == values.tobytes()

    run(scenario())


def test_a_snapshot_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            await j.upload(FIRST)
            (tmp_path / "file").write_bytes(b"")
            j.tell(SnapshotOrder(id=3, uri=str(tmp_path / "file"), version=0))
            for unit in (0, 1):
                await j.push(0, unit, GRADS[0][unit])
            j.commit()
            assert (await j.gather(0, 0))[0] == 1
            number, files, error = await j.reports[0].snapshots.get()
            assert (number, files) == (3, ())
            assert "cannot be written" in str(error)

    run(scenario())
