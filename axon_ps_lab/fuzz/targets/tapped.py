"""Channels of this process whose messages are recorded, as seeds, or exchanged, as a hostile server would send them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from axon_ps.rpc import channels
from axon_ps.rpc.calls.protocol import EOF, Destination, Message, Metadata, joined
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.in_process import InProcessCall, InProcessChannel
from axon_ps.wire.v1 import coordinator_pb2, shard_pb2

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (coordinator_pb2, shard_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""The RPCs of the coordinator and of shard servers, by path."""

LATEST = 40
"""Most seeds of a message type."""


class Tap:
    """The messages of the channels, on their way.

    Attributes:
        seeds: the newest recorded messages, by the full name of their type.
        reply: replaces a server's message on its way to the client, given path and message; None = none is replaced.
    """

    def __init__(self) -> None:
        self.seeds: defaultdict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=LATEST))
        self.reply: Callable[[str, bytes], bytes] | None = None

    def sent(self, path: str, data: bytes) -> bytes:
        """Record a message that a client sends, and return it."""
        self.seeds[METHODS[path].input_type.full_name].append(data)
        return data

    def received(self, path: str, data: bytes) -> bytes:
        """Record a message of a server, and return the message that its client receives instead."""
        self.seeds[METHODS[path].output_type.full_name].append(data)
        return data if self.reply is None else self.reply(path, data)

    @contextmanager
    def installed(self) -> Iterator[Tap]:
        """Tap the channels that are opened in this context."""
        tap = self

        class TappedChannel(InProcessChannel):
            def open(self, path: str, timeout_s: float | None, metadata: Metadata | None) -> InProcessCall:
                call = super().open(path, timeout_s, metadata)
                write, read = call.write, call.read

                async def written(message: Message) -> None:
                    await write(tap.sent(path, joined(message)))

                async def received(destination: Destination | None = None) -> Any:
                    message = await read(destination)
                    return message if message is EOF else tap.received(path, message)

                call.write, call.read = written, received  # type: ignore[method-assign]
                return call

            async def call(
                self, path: str, request: bytes, timeout_s: float | None, metadata: Metadata | None
            ) -> bytes | CallStatus:
                reply = await super().call(path, tap.sent(path, request), timeout_s, metadata)
                return reply if isinstance(reply, CallStatus) else tap.received(path, reply)

        with mock.patch.object(channels, "InProcessChannel", TappedChannel):
            yield self
