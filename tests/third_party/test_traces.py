"""Traces of real jobs, at a receiver of OTLP: one a step, of all processes, with the numbers of `.statistics()`.

Tests of `observe/tracing/otlp.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from axon_ps.observe.tracing.span import SpanContext
from otlp_receiver import Received, receiving

WORKERS, SHARDS, STEPS = 2, 2, 6
ERROR = 2
CLI = [sys.executable, "-m", "axon_ps.cli.main"]
WORKER = str(Path(__file__).with_name("traced_worker.py"))


@contextmanager
def job(directory: Path, *flags: str, steps: int = STEPS, pause_s: float = 0.0, **env: str) -> Iterator[Any]:
    command = [*CLI, "run", "--shards", str(SHARDS), "--nproc-per-node", str(WORKERS), *flags]
    command += [WORKER, str(directory), str(steps), str(pause_s)]
    with (directory / "job.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "AXON_PS_TOKEN": "t", **env}
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def ended(process: Any, directory: Path, limit_s: float = 120.0) -> list[dict[str, Any]]:
    """The numbers of the workers, once the job has ended well."""
    code = process.wait(limit_s)
    assert code == 0, (directory / "job.log").read_text()[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def traces(spans: list[Received]) -> dict[bytes, list[Received]]:
    found = defaultdict(list)
    for one in spans:
        found[one.span.trace_id].append(one)
    return found


def total(spans: list[Received], role: str, rank: int, name: str) -> float:
    mine = [s for s in spans if (s.role, s.rank, s.span.name) == (role, str(rank), name)]
    return sum(s.attributes.get("bytes", 0.0) for s in mine)


def grown(numbers: dict[str, Any], *path: Any) -> float:
    before, after = numbers["before"], numbers["after"]
    for key in path:
        before, after = before[key], after[key]
    return float(after - before)


def test_a_collector_gets_one_trace_a_step_with_the_numbers_of_the_job(tmp_path: Path) -> None:
    with receiving() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with job(tmp_path, "--trace-every", "1", **env) as process:
            numbers = ended(process, tmp_path)
        spans = collector.spans
    committed = {
        trace: members
        for trace, members in traces(spans).items()
        if any(s.role == "coordinator" and s.attributes.get("outcome") == "commit" for s in members)
    }
    assert len(committed) == numbers[0]["after"]["version"] == STEPS
    assert sum(numbers[0]["after"]["outcomes"]) == STEPS
    for members in committed.values():
        processes = {(s.role, s.rank) for s in members}
        assert processes == {("coordinator", "")} | {("worker", "0"), ("worker", "1"), ("shard", "0"), ("shard", "1")}
        (root,) = [s.span for s in members if not s.span.parent_span_id]
        ids = {s.span.span_id: s for s in members}
        assert root.name == "step"
        assert len(root.events) == WORKERS + SHARDS
        for one in members:
            if one.span is root or one.span.span_id == root.span_id:
                continue
            parent = ids[one.span.parent_span_id]
            wanted = {
                ("shard", "apply"): ("coordinator", "commit"),
                ("shard", "gather"): ("worker", "gather"),
                ("shard", "push"): ("worker", "push"),
                ("worker", "step"): ("coordinator", "step"),
                ("coordinator", "commit"): ("coordinator", "step"),
            }.get((one.role, one.span.name), ("worker", "step"))
            assert (parent.role, parent.span.name) == wanted, one.span.name
        assert sum(s.span.name == "apply" for s in members) == SHARDS
        assert sum((s.role, s.span.name) == ("worker", "step") for s in members) == WORKERS
    for rank in range(WORKERS):
        assert total(spans, "worker", rank, "gather") == grown(numbers[rank], "worker", "bytes_in")
        assert total(spans, "worker", rank, "push") == grown(numbers[rank], "worker", "bytes_out")
    for rank in range(SHARDS):
        assert total(spans, "shard", rank, "gather") == grown(numbers[0], "shards", rank, "bytes_out")
        assert total(spans, "shard", rank, "push") == grown(numbers[0], "shards", rank, "bytes_in")


def test_one_step_in_so_many_is_the_same_everywhere(tmp_path: Path) -> None:
    with receiving() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "AXON_PS_TRACE_EVERY": "4"}
        with job(tmp_path, steps=9, **env) as process:
            ended(process, tmp_path)
        spans = collector.spans
    roots = {
        s.span.trace_id: s.attributes["attempt"] for s in spans if s.role == "coordinator" and s.span.name == "step"
    }
    assert set(roots.values()) <= set(range(0, 12, 4))
    assert len(roots) >= 2
    workers = {(s.attributes["attempt"], s.rank) for s in spans if (s.role, s.span.name) == ("worker", "step")}
    assert {(attempt, str(rank)) for attempt in roots.values() for rank in range(WORKERS)} <= workers


def children(process: Any, word: str) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children(recursive=True) if word in p.cmdline()]


def reached(directory: Path, step: int, process: Any) -> None:
    """Wait until worker 0 has made so many steps."""
    file, pause, deadline = directory / "0.step", threading.Event(), time.monotonic() + 60
    while not file.exists() or int(file.read_text() or 0) < step:
        assert process.poll() is None, (directory / "job.log").read_text()[-4000:]
        assert time.monotonic() < deadline
        pause.wait(0.05)


def test_a_step_that_a_servers_death_aborts_is_an_error_in_its_trace(tmp_path: Path) -> None:
    with receiving() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with job(tmp_path, "--trace-every", "1", "--checkpoint-every", "1000", "--checkpoint-dir", str(tmp_path / "c"),
                 steps=40, pause_s=0.02, **env) as process:  # fmt: skip
            reached(tmp_path, 8, process)
            children(process, "shard")[0].kill()
            numbers = ended(process, tmp_path)
        spans = collector.spans
    assert sum(numbers[0]["after"]["outcomes"]) == 40
    aborted = [s for s in spans if (s.role, s.span.name) == ("coordinator", "step") and s.span.status.code == ERROR]
    assert [s.attributes["outcome"] for s in aborted] == ["abort"] * len(aborted)
    assert aborted
    assert "abort" in aborted[0].span.status.message
    of_workers = [s for s in spans if s.span.trace_id == aborted[0].span.trace_id and s.role == "worker"]
    assert [s for s in of_workers if s.span.name == "step" and s.span.status.code == ERROR]


@pytest.mark.parametrize("collector", ["dead", "hangs"])
def test_training_does_not_wait_for_a_collector(tmp_path: Path, collector: str) -> None:
    with receiving(hangs=True) as hanging:
        endpoint = hanging.endpoint if collector == "hangs" else "http://127.0.0.1:9"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with job(tmp_path, "--trace-every", "1", steps=100, **env) as process:
            numbers = ended(process, tmp_path, 100)
    assert sum(numbers[0]["after"]["outcomes"]) == 100
    log = (tmp_path / "job.log").read_text()
    assert "Traceback" not in log
    assert "were not exported" in log or "cannot be exported" in log


def test_axon_ps_trace_makes_a_file_of_the_next_steps_with_the_observers_token(tmp_path: Path) -> None:
    env = {"AXON_PS_OBSERVER_TOKEN": "o"}
    with job(tmp_path, steps=100_000, pause_s=0.01, **env) as process:
        reached(tmp_path, 3, process)
        log = (tmp_path / "job.log").read_text()
        address = log.partition("--coordinator ")[2].split()[0]
        ask = [*CLI, "trace", "--coordinator", address]
        both = [
            subprocess.Popen([*ask, "-o", str(tmp_path / f"{n}.json"), "--steps", "2"],
                             env={**os.environ, "AXON_PS_TOKEN": "o"})
            for n in range(2)
        ]  # fmt: skip
        assert [one.wait(60) for one in both] == [0, 0]
        late = subprocess.run([*ask, "--step", "1"], env={**os.environ, "AXON_PS_TOKEN": "o"}, capture_output=True,
                              text=True, timeout=60)  # fmt: skip
        assert late.returncode == 2
        assert "has begun" in late.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
    for n in range(2):
        trace = json.loads((tmp_path / f"{n}.json").read_text())
        events, notes = trace["traceEvents"], trace["otherData"]
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert names == ["coordinator", "worker 0", "worker 1", "shard server 0", "shard server 1"]
        assert notes["missing"] == []
        assert notes["last_step"] - notes["first_step"] == 1
        steps = [e for e in events if e["ph"] == "X" and e["name"].split()[0] == "step"]
        assert len({e["args"]["trace_id"] for e in steps}) == 2
        assert len(steps) == 2 * (1 + WORKERS)
        assert {e["cat"] for e in events if e["ph"] == "X"} >= {"step", "gather", "push", "vote", "commit", "apply"}


def test_our_traceparent_is_what_opentelemetry_reads() -> None:
    ours = SpanContext.of_step("job", 0, 1, 7)
    context = TraceContextTextMapPropagator().extract({"traceparent": ours.traceparent})
    theirs = get_current_span(context).get_span_context()
    assert (theirs.trace_id, theirs.span_id, theirs.trace_flags.sampled) == (ours.trace_id, ours.span_id, True)
