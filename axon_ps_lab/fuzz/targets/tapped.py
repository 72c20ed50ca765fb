"""Channels of this process whose messages are recorded, as seeds, or exchanged, as a hostile server would send them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from axon_ps.rpc import channels
from axon_ps.rpc.in_process import InProcessChannel
from axon_ps.wire.v1 import coordinator_pb2, shard_pb2

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (coordinator_pb2, shard_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every RPC of the schema, by path."""

LATEST = 40
"""Seeds of a message type."""


class Tap:
    """The messages of the channels, on their way.

    Attributes:
        seeds: recorded messages, by the full name of their type; the newest of them.
        reply: makes what a client receives of what the server has sent: path and message; None = nothing is changed.
    """

    def __init__(self) -> None:
        self.seeds: defaultdict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=LATEST))
        self.reply: Callable[[str, bytes], bytes] | None = None

    def sent(self, path: str, data: bytes) -> bytes:
        """A client sends a message."""
        self.seeds[METHODS[path].input_type.full_name].append(data)
        return data

    def received(self, path: str, data: bytes) -> bytes:
        """A client receives a message."""
        self.seeds[METHODS[path].output_type.full_name].append(data)
        return data if self.reply is None else self.reply(path, data)

    @contextmanager
    def installed(self) -> Iterator[Tap]:
        """Channels that are opened meanwhile are tapped."""
        tap = self

        class TappedChannel(InProcessChannel):
            def unary_unary(self, path: str, *, request_serializer: Any, response_deserializer: Any) -> Any:
                return super().unary_unary(
                    path,
                    request_serializer=lambda m: tap.sent(path, request_serializer(m) if request_serializer else m),
                    response_deserializer=_after(tap, path, response_deserializer),
                )

            def stream_stream(self, path: str, *, request_serializer: Any, response_deserializer: Any) -> Any:
                open_call = super().stream_stream(
                    path,
                    request_serializer=request_serializer,
                    response_deserializer=_after(tap, path, response_deserializer),
                )

                def opened(**options: Any) -> Any:
                    call: Any = open_call(**options)
                    send = call.send_serialized_message
                    call.send_serialized_message = lambda data: send(tap.sent(path, data))
                    return call

                return opened

        with mock.patch.object(channels, "InProcessChannel", TappedChannel):
            yield self


def _after(tap: Tap, path: str, deserialize: Any) -> Callable[[bytes], Any]:
    def received(data: bytes) -> Any:
        data = tap.received(path, data)
        return deserialize(data) if deserialize else data

    return received
