"""Figures of the observed events of a campaign: detection, commits, steps and samples lost, memory. Pure."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from axon_ps.data.elastic import ElasticBatch, Place, Position, SamplePlan
from axon_ps_lab.chaos.plan import Fault

IGNORED: Final = ("saving", "saved", "copied", "skipped")
"""Events of the coordinator's history that no fault makes happen by itself."""

FLAT: Final = 1.10
"""Memory is flat if the median of the last quarter is at most so many times that of the second."""

LEAST_WEIGHINGS: Final = 24
"""A process that was weighed less often tells nothing: at first it warms up."""

Version = tuple[int, int]
"""A version that a step began at, and the generation that it was tried in."""


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A fault that was dealt. All times are of one monotonic clock.

    Attributes:
        fault: it.
        target: the process that it struck, by name.
        began: when.
        ended: when it was over: a successor runs, connections pass again.
        complete: when the job had all its members and copies again; 0 = it never had.
        note: what there is to say.
    """

    fault: Fault
    target: str
    began: float
    ended: float
    complete: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """An event that the coordinator told of: a loss, a change.

    Attributes:
        at: when.
        kind: as in the coordinator's history; "silent" = the coordinator itself answered no more.
        text: in words.
    """

    at: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A step of which a worker says that it has committed.

    Attributes:
        version: that it began at.
        generation: in which it was tried.
        at: when the first worker knew.
    """

    version: int
    generation: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A step that a worker has tried; of several at the same version in the same generation, the last.

    Attributes:
        process: which of the workers' processes, counted as they were started.
        version: that it began at.
        generation: in which.
        epoch: of the data.
        samples: indices in the data set.
    """

    process: int
    version: int
    generation: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(kw_only=True)
class Events:
    """Everything that was observed.

    Attributes:
        dealt: the faults, in order.
        signs: what the coordinator told, by time.
        commits: by time.
        attempts: of all workers.
        aborted: when steps were aborted.
        memory: by process, its resident bytes, and at which fault that was.
        ends: workers that ended though nobody killed them, and why.
    """

    dealt: list[Dealt] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    aborted: list[float] = field(default_factory=list)
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a fault.

    Attributes:
        dealt: it.
        detection_s: from its beginning until the coordinator told of it; None = nobody needed to notice it.
        sign: what was told.
        next_commit_s: from its beginning to the next committed step; None = there was none.
        longest_s: the longest time without a commit from its beginning until the next fault.
        complete_s: from its beginning until the job had all its members and copies again; None = it never had.
        steps_lost: committed steps that were undone: the job was at an older version again.
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


def outcomes(events: Events) -> list[Outcome]:
    """By fault, in order."""
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
            Outcome(
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
    """When the job was at an older version again than before, and how many committed steps that has undone."""
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
        steps: how many were committed.
        missing_steps: versions between the first and the last from which no worker knows of a commit.
        used: how many samples.
        lost: how many should have been used by a committed step, and were not.
        doubled: how many were used more often than they should have been.
    """

    steps: int
    missing_steps: int
    used: int
    lost: int
    doubled: int


def samples(events: Events, batch: int, right: Callable[[int], Sequence[int]]) -> Samples:
    """Compare the samples of committed steps with those that they should have had.

    Args:
        events: what was observed.
        batch: samples of a step.
        right: by version, the samples that the step that begins at it should have.
    """
    committed = {(commit.version, commit.generation): commit.at for commit in events.commits}
    last: dict[int, Version] = {}  # what was committed again has replaced what was committed before
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
    """By version, the samples of the step that begins at it, if none was ever lost or doubled."""
    plan = SamplePlan(length, ElasticBatch(samples=batch, at_a_time=batch), seed=seed)
    steps = length // batch

    def of(version: int) -> Sequence[int]:
        position = Position(epoch=version // steps, samples=version % steps * batch)
        return plan.indices(next(iter(plan.micro_batches(position, Place()))))

    return of


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Whether a process's memory was flat.

    Attributes:
        process: its name.
        faults: how many it has lived through.
        early_bytes: the median of its second quarter.
        late_bytes: that of its last quarter.
    """

    process: str
    faults: int
    early_bytes: int
    late_bytes: int

    @property
    def is_flat(self) -> bool:
        """Whether it is."""
        return self.late_bytes <= FLAT * self.early_bytes


def memory(weighed: Mapping[str, Sequence[tuple[int, int]]]) -> list[Memory]:
    """Of the processes that lived long enough."""
    found = []
    for process, series in weighed.items():
        if len(series) >= LEAST_WEIGHINGS:
            quarter = len(series) // 4
            early = statistics.median(count for _, count in series[quarter : 2 * quarter])
            late = statistics.median(count for _, count in series[-quarter:])
            lived = series[-1][0] - series[0][0]
            found.append(Memory(process=process, faults=lived, early_bytes=int(early), late_bytes=int(late)))
    return found


def table(results: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind and role: how often, detection, next commit, what was lost."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for result in results:
        groups[result.dealt.fault.kind.value, result.dealt.fault.role].append(result)
    return [{"kind": kind, "role": role, **_row(some)} for (kind, role), some in sorted(groups.items())]


def _row(some: Sequence[Outcome]) -> dict[str, Any]:
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
    """To milliseconds."""
    return round(seconds, 3)
