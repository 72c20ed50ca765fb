"""The interceptor of a server: it checks the caller, reads the message of a unary call, and calls the servicer.

Note: [Credentials before bytes]
    A caller that is not known, or whose role may not make the call, is refused by the headers of its call. Its message
    is not read, so no more than HTTP/2's window arrives of a message of 60 MiB. The messages of callers without
    credentials (health) are received from few at a time. For one more, the call whose message has been awaited longest
    is refused.

Note: [What an aborted call leaves]
    gRPC stores the `AbortError` of a call with the call. An error refers to the frames that it has passed: the request,
    its bytes, and gRPC's call with its received data. They form a cycle that only the garbage collector finds. A
    service runs the collector rarely (`host.malloc`). *Measured* with refused puts of 1 MiB: 1,537 puts left 2.1 GiB.
    So an error that leaves this module refers to no frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, Busy, InvalidRequest, Timeout, forget
from axon_ps.rpc.access import needs_nothing
from axon_ps.rpc.auth.credentials import Ended, Guard, Unknown
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.grpc import abort
from axon_ps.rpc.limits import FIRST_MESSAGE_S, MAX_READS, MAX_READS_OF_STRANGERS
from axon_ps.rpc.security import TOKEN_KEY
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import status_of

_CERTIFICATE: Final = "x509_pem_cert"

Behaviour = Callable[[Any, Any], Awaitable[Any]]
Serving = Callable[[Any], contextlib.AbstractContextManager[None]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Precedes every servicer of a server. See the notes of this module, and Note: [A unary call that is reset].

    Args:
        guard: checks credentials and the table.
        asks: whether credentials are asked for at all; else every caller may call.
    """

    def __init__(self, guard: Guard, *, asks: bool) -> None:
        self._guard = guard
        self._asks = asks
        self._reads = _Reads()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, which first checks the caller; it is a stream also for a unary method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return _UNKNOWN
        path = handler_call_details.method
        given = next((v for k, v in handler_call_details.invocation_metadata if k == TOKEN_KEY), b"")
        serving = self._serving(path, given.encode() if isinstance(given, str) else given, handler.request_streaming)
        behaviour: Any = next(filter(None, (handler.stream_stream, handler.unary_stream, handler.unary_unary)), None)
        if inspect.isasyncgenfunction(behaviour):  # not a servicer of ours: gRPC's reflection
            answer = _generating(behaviour, serving) if handler.request_streaming else None
        elif inspect.iscoroutinefunction(behaviour):
            answer = self._answering(handler, behaviour, path, serving)
        else:
            answer = None
        if answer is None:
            return handler
        parse = handler.request_deserializer
        return grpc.stream_stream_rpc_method_handler(
            answer,
            request_deserializer=parse if handler.request_streaming else _parsed_or_error(parse),
            response_serializer=handler.response_serializer,
        )

    def _serving(self, path: str, given: bytes, is_stream: bool) -> Serving:
        """Return the context in which a call is served; it raises `PermissionDenied` if its caller may not make it."""
        if not self._asks or needs_nothing(path):
            return lambda context: contextlib.nullcontext()

        def serving(context: Any) -> contextlib.AbstractContextManager[None]:
            certificate = next(iter(context.auth_context().get(_CERTIFICATE, ())), b"")
            credentials = self._guard.admit(path, given, certificate, context.peer())
            return self._guard.revocations.watching(credentials, is_stream=is_stream)

        return serving

    def _answering(self, handler: Any, behaviour: Behaviour, path: str, serving: Serving) -> Behaviour:
        is_strange = self._asks and needs_nothing(path)

        async def perform(requests: Any, context: Any) -> None:
            try:
                with serving(context):
                    if handler.request_streaming:
                        await behaviour(requests, context)
                        return
                    request = await self._reads.message(context, path, is_strange=is_strange)
                    reply = await behaviour(request, context)
                    if not handler.response_streaming:
                        await Shielded(context.write(reply))
            except AxonError as error:  # the caller is refused, or has sent no message
                await _refuse(context, error)

        async def answer(requests: Any, context: Any) -> None:
            try:
                await perform(requests, context)
            except grpc.aio.AbortError as error:
                del requests, context  # see Note: [What an aborted call leaves]
                forget(error)
                raise

        return answer


