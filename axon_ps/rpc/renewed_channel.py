"""A channel over TLS whose certificate is renewed: new calls use a connection made with the newest one.

The certificate of an open connection cannot be replaced, nor can the credentials of a gRPC channel. So there is one
gRPC channel for each certificate. When there is a newer one, the next call opens another channel. The previous channel
is closed when its last call is over. So a session of several days is not interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from axon_ps.rpc.auth.certificates import Chain, ChainSource


class _Connected:
    """A gRPC channel, and the calls on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.callables: dict[int, Any] = {}  # by number of `RenewedChannel._make`


class RenewedChannel:
    """A channel with a renewed certificate; see the module's docstring.

    It has the methods of gRPC's channels that `service.Stub`, and stubs of protoc's plugin, use.

    Args:
        source: the source of certificates.
        connect: opens a channel with a certificate.
    """

    def __init__(self, source: ChainSource, connect: Callable[[Chain], grpc.aio.Channel]) -> None:
        self._source = source
        self._connect = connect
        self._chain = source.current()
        self._now = _Connected(connect(self._chain))
        self._before: set[_Connected] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._methods = 0
        self._closed = False

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        """See `grpc.aio.Channel`."""
        return self._make("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        """See `grpc.aio.Channel`."""
        return self._make("unary_stream", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        """See `grpc.aio.Channel`."""
        return self._make("stream_stream", args, options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the newest connection; see `grpc.aio.Channel`."""
        return self._newest().channel.get_state(try_to_connect=try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for a change of the newest connection's state; see `grpc.aio.Channel`."""
        await self._now.channel.wait_for_state_change(last_observed_state)

    def newest(self) -> object:
        """Return a value that identifies the connection of the next call."""
        return self._newest()

    async def close(self, grace: float | None = None) -> None:
        """Close every connection; calls get `grace` seconds to end. Harmless when repeated."""
        self._closed = True
        await asyncio.gather(*(each.channel.close(grace) for each in (self._now, *self._before)), *self._closing)

    def _make(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        number = self._methods
        self._methods += 1

        def call(*call_args: Any, **call_options: Any) -> Any:
            connected = self._newest()
            if (method := connected.callables.get(number)) is None:
                method = connected.callables[number] = getattr(connected.channel, kind)(*args, **options)
            made = method(*call_args, **call_options)
            connected.calls += 1
            made.add_done_callback(lambda _: self._ended(connected))
            return made

        return call

    def _newest(self) -> _Connected:
        chain = self._source.current()
        if chain is not self._chain and not self._closed:
            self._chain, before = chain, self._now
            self._now = _Connected(self._connect(chain))
            self._before.add(before)
            self._close_idle(before)
        return self._now

    def _ended(self, connected: _Connected) -> None:
        connected.calls -= 1
        self._close_idle(connected)

    def _close_idle(self, connected: _Connected) -> None:
        if connected in self._before and not connected.calls and not self._closed:
            self._before.discard(connected)
            task = asyncio.get_running_loop().create_task(connected.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
