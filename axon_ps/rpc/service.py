"""Servicers and stubs, built from the schema's service descriptors: there is no generated gRPC code.

A servicer is any object with one coroutine method per RPC, named in snake case (`AllGather` -> `all_gather`):

    unary    async def register(self, request, context) -> reply
    stream   async def session(self, context) -> None      reads with `await context.read()` until that is `EOF`,
                                                           writes with `await context.write(message)`

All streams are bidirectional.

Bulk messages and the feed's are raw bytes (see `wire.frames`); everything else is protobuf messages. An `AxonError` of
a servicer reaches the caller as the same class, by the status map. Any other exception is our bug: it is logged with
its traceback, and the caller gets `InternalError`.

Note: [Every call is answered]
    A servicer may end with `CancelledError` without having been cancelled by gRPC, because it awaited a task that the
    server cancelled while shutting down. gRPC sends no status then, so its client would wait. The client gets `Broken`
    instead.

Note: [An end of input may be a broken connection]
    When a client's connection breaks, a servicer that reads first gets `EOF`, exactly as for a clean half-close. gRPC
    cancels the servicer's task a moment later. So `EOF` alone never means that the client has sent everything: count
    the messages, or have the client send a message that marks the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from axon_ps.errors import AxonError, Broken, Closed, InternalError, InvalidRequest, Timeout
from axon_ps.rpc import channels
from axon_ps.rpc.bulk.client import BulkClient
from axon_ps.rpc.limits import FIRST_MESSAGE_S
from axon_ps.rpc.renewed_channel import RenewedChannel
from axon_ps.rpc.security import Security
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import error_of, parsed_or_error, status_of
from axon_ps.rpc.stream import EOF, Stream, task_is_cancelled
from axon_ps.wire.frames import BULK_MESSAGES
from axon_ps.wire.v1 import watch_pb2

__all__ = ["EOF", "Stream", "Stub", "error_of", "method_name", "service_handler", "together"]

RAW_MESSAGES: Final = frozenset(message.DESCRIPTOR.full_name for message in (*BULK_MESSAGES, watch_pb2.WatchEvent))
"""Messages that servicers and stubs get as encoded bytes: bulk, and events that are encoded once for many readers."""

NO_TOKEN: Final = Security()

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_CAPITALS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def method_name(rpc: str) -> str:
    """Return the name of the servicer's method for an RPC: "AllGather" -> "all_gather", "KV" -> "kv"."""
    return _CAPITALS.sub("_", rpc).lower()


