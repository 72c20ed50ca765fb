"""The Collective RPC: protocol only. Moves messages between a stream and its place in an operation.

A rank that has one message to send has sent it when the call begins, and is only written to from then on; else one
task reads while the call's own task writes, so both directions are busy at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from axon_ps.errors import AxonError, InvalidRequest
from axon_ps.shard.collective_shell import CollectiveShell, CollectiveStream
from axon_ps.transport.stream import EOF


async def serve(shell: CollectiveShell, context: Any) -> None:
    """Serve one stream, from its first message to its end."""
    message = await context.read()
    if message is EOF:
        raise InvalidRequest("the stream ended before its first message, which names caller and group")
    stream = await shell.open(message)
    reader: asyncio.Task[None] | None = None
    try:
        if stream.expects:
            reader = asyncio.ensure_future(_read(stream, context))
        while (message := await stream.next()) is not None:
            await context.write(message)
    finally:
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        stream.close()


async def _read(stream: CollectiveStream, context: Any) -> None:
    """Give the stream what comes, until all has come; what cannot be ends the call."""
    try:
        await stream.settled()
        while stream.expects:
            message = await context.read()
            if message is EOF:  # the connection broke, and gRPC is about to cancel the call; or it is nonsense
                return
            await stream.offer(message)
    except AxonError as error:
        stream.refuse(error)
