"""The shell: records are written before anything is published; a full disk delays that, a broken one ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.restart.knowledge import Knowledge
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.messages import event_from_proto
from axon_ps.coordinator.server import shell as shell_module
from axon_ps.coordinator.server.shell import MemberSession, Shell, StateLearned
from axon_ps.errors import Broken, Busy, InternalError, InvalidRequest, StorageFull
from axon_ps.storage.state_store import MemoryStateStore, Record
from axon_ps.types import Membership, Role
from axon_ps.wire.events import JoinRequest
from axon_ps.wire.v1 import session_pb2

OPERATOR = Caller(job="job")


def test_a_session_that_ends_for_two_reasons_at_once_is_lost_once() -> None:
    async def main() -> None:
        state = CoordinatorState(CoordinatorConfig(job="job", world_size=2, num_shards=1), 0.0)
        shell, deaf = Shell(state, MemoryStateStore()), []

        async def handle(rank: int) -> None:
            session = shell.open_session(send_soon=lambda _event: rank not in deaf)
            request = JoinRequest(job="job", incarnation=f"{rank}" * 32, node="n")
            try:
                shell.perform(state.join(session.number, Role.WORKER, request, shell.now()))
                async for _ in session.events():
                    pass
            finally:
                shell.close_session(session)

        one, other = asyncio.ensure_future(handle(0)), asyncio.ensure_future(handle(1))
        while len(state.membership.workers) < 2:
            await asyncio.sleep(0)
        deaf.append(0)
        other.cancel()  # of which the first cannot be told: its stream is closed, and its handler ends, too
        await asyncio.gather(one, other, return_exceptions=True)
        while state.membership.workers:
            await asyncio.sleep(0)
        assert not shell._sessions
        third = asyncio.ensure_future(handle(2))  # as a new one of the same rank finds it
        while [m.incarnation for m in state.membership.workers] != ["2" * 32]:
            await asyncio.sleep(0)
        await shell.close()
        await asyncio.gather(third, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 10.0))


class SlowStore(MemoryStateStore):
    """A store whose writes wait until they are let through, or fail."""

    blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.errors: list[Exception] = []

    def apply(self, records: Sequence[Record]) -> None:
        self.started.release()
        assert self.gate.acquire(timeout=10.0)
        if self.errors:
            raise self.errors.pop(0)
        self.batches.append(len(records))
        super().apply(records)


def run(test: Callable[[Shell, SlowStore], Awaitable[None]]) -> None:
    async def main() -> None:
        store = SlowStore()
        state = CoordinatorState(CoordinatorConfig(job="job", world_size=1, num_shards=4), 0.0)
        shell = Shell(state, store, store_retry_s=0.0)
        try:
            await asyncio.wait_for(test(shell, store), 10.0)
        finally:
            store.gate.release(1000)
            await shell.close()

    asyncio.run(main())


async def started(store: SlowStore) -> None:
    """Wait until a write is under way."""
    await asyncio.to_thread(store.started.acquire, timeout=10.0)


def put(shell: Shell, key: str) -> asyncio.Task[Any]:
    def event(call: int) -> Any:
        shell.state.kv(OPERATOR).put(call, key, b"v")
        return shell.state.flush()

    return asyncio.ensure_future(shell.call(event))


def join(shell: Shell) -> MemberSession:
    session = shell.open_session()
    request = JoinRequest(job="job", incarnation="a" * 32, node="n")
    shell.perform(shell.state.join(session.number, Role.WORKER, request, shell.now()))
    return session


def test_what_a_server_tells_is_learned_although_its_stream_ends() -> None:
    """Else the coordinator would decide nothing any more, and not end either."""

    async def test(shell: Shell, store: SlowStore) -> None:
        store.gate.release()
        await put(shell, "stored")
        await started(store)
        newer = dataclasses.replace(shell.state.membership, generation=7, state_id=shell.state.id)
        telling = asyncio.ensure_future(shell.learn(Knowledge(membership=newer, revoked={}), "generation 7"))
        await started(store)
        telling.cancel()
        await asyncio.wait([telling])
        store.gate.release()
        with pytest.raises(StateLearned, match="generation 7"):
            await shell.failed()

    run(test)


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps, as it does for a loop that something holds."""

    jumped_s = 0.0

    def time(self) -> float:
        return super().time() + self.jumped_s


def test_leases_are_extended_by_what_held_the_loop_also_where_that_was_short() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        state = CoordinatorState(CoordinatorConfig(job="job", world_size=1, num_shards=1, lease_s=4.0), loop.time())
        shell = Shell(state, MemoryStateStore())
        session = join(shell)
        for _ in range(5):
            loop.jumped_s += 0.9
            for _ in range(3):
                await asyncio.sleep(0)
        shell.perform(state.heartbeat(session.number, {}, shell.now()))
        assert [m.rank for m in shell.status().membership.workers] == [0]
        await shell.close()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


def test_what_comes_while_writing_is_written_together_afterwards() -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        first = put(shell, "a")
        await started(store)
        others = [put(shell, key) for key in "bcd"]
        session = join(shell)
        events = session.events()
        next_event = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not first.done()
        assert not next_event.done()
        store.gate.release()
        await first
        await started(store)
        assert not any(o.done() for o in others)
        assert not next_event.done(), "nothing is published that is not written"
        store.gate.release()
        await asyncio.gather(*others)
        assert session_pb2.SessionEvent.FromString(await next_event).HasField("welcome")
        assert store.batches == [4, 5]  # job, members, progress, kv/a; three keys, members, progress

    run(test)


