"""Servicers and stubs: what is raised on one side arrives on the other, in all four kinds of call."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from axon_ps.errors import (
    AxonError,
    Broken,
    Busy,
    ConfigurationError,
    GenerationChanged,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Timeout,
    Unreachable,
)
from axon_ps.rpc import channels
from axon_ps.rpc.calls.method import Method
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server
from axon_ps.rpc.service import Stub, method_name, service_handler
from axon_ps.wire.frames import decode_chunk, encode_chunk
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, membership_pb2, session_pb2, shard_pb2, status_pb2
from deadlines import HANG_S
from rpc_fakes import COORDINATOR, SHARD, FakeServicer, run, serving, write_forever

GRADIENT = np.arange(1000, dtype=np.float32)
FRAME = encode_chunk(common_pb2.Chunk(unit=3, numel=1000, dtype=common_pb2.D_TYPE_F32), GRADIENT)


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What we logged (asyncio may report a completion that came for the closed loop of an earlier test)."""
    return [r for r in caplog.records if r.name.startswith("axon_ps")]


@pytest.mark.parametrize(
    ("rpc", "method"),
    [("AllGather", "all_gather"), ("KV", "kv"), ("Session", "session"), ("KVStore", "kv_store"), ("GetKV", "get_kv")],
)
def test_methods_are_snake_case(rpc: str, method: str) -> None:
    assert method_name(rpc) == method


def test_a_servicer_that_lacks_methods_is_refused() -> None:
    servicer = FakeServicer(SHARD)
    del servicer.stats, servicer.upload  # type: ignore[attr-defined]
    with pytest.raises(InternalError, match=r"lacks upload, stats of axon_ps\.wire\.v1\.Shard"):
        service_handler(SHARD, servicer)


def test_a_unary_call() -> None:
    async def stats(request: shard_pb2.StatsRequest, context: Any) -> shard_pb2.StatsReply:
        return shard_pb2.StatsReply(values={request.context.job: 1.5})

    async def main() -> None:
        async with serving(stats=stats) as s:
            request = shard_pb2.StatsRequest(context=common_pb2.CallContext(job="j"))
            assert dict((await s.stub.call("Stats", request, timeout_s=HANG_S)).values) == {"j": 1.5}

    run(main())


def test_chunks_travel_as_bytes_in_both_directions() -> None:
    async def all_gather(context: Any) -> None:
        request = await context.read()
        for _ in range(request.end):
            await context.write(FRAME)

    async def reduce_scatter(context: Any) -> None:
        chunks = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            header, payload = decode_chunk(data)
            assert payload == GRADIENT.tobytes()
            chunks += 1
        await context.write(shard_pb2.ReduceScatterReply(step=header.unit, chunks=chunks))

    async def main() -> None:
        async with serving(all_gather=all_gather, reduce_scatter=reduce_scatter) as s:
            gather = s.stub.open("AllGather", timeout_s=HANG_S)
            await gather.write(shard_pb2.AllGatherRequest(end=5))
            assert [m async for m in gather] == [FRAME] * 5
            push = s.stub.open("ReduceScatter")
            for _ in range(4):
                await push.write(FRAME)
            await push.done_writing()
            assert await push.read() == shard_pb2.ReduceScatterReply(step=3, chunks=4)
            assert await push.read() is grpc.aio.EOF
            assert push.done()

    run(main())


def test_a_plain_protobuf_client_interoperates() -> None:
    async def all_gather(context: Any) -> None:
        assert (await context.read()).unit == 3
        await context.write(FRAME)

    async def reduce_scatter(context: Any) -> None:
        header, payload = decode_chunk(await context.read())
        assert await context.read() is grpc.aio.EOF
        assert payload == GRADIENT.tobytes()
        await context.write(shard_pb2.ReduceScatterReply(step=header.step))

    def plain(address: str) -> None:
        chunk = common_pb2.Chunk
        with grpc.insecure_channel(address) as channel:
            gather = channel.stream_stream(
                "/axon_ps.wire.v1.Shard/AllGather",
                request_serializer=shard_pb2.AllGatherRequest.SerializeToString,
                response_deserializer=chunk.FromString,
            )
            (gathered,) = gather(iter([shard_pb2.AllGatherRequest(unit=3)]), timeout=5)
            assert gathered.unit == 3
            assert gathered.payload == GRADIENT.tobytes()
            reduce = channel.stream_stream(
                "/axon_ps.wire.v1.Shard/ReduceScatter",
                request_serializer=chunk.SerializeToString,
                response_deserializer=shard_pb2.ReduceScatterReply.FromString,
            )
            (reply,) = reduce(iter([chunk(step=9, payload=GRADIENT.tobytes())]), timeout=5)
            assert reply.step == 9

    async def main() -> None:
        async with serving(all_gather=all_gather, reduce_scatter=reduce_scatter) as s:
            await asyncio.to_thread(plain, s.address)

    run(main())


