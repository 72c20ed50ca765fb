"""`Tracer`: the spans of one member, for the steps that are sampled, and their receivers.

A step is sampled if its number is a multiple of `TracePolicy.every`, which is the same in all workers. A step is also
sampled if it was ordered (`TraceOrder`, of `axon-ps trace`). If neither can happen `active` is False, and nothing else
is read.

Owns: the clock of spans, the bounded list of spans that were ordered. Refuses: threads, sockets, knowledge of steps.

Note: [The clock of spans]
    Spans of several processes need a common clock, the wall clock; durations need a clock that is never set. So spans
    are timed by the monotonic clock, plus its difference to the wall clock when this process last had no span open.
    If the clocks of hosts differ, their rows are shifted against each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from axon_ps.observe.tracing.span import MAX_SPANS, Span, SpanContext, TraceOrder, Value

if TYPE_CHECKING:
    from axon_ps.observe.tracing.otlp import OtlpExporter

_UNTRACED: Final = nullcontext()


@dataclass(frozen=True, kw_only=True)
class TracePolicy:
    """The steps that are traced and exported.

    Attributes:
        every: one of this many steps is traced; 0 = none.
        protocol: the exporter's protocol: "http/protobuf" or "grpc".
    """

    every: int = 0
    protocol: str = "http/protobuf"


NO_TRACES: Final = TracePolicy()
"""The policy that traces only steps that are ordered."""


@dataclass
class Collection:
    """The spans of an order, so far.

    Attributes:
        order: the order.
        done: called once: on the thread that ended the last step and its spans, or by `Tracer.finish`.
        expires_s: the time at which the order expires, by `time.monotonic`.
        spans: those that have ended.
        dropped: number of spans that exceeded `MAX_SPANS`.
        over: whether the last step is decided.
        under_way: ids of the earlier spans that have not ended.
    """

    order: TraceOrder
    done: Callable[[Collection], None]
    expires_s: float
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    over: bool = False
    under_way: set[int] = field(default_factory=set)

    def add(self, span: Span) -> None:
        """Add a span that has ended, up to `MAX_SPANS`."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1


class Tracer:
    """The spans of one member. Any thread may call it. Without an order or `start`, it samples nothing."""

    def __init__(self) -> None:
        self._exporter: OtlpExporter | None = None
        self._recorded = 0
        self._every = 0
        self._lock = threading.Lock()
        self._open = 0
        self._offset_ns = 0
        self._collection: Collection | None = None

    def start(self, policy: TracePolicy, role: str, attributes: Mapping[str, str]) -> None:
        """Begin to sample steps and export their spans; does nothing if the policy traces no step, or when repeated.

        Args:
            policy: selects the steps.
            role: this process's role: "worker", "shard" or "coordinator".
            attributes: attributes of this process: job, rank, node.

        Raises:
            ConfigurationError: the extra `otel` is not installed, or its settings are invalid.
        """
        if policy.every and self._exporter is None:
            from axon_ps.observe.tracing.otlp import OtlpExporter

            self._exporter = OtlpExporter(f"axon_ps.{role}", attributes, policy.protocol)
            self._every = policy.every

    def close(self) -> None:
        """Export the remaining spans, for at most `otlp.FLUSH_S`. Harmless when repeated."""
        if self._exporter is not None:
            self._exporter.close()

    def statistics(self) -> dict[str, float]:
        """Return the numbers of spans recorded, and of those exported, failed and dropped."""
        exported = {} if self._exporter is None else self._exporter.statistics()
        return {"spans_recorded": float(self._recorded), **exported}

    @property
    def active(self) -> bool:
        """True if any step may be sampled at present."""
        return self._every > 0 or self._collection is not None

    def samples(self, step: int, attempt: int) -> bool:
        """Return True if a step is traced.

        Args:
            step: its number, to which `every` applies: the attempt, or the clock of an asynchronous replica.
            attempt: the attempt that is decided next, to which orders apply.
        """
        if self._every and step % self._every == 0:
            return True
        collection = self._current()
        return collection is not None and collection.order.first <= attempt <= collection.order.last

    # ------------------------------------------------------------------ spans

    def now(self) -> int:
        """Return the time by the clock of spans: ns since 1970."""
        return time.perf_counter_ns() + (self._offset_ns or self._anchored())

    def _anchored(self) -> int:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        return self._offset_ns

    def begin(self, name: str, parent: SpanContext, start_ns: int = 0, /, **attributes: Value) -> Span:
        """Begin a span, which `end` must end.

        Args:
            name: its kind.
            parent: the span that contains it.
            start_ns: its begin; 0 = now.
            attributes: its attributes, by name.
        """
        with self._lock:
            if not self._open:
                self._anchored()
            self._open += 1
        context = parent.child()
        if (collection := self._collection) is not None and not collection.over:
            collection.under_way.add(context.span_id)
        return Span(name, context, parent.span_id, start_ns or self.now(), attributes=attributes)

    def end(self, span: Span, error: BaseException | str = "", **attributes: Value) -> None:
        """End a span, with an error if it failed."""
        span.end_ns = max(span.start_ns, self.now())
        span.error = error if isinstance(error, str) else str(error) or type(error).__name__
        span.attributes.update(attributes)
        with self._lock:
            self._open -= 1
        self.record(span)

    def record(self, span: Span) -> None:
        """Record a span that has ended."""
        self._recorded += 1
        if self._exporter is not None:
            self._exporter(span)
        if (collection := self._current()) is not None:
            collection.add(span)
            collection.under_way.discard(span.context.span_id)
            self._take()

    def serving(self, name: str, traceparent: str) -> AbstractContextManager[Span | None]:
        """Record a span of the work on a peer's request; None if it is not traced, or no spans are recorded here."""
        parent = SpanContext.parse(traceparent) if traceparent and self.active else None
        return _UNTRACED if parent is None else self._serving(name, parent)

    @contextmanager
    def _serving(self, name: str, parent: SpanContext) -> Iterator[Span]:
        span = self.begin(name, parent)
        try:
            yield span
        except BaseException as error:
            self.end(span, error)
            raise
        self.end(span)

    # ------------------------------------------------------------------ orders

    def order(self, order: TraceOrder, done: Callable[[Collection], None]) -> None:
        """Record the steps of an order; it replaces an order under way."""
        self._collection = Collection(order, done, time.monotonic() + order.timeout_s)

    def decided(self, model: int, step: int) -> None:
        """Record that the attempts of a model up to `step` are decided."""
        collection = self._current()
        if collection is not None and model == collection.order.model and step >= collection.order.last:
            collection.over = True
            self._take()

    def finish(self) -> None:
        """Hand over the spans so far, because the member ends."""
        self._take(at_once=True)

    def _current(self) -> Collection | None:
        collection = self._collection
        if collection is not None and time.monotonic() > collection.expires_s:
            self._collection = collection = None
        return collection

    def _take(self, *, at_once: bool = False) -> None:
        with self._lock:
            collection = self._collection
            if collection is None or not (at_once or (collection.over and not collection.under_way)):
                return
            self._collection = None
        collection.done(collection)