def test_reading_does_not_wait_for_a_write_that_comes_later_but_for_one_before() -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        def get(call: int) -> Any:
            shell.state.kv(OPERATOR).get(call, "a")
            return shell.state.flush()

        writing = put(shell, "a")
        await started(store)
        reading = asyncio.ensure_future(shell.call(get))
        await asyncio.sleep(0)
        assert not reading.done(), "it would tell of a value that may not survive"
        store.gate.release()
        await writing
        assert (await reading).value == b"v"

    run(test)


def test_a_full_disk_delays_everything_until_there_is_space() -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        store.errors = [StorageFull("no space"), StorageFull("no space")]
        writing = put(shell, "a")
        await started(store)
        store.gate.release()
        await started(store)
        assert any("no space" in p for p in shell.status().pending)
        assert not writing.done()
        store.gate.release(2)
        await writing
        assert not any("no space" in p for p in shell.status().pending)
        assert store.load()["kv/a"] == b"v"

    run(test)


def test_a_full_disk_does_not_keep_it_from_stopping() -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        store.errors = [StorageFull("no space")] * 1000
        writing = put(shell, "a")
        store.gate.release(5)
        for _ in range(5):
            await started(store)
        store.gate.release(1000)
        await shell.close()
        with pytest.raises(Broken, match="the coordinator is stopping"):
            await writing

    run(test)


def test_a_broken_store_ends_the_coordinator_and_not_its_members() -> None:
    """They are told what a member takes for the loss of its stream: it joins the next coordinator with what it has."""

    async def test(shell: Shell, store: SlowStore) -> None:
        store.errors = [OSError("the disk is gone")]
        session = join(shell)
        writing = put(shell, "a")
        store.gate.release()
        with pytest.raises(InternalError, match="the disk is gone"):
            await shell.failed()
        with pytest.raises(Broken, match="this coordinator's state store failed"):
            await writing
        with pytest.raises(Broken, match="the next coordinator knows what was done"):
            await anext(session.events())

    run(test)


def test_a_call_that_is_refused_changes_nothing_and_a_cancelled_one_is_dropped() -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        store.gate.release(1000)
        with pytest.raises(InvalidRequest):
            await put(shell, "")

        def wait(call: int) -> Any:
            shell.state.kv(OPERATOR).wait(call, "k", shell.now(), 1000.0)
            return shell.state.flush()

        waiting = asyncio.ensure_future(shell.call(wait))
        await asyncio.sleep(0)
        assert shell.state.next_deadline() < float("inf")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert shell.state.next_deadline() == float("inf")

    run(test)


def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        monkeypatch.setattr(shell_module, "MAX_CALLS", 1)
        waiting = put(shell, "a")
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="1 calls wait"):
            await put(shell, "b")
        store.gate.release()
        await waiting

    run(test)


def test_a_member_that_does_not_read_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(shell: Shell, store: SlowStore) -> None:
        monkeypatch.setattr(shell_module, "QUEUE_EVENTS", 4)
        store.gate.release(1000)
        session = join(shell)
        for i in range(4):
            request = JoinRequest(job="job", incarnation=f"{i:032x}", node="n", address=f"h:{i}")
            shell.perform(shell.state.join(shell.open_session().number, Role.SHARD, request, shell.now()))
            await put(shell, f"written {i}")
        assert isinstance(session.error, Broken)
        assert "has not read 4 events" in str(session.error)
        assert shell.status().membership.workers == (), "it may still send heartbeats, but it is lost"

    run(test)


def test_a_membership_is_a_difference_for_a_member_that_takes_one() -> None:
    async def told(session: MemberSession, others: int) -> tuple[list[str], list[Membership]]:
        """The kinds of a session's events about members, and what they say, once others have joined."""
        kinds, memberships = [], []
        async for encoded in session.events():
            message = session_pb2.SessionEvent.FromString(encoded)
            known = memberships[-1] if memberships else None
            if isinstance(event := event_from_proto(message, known), Membership):
                kinds.append(str(message.WhichOneof("message")))
                memberships.append(event)
                if len(event.shards) == others:
                    return kinds, memberships
        raise AssertionError

    async def main() -> None:
        state = CoordinatorState(CoordinatorConfig(job="job", world_size=1, num_shards=4), 0.0)
        shell = Shell(state, MemoryStateStore())
        sessions = [shell.open_session(differences=differences) for differences in (True, False, True, True)]
        for number, session in enumerate(sessions):
            request = JoinRequest(job="job", incarnation=f"{number:032x}", node="n", address=f"h:{number + 1}")
            shell.perform(shell.state.join(session.number, Role.SHARD, request, shell.now()))
        async with asyncio.timeout(10.0):
            takes, whole, *_ = [await told(session, 4) for session in sessions]
        assert takes[0] == ["membership", *["difference"] * 3]
        assert whole[0] == ["membership"] * 3
        assert takes[1][1:] == whole[1]
        await shell.close()

    asyncio.run(main())
