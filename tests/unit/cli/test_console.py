"""cli.launch.console: lines of many processes on one terminal."""

from __future__ import annotations

import io
import os

import pytest

from axon_ps.cli.launch.console import Console


class Screen:
    """A console that writes to memory."""

    def __init__(self, *, colour: bool = False) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.console = Console(self.out, self.err, colour=colour)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_every_line_carries_the_name_of_its_process(screen: Screen) -> None:
    zero, one = screen.console.source("worker 0"), screen.console.source("worker 1")
    zero.feed(b"a\nb", error=False)
    one.feed(b"c\n", error=False)
    one.feed(b"oops\n", error=True)
    zero.feed(b"ee\n", error=False)
    assert screen.out.getvalue() == "[worker 0] a\n[worker 1] c\n[worker 0] bee\n"
    assert screen.err.getvalue() == "[worker 1] oops\n"


def test_a_last_line_without_an_end_is_written_at_the_end(screen: Screen) -> None:
    source = screen.console.source("w")
    source.feed(b"no newline", error=False)
    assert screen.out.getvalue() == ""
    source.feed(b"", error=False)
    assert screen.out.getvalue() == "[w] no newline\n"


def test_characters_split_between_two_reads_stay_intact(screen: Screen) -> None:
    source = screen.console.source("w")
    data = "größe ✓\n".encode()
    for i in range(len(data)):
        source.feed(data[i : i + 1], error=False)
    assert screen.out.getvalue() == "[w] größe ✓\n"


def test_of_a_progress_bar_only_the_last_state_is_written_without_a_terminal(screen: Screen) -> None:
    source = screen.console.source("w")
    for percent in range(0, 101, 10):
        source.feed(b"\r\x1b[2K%d%%" % percent, error=True)
    source.feed(b"\ndone\n", error=True)
    assert screen.err.getvalue() == "[w] 100%\n[w] done\n"


def test_on_a_terminal_a_progress_bar_stays_below_other_lines() -> None:
    screen = Screen(colour=True)
    zero, one = screen.console.source("worker 0"), screen.console.source("worker 1")
    zero.feed(b"\r10%", error=True)
    one.feed(b"hello\n", error=True)
    name0, name1 = "\x1b[36m[worker 0]\x1b[0m", "\x1b[33m[worker 1]\x1b[0m"
    assert screen.err.getvalue() == f"\r\x1b[2K{name0} 10%" + f"\r\x1b[2K{name1} hello\n{name0} 10%"
    zero.feed(b"\r20%\n", error=True)
    assert screen.err.getvalue().endswith(f"\r\x1b[2K{name0} 20%\n")


def test_a_rewritten_line_does_not_grow_without_bound(screen: Screen) -> None:
    source = screen.console.source("w")
    for _ in range(10_000):
        source.feed(b"\r" + b"x" * 100, error=False)
    source.feed(b"y" * 200_000, error=False)
    assert len(screen.out.getvalue()) > 65_536  # written out although no line end came


def test_last_errors_are_the_last_traceback(screen: Screen) -> None:
    source = screen.console.source("w")
    source.feed(b"noise\nTraceback (most recent call last):\n  File x\nValueError: first\n", error=True)
    source.feed(b"Traceback (most recent call last):\n  File y\nKeyError: second\n", error=True)
    assert list(source.last_errors()) == ["Traceback (most recent call last):", "  File y", "KeyError: second"]


def test_last_errors_without_a_traceback_are_the_last_lines(screen: Screen) -> None:
    source = screen.console.source("w")
    source.feed(b"".join(b"line %d\n" % i for i in range(30)), error=True)
    assert list(source.last_errors())[-1] == "line 29"
    assert len(source.last_errors()) == 10


def test_whose_error_came_first_is_known(screen: Screen) -> None:
    cause, effect = screen.console.source("a"), screen.console.source("b")
    cause.feed(b"axon-ps: port 1 is in use\n", error=True)
    effect.feed(b"Traceback (most recent call last):\nBroken: nobody there\n", error=True)
    for source in (effect, cause):
        source.ended()
    assert cause.failed_at is not None
    assert effect.failed_at is not None
    assert cause.failed_at < effect.failed_at


def test_one_that_was_killed_failed_when_it_ended(screen: Screen) -> None:
    killed, effect = screen.console.source("a"), screen.console.source("b")
    killed.feed(b"step 1\n", error=False)
    killed.ended()
    effect.feed(b"Traceback (most recent call last):\nBroken: nobody there\n", error=True)
    effect.ended()
    assert (killed.failed_at, effect.failed_at, killed.error()) == (1, 1, "")
    assert sorted([killed, effect], key=lambda source: source.failed_at or 0)[0] is killed


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ("Traceback (most recent call last):\n  File x\n    f()\nValueError: a\nb\n", "ValueError: a"),
        ("[rank3]: Traceback (most recent call last):\n[rank3]:   File x\n[rank3]: KeyError: 'a'\n", "KeyError: 'a'"),
        (
            "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\nDuring handling of the above exception, "
            "another exception occurred:\n\nTraceback (most recent call last):\n  File y\nOSError: disk\n",
            "OSError: disk",
        ),
        ("noise\naxon-ps: port 1 is in use\n", "port 1 is in use"),
        ("Segmentation fault\n", ""),
        ("", ""),
    ],
)
def test_the_error_of_a_process_is_one_line(written: str, error: str, screen: Screen) -> None:
    source = screen.console.source("w")
    source.feed(written.encode(), error=True)
    assert source.error() == error


def test_after_an_interrupt_its_own_tracebacks_are_left_out(screen: Screen) -> None:
    source = screen.console.source("w")
    screen.console.interrupted = True
    source.feed(b"saving\nTraceback (most recent call last):\n  File x\n    f()\nKeyboardInterrupt\n", error=True)
    source.feed(b"Traceback (most recent call last):\n  File x\nOSError: disk\n\nbye\n", error=True)
    shown = screen.err.getvalue()
    assert "KeyboardInterrupt" not in shown
    assert shown.startswith("[w] saving\n")
    assert "[w] OSError: disk\n" in shown
    assert shown.endswith("[w] bye\n")


def test_progress_that_is_not_read_any_more_is_reported_as_other_lines_are() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as err:
        console = Console(io.StringIO(), err, colour=True)
        broken: list[str] = []
        console.on_broken_pipe = lambda: broken.append("broken")
        source = console.source("w")
        source.feed(b"\r10%", error=True)
        os.close(reader)
        source.feed(b"\r20%\r30%", error=True)
        console.end_progress()
    assert broken == ["broken"]
