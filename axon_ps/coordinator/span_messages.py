"""Conversions between recorded spans and the messages in which members send them, in both directions."""

from __future__ import annotations

from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.observe.tracing.chrome import MemberSpans
from axon_ps.observe.tracing.span import MAX_SPANS, Span, SpanContext, TraceOrder
from axon_ps.observe.tracing.tracer import Collection
from axon_ps.wire.conversion import Conversion
from axon_ps.wire.v1 import trace_pb2

_TRACE_BYTES = 16


TRACE_ORDER: Final = Conversion(TraceOrder, trace_pb2.TraceOrder)


def report_to_proto(collection: Collection, now_ns: int) -> trace_pb2.SpanReport:
    """Return the spans of an order as a message, sent now."""
    return trace_pb2.SpanReport(
        order=collection.order.id,
        spans=map(_span_to_proto, collection.spans),
        dropped=collection.dropped,
        sent_ns=now_ns,
    )


def report_from_proto(message: trace_pb2.SpanReport) -> MemberSpans:
    """Return a member's spans, from a message.

    Raises:
        InvalidRequest: there are too many, or one is malformed.
    """
    if len(message.spans) > MAX_SPANS:
        raise InvalidRequest(f"{message.member} sent {len(message.spans)} spans; at most {MAX_SPANS} are allowed")
    return MemberSpans(
        member=message.member,
        node=message.node,
        spans=[_span_from_proto(span) for span in message.spans],
        dropped=message.dropped,
        offset_s=message.offset_s,
    )


def _span_to_proto(span: Span) -> trace_pb2.Span:
    texts = {name: value for name, value in span.attributes.items() if isinstance(value, str)}
    return trace_pb2.Span(
        trace_id=span.context.trace_id.to_bytes(_TRACE_BYTES),
        span_id=span.context.span_id,
        parent_id=span.parent_id,
        name=span.name,
        start_ns=span.start_ns,
        duration_ns=span.duration_ns,
        numbers={name: float(value) for name, value in span.attributes.items() if name not in texts},
        texts=texts,
        error=span.error,
        events=[trace_pb2.SpanEvent(at_ns=at_ns, name=name) for at_ns, name in span.events],
    )


def _span_from_proto(message: trace_pb2.Span) -> Span:
    if len(message.trace_id) != _TRACE_BYTES:
        raise InvalidRequest(f"the id of a trace has {len(message.trace_id)} bytes; it must have {_TRACE_BYTES}")
    return Span(
        name=message.name,
        context=SpanContext(int.from_bytes(message.trace_id), message.span_id),
        parent_id=message.parent_id,
        start_ns=message.start_ns,
        end_ns=message.start_ns + message.duration_ns,
        attributes={**message.numbers, **message.texts},
        events=[(event.at_ns, event.name) for event in message.events],
        error=message.error,
    )
