"""Hanging collectives of a job, for `axon-ps doctor`: some workers wait in them, others have not called them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from axon_ps.cli.operations import client
from axon_ps.cli.settings import Settings
from axon_ps.errors import AxonError
from axon_ps.texts import printable, value_of_json
from axon_ps.worker.hang_report import key_of

_TIMEOUT_S = 5.0

Reports = Mapping[int, Mapping[str, Any]]
"""By worker rank, the report of `worker.hang_report`."""


async def hanging(settings: Settings) -> list[str]:
    """Ask the coordinator which workers wait, and for whom; empty when nothing hangs. The coordinator must be
    running."""
    async with client(settings) as operator:
        status = await operator.status(timeout_s=_TIMEOUT_S)
        reports = {}
        for member in status.membership.workers:
            content = await operator.kv_get(key_of(member.rank), timeout_s=_TIMEOUT_S)
            if content:
                reports[member.rank] = value_of_json(content, f"the report of worker {member.rank}")
    return explain(reports, time.time())


def explain(reports: Reports, now: float) -> list[str]:
    """Return one paragraph per collective that hangs.

    Args:
        reports: the reports of the workers that wait in one.
        now: seconds since the epoch.
    """
    waiting: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for rank, report in sorted(reports.items()):
        for entry in report["pending"]:
            waiting[entry["group"], entry["sequence"]][rank] = entry
    return [_explain_one(group, number, entries, reports, now) for (group, number), entries in sorted(waiting.items())]


def _explain_one(
    group: str, number: int, entries: Mapping[int, Mapping[str, Any]], reports: Reports, now: float
) -> str:
    ranks_by_call: dict[str, list[int]] = defaultdict(list)
    for rank, entry in entries.items():
        ranks_by_call[entry["call"]].append(rank)
    first = next(iter(entries.values()))
    calls = "; ".join(f"rank {', '.join(map(str, ranks))}: {call}" for call, ranks in ranks_by_call.items())
    since_s = now - min(e["started"] for e in entries.values())
    text = f"call {number} of group {group!r} has waited for {since_s:.0f} s ({calls})"
    if missing := [r for r in first["ranks"] if r not in entries]:
        text += f"; not there: {'; '.join(_where_is(r, group, reports) for r in missing)}"
    return printable(text)


def _where_is(rank: int, group: str, reports: Reports) -> str:
    """Describe, by its report, a rank that has not called the collective."""
    report = reports.get(rank)
    if report is None:
        return f"rank {rank}, which waits in no collective"
    elsewhere = [f"call {e['sequence']} of {e['group']!r}: {e['call']}" for e in report["pending"]]
    return f"rank {rank}, which waits in {', '.join(elsewhere)}"


def findings(settings: Settings) -> list[str]:
    """Return `hanging`, or nothing when the coordinator does not reply: `doctor` reports that in another line."""
    try:
        return asyncio.run(hanging(settings))
    except AxonError:
        return []
