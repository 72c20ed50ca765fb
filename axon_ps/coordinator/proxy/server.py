"""The server to which a host's members connect as if it were the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.proxy.upstream import Upstream
from axon_ps.errors import AxonError, ConfigurationError, InvalidRequest
from axon_ps.rpc.auth.credentials import StreamEnd, calling, stream_end
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.channels import CALL_OPTIONS
from axon_ps.rpc.multiplex.client import MultiplexedCall
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import listen
from axon_ps.rpc.service import EOF, method_name, service_handler
from axon_ps.wire.v1 import session_pb2

GRACE_S: Final = 1.0
"""Seconds that calls under way may take when it stops."""

_STREAMS: Final = {method_name(m.name) for m in SERVICE.methods if m.client_streaming}
_NAMES: Final = {method_name(m.name): m.name for m in SERVICE.methods}

_logger = logging.getLogger(__name__)


async def serve(
    coordinator: str,
    job: str,
    host: str,
    port: int,
    security: Security,
    ready: Callable[[int], None],
    stop: asyncio.Event,
) -> None:
    """Run a host's proxy until `stop` is set.

    Args:
        coordinator: "host:port" of the coordinator, or several with commas between them.
        job: name of the job.
        host: address to listen on.
        port: port to listen on; 0 = any free one.
        security: TLS and token of the job, for both sides.
        ready: called with the port once it listens.
        stop: set it to end the proxy. Its members' sessions end with it.

    Raises:
        ConfigurationError: addresses or security cannot work.
        AxonError: the coordinator refuses the host's session.
    """
    if security.spiffe:
        raise ConfigurationError(
            "a host's proxy serves members of all ranks, and the certificate of --tls-dir is one member's; give it "
            "the job's secret (--token-file or AXON_PS_TOKEN)"
        )
    if security.cert_file and not security.mutual and not security.tokens():
        raise ConfigurationError(
            "each process that reaches this proxy would act by its certificate; have it ask for theirs (--tls-mutual), "
            "or for the job's token (--token-file or AXON_PS_TOKEN)"
        )
    upstream = Upstream(coordinator, job, security.acting(Principal.WORKER, job), lambda up: server.set_serving(up))
    proxy = _Proxy(upstream)
    acting = security.acting(Principal.COORDINATOR, job)
    services = [service_handler(SERVICE, proxy)]
    server = listen(host, port, acting, services, [SERVICE.full_name], options=CALL_OPTIONS)
    ready(await server.start(serving=False))
    running, stopping = asyncio.create_task(upstream.run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        await server.stop(GRACE_S)
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


class _Proxy:
    """The coordinator's service: calls are forwarded unchanged on the host's session, with the caller of each."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._ends: dict[str, StreamEnd] = {}  # of sessions, by incarnation

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method not in _NAMES:
            raise AttributeError(method)
        return partial(self._stream if method in _STREAMS else self._call, _NAMES[method])

    async def host_session(self, context: ServerCall) -> None:
        """Refuse a host's session: a host's proxy does not forward another host's."""
        raise InvalidRequest("this is a host's proxy; give another one the address of the coordinator itself")

    async def _call(self, method: str, request: Any, context: object) -> bytes:
        caller = calling()
        if (end := self._ends.get(request.context.incarnation)) is not None:
            end.extend(caller)
        return await self._upstream.calls().call(method, request.SerializeToString(), caller)

    async def _stream(self, method: str, context: ServerCall) -> None:
        call, end = self._upstream.calls().open(method, calling()), stream_end()
        reading = asyncio.create_task(self._read(context, call, end))
        try:
            async for message in call.messages():
                await context.write(message)
        finally:
            reading.cancel()
            call.cancel()
            await asyncio.wait([reading])
            self._ends = {incarnation: known for incarnation, known in self._ends.items() if known is not end}

    async def _read(self, context: ServerCall, call: MultiplexedCall, end: StreamEnd | None) -> None:
        """Forward a member's messages. Heartbeats are not urgent, and are sent together."""
        try:
            while (message := await context.read()) is not EOF:
                kind = message.WhichOneof("message") if isinstance(message, session_pb2.SessionRequest) else ""
                if kind == "join" and end is not None:
                    self._ends[message.join.incarnation] = end
                call.send(message.SerializeToString(), lazy=kind == "heartbeat")
            await call.done_writing()
        except AxonError as error:
            call.cancel(error)
        except Exception as error:
            _logger.debug("a member's stream broke: %s", error)
            call.cancel()
