"""Servicers and stubs, built from the schema's service descriptors: there is no generated gRPC code.

A servicer is any object with one coroutine method per RPC, named in snake case (`AllGather` -> `all_gather`):

    unary    async def register(self, request, context) -> reply
    stream   async def session(self, context) -> None      reads with `await context.read()` until that is `EOF`,
                                                           writes with `await context.write(message)`

`context` is a `calls.protocol.ServerCall`. All streams are bidirectional.

Bulk messages and the feed's are raw bytes (see `wire.frames`); everything else is protobuf messages. An `AxonError` of
a servicer reaches the caller as the same class, by the status map. Any other exception is our bug: it is logged with
its traceback, and the caller gets `InternalError`.

Note: [An end of input may be a broken connection]
    When a client's connection breaks, a servicer that reads first gets `EOF`, exactly as for a clean half-close. gRPC
    cancels the servicer's task a moment later. So `EOF` alone never means that the client has sent everything: count
    the messages, or have the client send a message that marks the end.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from axon_ps.errors import Broken, Closed, InternalError
from axon_ps.rpc import channels
from axon_ps.rpc.calls.method import Method, Service
from axon_ps.rpc.calls.protocol import EOF, CallOver, ClientCall
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.bulk.client import BulkClient
from axon_ps.rpc.renewed_channel import RenewedChannel
from axon_ps.rpc.security import Security
from axon_ps.rpc.status import error_of, error_of_status
from axon_ps.rpc.stream import Stream
from axon_ps.wire.frames import BULK_MESSAGES
from axon_ps.wire.v1 import watch_pb2

__all__ = ["EOF", "Stream", "Stub", "error_of", "method_name", "service_handler", "together"]

RAW_MESSAGES: Final = frozenset(message.DESCRIPTOR.full_name for message in (*BULK_MESSAGES, watch_pb2.WatchEvent))
"""Messages that servicers and stubs get as encoded bytes: bulk, and events that are encoded once for many readers."""

NO_TOKEN: Final = Security()

T = TypeVar("T")

_CAPITALS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def method_name(rpc: str) -> str:
    """Return the name of the servicer's method for an RPC: "AllGather" -> "all_gather", "KV" -> "kv"."""
    return _CAPITALS.sub("_", rpc).lower()


def service_handler(descriptor: ServiceDescriptor, servicer: object) -> Service:
    """Return the methods with which a `server.Server` offers the service `descriptor`, performed by `servicer`.

    Raises:
        InternalError: the servicer lacks a method, or a method streams in one direction only.
    """
    missing = [name for m in descriptor.methods if not callable(getattr(servicer, name := method_name(m.name), None))]
    if missing:
        raise InternalError(f"{type(servicer).__name__} lacks {', '.join(missing)} of {descriptor.full_name}")
    if one_way := [m.name for m in descriptor.methods if _is_one_way(m)]:
        raise InternalError(
            f"{', '.join(one_way)} of {descriptor.full_name} stream in one direction only; they must stream in both"
        )
    return {_path(m): _method(m, getattr(servicer, method_name(m.name))) for m in descriptor.methods}