def _generating(behaviour: Any, serving: Serving) -> Any:
    async def generate(requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with serving(context):
                async for reply in behaviour(requests, context):
                    yield reply
        except AxonError as error:
            await _refuse(context, error)

    return generate


class _Reads:
    """The messages of unary calls that are being received: few of a connection, and few of callers without credentials.

    A stranger is a caller without credentials.
    """

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}
        self._strangers: dict[_Stranger, None] = {}  # in the order of their calls

    async def message(self, context: Any, path: str, *, is_strange: bool) -> Any:
        """Receive the message of a call.

        Raises:
            InvalidRequest: it cannot be parsed, or the call has ended without one.
            Timeout: it does not come.
            AbortError: it was refused in favour of newer calls.
        """
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                with self._stranger(context) if is_strange else contextlib.nullcontext() as stranger:
                    async with self._permit(context.peer()):
                        request = await Shielded(context.read())
        except TimeoutError:
            late = f"a call of {path} stayed without its message for {FIRST_MESSAGE_S:g} s; send it with the call"
            raise Timeout(late) from None
        if stranger is not None and stranger.refusal is not None:
            await stranger.refusal
        if isinstance(request, DecodeError):
            raise InvalidRequest(f"a message cannot be parsed: {request}")
        if request is grpc.aio.EOF:
            raise InvalidRequest(f"a call of {path} ended without its message")
        return request

    @contextlib.asynccontextmanager
    async def _permit(self, connection: str) -> AsyncIterator[None]:
        """Limit the messages of a connection that are being received in this context."""
        calls = self._connections.setdefault(connection, _Connection())
        calls.number += 1
        try:
            async with calls.free:
                yield
        finally:
            calls.number -= 1
            if not calls.number:
                del self._connections[connection]

    @contextlib.contextmanager
    def _stranger(self, context: Any) -> Iterator[_Stranger]:
        """Limit the messages of callers without credentials that are being received, or awaited, in this context."""
        if len(self._strangers) >= MAX_READS_OF_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.refuse()
        stranger = _Stranger(context)
        self._strangers[stranger] = None
        try:
            yield stranger
        finally:
            self._strangers.pop(stranger, None)


class _Connection:
    """The calls of a connection that receive their message, or wait to receive it."""

    def __init__(self) -> None:
        self.number = 0
        self.free = asyncio.Semaphore(MAX_READS)


class _Stranger:
    """A call without credentials whose message has not come.

    Attributes:
        refusal: raises gRPC's error of a call that is aborted; None = it was not refused.
    """

    def __init__(self, context: Any) -> None:
        self.refusal: asyncio.Task[None] | None = None
        self._context = context

    def refuse(self) -> None:
        """End the call, and the reading of its message."""
        self.refusal = asyncio.ensure_future(self._refuse())
        self.refusal.add_done_callback(lambda refusal: refusal.cancelled() or refusal.exception())

    async def _refuse(self) -> None:
        many = f"the messages of {MAX_READS_OF_STRANGERS} callers without credentials are waited for, which is the most"
        try:
            await _refuse(self._context, Busy(f"{many}; send the message with the call"))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:
            pass  # the caller has gone meanwhile


async def _unknown(_: Any, context: Any) -> None:
    await abort(context, CallStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))


_UNKNOWN: Final[Any] = grpc.stream_stream_rpc_method_handler(_unknown)
"""gRPC's answer to an unknown method; gRPC's own handler would leak memory if the call is reset."""


async def _refuse(context: Any, error: AxonError) -> None:
    status = status_of(error)
    if isinstance(error, (Unknown, Ended)):
        status = status._replace(code=grpc.StatusCode.UNAUTHENTICATED)
    await abort(context, status)


def _parsed_or_error(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Wrap `parse` so that it returns its error as a value, since gRPC would convert an exception to None."""
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parsed
