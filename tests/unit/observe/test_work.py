"""Long work as measures of members, and as text."""

from __future__ import annotations

import io

import pytest

from axon_ps.cli.terminal.progress import Progress
from axon_ps.cli.terminal.quantities import duration, size, sparkline, work_line
from axon_ps.observe.work import LongWork, from_measures, process_measures, to_measures


def test_work_of_all_members_is_added_up_by_kind() -> None:
    one = to_measures([LongWork("snapshot", 100, 40), LongWork("copy", 10, 0), LongWork("copy", 10, 5)])
    other = to_measures([LongWork("snapshot", 200, 60)])
    assert from_measures([one, other, {}]) == [LongWork("snapshot", 300, 100), LongWork("copy", 20, 5)]


def test_a_process_measures_itself() -> None:
    measured = process_measures({"bytes_in": 3.0, "bytes_out": 4.0})
    assert (measured["received_bytes"], measured["sent_bytes"]) == (3.0, 4.0)
    assert measured["memory_bytes"] > 1e6
    assert measured["cpu_s"] > 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 KB"), (999_600, "1 MB"), (20_500_000, "20.5 MB"), (3e15, "3 PB")],
)
def test_bytes_have_three_digits(count: float, text: str) -> None:
    assert size(count) == text


def test_durations_and_work_read_well() -> None:
    assert [duration(s) for s in (7.9, 123, 3900)] == ["7s", "2m03s", "1h05m"]
    assert work_line(LongWork("restore", 200, 50)) == "a checkpoint is restored: 50 B of 200 B (25 %)"


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3, 3]) == "▅▅"
    assert sparkline([]) == ""


def test_a_line_has_rate_and_time_left() -> None:
    seconds, work = iter([0.0, 2.0, 4.0]), LongWork("", 0, 0)
    shown = Progress("verifying", work, None, clock=lambda: next(seconds))
    work.total_bytes = 4000
    work.advance(1000)
    assert shown.line() == "verifying: 1 KB of 4 KB (25 %), 500 B/s, 6s left"
    work.advance(3000)
    assert shown.line() == "verifying: 4 KB of 4 KB (100 %), 1 KB/s"


def test_without_a_terminal_a_line_is_written_now_and_then() -> None:
    class Log(io.StringIO):
        def write(self, text: str) -> int:
            count = super().write(text)
            if self.getvalue().count("\n") == 2:
                done.set()
            return count

    import threading

    done, log = threading.Event(), Log()
    with Progress("saving", LongWork("", 10, 5), log, line_s=0.001):
        assert done.wait(10)
    assert log.getvalue().startswith("saving: 5 B of 10 B (50 %)")