class Stub:
    """The client's side of a service on one channel.

    Args:
        channel: a channel of `channels.connect`.
        descriptor: the service; methods that stream in one direction only (grpc.health.v1's Watch) are left out.
        security: its newest token is sent with every call, unless the channel's certificate proves as much.
        peer: the name of the other end in errors; the channel's address by default.

    Attributes:
        bulk: opens its bulk calls; None = they are made like all others.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        descriptor: ServiceDescriptor,
        security: Security = NO_TOKEN,
        *,
        peer: str = "",
    ) -> None:
        self.peer = peer or channels.address_of(channel)
        self.bulk: BulkClient | None = None
        self._security = NO_TOKEN if channels.proves_the_secret(channel) else security
        self._newest = channel.newest if isinstance(channel, RenewedChannel) else _plain
        self._methods = {m.name: _Rpc(m) for m in descriptor.methods if not _is_one_way(m)}
        self._carrier = channels.carrier_of(channel)

    async def call(self, method: str, request: Message, *, timeout_s: float | None = None) -> Any:
        """Call a unary method.

        Args:
            method: name of the RPC, as the schema spells it.
            request: its request message.
            timeout_s: seconds until it fails with `Timeout`; None = no deadline.

        Raises:
            AxonError: the error of the servicer; or `Unreachable`, `Broken`, `Timeout`, `Closed`, `PermissionDenied`.

        After an error: `Unreachable` and the errors that a servicer raises before it does something mean that nothing
        was done. After `Broken` or `Timeout` the peer may have done some, all or none of it.
        """
        rpc = self._methods[method]
        try:
            reply = await self._carrier.call(
                rpc.path, rpc.serialize(request), _timeout(timeout_s), self._security.metadata()
            )
        except CallOver:
            raise self._closed(method) from None
        if isinstance(reply, CallStatus):
            if reply.local:
                raise self._closed(method)
            raise error_of_status(reply, self.peer, method, timeout_s=timeout_s)
        try:
            return rpc.parse(reply)
        except DecodeError as error:
            raise Broken(f"{self.peer} sent a reply to {method} that cannot be parsed: {error}") from None

    def open(self, method: str, *, timeout_s: float | None = None) -> Stream:
        """Open a streaming call; the first failure shows at the first read or write.

        Args:
            method: name of the RPC, as the schema spells it.
            timeout_s: seconds the entire call may take; None = no deadline.

        Raises:
            Closed: the channel was closed.
        """
        try:
            call = self._carrier.open(self._methods[method].path, _timeout(timeout_s), self._security.metadata())
        except CallOver:
            raise self._closed(method) from None
        return self._stream(call, method, timeout_s, self.credentials())

    async def open_bulk(self, method: str) -> Stream:
        """Open a streaming call for much data, over a bulk connection (`rpc.carriers.bulk`) if possible.

        Args:
            method: name of the RPC, as the schema spells it.

        Raises:
            Closed: the channel was closed.
        """
        if self.bulk is not None:
            used = self.credentials()
            call = await self.bulk.open(self._methods[method].path)
            if call is not None:
                return self._stream(call, method, None, used)
        return self.open(method)

    def credentials(self) -> object:
        """Return a value that identifies the credentials of the next call; it differs once there are newer ones.

        Raises:
            ConfigurationError: the token's file cannot be read or has no token.
        """
        return self._newest(), self._security.metadata()

    def _stream(self, call: ClientCall, method: str, timeout_s: float | None, used: object) -> Stream:
        parse = self._methods[method].parse
        return Stream(call, self.peer, method, timeout_s, parse, lambda: self.credentials() == used)

    def _closed(self, method: str) -> Closed:
        return Closed(f"the connection to {self.peer} was closed before {method} was done")


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all results; the first error cancels the others, and is raised when they have ended."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _plain() -> object:
    """Return the connection's identity for a channel without renewed certificates: always the same."""
    return None


def _timeout(timeout_s: float | None) -> float | None:
    return None if timeout_s is None or math.isinf(timeout_s) else timeout_s


class _Rpc:
    """A method, as a stub calls it."""

    def __init__(self, method: MethodDescriptor) -> None:
        self.path = _path(method)
        self.serialize = _serializer(method.input_type) or _unchanged
        self.parse = _deserializer(method.output_type) or _unchanged


def _unchanged(message: Any) -> Any:
    return message


def _method(method: MethodDescriptor, behaviour: Callable[..., Awaitable[Any]]) -> Method:
    return Method(
        _path(method),
        behaviour,
        is_stream=method.client_streaming,
        request=method.input_type.name,
        parse=_deserializer(method.input_type),
        serialize=_serializer(method.output_type),
    )


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _is_one_way(method: MethodDescriptor) -> bool:
    return bool(method.client_streaming != method.server_streaming)


def _serializer(message: Descriptor) -> Callable[[Any], bytes] | None:
    if message.full_name in RAW_MESSAGES:
        return None
    encode = GetMessageClass(message).SerializeToString
    return lambda given: given if isinstance(given, bytes) else encode(given)


def _deserializer(message: Descriptor) -> Callable[[bytes], Any] | None:
    if message.full_name in RAW_MESSAGES:
        return None
    return GetMessageClass(message).FromString