def test_a_reply_that_cannot_be_parsed_is_the_peers_fault() -> None:
    async def stats(request: bytes, context: Any) -> bytes:
        return b"\xff\xff\xff"

    async def reduce_scatter(context: Any) -> None:
        await context.write(b"\xff\xff\xff")
        await asyncio.Event().wait()  # the client ends it

    paths = {name: f"/{SHARD.full_name}/{name}" for name in ("Stats", "ReduceScatter")}
    raw = {"request": "", "parse": None, "serialize": None}
    service = {
        paths["Stats"]: Method(paths["Stats"], stats, is_stream=False, **raw),
        paths["ReduceScatter"]: Method(paths["ReduceScatter"], reduce_scatter, is_stream=True, **raw),
    }
    server = Server("127.0.0.1", 0, Security(), [service], [])

    async def main() -> None:
        address = f"127.0.0.1:{await server.start()}"
        channel = connect(address, Security())
        stub = Stub(channel, SHARD)
        try:
            with pytest.raises(Broken, match=rf"{address} sent a reply to Stats that cannot be parsed"):
                await stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)
            stream = stub.open("ReduceScatter", timeout_s=HANG_S)
            with pytest.raises(Broken, match=rf"ReduceScatter at {address} sent a message that cannot be parsed"):
                await stream.read()
            assert stream.done()
        finally:
            await channel.close()
            await server.stop(0)

    run(main())


def test_streams_go_both_ways() -> None:
    (service,) = health_pb2.DESCRIPTOR.services_by_name.values()
    with pytest.raises(InternalError, match=r"Watch of grpc\.health\.v1\.Health stream in one direction only"):
        service_handler(service, FakeServicer(service))


ERRORS = [LayoutMismatch("rank 3 differs"), GenerationChanged("worker 1 left", 7), Busy("try later")]


def assert_same(error: AxonError, raised: AxonError, method: str, address: str) -> None:
    assert type(error) is type(raised)
    assert str(error) == str(raised)
    assert getattr(error, "generation", None) == getattr(raised, "generation", None)
    assert error.__notes__ == [f"raised by {method} at {address}"]


