"""Spans as a Chrome trace: the JSON that https://ui.perfetto.dev and chrome://tracing open. It is pure.

A process is a member. The spans of a row follow each other; those of the first row may also contain each other. Spans
that overlap get rows of their own. Arrows lead from a request to a server's work on it.

Source of the format: "Trace Event Format", the document that Chromium's trace viewer refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from axon_ps.observe.tracing.span import Span

_ROWS: Final = ("step", "gather", "push", "apply")
"""The rows of a process, from above; a span that belongs to none of them is in the first."""

_LABELS: Final = ("unit", "worker")
"""Attributes that are shown with a span's name."""


@dataclass(frozen=True, kw_only=True)
class MemberSpans:
    """The spans that a member has recorded.

    Attributes:
        member: its name: "worker 0".
        node: its host or container.
        spans: the spans, in any order.
        dropped: number of spans that were dropped for lack of memory.
        offset_s: the coordinator's clock minus the member's when they came, including the time on the way.
    """

    member: str
    node: str
    spans: Sequence[Span]
    dropped: int = 0
    offset_s: float = 0.0


def of_steps(members: Iterable[MemberSpans], first: int, last: int) -> list[MemberSpans]:
    """Return only the spans of the attempts `first` to `last`; others may have been sampled meanwhile."""
    known = list(members)
    wanted = {
        span.context.trace_id
        for member in known
        for span in member.spans
        if span.name == "step" and first <= float(span.attributes.get("attempt", -1)) <= last
    }
    return [replace(one, spans=[span for span in one.spans if span.context.trace_id in wanted]) for one in known]


def chrome_trace(members: Sequence[MemberSpans], notes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the trace, ready for `json.dump`.

    Args:
        members: spans by member, in the order in which they are shown.
        notes: further values for readers of the file.
    """
    began_ns = min((span.start_ns for member in members for span in member.spans), default=0)
    at: dict[int, tuple[int, int, Span]] = {}  # process, row and span, by the span's id
    events: list[dict[str, Any]] = []
    for pid, member in enumerate(members, 1):
        events += _names(pid, member)
        for tid, row, spans in _rows(member.spans):
            events.append(_metadata("thread_name", pid, tid, name=row))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            for span in spans:
                at[span.context.span_id] = pid, tid, span
                events.append(_complete(span, pid, tid, began_ns))
                events += _instants(span, pid, tid, began_ns)
    events += _arrows(at, began_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began_ns_since_1970": str(began_ns), **(notes or {})},
    }


def _names(pid: int, member: MemberSpans) -> list[dict[str, Any]]:
    incomplete = f", {member.dropped} spans dropped" if member.dropped else ""
    return [
        _metadata("process_name", pid, name=member.member),
        _metadata("process_labels", pid, labels=member.node + incomplete),
        _metadata("process_sort_index", pid, sort_index=pid),
    ]


def _metadata(name: str, pid: int, tid: int = 0, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _rows(spans: Iterable[Span]) -> Iterator[tuple[int, str, list[Span]]]:
    """Yield rows with their numbers and names: spans of a row are disjoint, or, in the first row, also nested."""
    by_row: dict[str, list[Span]] = {name: [] for name in _ROWS}
    for span in sorted(spans, key=lambda one: (one.start_ns, -one.end_ns)):
        by_row[span.name if span.name in by_row else _ROWS[0]].append(span)
    tid = 0
    for name, members in by_row.items():
        for number, row in enumerate(_apart(members, nested=name == _ROWS[0])):
            tid += 1
            yield tid, f"{name} {number + 1}" if number else name, row


def _apart(spans: Iterable[Span], *, nested: bool) -> list[list[Span]]:
    """Distribute spans, by their beginning, over as few rows as possible; if `nested`, a row may have nested spans."""
    rows: list[tuple[list[Span], list[int]]] = []  # each row with the ends of its open spans
    for span in spans:
        for _, ends in rows:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
        found = next((row for row in rows if not row[1] or (nested and span.end_ns <= row[1][-1])), None)
        if found is None:
            rows.append(found := ([], []))
        found[0].append(span)
        found[1].append(span.end_ns)
    return [row for row, _ in rows]


def _complete(span: Span, pid: int, tid: int, began_ns: int) -> dict[str, Any]:
    labels = [str(span.attributes[name]) for name in _LABELS if name in span.attributes]
    event: dict[str, Any] = {
        "ph": "X",
        "name": " ".join([span.name, *labels]),
        "cat": "error" if span.error else span.name,
        "ts": _us(span.start_ns - began_ns),
        "dur": _us(span.duration_ns),
        "pid": pid,
        "tid": tid,
        "args": {**span.attributes, "trace_id": f"{span.context.trace_id:032x}"},
    }
    if span.error:
        event["args"]["error"] = span.error
        event["cname"] = "terrible"
    return event


def _instants(span: Span, pid: int, tid: int, began_ns: int) -> Iterator[dict[str, Any]]:
    for at_ns, name in span.events:
        yield {"ph": "i", "s": "t", "name": name, "ts": _us(at_ns - began_ns), "pid": pid, "tid": tid}


def _arrows(at: Mapping[int, tuple[int, int, Span]], began_ns: int) -> Iterator[dict[str, Any]]:
    """Yield arrows from spans to those that they caused in other processes."""
    for span_id, (pid, tid, span) in at.items():
        cause = at.get(span.parent_id)
        if cause is None or cause[0] == pid or cause[2].name == "step":
            continue
        arrow = {"name": span.name, "cat": "cause", "id": f"{span_id:016x}"}
        begins = min(max(span.start_ns, cause[2].start_ns), cause[2].end_ns)
        yield {**arrow, "ph": "s", "ts": _us(begins - began_ns), "pid": cause[0], "tid": cause[1]}
        yield {**arrow, "ph": "f", "bp": "e", "ts": _us(span.start_ns - began_ns), "pid": pid, "tid": tid}


def _us(ns: int) -> float:
    return ns / 1000
