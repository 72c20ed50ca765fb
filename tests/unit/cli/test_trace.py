"""`axon-ps trace` writes the spans of all members to a file. Tests of `cli/terminal/trace.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest

from axon_ps.cli import operations
from axon_ps.cli.main import main
from axon_ps.coordinator.span_messages import report_to_proto
from axon_ps.observe.tracing.span import Span, SpanContext, TraceOrder
from axon_ps.observe.tracing.tracer import Collection
from axon_ps.wire.v1 import trace_pb2

ORDER = TraceOrder(id=1, model=0, first=7, last=8, timeout_s=1.0)
MS = 10**6


def span(name: str, step: int, ms: float, **changes: Any) -> Span:
    root = SpanContext.of_step("job", 0, 1, step)
    begin = 10**18 + step * 100 * MS
    return Span(name, root.child(), root.span_id, begin, begin + int(ms * MS), {"attempt": step}, **changes)


def report(member: str, *spans: Span, dropped: int = 0, offset_s: float = 0.0) -> trace_pb2.SpanReport:
    message = report_to_proto(Collection(ORDER, lambda _: None, 0.0, list(spans), dropped), 0)
    message.member, message.node, message.offset_s = member, "n", offset_s
    return message


class Operator:
    """A coordinator that has recorded two steps."""

    def __init__(self, reply: trace_pb2.TraceReply) -> None:
        self.reply = reply
        self.orders: list[tuple[int, int, float, str]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def trace(self, first: int, steps: int, timeout_s: float, *, model: str) -> trace_pb2.TraceReply:
        self.orders.append((first, steps, timeout_s, model))
        return self.reply


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Operator:
    reply = trace_pb2.TraceReply(
        first=7,
        last=8,
        missing=["worker 1 did not answer"],
        reports=[
            report("shard server 0", span("apply", 7, 1.0), dropped=2, offset_s=0.25),
            report("worker 10"),
            report("worker 2", span("step", 7, 8.0), span("step", 8, 9.0, error="it broke"), span("vote", 8, 2.5)),
            report("coordinator", span("step", 6, 99.0), span("step", 7, 8.5)),
        ],
    )
    found = Operator(reply)
    monkeypatch.setattr(operations, "client", lambda settings: found)
    monkeypatch.chdir(tmp_path)
    return found


def test_each_member_is_a_line_and_a_process_in_the_file(
    operator: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--coordinator", "127.0.0.1:1", "--steps", "2"]) == 0
    assert operator.orders == [(0, 2, 60.0, "")]
    assert capsys.readouterr().out.splitlines() == [
        "coordinator: step 8.5 ms",
        "worker 2: step 17.0 ms, vote 2.5 ms; 1 with errors",
        "worker 10: nothing recorded",
        "shard server 0: apply 1.0 ms; 2 spans dropped; its clock is +0.25 s off",
        "missing: worker 1 did not answer",
        "steps 7 to 8: 5 spans in step-7.json; open it at https://ui.perfetto.dev",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step-7.json"]
    trace = json.loads((tmp_path / "step-7.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["coordinator", "worker 2", "worker 10", "shard server 0"]
    notes = trace["otherData"]
    assert (notes["first_step"], notes["last_step"], notes["missing"]) == (7, 8, ["worker 1 did not answer"])
    assert notes["clock_offsets_s"]["shard server 0"] == 0.25


def test_a_step_and_a_file_may_be_named(operator: Operator, tmp_path: Path) -> None:
    operator.reply.last = 7
    arguments = ["--step", "7", "--model", "critic", "--timeout-s", "3", "-o", "mine.json"]
    assert main(["trace", "--coordinator", "127.0.0.1:1", *arguments]) == 0
    assert operator.orders == [(7, 1, 3.0, "critic")]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.parametrize("step", ["0", "-1", "last", str(1 << 63)])
def test_a_step_that_is_no_number_is_refused(step: str, operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--coordinator", "127.0.0.1:1", f"--step={step}"]) == 2
    assert "it must be 'next', or the number of a step, 1 or more" in " ".join(capsys.readouterr().err.split())
    assert not operator.orders


def test_a_trace_that_cannot_be_written_leaves_no_part_of_it(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert main(["trace", "--coordinator", "127.0.0.1:1", "-o", "taken"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
