"""What another user of the machine gets of a job: nothing, and it goes on.

Two real users, by processes that give up root; so these tests run as root only, as in containers and in CI.

Tests of `host/private_memory.py`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import axon_ps
import other_user
from axon_ps.host.peer_socket import Listener
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from deadlines import HANG_S
from other_user import maps_of, parent, uid_of
from pausing import make_pipes, pause, paused
from test_mapped_parameters import model_of, step

VICTIM, STRANGER = 65533, 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run processes as two other users")


@contextmanager
def process_of(user: int, work: Callable[..., None], *args: Any) -> Iterator[int]:
    """A program of another user's; `work` gets its end of a connection, and the test has the other."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", other_user.__file__, str(user), str(theirs.fileno()), work.__name__]
    with subprocess.Popen([*command, json.dumps(args)], pass_fds=[theirs.fileno()]) as program:
        theirs.close()
        try:
            yield ours.detach()
        finally:
            program.wait(60)
    assert program.returncode == 0


def report_of(user: int, attack: Callable[..., list[str]], *args: Any) -> list[str]:
    """What a process of a user found."""
    with process_of(user, other_user.report, attack.__name__, *args) as connection:
        raw = b""
        while not raw.endswith(b"\n."):
            part = os.read(connection, 1 << 16)
            assert part, "it has ended"
            raw += part
        os.close(connection)
    return [line for line in raw.decode().split("\n") if line not in ("", ".")]


def train(pipes: Path) -> Any:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = model_of(world)
        optimizer = axon_ps.parallel.SGD(model, lr=0.1)
        step(model, optimizer, 0)
        pause(pipes)
        step(model, optimizer, 1)
        assert world.statistics()["mapped_bytes_in"] > 0
        return os.getpid()


@needs_root
def test_another_user_gets_nothing_of_a_job_that_shares_memory(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with LocalCluster(shards=1, world_size=1) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path,))
        own = cluster.directory
        assert any(own.iterdir())
        with paused(tmp_path):
            pids = [
                cluster.process(Role.SHARD).pid,
                cluster.process("coordinator").pid,
                *(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent(int(pid)) == os.getpid()),
            ]
            assert any("memfd:axon_ps" in maps_of(pid) for pid in pids)
            assert report_of(STRANGER, other_user.everything, pids, str(own)) == []
        result = worker.result()
    assert not result.error, result.error
    with pytest.raises(ProcessLookupError):
        os.kill(result.value, 0)


@needs_root
def test_of_two_ordinary_users_neither_gets_anything_of_the_other() -> None:
    """A process of one shares memory with another of the same user, and a third user tries."""

    with process_of(VICTIM, other_user.share) as connection:
        name, fd = os.read(connection, 100).decode().split()
        victim = next(
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and parent(int(pid)) == os.getpid() and uid_of(pid) == VICTIM
        )

        for user, expected in (
            (VICTIM, "accepted 1, 8 bytes, 1 descriptors"),
            (STRANGER, "accepted 0, 0 bytes, 0 descriptors"),
        ):
            with process_of(user, other_user.connect_as_told, name) as told:
                assert os.read(told, 1) == b"a"
                os.write(connection, b"a")
                os.write(told, os.read(connection, 1))
                assert os.read(told, 100).decode() == expected
                os.close(told)
        assert report_of(STRANGER, other_user.attack, victim, fd) == []
        os.write(connection, b"z")
        os.close(connection)


@needs_root
@pytest.mark.parametrize("private", [True, False])
def test_the_memory_of_a_service_is_private_to_it_among_processes_of_one_user(private: bool) -> None:
    with process_of(VICTIM, other_user.keep_private, private) as connection:
        assert os.read(connection, 1) == b"r"
        service = next(
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and parent(int(pid)) == os.getpid() and uid_of(pid) == VICTIM
        )
        found = report_of(VICTIM, other_user.attack, service, "0")
        os.write(connection, b"z")
        os.close(connection)
    assert (found == []) == private, found


@pytest.mark.parametrize(("options", "limit"), [([], "0"), (["--debuggable"], "4096")])
def test_services_are_so_by_default(options: list[str], limit: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (4096, before[1]))
    try:
        command = [sys.executable, "-P", "-m", "axon_ps.cli.main", "coordinator", "--port", "0", "--state", "memory"]
        service = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    with service:
        assert service.stderr is not None
        assert "listening" in service.stderr.readline()
        limits = Path(f"/proc/{service.pid}/limits").read_text()
        service.terminate()
        service.communicate(timeout=HANG_S)
    assert re.search(rf"^Max core file size +{limit} ", limits, re.MULTILINE), limits


@needs_root
def test_who_is_told_a_name_of_another_users_socket_sends_nothing_there() -> None:
    """The other direction: a process that pretends to be the server, under a name that a worker was told."""
    listener = Listener()  # root's

    assert report_of(STRANGER, other_user.connect, listener.name) == [
        f"the process at the other end runs as user 0, and this one as user {STRANGER}; both must run as the same user "
        "to share memory"
    ]
    assert listener.next_peer() is None
    listener.close()
