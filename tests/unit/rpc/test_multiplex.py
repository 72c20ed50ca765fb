"""Many calls over one stream: each is as it would be by itself, and what is equal for several travels once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rpc_fakes
from axon_ps.errors import AxonError, Broken, Busy, InvalidRequest, PermissionDenied
from axon_ps.rpc.auth.credentials import EVERYBODY, Credentials, Revocations, calling, stream_end
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.calls.method import method_of
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.carriers.in_process import SUFFIX
from axon_ps.rpc.multiplex import client as client_module
from axon_ps.rpc.multiplex import frames as frames_module
from axon_ps.rpc.multiplex import server as server_module
from axon_ps.rpc.multiplex.client import MultiplexedClient
from axon_ps.rpc.multiplex.frames import FrameQueue
from axon_ps.rpc.multiplex.server import MultiplexedServer
from axon_ps.rpc.service import EOF, service_handler
from axon_ps.wire.v1 import coordinator_pb2, membership_pb2, multiplex_pb2, session_pb2
from rpc_fakes import COORDINATOR, FakeServicer, run, serving


def asked(key: str) -> bytes:
    return coordinator_pb2.KVRequest(key=key).SerializeToString()


def leave(reason: str) -> bytes:
    return session_pb2.SessionRequest(leave=membership_pb2.Leave(reason=reason)).SerializeToString()


async def kv(request: coordinator_pb2.KVRequest, context: object) -> coordinator_pb2.KVReply:
    """Gives the key back."""
    if request.key == "refused":
        raise Busy("come back later")
    return coordinator_pb2.KVReply(value=request.key.encode())


async def session(context: ServerCall) -> None:
    """Gives each reason back, as a message of its own."""
    while (message := await context.read()) is not EOF:
        if message.leave.reason == "end":
            raise PermissionDenied("it was asked to")
        await context.write(session_pb2.SessionEvent(welcome=membership_pb2.Welcome(state_id=message.leave.reason)))


@asynccontextmanager
async def calling_on(
    caller: Credentials = EVERYBODY, revocations: Revocations | None = None, **methods: Callable[..., Awaitable[Any]]
) -> AsyncIterator[tuple[MultiplexedClient, MultiplexedServer]]:
    """A client on one stream, and what performs its calls."""
    servicer = FakeServicer(COORDINATOR, **{"kv": kv, "session": session, **methods})
    handlers = (service_handler(COORDINATOR, servicer),)
    made: asyncio.Future[MultiplexedServer] = asyncio.get_running_loop().create_future()

    def found(method: str, caller: Credentials) -> Any:
        if (known := method_of(handlers, f"/{COORDINATOR.full_name}/{method}")) is None:
            raise InvalidRequest(f"there is no {method}")
        return known

    async def host_session(context: ServerCall) -> None:
        server = MultiplexedServer(context, found, caller, revocations or Revocations())
        made.set_result(server)
        await server.run()

    async with serving(COORDINATOR, host_session=host_session) as served:
        client = MultiplexedClient(served.stub.open("HostSession"), "the server")
        running = asyncio.ensure_future(client.run())
        await client.began()
        try:
            yield client, await made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def read(call: Any, count: int) -> list[str]:
    found: list[str] = []
    async for message in call.messages():
        found.append(session_pb2.SessionEvent.FromString(message).welcome.state_id)
        if len(found) == count:
            break
    return found


def test_calls_of_both_kinds_at_once() -> None:
    async def main() -> None:
        async with calling_on() as (client, _):
            streams = [client.open("Session") for _ in range(20)]
            for i, stream in enumerate(streams):
                for k in range(3):
                    stream.send(leave(f"{i}.{k}"))
            replies = await asyncio.gather(*(client.call("KV", asked(f"k{i}")) for i in range(20)))
            assert [coordinator_pb2.KVReply.FromString(r).value for r in replies] == [
                f"k{i}".encode() for i in range(20)
            ]
            assert [await read(s, 3) for s in streams] == [[f"{i}.{k}" for k in range(3)] for i in range(20)]
            for stream in streams:
                await stream.done_writing()
            assert [[m async for m in s.messages()] for s in streams] == [[]] * 20, "they ended well"

    run(main())


def test_an_error_reaches_its_call_alone_and_as_it_was_raised() -> None:
    async def main() -> None:
        async with calling_on() as (client, _):
            one, other = client.open("Session"), client.open("Session")
            one.send(leave("end"))
            with pytest.raises(PermissionDenied, match="it was asked to"):
                await read(one, 1)
            with pytest.raises(Busy, match="come back later"):
                await client.call("KV", asked("refused"))
            with pytest.raises(InvalidRequest, match="there is no Nothing"):
                await client.call("Nothing", b"")
            other.send(leave("fine"))
            assert await read(other, 1) == ["fine"]

    run(main())


def test_what_cannot_be_parsed_ends_its_call_alone() -> None:
    async def main() -> None:
        async with calling_on() as (client, _):
            one, other = client.open("Session"), client.open("Session")
            one.send(b"\xff\xff")
            with pytest.raises(InvalidRequest, match="a message of Session cannot be parsed"):
                await read(one, 1)
            with pytest.raises(InvalidRequest, match="a KVRequest cannot be parsed"):
                await client.call("KV", b"\xff\xff")
            other.send(leave("fine"))
            assert await read(other, 1) == ["fine"]

    run(main())


def test_a_call_that_is_cancelled_is_cancelled_at_the_server() -> None:
    async def main() -> None:
        ended: list[str] = []
        began = asyncio.Event()

        async def session(context: ServerCall) -> None:
            began.set()
            try:
                await context.read()
            except asyncio.CancelledError:
                ended.append("session")
                raise

        async def kv(request: object, context: object) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("kv")
                raise

        async with calling_on(session=session, kv=kv) as (client, server):
            stream = client.open("Session")
            await began.wait()
            stream.cancel()
            began.clear()
            waiting = asyncio.ensure_future(client.call("KV", asked("k")))
            await began.wait()
            waiting.cancel()
            while len(ended) < 2:
                await asyncio.sleep(0.001)
            assert sorted(ended) == ["kv", "session"]
            assert not server._calls

    run(main())


def test_calls_end_with_the_stream_on_both_sides() -> None:
    async def main() -> None:
        async with calling_on() as (client, server):
            stream = client.open("Session")
            stream.send(leave("a"))
            assert await read(stream, 1) == ["a"]
            server.end(Broken("the coordinator is stopping"))
            with pytest.raises(Broken, match="the coordinator is stopping"):
                await read(stream, 1)
            with pytest.raises(Broken, match="the coordinator is stopping"):
                client.open("Session")
            assert not server._calls

    run(main())


def test_a_client_that_is_cancelled_ends_its_calls() -> None:
    async def main() -> None:
        async with calling_on() as (client, _):
            stream = client.open("Session")
        with pytest.raises(Broken, match="HostSession at .* was closed"):
            await read(stream, 1)

    run(main())


def test_equal_messages_for_several_calls_are_one_frame() -> None:
    async def main() -> None:
        sent: list[multiplex_pb2.Frame] = []
        waiting: list[Any] = []

        async def session(context: ServerCall) -> None:
            assert context.send_soon is not None
            waiting.append(context.send_soon)
            await context.read()

        async with calling_on(session=session) as (client, _):
            streams = [client.open("Session") for _ in range(30)]
            while len(waiting) < 30:
                await asyncio.sleep(0.001)
            take = client._take

            def counted(frame: multiplex_pb2.Frame) -> None:
                sent.append(frame)
                take(frame)

            client._take = counted  # type: ignore[method-assign]
            event = session_pb2.SessionEvent(welcome=membership_pb2.Welcome(state_id="all")).SerializeToString()
            assert all(send(event) for send in waiting)
            assert [await read(s, 1) for s in streams] == [["all"]] * 30
            assert [len(frame.calls) for frame in sent] == [30]

    run(main())


def test_messages_are_given_to_who_receives_them_at_once() -> None:
    async def main() -> None:
        got: list[Any] = []
        done = asyncio.Event()

        def take(message: Any) -> None:
            got.append(message)
            if message is EOF:
                done.set()

        async def session(context: ServerCall) -> None:
            await context.read()
            assert context.receive(take)
            await done.wait()

        async with calling_on(session=session) as (client, _):
            stream = client.open("Session")
            for reason in ("first", "a", "b"):
                stream.send(leave(reason))
            await stream.done_writing()
            assert [m async for m in stream.messages()] == []
            assert [m is EOF or m.leave.reason for m in got] == ["a", "b", True]

    run(main())


def test_who_does_not_read_ends_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_UNREAD", 4)

    async def main() -> None:
        async def deaf(context: ServerCall) -> None:
            await asyncio.sleep(60)

        async with calling_on(session=deaf) as (client, server):
            stream = client.open("Session")
            for i in range(8):
                stream.send(leave(str(i)))
            with pytest.raises(Broken, match="has not read 4 messages"):
                await read(stream, 1)
            assert not server._calls

    run(main())


def test_what_nobody_reads_ends_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_UNREAD", 4)

    async def main() -> None:
        async with calling_on() as (client, _):
            stream, other = client.open("Session"), client.open("Session")
            for i in range(8):
                stream.send(leave(str(i)))
            await client.call("KV", asked("k"))
            with pytest.raises(Broken, match="4 messages of Session were not read"):
                await read(stream, 8)
            other.send(leave("fine"))
            assert await read(other, 1) == ["fine"]

    run(main())


def test_limits_of_calls_and_of_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CALLS", 3)
    monkeypatch.setattr(frames_module, "MAX_WAITING", 6)

    async def main() -> None:
        async with calling_on() as (client, _):
            streams = [client.open("Session") for _ in range(3)]
            with pytest.raises(Busy, match="3 calls are under way on this stream already"):
                await client.call("KV", asked("k"))
            await streams[0].done_writing()
            assert [m async for m in streams[0].messages()] == []
            await client.call("KV", asked("k"))
            with pytest.raises(Broken, match="the server does not take what is sent to it"):
                for i in range(8):
                    streams[1].send(leave(str(i)))

    run(main())


def test_a_message_that_is_too_large_is_refused_to_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_FRAME_BYTES", "MAX_CALL_FRAME_BYTES"):
        monkeypatch.setattr(frames_module, limit, 2000)

    async def large(request: coordinator_pb2.KVRequest, context: object) -> coordinator_pb2.KVReply:
        return coordinator_pb2.KVReply(value=bytes(int(request.key)))

    async def main() -> None:
        async with calling_on(kv=large) as (client, _):
            stream = client.open("Session")
            with pytest.raises(InvalidRequest, match="a message of KV has 2003 bytes; at most 2000"):
                await client.call("KV", asked("1" * 2000))
            with pytest.raises(InvalidRequest, match="a message of KV has 2503 bytes"):
                await client.call("KV", asked("2500"))
            with pytest.raises(InvalidRequest, match="a message of Session has"):
                stream.send(leave("x" * 3000))
            stream.send(leave("fine"))
            assert await read(stream, 1) == ["fine"]

    run(main())


def test_a_host_that_does_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_WAITING_BYTES", 1000)

    async def large(request: coordinator_pb2.KVRequest, context: object) -> coordinator_pb2.KVReply:
        return coordinator_pb2.KVReply(value=bytes(600))

    async def main() -> None:
        async with calling_on(kv=large) as (client, _):
            calls = [asyncio.ensure_future(client.call("KV", asked("k"))) for _ in range(8)]
            await asyncio.wait(calls)
            errors = [call.exception() for call in calls if call.exception() is not None]
            assert errors
            assert all("this host does not read what is sent to it" in str(error) for error in errors)

    run(main())


WORKER = Credentials(frozenset({Principal.WORKER}), 3, ("token-3",), False, text="worker 3")


def test_a_call_is_made_by_who_makes_it_and_ends_with_its_credentials() -> None:
    async def main() -> None:
        seen: list[Credentials] = []
        revocations = Revocations()

        async def kv(request: object, context: object) -> coordinator_pb2.KVReply:
            seen.append(calling())
            return coordinator_pb2.KVReply()

        async def session(context: ServerCall) -> None:
            seen.append(calling())
            await context.read()

        async with calling_on(revocations=revocations, kv=kv, session=session) as (client, _):
            await client.call("KV", asked("k"), WORKER)
            await client.call("KV", asked("k"))
            assert seen == [WORKER, EVERYBODY]
            theirs, others = client.open("Session", WORKER), client.open("Session")
            while len(seen) < 4:
                await asyncio.sleep(0.001)
            revocations.set({"token-3": "it leaked"})
            with pytest.raises(PermissionDenied, match="revoked: it leaked"):
                await read(theirs, 1)
            with pytest.raises(PermissionDenied, match="revoked: it leaked"):
                await client.call("KV", asked("k"), WORKER)
            others.send(leave("fine"))
            assert [m async for m in others.messages()] == []

    run(main())


def test_a_stream_ends_with_the_credentials_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_ps.rpc.auth.credentials.GRACE_S", 0.0)

    async def main() -> None:
        ends = []

        async def session(context: ServerCall) -> None:
            ends.append(stream_end())
            await context.read()

        short = Credentials(frozenset({Principal.WORKER}), 3, (), False, time.time() + 0.1, "worker 3")
        async with calling_on(session=session) as (client, _):
            with pytest.raises(Broken, match=r"the credentials that this stream was opened with \(worker 3\) are over"):
                await read(client.open("Session", short), 1)
        assert ends[0] is not None

    run(main())


def test_a_call_that_begins_twice_is_refused() -> None:
    async def main() -> None:
        async with calling_on() as (client, _):
            stream = client.open("Session")
            frame = multiplex_pb2.Frame(calls=(stream.number,), method="Session")
            client.outbox.add_frame(frame)
            with pytest.raises(
                Broken, match=r"HostSession .* has ended: call 1 of Session begins while it is under way"
            ):
                await read(stream, 1)

    run(main())


def test_what_is_in_no_hurry_goes_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "LAZY_S", 3600.0)

    async def main() -> None:
        outbox = FrameQueue()
        outbox.add(1, b"beat", lazy=True)
        outbox.add(2, b"beat", lazy=True)
        taking = asyncio.ensure_future(outbox.take())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taking.done()
        outbox.add(1, b"vote")
        (batch,) = await taking
        assert [(list(f.calls), f.message) for f in batch.frames] == [([1, 2], b"beat"), ([1], b"vote")]
        monkeypatch.setattr(frames_module, "LAZY_S", 0.0)
        outbox.add(1, b"beat", lazy=True)
        (batch,) = await outbox.take()
        assert [f.message for f in batch.frames] == [b"beat"]

    run(main())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([b"a", b"b", b"c", b"x" * 700])), max_size=40))
def test_every_call_gets_its_messages_in_order(messages: list[tuple[int, bytes]]) -> None:
    async def main() -> list[multiplex_pb2.Frames]:
        outbox = FrameQueue()
        for call, message in messages:
            outbox.add(call, message)
        return list(await outbox.take()) if messages else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames_module, "MAX_BYTES", 1000)
        batches = run(main())
    for call in range(1, 5):
        got = [frame.message for batch in batches for frame in batch.frames for c in frame.calls if c == call]
        assert got == [message for c, message in messages if c == call]
    assert all(sum(len(f.message) for f in batch.frames) <= 1000 for batch in batches)


FRAMES = st.builds(
    multiplex_pb2.Frame,
    calls=st.lists(st.integers(0, 6), max_size=5),
    method=st.sampled_from(["", "", "", "Session", "KV", "Nothing"]),
    message=st.none() | st.sampled_from([b"", b"\xff", leave("a"), leave("end"), asked("k")]),
    end=st.booleans(),
    cancel=st.sampled_from([False, False, True]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(FRAMES, max_size=30))
@example([multiplex_pb2.Frame(), multiplex_pb2.Frame(calls=[1], method="Session", message=leave("end"))])
def test_whatever_comes_is_answered_or_refused(sent: list[multiplex_pb2.Frame]) -> None:
    """A hostile host harms itself: its stream ends with an error of ours, or goes on, and the server is as before."""

    async def main() -> None:
        async with calling_on() as (client, server):
            for frame in sent:
                client.outbox.add_frame(frame)
            try:
                await client.call("KV", asked("after"))
            except (InvalidRequest, Broken):
                pass
            except PermissionDenied:  # of the service, which a frame for this very call asked for
                assert leave("end") in [frame.message for frame in sent]
            except AxonError as error:
                raise AssertionError("an error of another kind") from error
        while server._calls:
            await asyncio.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc_fakes, "HOST", ["multiplex" + SUFFIX])
        run(main())
