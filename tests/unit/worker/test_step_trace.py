"""The spans of a worker's steps, and what goes on within them. Tests of `worker/steps/step_trace.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.observe.tracing.span import Span, SpanContext, TraceOrder
from axon_ps.observe.tracing.tracer import Collection, Tracer
from axon_ps.types import Decision, Member, Membership, Outcome, Role
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.step_trace import StepTrace
from axon_ps.worker.steps.view import ModelView


class Worker:
    """Worker 2 of a job, at step 5, whose spans are kept."""

    def __init__(self, first: int = 5, last: int = 9) -> None:
        self.tracer = Tracer()
        self.collected: list[Collection] = []
        self.tracer.order(TraceOrder(id=1, model=0, first=first, last=last, timeout_s=1e6), self.collected.append)
        self.job = JobView(lambda: "me", 1.0)
        session: Any = SimpleNamespace(tracer=self.tracer, state_id="job")
        self.view = ModelView(self.job)
        self.trace = StepTrace(session, self.view)
        self.begin(generation=1, step=5)

    def begin(self, generation: int, step: int) -> None:
        me = Member(role=Role.WORKER, rank=2, incarnation="me", node="n", replica=0)
        self.job.known = Membership(
            generation=generation, step=step, version=0, workers=(me,), shards=(), num_replicas=1, complete=True
        )
        self.view.begin(self.job.known)

    def decide(self, step: int, outcome: Outcome = Outcome.COMMIT, reason: str = "") -> None:
        decision = Decision(step=step, generation=1, outcome=outcome, version=step, reason=reason)
        self.view.on_decision(decision)
        self.trace.decided(decision)

    def spans(self, name: str) -> list[Span]:
        if not self.collected:
            self.tracer.finish()
        return [span for span in self.collected[0].spans if span.name == name]


def root(step: int, generation: int = 1) -> SpanContext:
    return SpanContext.of_step("job", 0, generation, step)


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_decision() -> None:
    worker = Worker()
    assert worker.trace.current is worker.trace.current is not None
    worker.decide(5)
    assert worker.trace.current is not None
    worker.decide(6, Outcome.SKIP, "not finite")
    first, second = worker.spans("step")
    assert (first.context.trace_id, first.parent_id) == (root(5).trace_id, root(5).span_id)
    assert first.attributes == {
        "worker": 2, "node": "n", "attempt": 5, "generation": 1, "model": "model 0", "outcome": "commit", "version": 5,
    }  # fmt: skip
    assert (second.context.trace_id, second.error, second.attributes["outcome"]) == (
        root(6).trace_id,
        "skip: not finite",
        "skip",
    )
    assert 0 < second.start_ns - first.end_ns < 10**9, "it begins where the other one ended"
    assert worker.trace.seconds["step"].count == 1, "the first one began before this worker looked"


def test_a_step_that_is_not_ordered_has_no_span() -> None:
    worker = Worker(first=6)
    assert worker.trace.current is None
    assert worker.trace.begin("vote") is None
    with worker.trace.within("vote") as span:
        assert span is None
    worker.trace.end(None)
    worker.trace.mapped(0, 8)
    assert not worker.spans("step") + worker.spans("vote") + worker.spans("gather")


def test_calls_are_measured_whether_their_step_is_traced_or_not() -> None:
    worker = Worker(first=6)
    with worker.trace.timed(worker.trace.call("push", 0)) as span:
        assert span is None
    worker.decide(5)
    call = worker.trace.call("push", 1, absent=True)
    worker.decide(6)
    with pytest.raises(ValueError, match="lost"), worker.trace.timed(call) as span:
        assert span is not None
        raise ValueError("lost")
    (push,), (step,) = worker.spans("push"), worker.spans("step")
    assert push.parent_id == step.context.span_id, "its step may be over when it begins"
    assert push.attributes == {"unit": "unit 1", "bytes": 0.0, "absent": True}
    assert push.error == "lost"
    assert worker.trace.seconds["push"].count == 2


def test_parts_of_a_step_are_within_it_and_have_their_errors() -> None:
    worker = Worker()
    with worker.trace.within("vote", tries=1.0):
        pass
    with pytest.raises(ValueError, match="refused"), worker.trace.within("vote"):
        raise ValueError("refused")
    worker.trace.end(worker.trace.begin("wait"), "in vain")
    worker.trace.mapped(3, 64)
    worker.trace.failed(ValueError("no decision"))
    (step,) = worker.spans("step")
    parts = [*worker.spans("vote"), *worker.spans("wait"), *worker.spans("gather")]
    assert [part.error for part in parts] == ["", "refused", "in vain", ""]
    assert {part.parent_id for part in parts} == {step.context.span_id}
    assert parts[0].attributes == {"tries": 1.0}
    assert parts[3].attributes == {"unit": "unit 3", "bytes": 64.0, "mapped": True}
    assert step.error == "no decision"


def test_a_step_goes_on_as_another_attempt_when_the_members_change() -> None:
    worker = Worker()
    worker.trace.ticket(worker.view.stepping.ticket(0, worker.view.membership, 0))
    worker.begin(generation=2, step=6)
    ticket = worker.view.stepping.ticket(0, worker.view.membership, 0)
    worker.trace.ticket(ticket.void("a reason"))
    assert worker.trace.current is not None
    assert worker.trace.current.context.trace_id == root(5).trace_id, "a void ticket is of no attempt"
    worker.trace.ticket(ticket)
    worker.trace.ticket(ticket)
    worker.decide(6)
    first, second = worker.spans("step")
    assert first.error == "the members changed: it goes on as attempt 6 of generation 2"
    assert second.context.trace_id == root(6, generation=2).trace_id
    assert not second.error


def test_nothing_is_kept_while_no_step_can_be_sampled() -> None:
    worker = Worker()
    worker.tracer.finish()
    worker.trace.ticket(worker.view.stepping.ticket(0, worker.view.membership, 0))
    assert worker.trace.current is None
    worker.decide(5), worker.decide(6)
    assert worker.trace.seconds["step"].count == 1
    assert not worker.spans("step")
