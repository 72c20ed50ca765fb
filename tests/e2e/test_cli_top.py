"""`axon-ps top` in a terminal, as a user has it. Tests of `cli/terminal/live.py`."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from functools import partial
from struct import pack
from termios import TIOCSWINSZ

from axon_ps.testing import LocalCluster
from command_line import AXON_PS, axon_ps, environment
from deadlines import HANG_S

LIMIT_S = HANG_S


class Terminal:
    """What a program has written to a terminal of 80 by 24, and keys for it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._text = fd, ""

    def until(self, text: str) -> None:
        """Read until it is there; what was before is forgotten."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self._text:
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], self._text
            self._text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._fd, 65536).decode(errors="replace"))
        self._text = self._text.partition(text)[2]

    def press(self, key: str) -> None:
        """Press a key."""
        os.write(self._fd, key.encode())


@contextmanager
def top(cluster: LocalCluster) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
    variables = environment(
        {"AXON_PS_COORDINATOR": cluster.address, "AXON_PS_TOKEN": cluster.token, "AXON_PS_JOB": cluster.job}
        | {"TERM": "xterm"}
    )
    with subprocess.Popen(
        [*AXON_PS, "top"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # tests may run in the background of a shell
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours), process
        finally:
            process.kill()
            os.close(ours)


def test_members_events_and_keys() -> None:
    with LocalCluster(shards=2, world_size=1) as cluster, top(cluster) as (terminal, process):
        terminal.until("waiting for 1 of 1 workers")
        terminal.until("shard 1")
        terminal.press("p")
        terminal.until("paused; p goes on")
        terminal.press("p")
        terminal.press("s")
        terminal.until("s sort (cost)")
        terminal.press("q")
        assert process.wait(LIMIT_S) == 0


def test_ctrl_c_ends_it() -> None:
    with LocalCluster(shards=1, world_size=1) as cluster, top(cluster) as (terminal, process):
        terminal.until("shard 0")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130


def test_without_a_terminal_it_is_one_picture() -> None:
    with LocalCluster(shards=1, world_size=1) as cluster:
        of_the_job = {"AXON_PS_COORDINATOR": cluster.address, "AXON_PS_TOKEN": cluster.token}
        printed = axon_ps("top", **of_the_job, AXON_PS_JOB=cluster.job)
    assert printed.returncode == 0, printed.stderr
    assert "shard 0" in printed.stdout
    assert "quit" not in printed.stdout


def test_nobody_there_is_an_error() -> None:
    printed = axon_ps("top", "--coordinator", "127.0.0.1:1")
    assert printed.returncode == 1
    assert printed.stderr.startswith("axon-ps: nobody answers at 127.0.0.1:1")