@pytest.mark.parametrize("raised", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_arrive_from_unary_calls(raised: AxonError) -> None:
    async def stats(request: Any, context: Any) -> None:
        raise raised

    async def main() -> None:
        async with serving(stats=stats) as s:
            with pytest.raises(AxonError) as caught:
                await s.stub.call("Stats", shard_pb2.StatsRequest())
            assert_same(caught.value, raised, "Stats", s.address)

    run(main())


@pytest.mark.parametrize("raised", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_arrive_after_messages_of_a_stream(raised: AxonError) -> None:
    async def all_gather(context: Any) -> None:
        await context.write(FRAME)
        await got.wait()
        raise raised

    async def main() -> None:
        async with serving(all_gather=all_gather) as s:
            stream = s.stub.open("AllGather")
            assert await stream.read() == FRAME
            got.set()
            with pytest.raises(AxonError) as caught:
                await stream.read()
            assert_same(caught.value, raised, "AllGather", s.address)

    got = asyncio.Event()
    run(main())


@pytest.mark.parametrize("raised", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_arrive_while_the_client_still_writes(raised: AxonError) -> None:
    async def reduce_scatter(context: Any) -> None:
        assert await context.read() == FRAME
        raise raised

    async def main() -> None:
        async with serving(reduce_scatter=reduce_scatter) as s:
            for _ in range(20):  # the write fails at another moment each time
                push = s.stub.open("ReduceScatter")
                with pytest.raises(AxonError) as caught:
                    await write_forever(push, FRAME)
                assert_same(caught.value, raised, "ReduceScatter", s.address)
                with pytest.raises(AxonError) as caught:
                    await push.read()
                assert_same(caught.value, raised, "ReduceScatter", s.address)

    run(main())


@pytest.mark.parametrize("raised", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_arrive_in_a_two_way_stream(raised: AxonError) -> None:
    async def session(context: Any) -> None:
        request = await context.read()
        await context.write(session_pb2.SessionEvent(welcome=membership_pb2.Welcome(rank=request.join.world_size)))
        await context.read()
        raise raised

    async def main() -> None:
        async with serving(COORDINATOR, session=session) as s:
            stream = s.stub.open("Session")
            await stream.write(session_pb2.SessionRequest(join=session_pb2.Join(world_size=4)))
            assert (await stream.read()).welcome.rank == 4
            reading = asyncio.ensure_future(stream.read())
            await stream.write(session_pb2.SessionRequest(leave=membership_pb2.Leave()))
            with pytest.raises(AxonError) as caught:
                await reading
            assert_same(caught.value, raised, "Session", s.address)
            with pytest.raises(AxonError) as caught:
                await stream.write(session_pb2.SessionRequest())
            assert_same(caught.value, raised, "Session", s.address)
            await stream.done_writing()

    run(main())


def test_a_bug_in_a_servicer_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def stats(request: Any, context: Any) -> None:
        raise KeyError("oops")

    async def main() -> None:
        async with serving(stats=stats) as s:
            with pytest.raises(InternalError, match="Stats failed: KeyError: 'oops'"):
                await s.stub.call("Stats", shard_pb2.StatsRequest())

    run(main())
    (record,) = ours(caplog)
    assert record.name == "axon_ps.rpc.calls.method"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


def test_a_wrong_reply_is_a_bug_too(caplog: pytest.LogCaptureFixture) -> None:
    async def stats(request: Any, context: Any) -> None:
        return None

    async def main() -> None:
        async with serving(stats=stats) as s:
            with pytest.raises(InternalError, match="Stats failed: TypeError"):
                await s.stub.call("Stats", shard_pb2.StatsRequest())

    run(main())
    assert len(ours(caplog)) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_parsed_is_an_invalid_request(streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def session(context: Any) -> None:
        await context.read()

    async def main() -> None:
        async with serving(COORDINATOR, session=session) as s:
            if streaming:
                stream = s.stub.open("Session")
                await stream.write(b"\xff\xff\xff")
                with pytest.raises(InvalidRequest, match="a SessionRequest cannot be parsed"):
                    await stream.read()
            else:
                raw = s.channel.unary_unary("/axon_ps.wire.v1.Coordinator/KV")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw(b"\xff\xff\xff")
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "KVRequest cannot be parsed" in (caught.value.details() or "")

    run(main())
    assert not ours(caplog)


def test_a_servicer_whose_inner_task_was_cancelled_still_answers() -> None:
    async def stats(request: Any, context: Any) -> None:
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner

    async def main() -> None:
        async with serving(stats=stats) as s:
            with pytest.raises(Broken, match="Stats was broken off by the server"):
                await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)

    run(main())


def test_a_client_that_goes_away_cancels_the_servicer(caplog: pytest.LogCaptureFixture) -> None:
    async def session(context: Any) -> None:
        await context.read()
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        async with serving(COORDINATOR, session=session) as s:
            stream = s.stub.open("Session")
            await stream.write(session_pb2.SessionRequest())
            await entered.wait()
            stream.cancel()
            await cancelled.wait()

    entered, cancelled = asyncio.Event(), asyncio.Event()
    run(main())
    assert not ours(caplog)


def test_a_servicer_that_writes_to_nobody_ends_silently(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def all_gather(context: Any) -> None:
        try:
            while True:
                await context.write(FRAME)
        finally:
            ended.set()

    async def main() -> None:
        async with serving(all_gather=all_gather) as s:
            stream = s.stub.open("AllGather")
            await stream.read()
            stream.cancel()
            await ended.wait()

    ended = asyncio.Event()
    run(main())
    assert {r.name for r in ours(caplog)} == {"axon_ps.rpc.server"}


def test_deadlines() -> None:
    async def stats(request: Any, context: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def all_gather(context: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with serving(stats=stats, all_gather=all_gather) as s:
            with pytest.raises(Timeout, match=f"Stats at {s.address} did not answer within 0.05 s"):
                await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=0.05)
            with pytest.raises(Timeout, match=f"AllGather at {s.address} did not answer within 0.05 s"):
                await s.stub.open("AllGather", timeout_s=0.05).read()

    run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        async with serving() as s:
            address = s.address
        channel = connect(address, Security())
        stub = Stub(channel, SHARD)
        with pytest.raises(Unreachable, match=f"nobody answers at {address}"):
            await stub.call("Stats", shard_pb2.StatsRequest())
        with pytest.raises(Unreachable):
            await stub.open("AllGather").read()
        with pytest.raises(Unreachable):
            await stub.open("ReduceScatter").write(FRAME)
        await channel.close()

    run(main())


def test_a_service_that_is_not_there() -> None:
    async def main() -> None:
        async with serving(SHARD) as s:
            with pytest.raises(ConfigurationError, match="wrong service or version"):
                await Stub(s.channel, COORDINATOR).call("Status", status_pb2.StatusRequest())

    run(main())


def test_messages_over_the_limit_are_refused_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 16
    limits = {"grpc.max_send_message_length": most, "grpc.max_receive_message_length": most}
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", tuple({**dict(channels.CLIENT_OPTIONS), **limits}.items()))
    too_long = b"x" * (most + 1)

    async def kv(request: Any, context: Any) -> coordinator_pb2.KVReply:
        return coordinator_pb2.KVReply(value=too_long)

    async def session(context: Any) -> None:
        await context.read()

    async def main() -> None:
        async with serving(COORDINATOR, kv=kv, session=session) as s:
            with pytest.raises(InvalidRequest, match="too large"):
                await s.stub.call("KV", coordinator_pb2.KVRequest(value=too_long), timeout_s=HANG_S)
            with pytest.raises(InvalidRequest, match="too large"):
                await s.stub.call("KV", coordinator_pb2.KVRequest(), timeout_s=HANG_S)
            stream = s.stub.open("Session")
            with pytest.raises(InvalidRequest, match="too large"):
                await stream.write(too_long)

    run(main())


def test_a_long_message_arrives_shortened() -> None:
    async def stats(request: Any, context: Any) -> None:
        raise InvalidRequest("ö" * 100_000)

    async def main() -> None:
        async with serving(stats=stats) as s:
            with pytest.raises(InvalidRequest, match=r"^ö{1000,}\.\.\."):
                await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)

    run(main())
