"""What a script reports of its progress: how often that is sent, what is refused, what `axon-ps status` makes of it."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest

from axon_ps.cli.terminal.status_view import progress_line
from axon_ps.errors import Broken, InvalidRequest
from axon_ps.wire.report import parse
from axon_ps.worker.progress import ProgressReporter


class Sent:
    """Keeps what was sent; a message is under way until its future is ended."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.last: Future[None] = Future()

    def __call__(self, message: bytes) -> Future[None]:
        self.messages.append(json.loads(message))
        self.last = Future()
        return self.last


def test_it_is_sent_at_most_once_a_second_and_never_two_at_a_time_and_the_last_step_always() -> None:
    now = [100.0]
    sent = Sent()
    progress = ProgressReporter(sent, lambda: now[0])
    for step in range(1, 31):  # a tenth of a second each
        progress.report(step, 100, 1 / step, {"tokens_per_s": 50})
        now[0] += 0.1
    assert [m["step"] for m in sent.messages] == [1]  # the first has not arrived
    sent.last.set_exception(Broken("the coordinator is gone"))  # which is none of the script's business
    progress.report(31, 100, None, {})
    sent.last.set_result(None)
    progress.report(32, 100, None, {})
    progress.report(100, 100, None, {})
    assert [m["step"] for m in sent.messages] == [1, 31, 100]
    assert sent.messages[0] | {"at": 0} == {
        "step": 1, "steps": 100, "loss": 1.0, "steps_per_s": 0.0, "values": {"tokens_per_s": 50.0}, "at": 0,
    }  # fmt: skip
    assert sent.messages[1]["steps_per_s"] == pytest.approx(10.0)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="report takes numbers"):
        ProgressReporter(Sent()).report(1, None, None, {"name": "bert"})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest, match="33 values; at most 32"):
        ProgressReporter(Sent()).report(1, None, None, {str(i): 0.0 for i in range(33)})


@pytest.mark.parametrize(
    ("report", "line"),
    [
        ({"step": 3}, "step 3"),
        (
            {"step": 3, "steps": 4, "loss": 0.123456, "steps_per_s": 0.5, "at": 1000.0},
            "step 3 of 4 (75 %), loss 0.1235, 0.5 steps/s, 2s left, until ",
        ),
        (
            {"step": 4, "steps": 4, "values": {"tokens_per_s": 12345.6, "lr": 0.001}},
            "step 4 of 4 (100 %), 12,346 tokens/s, lr 0.001",
        ),
        (
            {"step": 3, "steps": 303, "steps_per_s": 1.0, "at": 925.0},
            "step 3 of 303 (0 %), 1 steps/s, reported 1m15s ago, 3m45s left, until ",
        ),
        ({"step": 3, "steps": 9, "steps_per_s": 1.0, "at": 925.0}, "step 3 of 9 (33 %), 1 steps/s, reported 1m15s ago"),
    ],
)
def test_it_is_shown_as_text(report: dict[str, Any], line: str) -> None:
    found = parse(json.dumps(report).encode())
    assert found is not None
    shown = progress_line(found, 1000.0, steps_per_s=found.steps_per_s)
    assert shown.startswith(line)
    assert len(shown) - len(line) in (0, 5)  # an hour and a minute
    assert "left" not in progress_line(found, 1000.0, over=True)


@pytest.mark.parametrize("nonsense", [None, b"", b"no JSON", b"[1]", b'{"step": [1]}', b'{"step": 1e999}', b"[" * 9999])
def test_a_store_without_it_or_with_nonsense_has_none(nonsense: bytes | None) -> None:
    assert parse(nonsense) is None
