"""The coordinator's spans of a step attempt: from the previous decision to its own, with the votes and reports.

An attempt is traced if a worker's vote on it is traced, or if the coordinator samples it itself, since an aborted
attempt may have no vote. The root of its trace is recorded here when it is decided. `observe.tracing.span` has a Note
on that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from axon_ps.observe.tracing.span import Span, SpanContext
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.types import Decision, Outcome
from axon_ps.wire.v1 import session_pb2

MAX_ATTEMPTS: Final = 256
"""Most attempts that are followed at once: with asynchronous steps one of every replica."""


@dataclass
class _Attempt:
    """The votes and reports on an attempt.

    Attributes:
        events: the time and name of each.
        is_traced: whether a worker traces it.
    """

    events: list[tuple[int, str]] = field(default_factory=list)
    is_traced: bool = False


class StepSpans:
    """The spans of all step attempts. It is used on the shell's event loop.

    Args:
        tracer: the coordinator's.
        job_id: id of the job's state.
    """

    def __init__(self, tracer: Tracer, job_id: str) -> None:
        self._tracer = tracer
        self._job_id = job_id
        self._attempts: OrderedDict[int, _Attempt] = OrderedDict()  # by trace
        self._decided: dict[int, tuple[int, int]] = {}  # by model: the newest decided attempt, and its time

    def voted(self, rank: int, vote: session_pb2.Vote) -> None:
        """Note a worker's vote."""
        if self._tracer.active and (context := SpanContext.parse(vote.traceparent)) is not None:
            self._happened(context.trace_id, f"vote of worker {rank}").is_traced = True

    def ready(self, rank: int, ready: session_pb2.Ready, *, asynchronous: bool) -> None:
        """Note a shard server's report that it has all gradients."""
        if self._tracer.active:
            replica = ready.replica if asynchronous else -1
            root = SpanContext.of_step(self._job_id, ready.model, ready.generation, ready.step, replica)
            self._happened(root.trace_id, f"shard {rank} is ready")

    def published(self, decision: Decision) -> str:
        """Record the spans of a decision that is about to be sent, for the first time or again.

        Returns:
            The traceparent to send with it; empty if it is not traced.
        """
        before, began_ns = self._decided.get(decision.model, (-1, 0))
        if not self._tracer.active or decision.step <= before:
            return ""
        now_ns, of = self._tracer.now(), decision.replica_clock
        self._decided[decision.model] = decision.step, now_ns
        step, replica = (decision.step, -1) if of is None else (of.clock, of.replica)
        root = SpanContext.of_step(self._job_id, decision.model, decision.generation, step, replica)
        attempt = self._attempts.pop(root.trace_id, _Attempt())
        traceparent = ""
        if attempt.is_traced or self._tracer.samples(step, decision.step):
            traceparent = self._record(decision, root, attempt, began_ns, now_ns)
        self._tracer.decided(decision.model, decision.step)
        return traceparent

    def _record(self, decision: Decision, root: SpanContext, attempt: _Attempt, began_ns: int, now_ns: int) -> str:
        first_ns, last_ns = (attempt.events[0][0], attempt.events[-1][0]) if attempt.events else (now_ns, now_ns)
        ended = "" if decision.outcome is Outcome.COMMIT else f"{decision.outcome.value}: {decision.reason}"
        about = {
            "attempt": decision.step,
            "generation": decision.generation,
            "outcome": decision.outcome.value,
            "version": decision.version,
            "grad_norm": decision.grad_norm,
        }
        commit = root.child()
        self._tracer.record(Span("commit", commit, root.span_id, last_ns, now_ns, {**about}, error=ended))
        events = attempt.events
        self._tracer.record(Span("step", root, 0, began_ns or first_ns, now_ns, {**about}, events, ended))
        return commit.traceparent

    def _happened(self, trace_id: int, what: str) -> _Attempt:
        attempt = self._attempts.setdefault(trace_id, _Attempt())
        attempt.events.append((self._tracer.now(), what))
        while len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        return attempt
