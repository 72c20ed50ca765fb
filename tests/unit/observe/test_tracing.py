"""The tracer by itself: which steps are sampled, how spans are named everywhere, what an order gets, and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from axon_ps.observe.metrics.histogram import BOUNDS_S, Histogram
from axon_ps.observe.tracing.chrome import MemberSpans, chrome_trace, of_steps
from axon_ps.observe.tracing.span import MAX_SPANS, Span, SpanContext, TraceOrder
from axon_ps.observe.tracing.tracer import Collection, Tracer

ROOT = SpanContext.of_step("job", 0, 1, 7)


def order(first: int = 5, last: int = 6, timeout_s: float = 60.0) -> TraceOrder:
    return TraceOrder(id=1, model=0, first=first, last=last, timeout_s=timeout_s)


def test_every_process_names_a_step_alike_and_no_two_steps() -> None:
    assert SpanContext.of_step("job", 0, 1, 7) == ROOT
    others = [("other", 0, 1, 7), ("job", 1, 1, 7), ("job", 0, 2, 7), ("job", 0, 1, 8)]
    assert len({ROOT, *(SpanContext.of_step(*other) for other in others), SpanContext.of_step("job", 0, 1, 7, 0)}) == 6
    assert ROOT.child().trace_id == ROOT.trace_id
    assert len({ROOT.child().span_id for _ in range(100)}) == 100


def test_a_traceparent_is_that_of_w3c() -> None:
    example = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the recommendation's
    context = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    assert (SpanContext.parse(example), context.traceparent) == (context, example)
    assert SpanContext.parse(ROOT.traceparent) == ROOT


@pytest.mark.parametrize(
    "text",
    [
        "", "x", ROOT.traceparent[:-1], ROOT.traceparent + "0", ROOT.traceparent[:-2] + "00",
        ROOT.traceparent.replace("-", "+"), f"00-{0:032x}-{1:016x}-01", f"00-{1:032x}-{0:016x}-01",
        f"00-{'g' * 32}-{1:016x}-01",
    ],
)  # fmt: skip
def test_what_is_no_sampled_traceparent_is_nothing(text: str) -> None:
    assert SpanContext.parse(text) is None


def test_without_an_order_nothing_is_sampled() -> None:
    tracer = Tracer()
    assert not tracer.active
    assert not tracer.samples(0, 0)
    with tracer.serving("gather", ROOT.traceparent) as span:
        assert span is None


def test_an_order_gets_the_spans_of_its_steps_once_they_are_over() -> None:
    tracer, got = Tracer(), list[Collection]()
    tracer.order(order(), got.append)
    assert [tracer.samples(step, step) for step in (4, 5, 6, 7)] == [False, True, True, False]
    step = tracer.begin("step", ROOT, attempt=6)
    with tracer.serving("gather", step.context.traceparent) as served:
        assert served is not None
    assert served.parent_id == step.context.span_id
    tracer.decided(0, 5)
    tracer.decided(1, 6)  # of another model
    tracer.decided(0, 6)
    late = tracer.begin("gather", step.context)  # of what comes after: nobody waits for it
    assert not got
    tracer.end(step)
    assert [span.name for span in got[0].spans] == ["gather", "step"]
    assert not tracer.active
    tracer.end(late)
    assert len(got) == 1
    assert tracer.statistics() == {"spans_recorded": 3.0}


def test_an_error_is_on_the_span_and_goes_on() -> None:
    tracer, got = Tracer(), list[Collection]()
    tracer.order(order(), got.append)
    with pytest.raises(ValueError, match="refused"), tracer.serving("push", ROOT.traceparent):
        raise ValueError("refused")
    tracer.finish()
    assert got[0].spans[0].error == "refused"


def test_an_order_that_nobody_wants_any_more_is_dropped() -> None:
    tracer, got = Tracer(), list[Collection]()
    tracer.order(order(timeout_s=-1.0), got.append)
    assert not tracer.samples(5, 5)
    assert not tracer.active
    tracer.decided(0, 6)
    assert not got


def test_spans_beyond_the_bound_are_counted() -> None:
    collection = Collection(order(), lambda _: None, 0.0)
    span = Span("gather", ROOT.child(), 0, 1, 2)
    for _ in range(MAX_SPANS + 3):
        collection.add(span)
    assert (len(collection.spans), collection.dropped) == (MAX_SPANS, 3)


# ---------------------------------------------------------------- files


def span(name: str, start: int, end: int, parent: SpanContext = ROOT, **attributes: Any) -> Span:
    return Span(name, parent.child(), parent.span_id, start * 1000, end * 1000, attributes)


def members() -> list[MemberSpans]:
    step = span("step", 0, 100, attempt=7.0)
    inside = [span("forward", 10, 40, step.context), span("gather wait", 12, 20, step.context, unit="a")]
    gathers = [span("gather", 5, 30, step.context, unit=unit) for unit in "ab"]
    served = span("gather", 6, 29, gathers[0].context, unit="a", worker=0.0)
    failed = span("push", 50, 60, step.context)
    failed.error = "refused"
    root = Span("step", ROOT, 0, 0, 110_000, {"attempt": 7.0}, [(90_000, "vote of worker 0")])
    return [
        MemberSpans(member="coordinator", node="n", spans=[root]),
        MemberSpans(member="worker 0", node="n", spans=[step, *inside, *gathers, failed]),
        MemberSpans(member="shard server 0", node="m", spans=[served], dropped=2),
    ]


def rows(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    places = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    return ([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == place] for place in sorted(places))


def test_a_file_has_what_the_format_asks_for() -> None:
    trace = json.loads(json.dumps(chrome_trace(members(), {"missing": []})))
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] in "XMisf"
        assert event["ph"] == "M" or event["ts"] >= 0
    assert all(e["dur"] >= 0 and e["cat"] for e in events if e["ph"] == "X")
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "coordinator", "worker 0", "shard server 0",
    ]  # fmt: skip
    assert {e["args"]["labels"] for e in events if e["name"] == "process_labels"} == {"n", "m, 2 spans dropped"}
    assert [e["args"]["error"] for e in events if e.get("cat") == "error"] == ["refused"]
    arrows = {e["ph"]: e for e in events if e["ph"] in "sf"}
    assert (arrows["s"]["pid"], arrows["f"]["pid"], arrows["s"]["id"]) == (2, 3, arrows["f"]["id"])
    assert trace["otherData"]["missing"] == []


def test_on_a_row_spans_are_within_each_other_or_apart() -> None:
    events = chrome_trace(members())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"step", "gather", "gather 2", "push"}
    for row in rows(events):
        for a in row:
            for b in row:
                apart = a["ts"] + a["dur"] <= b["ts"] or b["ts"] + b["dur"] <= a["ts"]
                inside = a["ts"] <= b["ts"] and b["ts"] + b["dur"] <= a["ts"] + a["dur"]
                outside = b["ts"] <= a["ts"] and a["ts"] + a["dur"] <= b["ts"] + b["dur"]
                assert apart or inside or outside


def test_only_the_steps_asked_for_are_in_it() -> None:
    other = span("gather", 1, 2, SpanContext.of_step("job", 0, 1, 8))
    found = of_steps([*members(), MemberSpans(member="worker 1", node="n", spans=[other])], 7, 7)
    assert [len(one.spans) for one in found] == [1, 6, 1, 0]
    assert not any(one.spans for one in of_steps(members(), 8, 9))


def test_a_histogram_counts_what_prometheus_wants() -> None:
    one, two = Histogram(), Histogram()
    for seconds in (0.0005, 0.001, 0.3, 1000.0):
        one.observe(seconds)
    two.observe(0.3)
    one.merge(two)
    buckets = dict(one.buckets())
    assert (one.count, one.sum_s) == (5, pytest.approx(1000.6015))
    assert (buckets[0.001], buckets[0.5], buckets[60.0], buckets[float("inf")]) == (2, 4, 4, 5)
    assert len(buckets) == len(BOUNDS_S) + 1
