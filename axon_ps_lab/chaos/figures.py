"""Figures of the observed events of a campaign: detection, commits, steps and samples lost, memory. It is pure."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from axon_ps.data.elastic import Coordinates, ElasticBatch, Position, SamplePlan
from axon_ps_lab.chaos.plan import PlannedFault

IGNORED: Final = ("saving", "saved", "copied", "skipped")
"""Events of the coordinator's history that are not effects of a fault."""

FLAT: Final = 1.10
"""Memory is flat if the median of the last quarter is at most so many times that of the second."""

LEAST_WEIGHINGS: Final = 24
"""The fewest measurements by which a process's memory is judged: at first the process warms up."""

Version = tuple[int, int]
"""The version at which a step began, and the generation in which it was tried."""


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A fault that was injected. All times are of one monotonic clock.

    Attributes:
        fault: the fault.
        target: the process that it struck, by name.
        began: time at which it began.
        ended: time at which it was over: a successor runs, connections are open again.
        complete: time at which the job had all its members and copies again; 0 = it never had.
        note: text for the report.
    """

    fault: PlannedFault
    target: str
    began: float
    ended: float
    complete: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """An event that the coordinator reported: a loss, a change.

    Attributes:
        at: its time.
        kind: as in the coordinator's history; "silent" = the coordinator itself stopped answering.
        text: a description.
    """

    at: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A committed step.

    Attributes:
        version: version at which it began.
        generation: generation in which it was tried; 0 = not known.
        at: time at which the first worker learned of it; in a job that chaos did not start, time of the decision.
    """

    version: int
    generation: int
    at: float


@dataclass(frozen=True, kw_only=True)
class ComputedAttempt:
    """A step that a worker has tried; of several at the same version in the same generation, the last counts.

    Attributes:
        process: number of the worker's process, in the order of their start.
        version: version at which it began.
        generation: generation in which it was tried.
        epoch: epoch of the data.
        samples: indices in the data set.
    """

    process: int
    version: int
    generation: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(kw_only=True)
class Events:
    """All observed events.

    Attributes:
        dealt: the faults, in order.
        signs: the coordinator's reports, by time.
        commits: committed steps, by time.
        attempts: attempts of all workers.
        aborted: times at which aborted attempts were read from the workers' notes.
        memory: by process, pairs of a fault's number and the resident bytes at that fault.
        ends: workers that ended though no fault killed them, with the reason.
    """

    dealt: list[Dealt] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    attempts: list[ComputedAttempt] = field(default_factory=list)
    aborted: list[float] = field(default_factory=list)
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """The outcome of a fault.

    Attributes:
        dealt: the fault.
        detection_s: seconds from its beginning until the coordinator reported it; None = it was not reported.
        sign: the report.
        next_commit_s: seconds from its beginning to the next committed step; None = there was none.
        longest_s: the longest time without a commit from its beginning until the next fault.
        complete_s: seconds from its beginning until the job had all its members and copies again; None = it never had.
        steps_lost: committed steps that were undone, because the job returned to an older version.
        aborted: attempts, of all workers, that did not commit.
    """

    dealt: Dealt
    detection_s: float | None
    sign: str
    next_commit_s: float | None
    longest_s: float
    complete_s: float | None
    steps_lost: int
    aborted: int


def outcomes(events: Events) -> list[FaultOutcome]:
    """Return the outcome of each fault, in order."""
    starts = [dealt.began for dealt in events.dealt]
    times = [commit.at for commit in events.commits]
    end = max([*starts, *times, *(d.complete for d in events.dealt)], default=0.0)
    undone = _rolled_back(events.commits)
    found = []
    for dealt, until in zip(events.dealt, [*starts[1:], end], strict=True):
        inside = times[bisect.bisect_right(times, dealt.began) : bisect.bisect_right(times, until)]
        sign = next((s for s in events.signs if dealt.began <= s.at < until and s.kind not in IGNORED), None)
        after = bisect.bisect_right(times, dealt.began)
        found.append(
            FaultOutcome(
                dealt=dealt,
                detection_s=None if sign is None else sign.at - dealt.began,
                sign="" if sign is None else f"{sign.kind}: {sign.text}",
                next_commit_s=times[after] - dealt.began if after < len(times) else None,
                longest_s=max((b - a for a, b in itertools.pairwise([dealt.began, *inside, until])), default=0.0),
                complete_s=dealt.complete - dealt.began if dealt.complete else None,
                steps_lost=sum(steps for at, steps in undone if dealt.began <= at < until),
                aborted=sum(dealt.began <= at < until for at in events.aborted),
            )
        )
    return found


