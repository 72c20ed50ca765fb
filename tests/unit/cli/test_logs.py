"""`axon-ps logs`: which records are shown, and how."""

from __future__ import annotations

import pytest

from axon_ps.cli.terminal.log_view import Wanted, as_dict, line
from axon_ps.errors import ConfigurationError
from axon_ps.wire.v1 import common_pb2, logs_pb2

RECORD = logs_pb2.LogRecord(
    at_s=1_770_000_000.25, level=30, logger="axon_ps.worker.world", text="it is slow\nindeed", number=1,
    role=common_pb2.ROLE_WORKER, rank=1, node="a",
)  # fmt: skip
COORDINATOR = logs_pb2.LogRecord(at_s=5.0, level=20, logger="axon_ps.x", text="leads")


def test_a_pipe_gets_plain_lines_and_a_terminal_coloured_ones() -> None:
    assert line(RECORD, colour=False) == (
        "2026-02-02T02:40:00.250Z WARNING worker 1 worker.world: it is slow\n    indeed"
    )
    painted = line(RECORD, colour=True)
    assert "mworker 1\x1b[0m \x1b[33mWARNING\x1b[0m it is slow" in painted
    assert line(COORDINATOR, colour=False).endswith(" INFO coordinator x: leads")


def test_nothing_in_a_record_controls_the_terminal() -> None:
    hostile = logs_pb2.LogRecord(at_s=1e300, logger="\x1b[2J", text="a\rb\x1b]0;title\x07\tc\x9b31m")
    shown = line(hostile, colour=False)
    assert shown.endswith("\\x1b[2J: a\\rb\\x1b]0;title\\x07\tc\\x9b31m")
    assert as_dict(hostile)["time"] == "9999-12-31T23:59:59.000Z"


def test_a_record_for_programs() -> None:
    assert as_dict(RECORD) == {
        "time": "2026-02-02T02:40:00.250Z", "level": "WARNING", "role": "worker", "rank": 1, "node": "a",
        "logger": "axon_ps.worker.world", "message": "it is slow\nindeed",
    }  # fmt: skip
    assert (as_dict(COORDINATOR)["role"], as_dict(COORDINATOR)["rank"]) == ("coordinator", None)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, [True, True]),
        ({"level": "Warning"}, [True, False]),
        ({"workers": [1]}, [True, False]),
        ({"workers": [0], "servers": [1]}, [False, False]),
        ({"since": "30s"}, [True, False]),
    ],
)
def test_which_are_shown(options: dict[str, object], shown: list[bool]) -> None:
    given = {"level": "info", "since": "", "workers": (), "servers": (), "now_s": RECORD.at_s + 20} | options
    wanted = Wanted.of(**given)  # type: ignore[arg-type]
    assert [wanted.has(RECORD), wanted.has(COORDINATOR)] == shown


@pytest.mark.parametrize("wrong", [{"level": "loud"}, {"since": "yesterday"}, {"since": "5"}, {"since": "-3s"}])
def test_what_cannot_be_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"--level is 'loud'; it must be|--since is .*; give a time"):
        Wanted.of(**{"level": "info", "since": ""} | wrong, workers=(), servers=(), now_s=0.0)
