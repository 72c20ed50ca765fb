"""The interceptor of a server: refuses, before a servicer sees it, every call that its caller may not make."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from axon_ps.errors import AxonError, PermissionDenied
from axon_ps.rpc.access import needs_nothing
from axon_ps.rpc.auth.credentials import Credentials, Ended, Guard, Revoked, Unknown
from axon_ps.rpc.security import TOKEN_KEY
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import status_of

_CERTIFICATE: Final = "x509_pem_cert"


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Has `guard` decide about every call, and ends calls under way of whoever is revoked.

    Args:
        guard: knows credentials and the table.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, or one of the same kind that first asks who calls."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or needs_nothing(path):
            return handler
        given = next((v for k, v in handler_call_details.invocation_metadata if k == TOKEN_KEY), b"")
        return self._guarded(handler, path, given.encode() if isinstance(given, str) else given)

    def _guarded(self, handler: Any, path: str, given: bytes) -> Any:
        streams = handler.request_streaming
        behaviour = handler.stream_stream if streams else handler.unary_unary
        watching = self._guard.revocations.watching

        async def answer(request: Any, context: Any) -> Any:
            credentials = await self._admit(path, given, context)
            try:
                with watching(credentials, is_stream=streams):
                    return await behaviour(request, context)
            except (Revoked, Ended) as error:
                await _refuse(context, error)

        async def generate(requests: Any, context: Any) -> AsyncIterator[Any]:  # of others: gRPC's reflection
            credentials = await self._admit(path, given, context)
            try:
                with watching(credentials, is_stream=True):
                    async for reply in behaviour(requests, context):
                        yield reply
            except (Revoked, Ended) as error:
                await _refuse(context, error)

        make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return make(
            generate if inspect.isasyncgenfunction(behaviour) else answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _admit(self, path: str, given: bytes, context: Any) -> Credentials:
        certificate = next(iter(context.auth_context().get(_CERTIFICATE, ())), b"")
        try:
            return self._guard.admit(path, given, certificate, context.peer())
        except PermissionDenied as error:
            await _refuse(context, error)
            raise AssertionError("an aborted call raises") from None


async def _refuse(context: Any, error: AxonError) -> None:
    code, details, metadata = status_of(error)
    code = grpc.StatusCode.UNAUTHENTICATED if isinstance(error, (Unknown, Ended)) else code
    await Shielded(context.abort(code, details, metadata))  # see Note: [An operation that is cancelled]