def _rolled_back(commits: Iterable[Commit]) -> list[tuple[float, int]]:
    """Return the times at which the job returned to an older version, and the committed steps that were undone."""
    top, found = -1, []
    for commit in commits:
        if commit.version <= top:
            found.append((commit.at, top + 1 - commit.version))
        top = commit.version
    return found


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The use of the samples of all committed steps.

    Attributes:
        steps: number of committed steps.
        missing_steps: number of versions below the last committed one whose commit no worker has recorded.
        used: number of samples used.
        lost: number of samples that a committed step should have used, and did not.
        doubled: number of samples that were used more often than they should have been.
    """

    steps: int
    missing_steps: int
    used: int
    lost: int
    doubled: int


def samples(events: Events, batch: int, right: Callable[[int], Sequence[int]]) -> Samples:
    """Compare the samples of committed steps with those that they should have had.

    Args:
        events: the observed events.
        batch: samples of a step.
        right: returns the samples that the step beginning at a version should have.
    """
    committed = {(commit.version, commit.generation): commit.at for commit in events.commits}
    last: dict[int, Version] = {}  # a later commit of a version has replaced the earlier one
    for (version, generation), _ in sorted(committed.items(), key=lambda item: item[1]):
        last[version] = (version, generation)
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for attempt in {(a.process, a.version, a.generation): a for a in events.attempts}.values():
        if last.get(attempt.version) == (attempt.version, attempt.generation):
            used[attempt.version].update(attempt.samples)
    lost = doubled = 0
    for version in last:
        wanted = Counter(right(version))
        lost += (wanted - used[version]).total()
        doubled += (used[version] - wanted).total()
    missing = max(last, default=-1) + 1 - len(last)
    return Samples(
        steps=len(last),
        missing_steps=missing,
        used=sum(counter.total() for counter in used.values()),
        lost=lost + missing * batch,
        doubled=doubled,
    )


def right_samples(length: int, batch: int, seed: int) -> Callable[[int], Sequence[int]]:
    """Return a function that gives the samples of the step beginning at a version, if none was lost or doubled."""
    plan = SamplePlan(length, ElasticBatch(samples=batch, at_a_time=batch), seed=seed)
    steps = length // batch

    def of(version: int) -> Sequence[int]:
        position = Position(epoch=version // steps, samples=version % steps * batch)
        return plan.indices(next(iter(plan.micro_batches(position, Coordinates()))))

    return of


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The growth of a process's memory.

    Attributes:
        process: its name.
        faults: number of faults during its life.
        early_bytes: the median of its second quarter.
        late_bytes: the median of its last quarter.
    """

    process: str
    faults: int
    early_bytes: int
    late_bytes: int

    @property
    def is_flat(self) -> bool:
        """True if the memory was flat; see `FLAT`."""
        return self.late_bytes <= FLAT * self.early_bytes


def memory(weighed: Mapping[str, Sequence[tuple[int, int]]]) -> list[Memory]:
    """Return the memory of the processes that lived long enough."""
    found = []
    for process, series in weighed.items():
        if len(series) >= LEAST_WEIGHINGS:
            quarter = len(series) // 4
            early = statistics.median(count for _, count in series[quarter : 2 * quarter])
            late = statistics.median(count for _, count in series[-quarter:])
            lived = series[-1][0] - series[0][0]
            found.append(Memory(process=process, faults=lived, early_bytes=int(early), late_bytes=int(late)))
    return found


def table(results: Sequence[FaultOutcome]) -> list[dict[str, Any]]:
    """Return a row for each kind and role: number of faults, detection, next commit, losses."""
    groups: dict[tuple[str, str], list[FaultOutcome]] = defaultdict(list)
    for result in results:
        groups[result.dealt.fault.kind.value, result.dealt.fault.role].append(result)
    return [{"kind": kind, "role": role, **_row(some)} for (kind, role), some in sorted(groups.items())]


def _row(some: Sequence[FaultOutcome]) -> dict[str, Any]:
    detected = [r.detection_s for r in some if r.detection_s is not None]
    commits = [r.next_commit_s for r in some if r.next_commit_s is not None]
    return {
        "faults": len(some),
        "detected": len(detected),
        "detection_median_s": rounded(statistics.median(detected)) if detected else None,
        "next_commit_median_s": rounded(statistics.median(commits)) if commits else None,
        "next_commit_worst_s": rounded(max(commits)) if commits else None,
        "longest_median_s": rounded(statistics.median(r.longest_s for r in some)),
        "longest_worst_s": rounded(max(r.longest_s for r in some)),
        "complete_median_s": rounded(statistics.median(r.complete_s for r in some if r.complete_s is not None))
        if any(r.complete_s is not None for r in some)
        else None,
        "steps_lost": sum(r.steps_lost for r in some),
        "aborted": sum(r.aborted for r in some),
    }


def rounded(seconds: float) -> float:
    """Round to milliseconds."""
    return round(seconds, 3)
