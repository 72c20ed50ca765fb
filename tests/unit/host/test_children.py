"""A child process: its ready line, its signals, and its end with everything that it left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps.host import memory
from axon_ps.host.children import Child, wait_for_any


def start(program: str, *, log: Path | None = None, stdin: bool = False, ready: bool = False) -> Child:
    """A Python child that runs `program`."""
    command = [sys.executable, "-I", "-S", "-c", program]
    return Child.start("child", command, os.environ, last_signal=signal.SIGKILL, output=log, stdin=stdin, ready=ready)


def test_it_reports_where_it_listens_and_reads_a_line(tmp_path: Path) -> None:
    child = start(
        "import os, sys; os.write(int(sys.argv[2]), b'host:1\\n'); print('read', input())",
        log=tmp_path / "log",
        stdin=True,
        ready=True,
    )
    assert child.ready_line(time.monotonic() + 30.0) == "host:1"
    child.send_line("a line")
    assert child.wait(30.0) == 0
    assert (child.ending, child.was_signalled) == ("exited with code 0", False)
    assert (child.end(), child.output) == (0, "read a line\n")


def test_one_that_dies_reports_nothing_and_says_how_it_ended() -> None:
    child = start("import sys; sys.exit(3)", stdin=True, ready=True)
    assert child.ready_line(time.monotonic() + 30.0) == ""
    assert (child.wait(30.0), child.end()) == (3, 3)
    assert (child.ending, child.ready_line(0.0)) == ("exited with code 3", "")
    child.send_line("nobody reads it")
    child.send_signal(signal.SIGTERM)  # harmless, and does not count
    assert not child.was_signalled


def test_one_that_the_kernel_is_ending_is_known_before_it_has_ended(tmp_path: Path) -> None:
    child = start(  # its first thread ends before the other one, which lets it be
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('begun', input(), flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n",
        log=tmp_path / "log",
        stdin=True,
    )
    assert not child.is_ending
    child.send_line("end")
    deadline = time.monotonic() + 30.0
    while not child.is_ending:
        assert time.monotonic() < deadline
    assert child.exit_code is None
    child.end()
    assert child.is_ending


@pytest.fixture
def limited_memory() -> Iterator[Path]:
    """A control group whose processes have 32 MiB together."""
    group = next(memory._groups()) / f"axon-ps-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / limit).write_text(str(32 << 20))
    except OSError as error:
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    yield group
    group.rmdir()


def test_one_that_the_kernel_killed_for_lack_of_memory_says_so(limited_memory: Path) -> None:
    child = start(f"import os; open('{limited_memory}/cgroup.procs', 'w').write(str(os.getpid())); b'x' * (1 << 28)")
    assert child.wait(60.0) == -signal.SIGKILL
    assert child.ending == "was ended by SIGKILL when the kernel killed for lack of memory (`dmesg` names the process)"
    assert child.end() == -signal.SIGKILL
    killed = start("import time; time.sleep(60)")
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(30.0) == -signal.SIGKILL
    assert killed.ending == "was ended by SIGKILL", "nobody lacked memory"
    killed.end()


def test_its_end_is_by_steps_even_when_it_is_frozen_and_takes_what_it_left_behind(tmp_path: Path) -> None:
    stubborn = start(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: time.sleep(60)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n",
        log=tmp_path / "log",
    )
    while "ready" not in stubborn.output:
        assert stubborn.wait(0.01) is None
    stubborn.send_signal(signal.SIGSTOP)
    assert stubborn.end((signal.SIGTERM, 0.05), (signal.SIGUSR1, 30.0)) == -signal.SIGUSR1
    deadline = time.monotonic() + 30.0
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(stubborn.pid, 0)


def test_the_first_of_several_to_end_is_returned() -> None:
    children = [start("import time; time.sleep(60)"), start("pass")]
    try:
        assert wait_for_any(children[:1], time.monotonic()) == []
        assert wait_for_any(children, time.monotonic() + 30.0) == children[1:]
    finally:
        assert [child.end() for child in children] == [-signal.SIGKILL, 0]
