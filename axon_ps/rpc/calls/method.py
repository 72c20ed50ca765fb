"""A servicer's method, as carriers perform it: every call is answered, with a status of our errors.

Note: [Every call is answered]
    A servicer may end with `CancelledError` without having been cancelled by its carrier, because it awaited a task
    that the server cancelled while shutting down. Without a status its client would wait. It gets `Broken` instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, Broken, InternalError, InvalidRequest, Timeout, forget
from axon_ps.rpc.calls.protocol import CallOver, ServerCall, task_is_cancelled
from axon_ps.rpc.calls.status import OK, CallStatus
from axon_ps.rpc.limits import FIRST_MESSAGE_S
from axon_ps.rpc.status import status_of

CANCEL_WAIT_S: Final = 5.0
"""Seconds for which a stopping server waits for the calls that it has cancelled."""

Behaviour = Callable[..., Awaitable[Any]]
_logger = logging.getLogger(__name__)


class Method:
    """A method of a servicer.

    Args:
        path: "/SERVICE/METHOD".
        behaviour: the servicer's method: gets a `ServerCall`, after the request if it is unary.
        is_stream: whether it has any number of messages both ways; else one.
        request: the type of a client's message, for errors.
        parse: decodes a message of a client; None = the servicer gets it as it is.
        serialize: encodes a message to a client; None = the servicer has done it.
    """

    __slots__ = ("_behaviour", "_request", "is_stream", "parse", "path", "serialize")

    def __init__(
        self,
        path: str,
        behaviour: Behaviour,
        *,
        is_stream: bool,
        request: str,
        parse: Callable[[bytes], Any] | None,
        serialize: Callable[[Any], bytes] | None,
    ) -> None:
        self.path = path
        self.is_stream = is_stream
        self.parse = parse
        self.serialize = serialize
        self._behaviour = behaviour
        self._request = request

    @property
    def name(self) -> str:
        """The method, as the schema spells it."""
        return self.path.rpartition("/")[2]

    async def perform(self, call: ServerCall, request: bytes | None = None) -> CallStatus:
        """Perform a call, and return the status with which its carrier ends it.

        Args:
            call: the servicer's end of the call.
            request: the encoded request of a unary method, whose reply is written to `call`.

        Raises:
            CancelledError: the call is over and needs no status, or its carrier has cancelled the task.
        """
        try:
            if self.is_stream:
                async with _first_message(call):
                    await self._behaviour(call)
            else:
                if request is None:
                    raise InvalidRequest(f"a call of {self.path} ended without its message")
                await call.write(await self._behaviour(self.parse(request) if self.parse else request, call))
            return OK
        except asyncio.CancelledError:
            if task_is_cancelled():  # by the carrier: the client has gone, or by the end of the event loop
                raise
            return status_of(Broken(f"{self.name} was broken off by the server"))  # Note: [Every call is answered]
        except CallOver as error:
            _logger.debug("%s: the client has gone", self.path, exc_info=error)
            raise asyncio.CancelledError from error
        except Exception as error:
            status = self._status_of(error)
            forget(error)  # a future of the servicer may keep it, and with it the frames that have the messages
            return status

    def _status_of(self, error: Exception) -> CallStatus:
        """Return the status of a servicer's error; a bug of ours is logged."""
        if isinstance(error, AxonError):
            if isinstance(error, InternalError):
                _logger.error("%s failed", self.path, exc_info=error)
            return status_of(error)
        if isinstance(error, TimeoutError):
            silent = f"a stream of {self.name} stayed without a message for {FIRST_MESSAGE_S:g} s; open it to use it"
            return status_of(Timeout(silent))
        if isinstance(error, DecodeError):
            return status_of(InvalidRequest(f"a {self._request} cannot be parsed: {error}"))
        _logger.error("%s failed", self.path, exc_info=error)
        return status_of(InternalError(f"{self.name} failed: {type(error).__name__}: {error}"))


@asynccontextmanager
async def _first_message(call: ServerCall) -> AsyncIterator[None]:
    """Raise `TimeoutError` in this context if neither the first message nor the end is read in `FIRST_MESSAGE_S`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def give_up() -> None:
            if not call.received:
                limit.reschedule(loop.time())

        timer = loop.call_later(FIRST_MESSAGE_S, give_up)
        try:
            yield
        finally:
            timer.cancel()


# ---- shared by the servers that are not gRPC's ----

Service = Mapping[str, Method]
"""The methods of a service, by path."""


def method_of(services: Sequence[Service], path: str) -> Method | None:
    """Return the method of "/SERVICE/METHOD"; None when it is not served."""
    return next((service[path] for service in services if path in service), None)


async def end_calls(calls: Collection[asyncio.Task[None]], grace_s: float) -> None:
    """Give calls under way `grace_s` seconds, then cancel them.

    Args:
        calls: those that have not ended; the caller removes each that ends meanwhile.
        grace_s: seconds that they may take.
    """
    if calls:
        await asyncio.wait(calls, timeout=grace_s)
    for call in calls:
        call.cancel()
    if calls:
        await asyncio.wait(calls, timeout=CANCEL_WAIT_S)
