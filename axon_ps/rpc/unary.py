"""The message of a unary call, read as a stream's is: it is waited for no longer than that, and a reset leaves nothing.

Note: [A unary call that is reset]
    gRPC reads the message of a unary call itself, in the task that it cancels when the client resets the call, so that
    the read is never freed (see Note: [An operation that is cancelled]), and it waits for it for ever. Nobody has been
    asked for a token by then. So a server offers its unary methods as streams of one message, which are the same on the
    wire. *Measured*: 2 bytes a reset call are left of 96; a call takes 0.72 ms in place of 0.59 on a busy machine.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, InvalidRequest, Timeout
from axon_ps.rpc.limits import FIRST_MESSAGE_S
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import status_of

Answer = Callable[[Any, Any], Awaitable[Any]]


class UnaryInterceptor(grpc.aio.ServerInterceptor):
    """Makes streams of one message of the unary methods of a server. It has to be the first of its interceptors."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, which reads the message itself."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return _UNKNOWN
        if handler.request_streaming:
            return handler
        behaviour: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        return grpc.stream_stream_rpc_method_handler(
            _read_first(behaviour, handler_call_details.method, writes=not handler.response_streaming),
            request_deserializer=_parsed_or_error(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _read_first(behaviour: Answer, method: str, *, writes: bool) -> Answer:
    async def answer(_: Any, context: Any) -> None:
        request = await _message(context, method)
        if isinstance(request, AxonError):
            code, details, metadata = status_of(request)
            await Shielded(context.abort(code, details, metadata))
        reply = await behaviour(request, context)
        if writes:
            await Shielded(context.write(reply))

    return answer


async def _unknown(_: Any, context: Any) -> None:
    await Shielded(context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))


_UNKNOWN: Final[Any] = grpc.stream_stream_rpc_method_handler(_unknown)
"""gRPC's own answer, which a reset would leave memory of."""


async def _message(context: Any, method: str) -> Any:
    """The message, or the error that says why there is none."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            request = await Shielded(context.read())
    except TimeoutError:
        return Timeout(
            f"a call of {method} stayed without its message for {FIRST_MESSAGE_S:g} s; send it with the call"
        )
    return InvalidRequest(f"a call of {method} ended without its message") if request is grpc.aio.EOF else request


def _parsed_or_error(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """As `parse`; what cannot be parsed is an error as a value, since gRPC would log one that is raised."""
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return InvalidRequest(f"a message cannot be parsed: {error}")

    return parsed
