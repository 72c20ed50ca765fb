"""The coordinator over real gRPC on loopback: sessions, pushes, leases, barriers, keys, registration, checkpoints.

Tests of `coordinator/client/operator.py` and `coordinator/server/registering.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.client.session import (
    JobState,
    RestoreOrder,
    SessionLost,
    SessionRestored,
    SnapshotFile,
    SnapshotOrder,
)
from axon_ps.coordinator.messages import join_to_proto
from axon_ps.coordinator.server.shell import QUEUE_EVENTS, MemberSession
from axon_ps.errors import (
    AxonError,
    Broken,
    Busy,
    CheckpointNotFound,
    Closed,
    ConfigurationError,
    GenerationChanged,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    MemberLost,
    Misuse,
    PermissionDenied,
    StorageFull,
    Timeout,
    Unreachable,
)
from axon_ps.rpc.channels import connect
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.stream import Stream
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.storage.manifest import Manifest, read_manifest
from axon_ps.types import Decision, DType, Grouping, Membership, Outcome, Role
from axon_ps.wire.events import UPLOADED, JoinRequest, Vote
from axon_ps.wire.v1 import common_pb2, membership_pb2, session_pb2
from coordinator_harness import OPTIMIZER, SOON_S, SPEC, Coordinator, Member, coordinator, ready
from deadlines import HANG_S
from shard_files import put_files

Test = Callable[[Coordinator], Awaitable[None]]


def run(tmp_path: Path, test: Test, **config: Any) -> None:
    async def main() -> None:
        async with coordinator(tmp_path, **config) as c:
            await test(c)

    asyncio.run(main())


class RawSession:
    """A session that sends only what the test sends: no heartbeats, no reconnects."""

    def __init__(self, c: Coordinator) -> None:
        self._channel = connect(c.address, Security())
        self.stream: Stream = Stub(self._channel, SERVICE).open("Session")

    async def join(self, role: Role = Role.WORKER, incarnation: str = "f" * 32) -> session_pb2.SessionEvent:
        request = JoinRequest(job="job", incarnation=incarnation, node="raw", address="127.0.0.1:1")
        await self.stream.write(join_to_proto(request, role))
        event: session_pb2.SessionEvent = await self.stream.read()
        return event

    async def error(self) -> AxonError:
        """What ends the session."""
        async with asyncio.timeout(SOON_S):
            try:
                while await self.stream.read() is not grpc.aio.EOF:
                    pass
            except AxonError as error:
                return error
        pytest.fail("the session ended without an error")

    async def close(self) -> None:
        self.stream.cancel()
        await self._channel.close()


def state_of(member: Member) -> JobState | None:
    """What a member knows of the first model, but for where its slices are."""
    state = member.job_state
    return None if state is None else dataclasses.replace(state, placement=None)


# ---------------------------------------------------------------------- sessions


def test_members_join_and_get_the_membership(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        membership = await workers[0].until_complete()
        assert membership == workers[1].membership == shard.membership
        assert [w.incarnation for w in membership.workers] == [w.incarnation for w in workers]
        assert [(w.rank, w.world_size, w.num_shards, w.lease_s) for w in workers] == [(0, 2, 1, 5.0), (1, 2, 1, 5.0)]
        assert shard.job_state is not None
        assert shard.job_state.spec == SPEC
        assert state_of(workers[0]) == JobState(name="model 0", initialized=True)
        context = workers[0].context()
        assert (context.job, context.generation, context.incarnation) == ("job", 3, workers[0].incarnation)

    run(tmp_path, test)


def test_a_reset_is_pushed_to_the_others_within_milliseconds(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        shard = await c.join(Role.SHARD)
        worker = await c.join(Role.WORKER)
        raw = RawSession(c)
        await raw.join()
        await worker.until_complete()
        received, began = len(worker.received(Membership)), time.monotonic()
        await raw.close()
        membership = await worker.wait_for(Membership, after=received)
        took_s = time.monotonic() - began
        assert not membership.complete
        assert (await worker.wait_for(Decision)).reason == "worker 1 (node raw) was lost: its connection broke"
        assert took_s < 1.0, "the promise; it takes about 3 ms"
        await shard.wait_for(Decision)

    run(tmp_path, test)


def test_a_silent_member_is_lost_after_its_lease_and_others_are_not(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        worker = await c.join(Role.WORKER)
        await c.join(Role.SHARD)
        raw = RawSession(c)
        began = time.monotonic()
        await raw.join()
        error = await raw.error()
        took_s = time.monotonic() - began
        assert isinstance(error, MemberLost)
        assert "worker 1 (node raw) was silent for 0.6 s; it is no member any more" in str(error)
        assert 0.5 < took_s < HANG_S / 2
        await worker.until(lambda: worker.membership is not None and len(worker.membership.workers) == 1)
        assert not worker.received(SessionLost)
        await raw.close()

    run(tmp_path, test, lease_s=0.6)


class SuspendedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can jump, as it does when the process is suspended."""

    suspended_s = 0.0

    def time(self) -> float:
        return super().time() + self.suspended_s


