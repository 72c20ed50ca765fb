"""`Tracer`: the spans of one member, for the steps that are sampled, and who gets them.

A step is sampled if its number is a multiple of `TracePolicy.every`, the same in all workers; or if somebody has
ordered it (`TraceOrder`, of `axon-ps trace`). Where neither is the case `active` is False, and nothing else is read.

Owns: the clock of spans, the bounded list of those that were ordered. Refuses: threads, sockets, what a step is.

Note: [The clock of spans]
    Spans of several processes need a clock in common, the wall clock; durations need one that nobody sets. So spans
    are timed by the monotonic clock, counted from the wall clock as it was when this process last had no span open.
    Hosts whose clocks differ show it: their rows are shifted against each other.
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
        every: one in so many; 0 = none.
        protocol: of the exporter: "http/protobuf" or "grpc".
    """

    every: int = 0
    protocol: str = "http/protobuf"


NO_TRACES: Final = TracePolicy()
"""None are, before somebody orders some."""


@dataclass
class Collection:
    """The spans of an order, so far.

    Attributes:
        order: the order.
        done: called once, when the last step and its spans are over, on the thread that ended it.
        expires_s: when they are not wanted any more, by `time.monotonic`.
        spans: those that have ended.
        dropped: how many there was no room for.
        over: whether the last step is decided.
        under_way: ids of the spans that began before that and have not ended.
    """

    order: TraceOrder
    done: Callable[[Collection], None]
    expires_s: float
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    over: bool = False
    under_way: set[int] = field(default_factory=set)

    def add(self, span: Span) -> None:
        """Take a span that has ended, while there is room."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1


class Tracer:
    """Any thread; without an order or `start`, it samples nothing."""

    def __init__(self) -> None:
        self._exporter: OtlpExporter | None = None
        self._recorded = 0
        self._every = 0
        self._lock = threading.Lock()
        self._open = 0
        self._offset_ns = 0
        self._collection: Collection | None = None

    def start(self, policy: TracePolicy, role: str, attributes: Mapping[str, str]) -> None:
        """From now on sample steps, and export what is recorded; nothing where the policy has none traced.

        Args:
            policy: which steps.
            role: of this process: "worker", "shard" or "coordinator".
            attributes: of this process: job, rank, node.

        Raises:
            ConfigurationError: the extra `otel` is not installed, or its settings cannot be.
        """
        if policy.every and self._exporter is None:
            from axon_ps.observe.tracing.otlp import OtlpExporter

            self._exporter = OtlpExporter(f"axon_ps.{role}", attributes, policy.protocol)
            self._every = policy.every

    def close(self) -> None:
        """Export what is left, for at most `otlp.FLUSH_S`. Harmless when repeated."""
        if self._exporter is not None:
            self._exporter.close()

    def statistics(self) -> dict[str, float]:
        """Spans that were recorded, and what became of them."""
        exported = {} if self._exporter is None else self._exporter.statistics()
        return {"spans_recorded": float(self._recorded), **exported}

    @property
    def active(self) -> bool:
        """Whether any step may be sampled at present."""
        return self._every > 0 or self._collection is not None

    def samples(self, step: int, attempt: int) -> bool:
        """Whether a step is to be traced.

        Args:
            step: its number, which `every` goes by: the attempt, or the clock of an asynchronous replica.
            attempt: the attempt that is decided next, which orders go by.
        """
        if self._every and step % self._every == 0:
            return True
        collection = self._current()
        return collection is not None and collection.order.first <= attempt <= collection.order.last

    # ------------------------------------------------------------------ spans

    def now(self) -> int:
        """The time, as spans have it: ns since 1970."""
        return time.perf_counter_ns() + (self._offset_ns or self._anchored())

    def _anchored(self) -> int:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        return self._offset_ns

    def begin(self, name: str, parent: SpanContext, start_ns: int = 0, /, **attributes: Value) -> Span:
        """Begin a span; `end` it.

        Args:
            name: what it is of.
            parent: the span that it is within.
            start_ns: when it began; 0 = now.
            attributes: by name.
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
        """A span has ended."""
        self._recorded += 1
        if self._exporter is not None:
            self._exporter(span)
        if (collection := self._current()) is not None:
            collection.add(span)
            collection.under_way.discard(span.context.span_id)
            self._take()

    def serving(self, name: str, traceparent: str) -> AbstractContextManager[Span | None]:
        """A span of what a peer has asked for; None where it is not traced, or its spans are not wanted here."""
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
        """Record the steps of an order; another one that is under way is given up."""
        self._collection = Collection(order, done, time.monotonic() + order.timeout_s)

    def decided(self, model: int, step: int) -> None:
        """The attempts of a model up to `step` are decided."""
        collection = self._current()
        if collection is not None and model == collection.order.model and step >= collection.order.last:
            collection.over = True
            self._take()

    def finish(self) -> None:
        """The member ends: hand over what there is."""
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
