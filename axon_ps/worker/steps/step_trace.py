"""The spans of a worker's steps of one model, and the durations of their parts.

A step begins when the step before it has ended, since its batch is drawn then, and ends with its decision. The gathers,
pushes and vote in between are within it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.observe.tracing.span import Span, SpanContext, Value
from axon_ps.types import Decision, Outcome
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.steps.view import ModelView


@dataclass(frozen=True, slots=True)
class UnitCall:
    """A call to the servers about a unit.

    Attributes:
        name: "gather" or "push".
        unit: its number.
        step: the span of its step; None = it is not traced.
        attributes: of its own span.
    """

    name: str
    unit: int
    step: Span | None
    attributes: Mapping[str, Value]


class StepTrace:
    """The spans of this worker's steps of a model; thread-safe. While the tracer is inactive, a span costs one test.

    Args:
        session: has this worker's tracer, and the id of the job's state.
        view: this worker's view of the model.

    Attributes:
        seconds: the durations of gathers, pushes, votes and steps, also of those not sampled.
    """

    def __init__(self, session: CoordinatorClient, view: ModelView) -> None:
        self._tracer = session.tracer
        self._session = session
        self._view = view
        self._attempt: tuple[int, int] | None = None  # generation and step of `_span`; None = it is to be decided
        self._span: Span | None = None
        self._ended_ns = 0
        self._ended_s = 0.0
        self.seconds = {name: Histogram() for name in ("gather", "push", "vote", "step")}

    @property
    def current(self) -> Span | None:
        """The span of the step under way; None if it is not sampled."""
        if not self._tracer.active:
            return None
        with self._view.job.changed:
            if self._attempt is None and self._view.job.known is not None:
                self._begin(self._view.job.known.generation, self._view.stepping.attempt)
            return self._span

    def ticket(self, ticket: Ticket) -> None:
        """Note the step's ticket. If members changed since the step began, it is traced further as another attempt."""
        if ticket.is_void or not self._tracer.active:
            return
        with self._view.job.changed:
            if self._attempt not in (None, (ticket.generation, ticket.step)):
                self._end(f"the members changed: it goes on as attempt {ticket.step} of generation {ticket.generation}")
            if self._attempt is None:
                self._begin(ticket.generation, ticket.step)

    def decided(self, decision: Decision) -> None:
        """End the step with its decision."""
        now_s = time.perf_counter()
        if self._ended_s:
            self.seconds["step"].observe(now_s - self._ended_s)
        self._ended_s = now_s
        if not self._tracer.active and self._span is None:
            self._attempt, self._ended_ns = None, 0
            return
        with self._view.job.changed:
            outcome = decision.outcome
            self._end(
                "" if outcome is Outcome.COMMIT else f"{outcome.value}: {decision.reason}",
                outcome=outcome.value,
                version=decision.version,
            )

    def failed(self, error: BaseException) -> None:
        """End the step with an error. The step may still have committed."""
        with self._view.job.changed:
            self._end(error)

    @contextmanager
    def within(self, name: str, **attributes: Value) -> Iterator[Span | None]:
        """Trace a part of the step, in the calling thread."""
        step = self.current
        if step is None:
            yield None
            return
        span = self._tracer.begin(name, step.context, **attributes)
        try:
            yield span
        except BaseException as error:
            self._tracer.end(span, error)
            raise
        self._tracer.end(span)

    def call(self, name: str, unit: int, **attributes: Value) -> UnitCall:
        """Return the trace context of a call to the servers about a unit, which begins now or soon.

        Args:
            name: "gather" or "push".
            unit: its number.
            attributes: of its span.
        """
        return UnitCall(name, unit, self.current, attributes)

    @contextmanager
    def timed(self, call: UnitCall) -> Iterator[Span | None]:
        """Measure a call to the servers. Its step may be over when the call ends."""
        began_s, span = time.perf_counter(), None
        if call.step is not None:
            span = self._tracer.begin(
                call.name, call.step.context, unit=self._name(call.unit), bytes=0.0, **call.attributes
            )
        error: BaseException | str = ""
        try:
            yield span
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.seconds[call.name].observe(time.perf_counter() - began_s)
            if span is not None:
                self._tracer.end(span, error)

    def begin(self, name: str) -> Span | None:
        """Begin a part of the step. Pass the span to `end`."""
        step = self.current
        return None if step is None else self._tracer.begin(name, step.context)

    def end(self, span: Span | None, error: str = "") -> None:
        """End the span that `begin` returned."""
        if span is not None:
            self._tracer.end(span, error)

    def mapped(self, unit: int, size_bytes: int) -> None:
        """Trace a unit that needed no message, since it was in memory that a server of this host writes."""
        step = self.current
        if step is not None:
            name = self._name(unit)
            self._tracer.end(
                self._tracer.begin("gather", step.context, unit=name, bytes=float(size_bytes), mapped=True)
            )

    def _begin(self, generation: int, step: int) -> None:
        """Begin the step's span if the step is sampled, under `JobView.changed`."""
        view, self._attempt = self._view, (generation, step)
        me = view.job.member_in(view.job.membership)
        if me is None or not self._tracer.samples(step, view.stepping.next_attempt):
            return
        root = SpanContext.of_step(self._session.state_id, view.model, generation, step, view.stepping.replica)
        self._span = self._tracer.begin(
            "step",
            root,
            self._ended_ns,
            worker=me.rank,
            node=me.node,
            attempt=view.stepping.next_attempt,
            generation=generation,
            model=view.name or f"model {view.model}",
        )

    def _end(self, error: BaseException | str, **attributes: Value) -> None:
        """End the span, if there is one, under `JobView.changed`."""
        span, self._span, self._attempt = self._span, None, None
        if span is not None:
            self._tracer.end(span, error, **attributes)
        self._ended_ns = self._tracer.now()

    def _name(self, unit: int) -> str:
        spec = self._view.spec
        return f"unit {unit}" if spec is None else spec.layout.name_of(unit)