@pytest.mark.parametrize("suspended_s", [0.5, 0.9, 60.0])
def test_suspending_the_whole_process_costs_no_member_its_lease(tmp_path: Path, suspended_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SuspendedLoop)
        async with coordinator(tmp_path, lease_s=0.6) as c:
            workers, shard = await c.assembled()
            membership = await workers[0].until_complete()
            for moment in range(20):  # between two heartbeats, which are 0.2 s apart
                await asyncio.sleep(0.01 * moment)
                loop.suspended_s += suspended_s
            await asyncio.sleep(0.2)
            assert not any(member.received(SessionLost) for member in (*workers, shard))
            assert workers[0].membership == membership

    with asyncio.Runner(loop_factory=SuspendedLoop) as runner:
        runner.run(main())


def test_leaving_is_published_at_once_and_is_no_error(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, _ = await c.assembled()
        await workers[1].close("done")
        assert (await workers[0].wait_for(Decision)).reason == "worker 1 (node node-a) left: done"
        assert not workers[1].received(SessionLost)
        await workers[1].close()
        with pytest.raises(Closed):
            await workers[1].kv_get("k")

    run(tmp_path, test)


def test_a_refused_join_names_the_reason_at_once(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        first = await c.join(Role.WORKER, requested_rank=0, node="host-1")
        with pytest.raises(PermissionDenied, match="runs job 'job', not 'other'"):
            await c.join(Role.WORKER, job="other")
        with pytest.raises(InvalidRequest, match=rf"rank 0 is held by worker 0 \(node host-1\).*{first.incarnation}"):
            await c.join(Role.WORKER, requested_rank=0)
        with pytest.raises(InvalidRequest, match="was started for 3 workers; the job starts with 2"):
            await c.join(Role.WORKER, world_size=3)
        with pytest.raises(InvalidRequest, match="not 32 hex digits"):
            await c.join(Role.WORKER, incarnation="x")
        with pytest.raises(InvalidRequest, match="joins without an address"):
            await c.join(Role.SHARD, listen_address="")
        with pytest.raises(Misuse, match="started before"):
            await first.start(1.0)

    run(tmp_path, test)


def test_who_finds_no_place_waits_for_one(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        shard = await c.join(Role.SHARD)
        spare = c.member(Role.SHARD)
        waiting = asyncio.create_task(spare.start(SOON_S))
        late = c.member(Role.SHARD)
        with pytest.raises(Busy, match="has all its 1 shard servers"):
            await late.start(0.2)
        await shard.close()
        await waiting
        assert spare.rank == 0

    run(tmp_path, test)


def test_an_unreachable_coordinator_is_an_error_after_the_time_out() -> None:
    async def main() -> None:
        member = Member("127.0.0.1:9", Role.WORKER)
        with pytest.raises(Unreachable, match=r"nobody answers at 127\.0\.0\.1:9"):
            await member.start(0.3)
        await member.close()

    asyncio.run(main())


def test_the_token(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        with pytest.raises(PermissionDenied, match="token, and none was given"):
            await c.join(Role.WORKER)
        with pytest.raises(PermissionDenied, match="token"):
            await c.join(Role.WORKER, security=Security(token="wrong"))
        await c.join(Role.WORKER, security=Security(token="right"))
        with pytest.raises(PermissionDenied):
            await c.operator(security=Security()).status(SOON_S)
        assert len((await c.operator().status(SOON_S)).membership.workers) == 1

    run(tmp_path, test, security=Security(token="right"))


def test_what_is_no_protocol_is_refused(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        raw = RawSession(c)
        await raw.stream.write(session_pb2.SessionRequest(heartbeat=membership_pb2.Heartbeat()))
        assert "begins with heartbeat; its first message is a Join" in str(await raw.error())
        await raw.close()
        worker = await c.join(Role.WORKER)
        for message, words in (
            (session_pb2.SessionRequest(), "a session's message is empty"),
            (session_pb2.SessionRequest(ready=session_pb2.Ready()), "only a shard may"),
            (
                join_to_proto(JoinRequest(job="job", incarnation="e" * 32, node="n"), Role.WORKER),
                "a session's message is join",
            ),
        ):
            raw = RawSession(c)
            await raw.join()
            await raw.stream.write(message)
            error = await raw.error()
            assert isinstance(error, InvalidRequest)
            assert words in str(error)
            await raw.close()
            await worker.until(lambda: worker.membership is not None and len(worker.membership.workers) == 1)

    run(tmp_path, test)


def test_a_member_that_does_not_read_loses_its_session(tmp_path: Path) -> None:
    """What it has not read waits in its queue, and only so much of it."""

    async def test(c: Coordinator) -> None:
        session = MemberSession(1)
        message = session_pb2.SessionEvent()
        assert all(session.send(message) for _ in range(QUEUE_EVENTS))
        assert not session.send(message)
        session.close(Broken("too slow"))
        assert session.send(message), "what is over takes anything and keeps nothing"
        with pytest.raises(Broken, match="too slow"):
            await anext(session.events())

    run(tmp_path, test)


# ---------------------------------------------------------------------- steps


def test_votes_and_sums_become_decisions(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        generation = shard.context().generation
        for step in (1, 2, 3):
            shard.ready(ready(shard, generation, step, 16.0))
            for w in workers:
                w.vote(Vote(generation=generation, step=step, max_norm=2.0, hyper=({"lr": 0.1 / step},)))
            for p in (*workers, shard):
                decision = await p.wait_for(Decision, after=step - 1)
                assert (decision.step, decision.version, decision.outcome) == (step, step, Outcome.COMMIT)
                assert decision.grad_norm == 4.0
                assert decision.clip_factor == pytest.approx(0.5, rel=1e-6)
                assert decision.hyper[0]["lr"] == pytest.approx(0.1 / step)
        status = await c.operator().status(SOON_S)
        assert (status.version, status.step, status.counters["steps_committed"]) == (3, 4, 3)

    run(tmp_path, test)


def test_a_vote_from_another_thread(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        generation = shard.context().generation
        await asyncio.to_thread(shard.ready, ready(shard, generation, 1, 1.0))
        for w in workers:
            await asyncio.to_thread(w.vote, Vote(generation=generation, step=1))
        assert (await workers[0].wait_for(Decision)).version == 1

    run(tmp_path, test)


def test_a_vote_for_a_generation_that_is_over_is_answered_by_the_client(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        worker = await c.join(Role.WORKER)
        await c.join(Role.SHARD)
        await worker.until(lambda: worker.context().generation == 2)
        worker.vote(Vote(generation=1, step=1))
        decision = await worker.wait_for(Decision)
        assert (decision.step, decision.outcome) == (1, Outcome.ABORT)
        assert decision.reason == "generation 1 ended before the step was decided"

    run(tmp_path, test)


# ---------------------------------------------------------------------- barriers and keys


def test_a_barrier_opens_for_all_and_names_who_is_missing(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        generations = await asyncio.gather(*(w.barrier("b", timeout_s=SOON_S) for w in workers))
        assert generations == [3, 3]
        with pytest.raises(Timeout, match="barrier 'b' still waits for rank 1 after 0"):
            await workers[0].barrier("b", timeout_s=0.1)
        with pytest.raises(InvalidRequest, match="which is for rank 1"):
            await workers[0].barrier("b", [1], timeout_s=SOON_S)
        waiting = asyncio.create_task(workers[0].barrier("pair", [0, 1]))
        await _until_pending(c, "barrier 'pair' still waits for rank 1")
        await workers[1].close()
        with pytest.raises(MemberLost, match="barrier 'pair' needs rank 1: worker 1"):
            await waiting
        assert shard.rank == 0

    run(tmp_path, test)


async def _until_pending(c: Coordinator, words: str) -> None:
    """Wait until the coordinator says that it waits for something."""
    operator = c.operator()
    async with asyncio.timeout(SOON_S):
        while words not in (await operator.status(SOON_S)).pending:
            pass


def test_a_caller_that_gives_up_has_not_arrived(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, _ = await c.assembled()
        waiting = asyncio.create_task(workers[0].barrier("b"))
        await _until_pending(c, "barrier 'b' still waits for rank 1")
        waiting.cancel()
        operator = c.operator()
        async with asyncio.timeout(SOON_S):
            while (await operator.status(SOON_S)).pending:
                pass

    run(tmp_path, test)


def test_keys(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        a, b, operator = await c.join(Role.WORKER), await c.join(Role.WORKER), c.operator()
        assert await a.kv_get("k") is None
        waiting = asyncio.create_task(b.kv_wait("k", SOON_S))
        await a.kv_put("k", b"\x00v")
        assert await waiting == b"\x00v"
        assert await operator.kv_get("k") == b"\x00v"
        assert sorted(await asyncio.gather(*(x.kv_add("n", 1) for x in (a, b) * 5))) == list(range(1, 11))
        assert await a.kv_compare_and_set("c", b"", b"1")
        assert not await b.kv_compare_and_set("c", b"", b"2")
        assert await b.kv_swap("c", b"1", b"2") == (True, b"2")
        assert await b.kv_swap("c", b"1", b"3") == (False, b"2")
        assert await a.kv_delete("c")
        assert not await a.kv_delete("c")
        with pytest.raises(Timeout, match="nobody stored key 'never' within 0"):
            await a.kv_wait("never", 0.1)
        with pytest.raises(InvalidRequest, match="a key has 1 to 512"):
            await a.kv_put("", b"")

    run(tmp_path, test)


# ---------------------------------------------------------------------- registration and checkpoints


def test_another_layout_is_refused_naming_rank_and_difference(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        await c.join(Role.SHARD)
        a, b = await c.join(Role.WORKER), await c.join(Role.WORKER)
        first = await a.register(SPEC, OPTIMIZER)
        assert (first.first, first.upload, first.initialized, first.version) == (True, True, False, 0)
        other = JobSpec(layout=Layout(units=(build_unit("block", [("block.weight", (64, 128), DType.F32)]),)))
        words = (
            r"worker 1 registers another model .*'block.weight' has shape \(64, 128\) here and \(128, 128\) in the job"
        )
        with pytest.raises(LayoutMismatch, match=words):
            await b.register(other)
        second = await b.register(SPEC, OPTIMIZER)
        assert (second.first, second.upload) == (False, False)

    run(tmp_path, test)


def test_a_registration_that_renumbers_replicas_returns_when_the_client_knows(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        await c.join(Role.SHARD)
        a, _ = await c.join(Role.WORKER), await c.join(Role.WORKER)
        reply = await a.register(JobSpec(layout=SPEC.layout, grouping=Grouping(by_node=True)))
        assert a.membership is not None
        assert a.membership.generation == reply.generation
        assert a.membership.num_replicas == 1

    run(tmp_path, test)


CHECKPOINT = Manifest(
    job="job", version=1, layout=SPEC.layout, optimizer=None, num_servers=1, options=SPEC.options, files=()
)


def answer_orders(shard: Member, *, error: AxonError | None = None) -> Callable[[], None]:
    """A shard server's part in checkpoints, whose parameters are 0. Returns what looks for orders not yet answered."""
    answered = [0, 0]

    def answer() -> None:
        for order in shard.received(SnapshotOrder)[answered[0] :]:
            answered[0] += 1
            if error is not None:
                shard.snapshot_report(order.id, error=error)
            else:
                (file,) = put_files(order.uri, CHECKPOINT, str(order.id)).files
                shard.snapshot_report(order.id, (SnapshotFile(name=file.name, sha256=file.sha256, bytes=file.bytes),))
        for restore in shard.received(RestoreOrder)[answered[1] :]:
            answered[1] += 1
            if error is not None:
                shard.restore_report(restore.epoch, error)
            else:
                shard.initialized(version=restore.version, epoch=restore.epoch)

    return answer


async def answered(shard: Member, call: Awaitable[Any], **options: Any) -> Any:
    """The result of a call that a shard server answers orders for."""
    answer = answer_orders(shard, **options)
    task = asyncio.ensure_future(call)
    orders = len(shard.received(SnapshotOrder)) + len(shard.received(RestoreOrder))
    await shard.until(
        lambda: len(shard.received(SnapshotOrder)) + len(shard.received(RestoreOrder)) > orders or task.done()
    )
    answer()
    async with asyncio.timeout(SOON_S):
        return await task


def test_saving_and_restoring(tmp_path: Path) -> None:
    uri = str(tmp_path / "checkpoints" / "v1")

    async def test(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        operator = c.operator()
        shard.ready(ready(shard, 3, 1, 1.0))
        for w in workers:
            w.vote(Vote(generation=3, step=1))
        await workers[0].wait_for(Decision)
        with pytest.raises(InvalidRequest, match="extra_json is a JSON list; it must be an object"):
            await workers[0].save_checkpoint(uri, "[]")
        with pytest.raises(StorageFull, match="shard server 0: the disk is full"):
            await answered(shard, workers[0].save_checkpoint(uri), error=StorageFull("the disk is full"))
        with pytest.raises(CheckpointNotFound):
            await operator.restore_checkpoint(uri, SOON_S)
        saved = await answered(shard, workers[0].save_checkpoint(uri, json.dumps({"epoch": 3})))
        assert (saved.uri, saved.version, json.loads(saved.extra_json)) == (uri, 1, {"epoch": 3})
        assert saved.bytes == sum(file.bytes for file in read_manifest(uri).files)
        orders = len(shard.received(SnapshotOrder))
        both = asyncio.gather(*(w.save_checkpoint(uri, json.dumps({"epoch": 3})) for w in workers))
        assert await answered(shard, both) == [saved] * len(workers)
        assert len(shard.received(SnapshotOrder)) == orders + 1
        manifest = read_manifest(uri)
        assert (manifest.job, manifest.version, manifest.layout, manifest.num_servers) == ("job", 1, SPEC.layout, 1)

        restored = await answered(shard, operator.restore_checkpoint(os.path.dirname(uri), SOON_S))
        assert (restored.version, json.loads(restored.extra_json)) == (1, {"epoch": 3})
        assert restored.uri.endswith("v1")
        await workers[0].until(
            lambda: state_of(workers[0]) == JobState(name="model 0", initialized=True, version=1, epoch=1)
        )
        assert (await workers[0].wait_for(Decision, after=1)).outcome is Outcome.ABORT
        await workers[0].until(lambda: workers[0].context().generation == 4)

    run(tmp_path, test)


def test_a_job_that_resumes_is_restored_by_the_first_registration(tmp_path: Path) -> None:
    uri = str(tmp_path / "checkpoint")

    async def first(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        await answered(shard, workers[0].save_checkpoint(uri))

    async def second(c: Coordinator) -> None:
        shard, worker = await c.join(Role.SHARD), await c.join(Role.WORKER)
        wrong = JobSpec(layout=Layout(units=(build_unit("block", [("other.weight", (128, 128), DType.F32)]),)))
        with pytest.raises(InvalidRequest, match=r"the checkpoint has no parameter 'other.weight'"):
            await worker.register(wrong)
        reply = await worker.register(SPEC)
        assert (reply.first, reply.upload, reply.initialized) == (True, False, False)
        order = await shard.wait_for(RestoreOrder)
        assert (order.epoch, order.version) == (1, 0)
        shard.initialized(version=0, epoch=1)
        await worker.until(lambda: state_of(worker) == JobState(name="model 0", initialized=True, version=0, epoch=1))

    for name, test, resume in (("a", first, ""), ("b", second, uri)):
        (tmp_path / name).mkdir()
        run(tmp_path / name, test, resume=resume)


def test_a_coordinator_that_resumes_from_nothing_does_not_begin(tmp_path: Path) -> None:
    async def nobody(c: Coordinator) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(CheckpointNotFound, match="there is no such directory"):
        run(tmp_path, nobody, resume=str(tmp_path / "nowhere"))


def test_what_cannot_be_resumed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = str(tmp_path / "checkpoint")

    async def first(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        await answered(shard, workers[0].save_checkpoint(uri))

    async def no_model(c: Coordinator) -> None:
        await c.join(Role.WORKER)

    run(tmp_path, first)
    run(tmp_path, no_model, resume=uri)
    assert f"the job goes on from the coordinator's state, and not from {uri}" in caplog.text
    (tmp_path / "other").mkdir()
    run(tmp_path / "other", no_model, resume=uri)
    assert f"nothing was resumed from {uri}" in caplog.text


# ---------------------------------------------------------------------- when the coordinator goes


def test_members_come_back_to_a_restarted_coordinator_and_no_step_is_lost(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, shard = await c.assembled()
        generation = shard.context().generation
        shard.ready(ready(shard, generation, 1, 1.0))
        for w in workers:
            w.vote(Vote(generation=generation, step=1))
        await workers[0].wait_for(Decision)
        await workers[0].kv_put("k", b"v")
        shard.ready(ready(shard, generation, 2, 1.0))
        workers[0].vote(Vote(generation=generation, step=2))
        await _until_pending(c, "votes of worker 1")
        await c.stop()
        for p in (*workers, shard):
            assert not (await p.wait_for(SessionLost)).final
        reading = asyncio.create_task(workers[0].kv_get("k"))  # waits for the session
        waiting = asyncio.create_task(workers[1].barrier("b", timeout_s=SOON_S))
        await c.start()
        for p in (*workers, shard):
            await p.wait_for(SessionRestored)
        assert await reading == b"v"
        workers[1].vote(Vote(generation=generation, step=2))
        for p in (*workers, shard):
            decision = await p.wait_for(Decision, after=1)
            assert (decision.step, decision.version, decision.outcome) == (2, 2, Outcome.COMMIT)
            assert p.context().generation == generation
        assert await workers[0].barrier("b", timeout_s=SOON_S) == generation
        assert await waiting == generation
        assert [len(p.received(Membership)) for p in workers] == [2, 1], "nobody received again what it had"

    run(tmp_path, test)


def test_a_member_that_does_not_reconnect_is_lost_after_one_lease(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        worker = await c.join(Role.WORKER)
        raw = RawSession(c)
        await raw.join()
        await c.stop()
        await raw.close()
        await c.start()
        await worker.wait_for(SessionRestored)
        assert worker.membership is not None
        assert len(worker.membership.workers) == 2
        await worker.until(lambda: worker.membership is not None and len(worker.membership.workers) == 1)

    run(tmp_path, test, lease_s=0.6)


def test_a_coordinator_that_lost_its_state_ends_the_session_for_good(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, _ = await c.assembled()
        await c.stop()
        os.remove(c.path)
        await c.start()
        lost = await workers[0].until(lambda: [e for e in workers[0].received(SessionLost) if e.final])
        assert isinstance(lost[0].error, MemberLost)
        assert "without the state it had" in str(lost[0].error)
        with pytest.raises(MemberLost):
            await workers[0].kv_get("k")
        assert (await c.operator().status(SOON_S)).membership.generation == 0, "it was no member of another job's"

    run(tmp_path, test, min_workers=1)


def test_a_client_gives_up_after_its_time(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        worker = await c.join(Role.WORKER, reconnect_timeout_s=0.3)
        await c.stop()
        lost = await worker.until(lambda: [e for e in worker.received(SessionLost) if e.final])
        assert isinstance(lost[0].error, Broken)
        with pytest.raises(Broken):
            await worker.kv_get("k")
        with pytest.raises(Unreachable):
            await c.operator().status(SOON_S)

    run(tmp_path, test)


def test_who_waits_for_a_membership_learns_that_the_session_is_over(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        worker = await c.join(Role.WORKER, reconnect_timeout_s=0.3)
        waits = asyncio.create_task(worker._reached(99, Deadline(None)))
        await asyncio.sleep(0)
        await c.stop()
        with pytest.raises(Broken):
            await asyncio.wait_for(waits, SOON_S)

    run(tmp_path, test)


def test_an_exception_of_the_listener_ends_the_session_for_good(tmp_path: Path, caplog: Any) -> None:
    async def test(c: Coordinator) -> None:
        worker = await c.join(Role.WORKER)
        broken = asyncio.Event()

        def fail(event: object) -> None:
            if isinstance(event, SessionLost):
                broken.set()
            else:
                raise ZeroDivisionError

        worker._on_event = fail
        await c.join(Role.SHARD)
        await asyncio.wait_for(broken.wait(), SOON_S)
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            await worker.kv_get("k")

    run(tmp_path, test)


def test_another_coordinator_cannot_take_the_port_or_the_state(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        second = Coordinator(tmp_path)
        with pytest.raises(ConfigurationError, match="in use by another coordinator"):
            await second.start()
        (tmp_path / "other").mkdir()
        third = Coordinator(tmp_path / "other")
        third.port = c.port
        with pytest.raises(ConfigurationError, match="in use by another process"):
            await third.start()

    run(tmp_path, test)


_KILLABLE = """
import asyncio, sys
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server.server import serve
from axon_ps.storage.state_store import SqliteStateStore
from axon_ps.rpc.security import Security

config = CoordinatorConfig(job="job", world_size=2, num_shards=1)
with SqliteStateStore(sys.argv[1]) as store:
    ready = lambda port: print(port, flush=True)
    asyncio.run(serve(config, "127.0.0.1", int(sys.argv[2]), Security(), store, ready, asyncio.Event()))
"""


def test_a_coordinator_that_is_killed_comes_back_where_it_was(tmp_path: Path) -> None:
    async def spawn(port: int) -> tuple[asyncio.subprocess.Process, int]:
        arguments = ["-c", _KILLABLE, str(tmp_path / "state.db"), str(port)]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        return process, int(await process.stdout.readline())

    async def main() -> None:
        c = Coordinator(tmp_path)
        process, c.port = await spawn(0)
        try:
            workers, shard = await c.assembled()
            generation = shard.context().generation
            for step in (1, 2):
                shard.ready(ready(shard, generation, step, 1.0))
                for w in workers:
                    w.vote(Vote(generation=generation, step=step))
                await workers[0].wait_for(Decision, after=step - 1)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            shard.ready(ready(shard, generation, 3, 1.0))
            for w in workers:
                await w.wait_for(SessionLost)
                w.vote(Vote(generation=generation, step=3))
            process, _ = await spawn(c.port)
            for p in (*workers, shard):
                decision = await p.wait_for(Decision, after=2)
                assert (decision.step, decision.version, decision.outcome) == (3, 3, Outcome.COMMIT)
                assert p.context().generation == generation
        finally:
            await c.close()
            process.kill()
            await process.wait()

    asyncio.run(main())


TAKES_AWAY = {
    "Release": [{}, {"model": 0}, {"name": "model 0"}, {"model": 1, "name": ""}],
    "Drain": [{}],
    "RestoreCheckpoint": [{}, {"uri": UPLOADED}, {"uri": UPLOADED, "models": ["model 0", "b"]}],
    "Revoke": [{}, {"reason": "none"}],
}
"""Calls that take something away, and requests that leave out what."""


@pytest.mark.parametrize("rpc", TAKES_AWAY)
def test_what_takes_something_away_names_it_and_the_job(tmp_path: Path, rpc: str) -> None:
    """No default value of a message destroys anything, so a client of another version, or a bug, does not."""
    method = SERVICE.methods_by_name[rpc]
    kind = GetMessageClass(method.input_type)
    full = {"model": 0, "name": "model 0", "rank": 0, "uri": str(tmp_path / "run"), "target": "shard/0"}

    async def test(c: Coordinator) -> None:
        _, shard = await c.assembled()
        operator = c.operator(job="job")
        stub = await operator._connected(Deadline(SOON_S))
        before = await operator.status()
        known = {field.name for field in method.input_type.fields}
        named = {name: value for name, value in full.items() if name in known}
        for job, given in [*(("job", given) for given in TAKES_AWAY[rpc]), ("", named)]:
            request = kind(context=common_pb2.CallContext(job=job), **given)
            with pytest.raises(InvalidRequest) as refused:
                await stub.call(rpc, request, timeout_s=SOON_S)
            assert job or "it must name the job; this is 'job'" in str(refused.value)
        after = await operator.status()
        assert (after.models, after.membership, after.draining) == (before.models, before.membership, before.draining)
        assert not shard.received(RestoreOrder)

    run(tmp_path, test)


WHO_MAY = {
    "Barrier": "member",
    "Register": "member",
    "KV": "member or operator",
    "Release": "member or operator",
    "SaveCheckpoint": "member or operator",
    "RestoreCheckpoint": "member or operator",
    "Drain": "member or operator",
    "Revoke": "member or operator",
    "Describe": "anybody",
    "Status": "anybody",
    "Logs": "anybody",
    "Trace": "anybody",
}
"""By call of one message, who of those whose role may; roles are in `access`."""


def test_who_of_those_whose_role_may_is_a_member(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        workers, _ = await c.assembled()
        stub = await c.operator()._connected(Deadline(SOON_S))
        unary = [m for m in SERVICE.methods if not m.client_streaming]
        assert {m.name for m in unary} == set(WHO_MAY)
        member, stranger = workers[0].incarnation, "0" * 32
        values = {
            "model": 0,
            "name": "model 1",
            "rank": 1,
            "uri": str(tmp_path / "no"),
            "target": "shard/9",
            "op": 2,
            "extra_json": "no",
        }
        for method in unary:
            known = {f.name for f in method.input_type.fields if f.name in values and not f.message_type}
            given = {name: values[name] for name in known} if method.name not in ("Describe", "Trace") else {}

            async def refused(job: str, incarnation: str, method: Any = method, given: Any = given) -> type[AxonError]:
                context = common_pb2.CallContext(job=job, incarnation=incarnation)
                request = GetMessageClass(method.input_type)(context=context, **given)
                try:
                    await stub.call(method.name, request, timeout_s=SOON_S)
                except AxonError as error:
                    return type(error)
                return AxonError

            who = WHO_MAY[method.name]
            assert await refused("other", "") is PermissionDenied, method.name
            assert await refused("other", member) is PermissionDenied, method.name
            turned_away = (PermissionDenied, GenerationChanged)
            assert (await refused("job", stranger) in turned_away) == (who != "anybody"), method.name
            assert (await refused("job", "") in turned_away) == (who == "member"), method.name
            if method.name not in ("Barrier", "Drain"):  # it would wait; only an operator, or the server itself
                assert await refused("job", member) not in turned_away, method.name

    run(tmp_path, test)


def test_generation_changed_is_what_a_stranger_gets(tmp_path: Path) -> None:
    async def test(c: Coordinator) -> None:
        await c.join(Role.WORKER)
        stranger = c.operator()
        stranger.context = lambda: Member(c.address, Role.WORKER).context()  # type: ignore[method-assign]
        stranger._job = "job"
        with pytest.raises(GenerationChanged, match="is no member of generation 1"):
            await stranger.kv_get("k")

    run(tmp_path, test)
