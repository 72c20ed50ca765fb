"""The measures of members, out of the status of a job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from axon_ps.errors import AxonError
from axon_ps.observe.work import LongWork, from_measures
from axon_ps.types import Role
from axon_ps.wire.events import Status

ASK_S: Final = 0.5
"""Seconds between two looks at the progress of long work."""


def measures_of(counters: Mapping[str, float], role: Role) -> dict[int, dict[str, float]]:
    """Return the measures of a role's members, by rank; the status has them as "role/rank/name"."""
    found: dict[int, dict[str, float]] = {}
    for key, value in counters.items():
        of_role, _, rest = key.partition("/")
        rank, _, name = rest.partition("/")
        if of_role == role.value and rank.isdigit() and name:
            found.setdefault(int(rank), {})[name] = value
    return found


def of_the_job(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the counters that are not a member's measures."""
    roles = tuple(f"{role.value}/" for role in Role)
    return {name: value for name, value in counters.items() if not name.startswith(roles)}


def works_of(status: Status) -> list[LongWork]:
    """Return the long work that the shard servers are doing, together."""
    return from_measures(measures_of(status.counters, Role.SHARD).values())


async def follow_work(ask: Callable[[], Awaitable[Status]], work: LongWork) -> None:
    """Copy the servers' progress with work of its kind to `work`, again and again, until cancelled."""
    while True:
        with contextlib.suppress(AxonError):  # the caller's own call raises the error
            for found in works_of(await ask()):
                if found.kind == work.kind:
                    work.total_bytes, work.done_bytes = found.total_bytes, found.done_bytes
        await asyncio.sleep(ASK_S)
