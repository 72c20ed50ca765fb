"""What a launch needs to know about addresses, without gRPC: the launcher itself holds no channel."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from axon_ps.errors import Unreachable
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.rpc.deadlines import Deadline, retry

_ATTEMPT_S = 5.0


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_listening(address: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Return as soon as somebody listens at `address`.

    Args:
        address: "host:port".
        timeout_s: how long to wait, in seconds.
        say: gets a line after a while, and then ever more rarely, as long as nobody does.

    Raises:
        Unreachable: nobody did within `timeout_s` seconds.
    """
    waiting = asyncio.create_task(_knock(address, timeout_s))
    waited_s = 0.0
    try:
        for pause_s in reminder_pauses():
            if (await asyncio.wait((waiting,), timeout=pause_s))[0]:
                break
            waited_s += pause_s
            say(f"axon-ps: waiting for the coordinator at {address}, for {waited_s:.0f} s now")
        waiting.result()
    finally:
        waiting.cancel()


async def _knock(address: str, timeout_s: float) -> None:
    host, _, port = address.rpartition(":")
    deadline = Deadline(timeout_s)

    async def knock() -> None:
        opening = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(opening, min(_ATTEMPT_S, deadline.remaining() + 0.1))
        writer.close()

    try:
        await retry(knock, until=deadline, on=(OSError, TimeoutError), max_s=1.0)
    except (OSError, TimeoutError) as error:
        reason = (
            "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else str(error)
        )
        raise Unreachable(
            f"nobody answers at {address} ({reason}), waited {timeout_s:g} s; is the coordinator running there?"
        ) from None
