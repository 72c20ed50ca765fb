"""How the doctor reports collectives that hang."""

from __future__ import annotations

import json

import numpy as np

from axon_ps.cli.hangs import explain
from axon_ps.collectives.backends.base import Call, Operation
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.types import DType, ReduceOp
from axon_ps.worker.hang_report import HANGS_AFTER_S, report

ALL_REDUCE = Call(sequence=17, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(12,), op=ReduceOp.SUM)
BARRIER = Call(sequence=3, operation=Operation.BARRIER)


def test_only_what_takes_long_is_reported() -> None:
    recorder = Recorder()
    recorder.end(recorder.begin("world@1", (0, 1), BARRIER))
    entry = recorder.begin("world@1", (0, 1), ALL_REDUCE)
    assert report(recorder, entry.started + 1.0, "a") == b""
    reported = json.loads(report(recorder, entry.started + HANGS_AFTER_S + 1.0, "a"))
    assert [e["call"] for e in reported["pending"]] == ["all_reduce(sum) of 12 f32"]
    assert [e["outcome"] for e in reported["last"]] == ["done", ""]
    recorder.end(entry)
    assert report(recorder, entry.started + 100.0, "a") == b""


def test_who_waits_for_whom() -> None:
    recorders = [Recorder() for _ in range(3)]
    ranks = (0, 1, 2, 3)
    started = [
        recorders[0].begin("world@1", ranks, ALL_REDUCE),
        recorders[1].begin("world@1", ranks, ALL_REDUCE),
        recorders[2].begin("world@1/0", (2, 3), BARRIER),
    ]
    now = np.floor(started[0].started) + 60.0
    reports = {rank: json.loads(report(r, now, "a")) for rank, r in enumerate(recorders)}
    first, second = explain(reports, started[0].started + 30.0)
    assert first == (
        "call 17 of group 'world@1' has waited for 30 s (rank 0, 1: all_reduce(sum) of 12 f32); not there: "
        "rank 2, which waits in call 3 of 'world@1/0': barrier; rank 3, which waits in no collective"
    )
    assert "not there: rank 3, which waits in no collective" in second
    assert explain({}, now) == []
