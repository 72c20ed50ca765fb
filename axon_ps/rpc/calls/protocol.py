"""The two ends of a call, and the carrier on which a client makes calls. See `rpc.calls` for the promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc

from axon_ps.rpc.calls.status import CallStatus

EOF: Final = grpc.aio.EOF
"""The result of a read when there are no more messages."""

Buffer = bytes | memoryview
Message = bytes | tuple[Buffer, ...]
"""An encoded message; a tuple has its parts, in order."""

Destination = Callable[[memoryview, int], tuple[int, memoryview] | None]
"""Gets a message's first bytes and its size; returns the offset at which its end begins, and the memory for that.

None = any memory.
"""

Metadata = tuple[tuple[str, str | bytes], ...]


class CallOver(Exception):
    """A message cannot be sent or a call cannot begin: the call has ended, or its channel was closed."""


class ClientCall(Protocol):
    """A client's end of a streaming call. One task may read while others write, one after the other.

    A task that is cancelled while it waits for the call cancels the call.
    """

    async def read(self, destination: Destination | None = None) -> Any:
        """Return the server's next message, encoded; `EOF` once the call has ended with `status`.

        Args:
            destination: returns the destination of a large message, or of its end; then only the bytes before that are
                returned. For a small message it is not called.
        """

    async def write(self, message: Message) -> None:
        """Send the server a message; returns when the transport has accepted it.

        Raises:
            CallOver: the call has ended.
        """

    async def done_writing(self) -> None:
        """Half-close: no further message is sent. Does nothing when the call is over."""

    def cancel(self) -> None:
        """End the call from this side. Does nothing when it is over."""

    def done(self) -> bool:
        """Return True if the call has ended; earlier messages may still be read."""

    async def status(self) -> CallStatus:
        """Return the status with which the call has ended, as soon as it is known.

        It comes after all messages: while one task waits for it, another must read.
        """


class ServerCall(Protocol):
    """A servicer's end of a call. One task may read while others write.

    The servicer's task is cancelled when the client has gone.

    Attributes:
        received: whether the client's first message, or the end of its messages, was read.
        send_soon: sends an encoded message without waiting, and returns False if it cannot; None = writes must wait.
    """

    received: bool

    @property
    def send_soon(self) -> Callable[[bytes], bool] | None:
        """See the class."""

    async def read(self) -> Any:
        """Return the client's next message, decoded; `EOF` when there are no more.

        Raises:
            CallOver: the call has ended.
            InvalidRequest, DecodeError: the client has sent something that is not a message.
        """

    def end_input(self) -> None:
        """Have the read under way, and later ones, return `EOF`: no further message is wanted."""

    def receive(self, take: Callable[[Any], None]) -> bool:
        """Have every further message, and `EOF`, passed to `take` as it comes; False if the caller must read instead.

        Args:
            take: gets the messages; it must not raise.
        """

    async def write(self, message: Any) -> None:
        """Send the client a message, encoded or not; returns when the transport has accepted it.

        Raises:
            CallOver: the call has ended.
        """

    def done(self) -> bool:
        """Return True if the call has ended."""

    def peer(self) -> str:
        """Return the address of the client; empty in one process."""


class Carrier(Protocol):
    """A connection to a server on which a client makes calls."""

    def open(self, path: str, timeout_s: float | None, metadata: Metadata | None) -> ClientCall:
        """Begin a streaming call; the first failure shows at the first read or write.

        Args:
            path: "/SERVICE/METHOD".
            timeout_s: seconds the entire call may take; None = no deadline.
            metadata: key-value pairs that are sent with the call beside its messages.

        Raises:
            CallOver: the channel was closed.
        """

    async def call(
        self, path: str, request: bytes, timeout_s: float | None, metadata: Metadata | None
    ) -> bytes | CallStatus:
        """Make a unary call; returns the encoded reply, or the status with which it ended without one.

        Raises:
            CallOver: the channel was closed.
        """


def joined(message: Message) -> bytes:
    """Return a message as one piece."""
    return b"".join(message) if isinstance(message, tuple) else message


def task_is_cancelled() -> bool:
    """Return True if the current task itself is being cancelled, and not only the future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
