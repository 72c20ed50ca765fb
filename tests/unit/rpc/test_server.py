"""A server: where it may listen, what it answers beside its services, how it stops. Tests of `rpc/health.py`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from axon_ps.errors import Broken, ConfigurationError, Misuse, PermissionDenied, Timeout
from axon_ps.rpc import health_service, limits
from axon_ps.rpc.auth.tokens import new_secret
from axon_ps.rpc.calls import method
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import session_pb2, shard_pb2, status_pb2
from deadlines import HANG_S
from rpc_fakes import COORDINATOR, SHARD, run, serving, until_nobody_answers

TOKEN = "c0ffee-c0ffee"


async def stats(request: Any, context: Any) -> shard_pb2.StatsReply:
    return shard_pb2.StatsReply()


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with serving() as s:
            with pytest.raises(ConfigurationError, match=f"cannot listen on {s.address}: port .* in use"):
                await Server("127.0.0.1", s.server.port, Security(), [], []).start()

    run(main())
    assert capfd.readouterr().err == ""


def test_a_port_of_somebody_elses_socket_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigurationError, match="in use"):
            run(Server("127.0.0.1", other.getsockname()[1], Security(), [], []).start())


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on {host}:0"):
        run(Server(host, 0, Security(insecure=True), [], []).start())


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist(port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"port {port} does not exist"):
        Server("127.0.0.1", port, Security(), [], [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.168.1.5", "example.org", ""])
def test_the_network_is_refused_without_tls_and_token(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a secret of the job of at least 128 random bits"):
        Server(host, 0, Security(), [], [])
    with pytest.raises(ConfigurationError, match="can be guessed: `axon-ps auth init FILE`"):
        Server(host, 0, Security(token=TOKEN), [], [])
    with pytest.raises(ConfigurationError, match="needs a token"):
        Server(host, 0, Security(cert_file="c", key_file="k"), [], [])
    Server(host, 0, Security(cert_file="c", key_file="k", token=TOKEN), [], [])
    Server(host, 0, Security(insecure=True), [], [])
    Server(host, 0, Security(token=new_secret()), [], [])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "localhost", "::1", "[::1]"])
def test_loopback_needs_nothing(host: str) -> None:
    Server(host, 0, Security(), [], [])


def test_an_explicitly_insecure_server_listens_everywhere() -> None:
    async def main() -> None:
        server = Server("0.0.0.0", 0, Security(insecure=True), [], [])
        assert await server.start() > 0
        await server.stop(0)

    run(main())


def test_ipv6_loopback() -> None:
    async def main() -> None:
        server = Server("::1", 0, Security(), [], [])
        port = await server.start()
        assert server.address == f"[::1]:{port}"
        await server.stop(0)

    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback here")
    run(main())


def test_it_is_started_once_and_stopped_at_will() -> None:
    async def main() -> None:
        server = Server("127.0.0.1", 0, Security(), [], [])
        await server.stop(0)
        with pytest.raises(Misuse, match="not started"):
            await server.wait()
        await server.start()
        with pytest.raises(Misuse, match="started before"):
            await server.start()
        waiting = asyncio.ensure_future(server.wait())
        await server.stop(0)
        await server.stop(0)
        await waiting

    run(main())


@pytest.mark.parametrize("given", ["", "c0ffee", TOKEN + "x", TOKEN.upper()])
def test_a_wrong_token_is_refused_in_every_kind_of_call(given: str) -> None:
    message = "is none of this server" if given else "none was given"

    async def main() -> None:
        for descriptor in (SHARD, COORDINATOR):
            async with serving(descriptor, security=Security(token=TOKEN), client=Security(token=given)) as s:
                if descriptor is SHARD:
                    with pytest.raises(PermissionDenied, match=message):
                        await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)
                    with pytest.raises(PermissionDenied, match=message):
                        await s.stub.open("AllGather", timeout_s=HANG_S).read()
                else:
                    with pytest.raises(PermissionDenied, match=message):
                        await s.stub.open("Session", timeout_s=HANG_S).read()

    run(main())


def test_the_right_token_is_accepted_and_health_needs_none() -> None:
    async def main() -> None:
        async with serving(security=Security(token=TOKEN), stats=stats) as s:
            await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)
            assert await health_of(s.channel, "") == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(s.channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reflection.ServerReflectionInfo(iter([])).read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(main())


def test_a_method_that_is_not_there_is_unimplemented_with_a_token_too() -> None:
    async def main() -> None:
        async with serving(security=Security(token=TOKEN)) as s:
            with pytest.raises(ConfigurationError):
                await Stub(s.channel, COORDINATOR, Security(token=TOKEN)).call("Status", status_pb2.StatusRequest())

    run(main())


def test_health_knows_every_service() -> None:
    async def main() -> None:
        async with serving() as s:
            for name in ("", SHARD.full_name):
                assert await health_of(s.channel, name) == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_of(s.channel, "no.such.Service")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(main())


def test_reflection_lists_the_services_and_their_schema() -> None:
    async def main() -> None:
        async with serving() as s:
            stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
            request = reflection_pb2.ServerReflectionRequest
            call = stub.ServerReflectionInfo()
            await call.write(request(list_services=""))
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert {SHARD.full_name, "grpc.health.v1.Health"} <= names
            await call.write(request(file_containing_symbol=SHARD.full_name))
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            assert any(b"ReduceScatter" in f for f in files)
            await call.done_writing()

    run(main())


def test_reflection_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_reflection.v1alpha", None)

    async def main() -> None:
        async with serving(stats=stats) as s:
            await s.stub.call("Stats", shard_pb2.StatsRequest())

    run(main())


def watch_health(s: Any, service: str = "") -> Any:
    return health_pb2_grpc.HealthStub(s.channel).Watch(health_pb2.HealthCheckRequest(service=service))


def test_watches_of_the_health_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_service, "MAX_WATCHES", 2)

    async def main() -> None:
        async with serving() as s:
            watches = [watch_health(s) for _ in range(2)]
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="2 watches of this server's health are open") as caught:
                await watch_health(s).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.aio.AioRpcError, match="no service 'no.such.Service' to watch"):
                await watch_health(s, "no.such.Service").read()
            watches[0].cancel()
            await s.server._set_health("", serving=False)  # which the one that is left still sees
            assert (await watches[1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            monkeypatch.setattr(health_service, "WATCH_S", 0.05)
            short = watch_health(s, SHARD.full_name)
            await short.read()
            with pytest.raises(grpc.aio.AioRpcError, match=r"a watch lasts 0\.05 s"):
                await short.read()
            watches[1].cancel()

    run(main())


def test_a_stream_without_a_first_message_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "FIRST_MESSAGE_S", 0.05)

    async def session(context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(session_pb2.SessionEvent())

    async def main() -> None:
        async with serving(COORDINATOR, session=session) as s:
            silent, used = s.stub.open("Session"), s.stub.open("Session")
            await used.write(session_pb2.SessionRequest())
            await used.read()
            with pytest.raises(Timeout, match=r"a stream of Session stayed without a message for 0\.05 s"):
                await silent.read()
            await used.write(session_pb2.SessionRequest())
            assert isinstance(await used.read(), session_pb2.SessionEvent), "one that was used may rest"
            used.cancel()

    run(main())


def test_connections_beyond_the_limit_and_silent_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.5)

    def ended(connection: socket.socket) -> bool:
        """Whether the server closes a connection that sends nothing."""
        connection.settimeout(10.0)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 10):
                pass
        return True

    async def main() -> None:
        async with serving(stats=stats) as s:
            silent = [socket.create_connection(("127.0.0.1", s.server.port)) for _ in range(8)]
            with pytest.raises(Broken):
                await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)
            assert all(await asyncio.gather(*(asyncio.to_thread(ended, c) for c in silent)))
            for connection in silent:
                connection.close()
            await until_answered(s)

    run(main())


async def until_answered(s: Any) -> None:
    """Call until the server has a connection for us."""
    async with asyncio.timeout(20.0):
        while True:
            with contextlib.suppress(Broken):
                await s.stub.call("Stats", shard_pb2.StatsRequest())
                return
            await asyncio.sleep(0.05)


def test_without_the_package_of_health_checks_none_are_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        server = Server("127.0.0.1", 0, Security(), [], [])
        await server.start()
        await server.stop(0.0)

    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    run(main())
    assert "grpcio-health-checking is not installed" in caplog.text


def test_stopping_says_so_lets_calls_finish_and_takes_no_new_ones() -> None:
    async def session(context: Any) -> None:
        await context.read()
        entered.set()
        await may_end.wait()
        await context.write(session_pb2.SessionEvent())

    async def status(request: Any, context: Any) -> status_pb2.StatusReply:
        return status_pb2.StatusReply()

    async def main() -> None:
        async with serving(COORDINATOR, session=session, status=status) as s:
            watch = health_pb2_grpc.HealthStub(s.channel).Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stream = s.stub.open("Session")
            await stream.write(session_pb2.SessionRequest())
            await entered.wait()
            stopping = asyncio.ensure_future(s.server.stop(10))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            await until_nobody_answers(lambda: s.stub.call("Status", status_pb2.StatusRequest()))
            may_end.set()
            assert isinstance(await stream.read(), session_pb2.SessionEvent)
            assert await stream.read() is grpc.aio.EOF
            await stopping

    entered, may_end = asyncio.Event(), asyncio.Event()
    run(main())
