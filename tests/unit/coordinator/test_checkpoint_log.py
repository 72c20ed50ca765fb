"""What `axon-ps status` says of checkpoints."""

from __future__ import annotations

from axon_ps.cli.terminal.status_view import checkpoint_lines
from axon_ps.coordinator.server.checkpoint_log import CheckpointLog
from axon_ps.wire.events import CheckpointReply, CheckpointStatus
from axon_ps_lab.clock import ManualClock


def test_the_newest_the_newest_failure_and_what_goes_on() -> None:
    clock = ManualClock(1000.0)
    happened: list[tuple[str, str]] = []
    log = CheckpointLog(clock, lambda kind, text: happened.append((kind, text)))
    assert log.status() == CheckpointStatus()
    log.written(CheckpointReply(uri="/old", version=3, bytes=5), took_s=0.0, age_s=600.0)
    clock.advance(30.0)
    assert log.status() == CheckpointStatus(uri="/old", version=3, bytes=5, age_s=630.0)
    log.failed("no space left for /new")
    log.written(CheckpointReply(uri="/new", version=4, bytes=6), took_s=1.5)
    clock.advance(10.0)
    log.next = lambda: "the next one is due in 5 steps"
    status = log.status()
    assert (status.uri, status.version, status.age_s, status.took_s) == ("/new", 4, 10.0, 1.5)
    assert (status.failure, status.failure_age_s) == ("no space left for /new", 10.0)
    assert status.activity == "the next one is due in 5 steps"
    assert happened == [
        ("checkpoint failed", "no space left for /new"),
        ("saved", "version 4 is saved at /new, in 1.5 s"),
    ]
    with log.doing("writing /x"):
        with log.doing("verifying /x"):
            assert log.status().activity == "verifying /x"
        assert log.status().activity == "writing /x"
    assert log.status().activity == "the next one is due in 5 steps"


def test_as_text() -> None:
    assert checkpoint_lines(CheckpointStatus()) == []
    known = CheckpointStatus(
        uri="/run/step-7", version=7, bytes=203_000_000, age_s=75.0, took_s=1.234, failure="/run/step-6: full",
        failure_age_s=3700.0, activity="the next one is due in 5 steps",
    )  # fmt: skip
    assert checkpoint_lines(known) == [
        "newest checkpoint: /run/step-7, version 7, 203,000,000 bytes, 1m15s ago, written in 1.23 s",
        "checkpoints: the next one is due in 5 steps",
        "newest failure of a checkpoint, 1h01m ago: /run/step-6: full",
    ]
