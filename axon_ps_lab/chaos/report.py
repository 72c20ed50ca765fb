"""The report of a campaign as JSON: a summary, the table of `figures`, and every fault. It is pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from axon_ps_lab.chaos.campaign import Embedded
from axon_ps_lab.chaos.figures import Events, FaultOutcome, memory, rounded, table
from axon_ps_lab.chaos.runner import Result

BINS: Final = 240
"""Points of the curve of commits over time."""

POINTS: Final = 60
"""The most points of the curve of a process's memory."""


def report(result: Result) -> dict[str, Any]:
    """Return a result as JSON."""
    some, samples = result.outcomes, result.samples
    commits = sorted(o.next_commit_s for o in some if o.next_commit_s is not None)
    target = result.campaign.target
    return {
        "seed": result.campaign.seed,
        "faults": len(some),
        "planned": result.campaign.faults,
        "seconds": round(result.seconds, 1),
        "is_good": result.is_good,
        "stopped": result.stopped,
        "problems": result.problems,
        "steps": result.steps or len(result.events.commits),
        "steps_lost": sum(o.steps_lost for o in some),
        "samples_used": samples.used if samples else None,
        "samples_lost": samples.lost if samples else None,
        "samples_doubled": samples.doubled if samples else None,
        "bits_different": result.bits_different,
        "detected": sum(o.detection_s is not None for o in some),
        "next_commit_median_s": rounded(commits[len(commits) // 2]) if commits else None,
        "next_commit_p99_s": rounded(commits[int(0.99 * (len(commits) - 1))]) if commits else None,
        "next_commit_worst_s": rounded(commits[-1]) if commits else None,
        "attempts_aborted": len(result.events.aborted),
        "workers_given_up": len(result.events.ends),
        "given_up_for": sorted({reason.partition(": ")[2][:120] for reason in result.events.ends})[:8],
        "memory": [
            {**dataclasses.asdict(m), "growth": round(m.late_bytes / max(1, m.early_bytes), 3), "is_flat": m.is_flat}
            for m in memory(result.events.memory)
        ],
        "job": {"embedded": isinstance(target, Embedded), **dataclasses.asdict(target)},
        "by_kind": table(some),
        "commits_per_s": _curve(result),
        "memory_mib": _series(result.events),
        "timeline": [_entry(outcome, result.began) for outcome in some],
    }


def _curve(result: Result) -> dict[str, Any]:
    """Return the committed steps a second, over time."""
    width_s = max(1.0, result.seconds / BINS)
    counts = [0] * (int(result.seconds / width_s) + 1)
    for commit in result.events.commits:
        index = int((commit.at - result.began) // width_s)
        if 0 <= index < len(counts):
            counts[index] += 1
    return {"bin_s": round(width_s, 3), "values": [round(count / width_s, 2) for count in counts]}


def _series(events: Events) -> dict[str, list[tuple[int, float]]]:
    """Return, for each process that lived long enough, pairs of a fault's number and MiB of memory."""
    return {m.process: _thinned([(n, round(b / 2**20, 1)) for n, b in events.memory[m.process]]) for m in
            memory(events.memory)}  # fmt: skip


def _thinned(series: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    stride = -(-len(series) // POINTS)
    return list(series[::stride])


def _entry(outcome: FaultOutcome, began: float) -> dict[str, Any]:
    dealt = outcome.dealt
    return {
        "number": dealt.fault.number,
        "fault": dealt.fault.name,
        "kind": dealt.fault.kind.value,
        "role": dealt.fault.role,
        "index": dealt.fault.index,
        "target": dealt.target,
        "at_s": rounded(dealt.began - began),
        "lasted_s": rounded(max(0.0, dealt.ended - dealt.began)),
        "detection_s": None if outcome.detection_s is None else rounded(outcome.detection_s),
        "sign": outcome.sign[:120],
        "next_commit_s": None if outcome.next_commit_s is None else rounded(outcome.next_commit_s),
        "longest_s": rounded(outcome.longest_s),
        "complete_s": None if outcome.complete_s is None else rounded(outcome.complete_s),
        "steps_lost": outcome.steps_lost,
        "aborted": outcome.aborted,
        "note": dealt.note[:200],
    }
