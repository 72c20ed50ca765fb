"""`axon-ps kill`: one process of a job of this user, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from axon_ps.cli.kill import Killed, Running, _service, kill, running
from axon_ps.errors import ConfigurationError

WAITS = "import sys; print(flush=True); sys.stdin.read()"
JOB = f"killed-{os.getpid()}"


@contextmanager
def started(*arguments: str, code: str = WAITS, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with such a command line and environment, which waits."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_the_one_that_is_named_is_killed() -> None:
    starts = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'])\n"
    worker = {"AXON_PS_JOB": JOB, "RANK": "1"}
    with ExitStack() as stack:
        first, second, other, coordinator, one = (
            stack.enter_context(process)
            for process in (
                started("-m", "axon_ps.cli.main", "shard", "--rank", "0", AXON_PS_JOB=JOB),
                started("/usr/bin/axon-ps", "shard", f"--job={JOB}", "--rank=1"),
                started("axon-ps", "shard", "--rank", "0", "--job", "another"),
                started("axon-ps", "coordinator", "--job", JOB),
                started(code=f"{starts}{WAITS}", **worker),
            )
        )
        mine = [p for p in running() if p.job == JOB]
        assert {(p.kind, p.rank, p.pid) for p in mine} == {
            (Killed.SHARD, 0, first.pid),
            (Killed.SHARD, 1, second.pid),
            (Killed.COORDINATOR, None, coordinator.pid),
            (Killed.WORKER, 1, one.pid),
        }
        with pytest.raises(ConfigurationError, match=f"shard of job '{JOB}' is wanted, and 2 are there"):
            kill(Killed.SHARD, job=JOB)
        with pytest.raises(ConfigurationError, match=f"shard 2 of job '{JOB}' is wanted, and none is there"):
            kill(Killed.SHARD, 2, JOB)
        for what, rank, process in (
            (Killed.SHARD, 1, second),
            (Killed.COORDINATOR, None, coordinator),
            (Killed.WORKER, 1, one),
        ):
            kill(what, rank, JOB)
            assert process.wait() == -signal.SIGKILL
        assert (first.poll(), other.poll()) == (None, None)


def test_without_its_variables_a_service_is_found_by_the_job_of_its_command_alone() -> None:
    """A service's memory is private: its variables are read by root alone."""
    command = ["python", "-m", "axon_ps.cli.main", "shard", "--rank", "3"]
    assert _service(7, command, None) is None, "of whatever job it is"
    assert _service(7, [*command, "--job", "gpt"], None) == Running(7, Killed.SHARD, "gpt", 3)
    assert _service(7, command, {"AXON_PS_JOB": "gpt"}) == Running(7, Killed.SHARD, "gpt", 3)
