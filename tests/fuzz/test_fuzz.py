"""Less than a minute of `make lab NAME=fuzz`, with seeds and numbers of messages that never change."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from axon_ps.storage import checkpoint, contents, manifest
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, session_pb2, trace_pb2
from axon_ps_lab.fuzz.entropy import Entropy, GivenEntropy
from axon_ps_lab.fuzz.findings import Case, Findings
from axon_ps_lab.fuzz.grown import Facts, Grower, entries
from axon_ps_lab.fuzz.outside import ATTACK, Amount, outside
from axon_ps_lab.fuzz.targets.checkpoint_files import CheckpointFiles
from axon_ps_lab.fuzz.targets.decoders import Decoders
from axon_ps_lab.fuzz.targets.services import ServiceCalls
from axon_ps_lab.fuzz.targets.worker_half import WorkerHalf


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "findings")


def test_the_same_seed_grows_the_same_messages_and_they_are_of_all_kinds() -> None:
    kind = session_pb2.SessionRequest.DESCRIPTOR
    grower = Grower(Facts(seeds={kind.full_name: [session_pb2.SessionRequest().SerializeToString()]}))
    grown = [[grower.message(kind, Entropy(f"s{n}")) for n in range(300)] for _ in range(2)]
    assert grown[0] == grown[1]
    assert len(set(grown[0])) > 200
    whole = [message for message in grown[0] if entries(message) is not None]
    assert 50 < len(whole) < 300  # others are damaged
    assert grower.message(kind, GivenEntropy(bytes(range(200)))) == grower.message(
        kind, GivenEntropy(bytes(range(200)))
    )


def test_a_finding_is_written_and_read_again(tmp_path: Path, findings: Findings) -> None:
    case = Case("decoders", "Chunk", (b"\xff", b"a" * 32), {"worker 0": "a" * 32})
    findings.add("something", [case], "why")
    findings.add("something", [case], "why")
    (path,) = (tmp_path / "findings").iterdir()
    assert Case.read(path) == case
    assert case.among({"worker 0": "b" * 32}).messages == (b"\xff", b"b" * 32)
    assert "2 x something" in str(findings)


def test_what_is_wrong_is_found(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that has the fault of a real one: the table is patched, not the product."""
    table = Decoders.__init__.__globals__["DECODERS"]
    monkeypatch.setitem(table, "ReplicaClock_from_proto", (int, common_pb2.Turn.DESCRIPTOR))
    Decoders(findings).replay(Case("decoders", "ReplicaClock_from_proto", (b"x",)))
    assert len(findings.counts) == 1


def test_decoders(findings: Findings) -> None:
    target = Decoders(findings)
    number = 0
    while target.messages < 20_000:
        target.run(Entropy(f"decoders-{number}"))
        number += 1
    assert not findings, str(findings)
    assert target.decoded > 3_000


def test_services(findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what has a relative name is written there
    number = 0
    with closing(ServiceCalls(findings, str(tmp_path / "checkpoints"))) as target:
        while target.messages < 6_000:
            target.run(Entropy(f"services-{number}"))
            number += 1
    assert not findings, str(findings)
    assert {"OK", "INVALID_ARGUMENT", "PERMISSION_DENIED"} <= set(target.statuses)


def test_the_workers_own_half(findings: Findings) -> None:
    with closing(WorkerHalf(findings)) as target:
        for number in range(100):
            target.run(Entropy(f"worker-{number}"))
    assert not findings, str(findings)
    assert target.messages > 50
    assert target.ends["result"] > 20


def test_checkpoint_directories(findings: Findings, tmp_path: Path) -> None:
    with closing(CheckpointFiles(findings, str(tmp_path))) as target:
        for number in range(120):
            target.run(Entropy(f"files-{number}"))
    assert not findings, str(findings)
    assert target.ends["server: restored"] > 10, "changes that do not matter"
    assert target.ends["check: CheckpointCorrupt"] > 50
    assert target.ends["manifest: ok"] > 30, "they pass the first comparison"


def test_values_that_nobody_checks_are_found(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults of before: tensors may overlap, and counts of updates be below zero."""

    def unchecked(reader: checkpoint.SafetensorsReader, tensor: str, count: int) -> tuple[int, ...]:
        counts = np.zeros(count, np.int64)
        reader.read_into(tensor, 0, counts)
        return tuple(counts.tolist())

    monkeypatch.setattr(checkpoint.SafetensorsReader, "_check_order", lambda *_: None)
    monkeypatch.setattr(contents, "_updates", unchecked)
    with closing(CheckpointFiles(findings, str(tmp_path))) as target:
        for number in range(500):
            target.run(Entropy(f"files-{number}"))
            if any(what.startswith("step: ") for what in findings.counts):
                return
    pytest.fail(str(findings))


def test_a_reader_that_is_not_bounded_is_found(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of before: JSON that is nested ends the coordinator's start."""
    for module in (checkpoint, contents, manifest):
        monkeypatch.setattr(module, "value_of_json", lambda text, *_, **__: json.loads(text))
    with closing(CheckpointFiles(findings, str(tmp_path))) as target:
        for number in range(60):
            target.run(Entropy(f"files-{number}"))
    assert any("RecursionError" in what for what in findings.counts), str(findings)
    (first, *_) = sorted(findings.directory.iterdir())
    monkeypatch.undo()
    again = Findings(tmp_path / "again")
    with closing(CheckpointFiles(again, str(tmp_path))) as target:
        target.replay(Case.read(first))
    assert not again, str(again)


def test_what_a_worker_was_sent_is_sent_again(findings: Findings, tmp_path: Path) -> None:
    """From the file of a finding, to the worker of another job: an answer to a read of the key-value store."""
    names, path = {"worker 0": "a" * 32}, tmp_path / "case.json"
    reply = coordinator_pb2.KVReply(found=True, value=b"a" * 32)
    sent = (("/axon_ps.wire.v1.Coordinator/KV", 0),)
    Case("worker", "kv_get", (reply.SerializeToString(),), names, sent).write(path)
    with closing(WorkerHalf(findings)) as target:
        target.replay(Case.read(path))
    assert not findings, str(findings)
    assert (target.messages, target.ends["result"]) == (1, 1)


def test_hostile_connections_and_calls_while_a_job_trains_beside(findings: Findings, tmp_path: Path) -> None:
    with outside(findings, tmp_path, level=0, pause_s=0.02) as attacked:
        period = attacked.period(ATTACK, "connections", Amount(150, 150, 40), 0.0)
        assert period.steps, "the job beside has made no step"
    assert not findings, f"{findings}"
    assert attacked.steps > 20
    assert sum(attacked.connections.values()) == 150


def test_a_trace_of_a_step_far_ahead_is_refused(findings: Findings, tmp_path: Path) -> None:
    """An hour found it: an internal error of the coordinator."""
    trace = trace_pb2.TraceRequest(first=2**64 - 2, steps=3, timeout_s=0.5)
    with closing(ServiceCalls(findings, str(tmp_path / "checkpoints"))) as target:
        target.replay(Case("services", "/axon_ps.wire.v1.Coordinator/Trace", (trace.SerializeToString(),)))
    assert not findings, str(findings)
    assert target.statuses["INVALID_ARGUMENT"] == 1
