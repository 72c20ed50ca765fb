"""The coordinator records a step when it decides it. Tests of `coordinator/server/step_spans.py`."""

from __future__ import annotations

from axon_ps.coordinator.server import step_spans
from axon_ps.coordinator.server.step_spans import StepSpans
from axon_ps.observe.tracing.span import Span, SpanContext, TraceOrder
from axon_ps.observe.tracing.tracer import Collection, Tracer
from axon_ps.types import Decision, Outcome, ReplicaClock
from axon_ps.wire.v1 import session_pb2

GENERATION = 4


class Recorded(Tracer):
    """A tracer whose time is a count, and that keeps the spans it records."""

    def __init__(self, first: int = 1, last: int = 1000) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.time_ns = 0
        self.order(TraceOrder(id=1, model=0, first=first, last=last, timeout_s=1e6), self._done)

    def _done(self, collection: Collection) -> None:
        self.spans = collection.spans

    def now(self) -> int:
        self.time_ns += 1
        return self.time_ns

    def take(self) -> dict[str, Span]:
        self.finish()
        return {span.name: span for span in self.spans}


def root(step: int, replica: int = -1) -> SpanContext:
    return SpanContext.of_step("job", 0, GENERATION, step, replica)


def vote(step: int, replica: int = -1) -> session_pb2.Vote:
    return session_pb2.Vote(step=step, traceparent=root(step, replica).child().traceparent)


def ready(step: int, replica: int = 0) -> session_pb2.Ready:
    return session_pb2.Ready(generation=GENERATION, step=step, replica=replica)


def decision(step: int, outcome: Outcome = Outcome.COMMIT, clock: ReplicaClock | None = None) -> Decision:
    return Decision(
        step=step,
        generation=GENERATION,
        outcome=outcome,
        version=step,
        grad_norm=2.0,
        reason="why",
        replica_clock=clock,
    )


def test_a_step_lasts_from_the_decision_before_to_its_own_with_its_votes_and_reports() -> None:
    tracer = Recorded(first=2)
    spans = StepSpans(tracer, "job")
    assert spans.published(decision(1)) == "", "it is not sampled"
    spans.voted(1, vote(2))
    spans.ready(0, ready(2), asynchronous=False)
    traceparent = spans.published(decision(2))
    found = tracer.take()
    step, commit = found["step"], found["commit"]
    assert (step.context, step.parent_id) == (root(2), 0)
    assert [(step.start_ns, step.end_ns), step.events] == [
        (1, 4),
        [(2, "vote of worker 1"), (3, "shard 0 is ready")],
    ]
    assert (commit.parent_id, commit.start_ns, commit.end_ns) == (root(2).span_id, 3, 4)
    assert traceparent == commit.context.traceparent
    assert step.attributes == {
        "attempt": 2,
        "generation": GENERATION,
        "outcome": "commit",
        "version": 2,
        "grad_norm": 2.0,
    }
    assert not step.error


def test_a_step_without_votes_is_traced_if_it_was_ordered_and_its_reason_is_the_error() -> None:
    tracer = Recorded()
    assert StepSpans(tracer, "job").published(decision(1, Outcome.ABORT))
    found = tracer.take()
    assert found["step"].error == found["commit"].error == "abort: why"
    assert found["step"].start_ns == found["step"].end_ns == 1


def test_a_step_that_a_worker_traces_is_traced_here_though_it_was_not_ordered() -> None:
    tracer = Recorded(first=7)
    spans = StepSpans(tracer, "job")
    spans.ready(0, ready(1), asynchronous=False)
    spans.voted(0, session_pb2.Vote(step=1, traceparent="of somebody else"))
    assert spans.published(decision(1)) == ""
    spans.voted(0, vote(2))
    assert spans.published(decision(2))


def test_a_decision_that_is_sent_again_is_recorded_once() -> None:
    tracer = Recorded()
    spans = StepSpans(tracer, "job")
    assert spans.published(decision(3))
    assert spans.published(decision(3)) == spans.published(decision(2)) == ""
    assert tracer.statistics()["spans_recorded"] == 2


def test_an_asynchronous_step_has_the_trace_of_its_replica_and_clock() -> None:
    tracer = Recorded()
    spans = StepSpans(tracer, "job")
    spans.ready(0, ready(5, replica=1), asynchronous=True)
    spans.ready(0, ready(5, replica=0), asynchronous=True)
    spans.published(decision(9, clock=ReplicaClock(replica=1, clock=5, slowest_clock=4)))
    step = tracer.take()["step"]
    assert step.context == root(5, replica=1)
    assert step.events == [(1, "shard 0 is ready")]


def test_the_attempts_that_are_followed_are_bounded() -> None:
    tracer = Recorded(first=10**6, last=10**6)
    spans = StepSpans(tracer, "job")
    for step in range(1, step_spans.MAX_ATTEMPTS + 2):
        spans.voted(0, vote(step))
    assert spans.published(decision(1)) == "", "the oldest is forgotten"
    assert spans.published(decision(2))


def test_nothing_is_followed_while_no_step_is_sampled() -> None:
    tracer = Tracer()
    spans = StepSpans(tracer, "job")
    spans.voted(0, vote(1))
    spans.ready(0, ready(1), asynchronous=False)
    assert spans.published(decision(1)) == ""
    assert tracer.statistics() == {"spans_recorded": 0.0}
