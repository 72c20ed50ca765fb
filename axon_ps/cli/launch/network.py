"""Ports and addresses for a launch, without gRPC: the launcher itself has no channel."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

from axon_ps.errors import Unreachable
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.rpc.deadlines import Deadline, retry

_ATTEMPT_S = 5.0


async def wait_until_listening(address: str, timeout_s: float, notify: Callable[[str], None]) -> None:
    """Return as soon as a server listens at `address`.

    Args:
        address: "host:port"; of several, with commas between them, one is enough.
        timeout_s: seconds to wait.
        notify: gets a line after a while, and then ever more rarely, while no server does.

    Raises:
        Unreachable: no server did within `timeout_s` seconds.
    """
    waiting = asyncio.create_task(_connect_until(address, timeout_s))
    waited_s = 0.0
    try:
        for pause_s in reminder_pauses():
            if (await asyncio.wait((waiting,), timeout=pause_s))[0]:
                break
            waited_s += pause_s
            notify(f"axon-ps: waiting for the coordinator at {address}, for {waited_s:.0f} s now")
        waiting.result()
    finally:
        waiting.cancel()


async def _connect_until(address: str, timeout_s: float) -> None:
    deadline, addresses = Deadline(timeout_s), itertools.cycle(address.split(","))

    async def connect() -> None:
        host, _, port = next(addresses).strip().rpartition(":")
        connecting = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(connecting, min(_ATTEMPT_S, deadline.remaining() + 0.1))
        writer.close()

    try:
        await retry(connect, until=deadline, on=(OSError, TimeoutError), max_s=1.0)
    except (OSError, TimeoutError) as error:
        reason = (
            "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else str(error)
        )
        raise Unreachable(
            f"nobody answers at {address} ({reason}), waited {timeout_s:g} s; is the coordinator running there?"
        ) from None
