"""Report a hanging collective of this worker to the job. `axon-ps doctor` shows which worker waits for which.

Owns: the key "doctor/RANK" of the job's store, which exists while a collective hangs. Refuses: to end collectives.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.errors import AxonError

HANGS_AFTER_S: Final = 5.0
"""Seconds after which a collective is reported."""

INTERVAL_S: Final = 1.0
"""Seconds between two checks."""

MAX_REPORTED: Final = 16
"""Number of the last collectives that are reported with it."""


def key_of(rank: int) -> str:
    """Return the key of a worker's report."""
    return f"doctor/{rank}"


def report(recorder: Recorder, now: float, node: str) -> bytes:
    """Return the report; empty when nothing hangs.

    Args:
        recorder: of this worker.
        now: seconds since the epoch.
        node: the worker's node.
    """
    hanging = [e for e in recorder.pending() if now - e.started > HANGS_AFTER_S]
    if not hanging:
        return b""
    last = recorder.entries()[-MAX_REPORTED:]
    content = {
        "node": node,
        "pid": os.getpid(),
        "pending": [e.as_json() for e in hanging],
        "last": [e.as_json() for e in last],
    }
    return json.dumps(content).encode()


async def watch(
    recorder: Recorder,
    node: str,
    put: Callable[[bytes], Awaitable[object]],
    delete: Callable[[], Awaitable[object]],
) -> None:
    """Check every `INTERVAL_S` seconds, and report changes, until cancelled."""
    reported = b""
    while True:
        await asyncio.sleep(INTERVAL_S)
        content = report(recorder, time.time(), node)
        if content == reported:
            continue
        try:
            await (put(content) if content else delete())
            reported = content
        except AxonError:  # the coordinator is away; check again later
            continue