def service_handler(descriptor: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Make the handler with which a `server.Server` offers the service `descriptor`, performed by `servicer`.

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
    return grpc.method_handlers_generic_handler(
        descriptor.full_name,
        {m.name: _method_handler(m, getattr(servicer, method_name(m.name))) for m in descriptor.methods},
    )


class Stub:
    """The client's side of a service on one channel.

    Args:
        channel: from `channels.connect`.
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
        self._methods = {m.name: m for m in descriptor.methods if not _is_one_way(m)}
        self._calls = {name: _callable(channel, method) for name, method in self._methods.items()}

    async def call(self, method: str, request: Message, *, timeout_s: float | None = None) -> Any:
        """Call a unary method.

        Args:
            method: name of the RPC, as the schema spells it.
            request: its request message.
            timeout_s: seconds until it fails with `Timeout`; None = no deadline.

        Raises:
            AxonError: the error of the servicer; or `Unreachable`, `Broken`, `Timeout`, `PermissionDenied`.

        After an error: `Unreachable` and the errors that a servicer raises before it does something mean that nothing
        was done. After `Broken` or `Timeout` the peer may have done some, all or none of it.
        """
        try:
            return await self._calls[method](request, timeout=_timeout(timeout_s), metadata=self._security.metadata())
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.peer, method, timeout_s=timeout_s) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise self._closed(method) from None
        except grpc.aio.UsageError:
            raise self._closed(method) from None

    def open(self, method: str, *, timeout_s: float | None = None) -> Stream:
        """Open a streaming call; the first failure shows at the first read or write.

        Args:
            method: name of the RPC, as the schema spells it.
            timeout_s: seconds the entire call may take; None = no deadline.

        Raises:
            Closed: the channel was closed.
        """
        try:
            call = self._calls[method](timeout=_timeout(timeout_s), metadata=self._security.metadata())
        except grpc.aio.UsageError:
            raise self._closed(method) from None
        used = self.credentials()
        return Stream(call, self.peer, method, timeout_s, lambda: self.credentials() == used)

    async def open_bulk(self, method: str) -> Stream:
        """Open a streaming call for much data, over a bulk connection (`rpc.bulk`) if possible.

        Args:
            method: name of the RPC, as the schema spells it.

        Raises:
            Closed: the channel was closed.
        """
        if self.bulk is not None:
            used, m = self.credentials(), self._methods[method]
            call = await self.bulk.open(_path(m), _deserializer(m.output_type))
            if call is not None:
                return Stream(call, self.peer, method, None, lambda: self.credentials() == used)
        return self.open(method)

    def credentials(self) -> object:
        """Return a value that identifies the credentials of the next call; it differs once there are newer ones.

        Raises:
            ConfigurationError: the token's file cannot be read or has no token.
        """
        return self._newest(), self._security.metadata()

    def _closed(self, method: str) -> Closed:
        return Closed(f"the connection to {self.peer} was closed before {method} was done")


class ServerStream:
    """A servicer's end of a streaming call.

    Args:
        context: gRPC's context.
        first: ends the stream unless its first message, or its end, comes before; None = there is no time-out.
    """

    def __init__(self, context: Any, first: asyncio.Timeout | None = None) -> None:
        self._context = context
        self._first = first

    def read(self) -> Shielded[Any]:
        """Return an awaitable for the client's next message, or `EOF` when there are no more."""
        return Shielded(self._context.read() if self._first is None else self._read_first(self._first))

    async def _read_first(self, first: asyncio.Timeout) -> Any:
        message = await self._context.read()
        if self._first is not None and not first.expired():
            first.reschedule(None)
        self._first = None
        return message

    def peer(self) -> str:
        """Return the address of the client; empty in one process."""
        return str(self._context.peer()) if hasattr(self._context, "peer") else ""

    def write(self, message: Any) -> Shielded[None]:
        """Return an awaitable that sends a message, encoded or not; it ends when the transport has accepted it."""
        return Shielded(self._context.write(message))

    @property
    def send_soon(self) -> Callable[[bytes], bool] | None:
        """A function that sends an encoded message without waiting, False = it cannot; None if writes must wait."""
        return getattr(self._context, "send_soon", None)

    def receive(self, take: Callable[[Any], None]) -> bool:
        """Have every further message, and `EOF`, passed to `take` as it comes; False if the caller must read instead.

        Args:
            take: gets the messages; it must not raise.
        """
        if can := hasattr(self._context, "receive"):
            self._context.receive(take)
        return can


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


def _callable(channel: grpc.aio.Channel, method: MethodDescriptor) -> Any:
    make = channel.stream_stream if method.client_streaming else channel.unary_unary
    call: Any = make(
        _path(method),
        request_serializer=_serializer(method.input_type),
        response_deserializer=parsed_or_error(_deserializer(method.output_type)),
    )
    if method.client_streaming:
        return call

    async def call_once(request: Message, **options: Any) -> Any:
        reply = await call(request, **options)
        if isinstance(reply, DecodeError):
            raise Broken(f"{channels.address_of(channel)} sent a reply to {method.name} that cannot be parsed: {reply}")
        return reply

    return call_once


def _method_handler(method: MethodDescriptor, behaviour: Callable[..., Awaitable[Any]]) -> Any:
    # We parse a unary request and serialize its reply; gRPC's context does that for messages of a stream. Both happen
    # inside of `perform`, which answers a message that cannot be parsed.
    parse, serialize = _deserializer(method.input_type), _serializer(method.output_type)
    streams = method.client_streaming

    async def perform(raw_or_iterator: Any, context: Any) -> Any:
        try:
            if streams:
                async with asyncio.timeout(FIRST_MESSAGE_S) as first:
                    return await behaviour(ServerStream(context, first))
            reply = await behaviour(parse(raw_or_iterator) if parse else raw_or_iterator, context)
            return serialize(reply) if serialize else reply
        except asyncio.CancelledError:
            if task_is_cancelled():  # by gRPC: the client has gone, or by the end of the event loop
                raise
            # See Note: [Every call is answered]
            await _abort(context, Broken(f"{method.name} was broken off by the server"))
        except grpc.aio.AbortError:
            raise
        except AxonError as error:
            if isinstance(error, InternalError):
                _logger.error("%s failed", method.full_name, exc_info=error)
            await _abort(context, error)
        except TimeoutError:
            silent = f"a stream of {method.name} stayed without a message for {FIRST_MESSAGE_S:g} s; open it to use it"
            await _abort(context, Timeout(silent))
        except DecodeError as error:
            await _abort(context, InvalidRequest(f"a {method.input_type.name} cannot be parsed: {error}"))
        except Exception as error:
            if _nobody_listens(error, context):
                _logger.debug("%s: the client has gone", method.full_name, exc_info=error)
                raise asyncio.CancelledError from error
            _logger.exception("%s failed", method.full_name)
            await _abort(context, InternalError(f"{method.name} failed: {type(error).__name__}: {error}"))

    make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return make(
        perform,
        request_deserializer=parse if streams else None,
        response_serializer=serialize if streams else None,
    )


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _is_one_way(method: MethodDescriptor) -> bool:
    return bool(method.client_streaming != method.server_streaming)


async def _abort(context: Any, error: AxonError) -> None:
    if context.done():  # a status was sent before: the client gets no other
        raise asyncio.CancelledError
    code, details, metadata = status_of(error)
    try:
        await Shielded(context.abort(code, details, metadata))  # see Note: [An operation that is cancelled]
    except grpc.aio.InternalError:  # the client has gone meanwhile
        raise asyncio.CancelledError from None


def _nobody_listens(error: Exception, context: Any) -> bool:
    """Return True if a read or write failed with `error` because the connection is broken or the server stopped."""
    return isinstance(error, grpc.aio.BaseError) and (not isinstance(error, grpc.aio.UsageError) or context.done())


def _serializer(message: Descriptor) -> Callable[[Any], bytes] | None:
    if message.full_name in RAW_MESSAGES:
        return None
    encode = GetMessageClass(message).SerializeToString
    return lambda given: given if isinstance(given, bytes) else encode(given)


def _deserializer(message: Descriptor) -> Callable[[bytes], Any] | None:
    if message.full_name in RAW_MESSAGES:
        return None
    return GetMessageClass(message).FromString
