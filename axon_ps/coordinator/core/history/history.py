"""The history of a job since this coordinator leads. Pure: the time is passed in, and all memory is bounded.

It gets the events that the coordinator publishes and the reports of members, and returns the news (`take_new`) or
everything. It is not durable: after a restart or a failover another history begins.

Note: [Events that happen again]
    After the death of one server each of its slices is copied, and with differing votes one step after the other
    aborts. Such events are recorded as one event with a count, until something else happens, so that they do not bury
    their cause. Readers get such an event again, with the same number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from axon_ps.coordinator.core.history.curves import Curves
from axon_ps.coordinator.core.history.loads import Loads
from axon_ps.coordinator.core.history.logs import Logs
from axon_ps.coordinator.core.history.phase import with_phase
from axon_ps.coordinator.core.history.step_rate import Rhythm, StepRate
from axon_ps.coordinator.core.history.timing import Timing
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.sharding.placement import Placement
from axon_ps.types import Decision, Member, Membership, Outcome, Role
from axon_ps.wire.events import UPLOADED, JobState, RestoreOrder, ServerEvent, SnapshotOrder, Status
from axon_ps.wire.report import REPORT_KEY, parse
from axon_ps.wire.v1 import watch_pb2

MAX_STEPS: Final = 240
MAX_EVENTS: Final = 400
SAMPLE_S: Final = 1.0
"""Seconds between two points of the curves of rates."""

MAX_TEXT: Final = 500


@dataclass
class _Event:
    """An event that may happen again; see Note: [Events that happen again].

    Attributes:
        record: the record for readers.
        cause: a text that is equal for repetitions of the event.
        counts: number of repetitions, by shard server or model.
    """

    record: watch_pb2.EventRecord
    cause: str
    counts: Counter[int]


class History:
    """The events since `now`.

    Args:
        now: the time.
        steps: by model, its step when the history begins: decisions on earlier steps are repetitions.

    Attributes:
        logs: the log records of the job's processes.
        stepped: whether a step has committed since the membership is complete.
        step_seconds: seconds from a decision on a step to the next, of all models.
    """

    def __init__(self, now: float, steps: Mapping[int, int]) -> None:
        self._began = self._now = now
        self._steps: deque[watch_pb2.StepRecord] = deque(maxlen=MAX_STEPS)
        self._events: deque[watch_pb2.EventRecord] = deque(maxlen=MAX_EVENTS)
        self._new_steps: deque[watch_pb2.StepRecord] = deque(maxlen=MAX_STEPS)
        self._new_events: deque[watch_pb2.EventRecord] = deque(maxlen=MAX_EVENTS)
        self._numbers = 0
        self._next_step = dict(steps)
        self._decided_s: dict[int, float] = {}  # by model
        self._placements: dict[int, Placement] = {}
        self._membership: Membership | None = None
        self._repeated: dict[str, _Event] = {}  # by kind, the events that may go on
        self._step_rates: dict[int, StepRate] = {}  # by model
        self.stepped = False
        self._active_s = now  # the last time at which the membership became complete, or a step committed
        self._commits, self._sampled, self._version, self._norm = 0, now, 0, 0.0
        self._timing, self._curves, self._loads = Timing(), Curves(), Loads()
        self.logs = Logs()
        self.step_seconds = Histogram()

    # ------------------------------------------------------------------ recording

    def happened(self, kind: str, text: str, now: float) -> None:
        """Record an event. The kinds are those of `EventRecord`."""
        self._repeated.clear()
        self._record(kind, text, now)

    def published(self, event: ServerEvent, now: float) -> None:
        """Record an event that was announced to members. Repeated memberships, decisions and placements are ignored."""
        if isinstance(event, Decision):
            self._decision(event, now)
        elif isinstance(event, Membership):
            self._members(event, now)
        elif isinstance(event, JobState):
            self._placed(event, now)
        elif isinstance(event, SnapshotOrder):
            self.happened("saving", f"version {event.version} is written to {event.uri}", now)
        elif isinstance(event, RestoreOrder) and event.uri.startswith(UPLOADED):
            self.happened("restoring", "a worker uploads the parameters", now)
        elif isinstance(event, RestoreOrder):
            self.happened("restoring", f"version {event.version} is restored from {event.uri}", now)

    def arrived(self, ranks: Sequence[int], model: int, step: int, now: float) -> None:
        """Note that workers have voted in a step, or wait in it until the servers take their gradients."""
        if step >= self._next_step.get(model, 0):
            self._timing.arrived(ranks, model, step, now)

    def measured(self, member: Member, metrics: Mapping[str, float], now: float) -> None:
        """Take the metrics that a member has reported."""
        if metrics:
            self._loads.measured((member.role, member.rank), metrics, self._at(now), self._rhythm(now))

    def stored(self, key: str, value: bytes, now: float) -> None:
        """Take a value that was put into the store: perhaps the report of a training script."""
        if key == REPORT_KEY and (report := parse(value)) is not None:
            loss = {} if report.loss is None else {"loss": report.loss}
            self._curves.add(self._at(now), report.step, {**loss, **report.values})

    def tick(self, now: float) -> None:
        """Add a point to the curves of rates, if it is time."""
        if now - self._sampled < SAMPLE_S:
            return
        values = {}
        if rate := self.steps_per_s(now):
            values["steps_per_s"] = rate
        if self._commits:
            values["grad_norm"] = self._norm
        if (sent := self._loads.bytes_per_s()) is not None:
            values["sent_bytes_per_s"] = sent
        self._curves.add(self._at(now), self._version, values)
        self._commits, self._sampled = 0, now

    # ------------------------------------------------------------------ reading

    def steps_per_s(self, now: float, model: int = 0) -> float:
        """Return the committed steps of a model per second; 0 = unknown, before the second one."""
        rate = self._step_rates.get(model)
        return 0.0 if rate is None else rate.steps_per_s(now)

    @property
    def step_s(self) -> float:
        """Seconds of a step, of the model whose steps take longest; 0 = unknown."""
        return max((rate.step_s for rate in self._step_rates.values()), default=0.0)

    def with_phase(self, status: Status, now: float) -> Status:
        """Return a status that was taken now, with its phase."""
        return with_phase(status, stepped=self.stepped, step_s=self.step_s, since_s=now - self._active_s)

    def take_new(self, now: float) -> watch_pb2.WatchEvent:
        """Return the news since the last call of this method."""
        self._score()
        new = watch_pb2.WatchEvent(
            at_s=self._at(now),
            steps=self._new_steps,
            events=self._new_events,
            curves=self._curves.take_new(),
            members=self._loads.take_new(),
        )
        self._new_steps.clear()
        self._new_events.clear()
        return new

    def everything(self, now: float) -> watch_pb2.WatchEvent:
        """Return the whole history."""
        return watch_pb2.WatchEvent(
            begins=True,
            at_s=self._at(now),
            steps=self._steps,
            events=self._events,
            curves=self._curves.everything(),
            members=self._loads.everything(),
        )

    # ------------------------------------------------------------------ inside

    def _at(self, now: float) -> float:
        return round(now - self._began, 3)

    def _record(self, kind: str, text: str, now: float) -> watch_pb2.EventRecord:
        self._numbers += 1
        event = watch_pb2.EventRecord(number=self._numbers, at_s=self._at(now), kind=kind, text=text[:MAX_TEXT])
        self._events.append(event)
        self._new_events.append(event)
        return event

    def _again(
        self, kind: str, cause: str, counted: Iterable[int], text_of: Callable[[Counter[int]], str], now: float
    ) -> None:
        """Record an event that may be a repetition; see Note: [Events that happen again]."""
        event = self._repeated.get(kind)
        if event is None or event.cause != cause:
            counts = Counter(counted)
            self._repeated[kind] = _Event(self._record(kind, text_of(counts), now), cause, counts)
            return
        event.counts.update(counted)
        event.record.text, event.record.at_s = text_of(event.counts)[:MAX_TEXT], self._at(now)
        for events in (self._events, self._new_events):  # it is the newest one now
            if event.record in events:
                events.remove(event.record)
            events.append(event.record)

    def _rhythm(self, now: float) -> Rhythm | None:
        """Return the rhythm of the model with the longest steps: during one of these the others make full steps."""
        rhythms = [rhythm for rate in self._step_rates.values() if (rhythm := rate.rhythm(now)) is not None]
        return max(rhythms, key=lambda rhythm: rhythm.step_s, default=None)

    def _decision(self, decision: Decision, now: float) -> None:
        model = decision.model
        if decision.step < self._next_step.get(model, 0):
            return
        self._next_step[model] = decision.step + 1
        began = self._decided_s.get(model, now)
        if model in self._decided_s:
            self.step_seconds.observe(now - began)
        self._decided_s[model] = now
        commits = decision.outcome is Outcome.COMMIT
        phases = self._timing.decided(model, decision.step, began, now, commits=commits)
        record = watch_pb2.StepRecord(
            model=model,
            step=decision.step,
            version=decision.version,
            outcome=decision.outcome.value,
            reason=decision.reason[:MAX_TEXT],
            at_s=self._at(now),
            duration_s=round(now - began, 4),
            waited_for=phases.waited_for,
            grad_norm=float(f"{decision.grad_norm:.4g}"),
            **{name: round(getattr(phases, name), 4) for name in _SECONDS},
        )
        self._steps.append(record)
        self._new_steps.append(record)
        if commits:
            self._commits += 1
            self._step_rates.setdefault(model, StepRate(model)).made(now)
            self._active_s, self.stepped = now, True
        if model == 0 and commits:
            self._version, self._norm = decision.version, decision.grad_norm
        if not commits:
            kind = "aborted" if decision.outcome is Outcome.ABORT else "skipped"
            cause = f"{model}, {decision.version}: {decision.reason}"
            self._again(kind, cause, [model], lambda counts: _not_made(kind, decision, counts.total()), now)

    def _members(self, membership: Membership, now: float) -> None:
        if self._membership is not None and membership.generation <= self._membership.generation:
            return
        before = () if self._membership is None else self._membership.workers
        if membership.complete and (self._membership is None or not self._membership.complete):
            self._active_s, self.stepped = now, False
        self._membership = membership
        ranks = {m.rank for m in membership.workers}
        for member in before:
            if member.rank not in ranks:
                self._timing.forget(member.rank)
        self._loads.only({(m.role, m.rank) for m in (*membership.workers, *membership.shards)})
        self._decided_s = dict.fromkeys(self._decided_s, now)
        self._count_slices()

    def _placed(self, job: JobState, now: float) -> None:
        """Record the promotions and copies in a model's new placement."""
        if job.released:
            self._placements.pop(job.model, None)
        before, after = self._placements.get(job.model), job.placement
        if after is None or (before is not None and after.number <= before.number):
            return
        self._placements[job.model] = after
        self._count_slices()
        if before is None or len(before.holders) != len(after.holders):
            return
        pairs = [(old, new) for old, new in zip(before.holders, after.holders, strict=True) if old is not new]
        promoted = [new.primary for old, new in pairs if new.primary != old.primary]
        copied = [rank for old, new in pairs for rank in set(new.complete) & set(old.copying)]
        if promoted:
            self._again("promoted", "", promoted, lambda counts: _more_slices(counts, "the primary"), now)
        if copied:
            self._again("copied", "", copied, lambda counts: _more_slices(counts, "a backup"), now)

    def _count_slices(self) -> None:
        """Count the slices of each shard server."""
        if self._membership is None:
            return
        counts: dict[str, Counter[int]] = {
            name: Counter() for name in ("primary_slices", "backup_slices", "copying_slices")
        }
        for h, count in chain.from_iterable(placement.counts.items() for placement in self._placements.values()):
            for name, ranks in zip(counts, (h.complete[:1], h.complete[1:], h.copying), strict=True):
                for rank in ranks:
                    counts[name][rank] += count
        for server in self._membership.shards:
            slices = {name: ranks[server.rank] for name, ranks in counts.items()}
            self._loads.changed((Role.SHARD, server.rank), **slices)

    def _score(self) -> None:
        scores = self._timing.scores()
        for rank, lag_s in self._timing.lag_s.items():
            last_in, cost_s = scores.get(rank, (0, 0.0))
            values = {"lag_s": round(lag_s, 4), "last_in": last_in, "cost_s": round(cost_s, 3)}
            self._loads.changed((Role.WORKER, rank), **values)


_SECONDS: Final = ("computing_s", "waiting_s", "summing_s", "marginal_s")


def _not_made(kind: str, decision: Decision, times: int) -> str:
    """Return a text about a step that was aborted or skipped, with the number of times."""
    what = "the step" if times == 1 else f"{times} steps"
    return f"{what} to version {decision.version + 1} {'was' if times == 1 else 'were'} {kind}: {decision.reason}"


def _more_slices(counts: Counter[int], role: str) -> str:
    """Return a text about the new role of shard servers, with the number of further slices."""
    slices = counts.total()
    servers = f"shard server {format_ranks(sorted(counts))} {'is' if len(counts) == 1 else 'are'}"
    return f"{servers} now {role} of {slices} slice{'' if slices == 1 else 's'} more"
