"""Spans survive their way to the coordinator. Tests of `coordinator/span_messages.py`."""

from __future__ import annotations

import pytest

from axon_ps.coordinator import span_messages
from axon_ps.coordinator.span_messages import TRACE_ORDER, report_from_proto, report_to_proto
from axon_ps.errors import InvalidRequest
from axon_ps.observe.tracing.span import Span, SpanContext, TraceOrder
from axon_ps.observe.tracing.tracer import Collection
from axon_ps.wire.v1 import trace_pb2

ORDER = TraceOrder(id=4, model=1, first=5, last=6, timeout_s=60.0)
ROOT = SpanContext((1 << 127) + 3, (1 << 63) + 1)


def collection(*spans: Span, dropped: int = 0) -> Collection:
    return Collection(ORDER, lambda _: None, 0.0, spans=list(spans), dropped=dropped)


def test_an_order_comes_back_equal() -> None:
    assert TRACE_ORDER.from_proto(TRACE_ORDER.to_proto(ORDER)) == ORDER


def test_spans_come_back_with_times_attributes_events_and_errors() -> None:
    spans = [
        Span("step", ROOT, 0, 10**18, 10**18 + 7, {"worker": 2.0, "node": "a"}, [(10**18 + 1, "vote of worker 2")]),
        Span("gather", ROOT.child(), ROOT.span_id, 10**18, 10**18, error="it broke"),
    ]
    message = report_to_proto(collection(*spans, dropped=3), now_ns=99)
    assert (message.order, message.sent_ns) == (4, 99)
    message.member, message.node, message.offset_s = "worker 2", "a", 0.25
    found = report_from_proto(trace_pb2.SpanReport.FromString(message.SerializeToString()))
    assert (found.member, found.node, found.dropped, found.offset_s) == ("worker 2", "a", 3, 0.25)
    assert found.spans == spans


def test_flags_and_numbers_travel_as_numbers() -> None:
    message = report_to_proto(collection(Span("gather", ROOT, 0, 1, 2, {"mapped": True, "bytes": 8})), 0)
    assert report_from_proto(message).spans[0].attributes == {"mapped": 1.0, "bytes": 8.0}


@pytest.mark.parametrize("trace_id", [b"", bytes(15), bytes(17)])
def test_an_id_of_another_length_is_refused(trace_id: bytes) -> None:
    message = trace_pb2.SpanReport(member="worker 2", spans=[trace_pb2.Span(trace_id=trace_id)])
    with pytest.raises(InvalidRequest, match=f"the id of a trace has {len(trace_id)} bytes; it must have 16"):
        report_from_proto(message)


def test_a_member_with_too_many_spans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_messages, "MAX_SPANS", 2)
    message = report_to_proto(collection(*[Span("gather", ROOT, 0, 1, 2)] * 3), 0)
    message.member = "worker 2"
    with pytest.raises(InvalidRequest, match="worker 2 sent 3 spans; at most 2 are allowed"):
        report_from_proto(message)
    del message.spans[0]
    assert len(report_from_proto(message).spans) == 2
