"""Unix sockets between processes: who is at the other end, and that nothing blocks or remains."""

from __future__ import annotations

import gc
import os
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from axon_ps.errors import Broken, InvalidRequest, Unreachable
from axon_ps.host import peer_socket
from axon_ps.host.peer_socket import Listener, PeerSocket
from deadlines import HANG_S


def connected() -> tuple[PeerSocket, PeerSocket]:
    listener = Listener()
    ours = PeerSocket.connect(listener.name)
    theirs = listener.next_peer()
    listener.close()
    assert theirs is not None
    return ours, theirs


def names() -> str:
    return Path("/proc/net/unix").read_text()


def test_messages_come_whole_and_in_order_with_their_descriptors() -> None:
    ours, theirs = connected()
    assert theirs.receive() is None
    read, write = os.pipe()
    assert ours.send(b"first", read)
    assert ours.send(b"second")
    os.close(read)
    message, fd = theirs.receive() or (b"", -1)
    assert message == b"first"
    assert not os.get_inheritable(fd)
    os.write(write, b"!")
    assert os.read(fd, 1) == b"!"
    for each in (fd, write):
        os.close(each)
    assert theirs.receive() == (b"second", -1)
    assert theirs.receive() is None
    assert (ours.pid, theirs.pid) == (os.getpid(), os.getpid())
    ours.close()
    theirs.close()


def test_a_process_that_may_open_no_more_files_is_told() -> None:
    listener, (soft, hard) = Listener(), resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for make in (Listener, lambda: PeerSocket.connect(listener.name)):
            with pytest.raises(Unreachable, match="can make no socket: Too many open files"):
                make()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == opened
    listener.close()


def test_a_descriptor_that_is_not_expected_is_not_opened() -> None:
    ours, theirs = connected()
    before = os.listdir("/proc/self/fd")
    assert ours.send(b"hello", 0)
    with pytest.raises(InvalidRequest, match="more descriptors than 0"):
        theirs.receive(descriptor=False)
    assert os.listdir("/proc/self/fd") == before


def test_a_peer_that_reads_nothing_is_no_wait() -> None:
    ours, theirs = connected()
    sent = 0
    while ours.send(b"x" * 100):
        sent += 1
        assert sent < 10_000
    while theirs.receive() is not None:
        sent -= 1
    assert sent == 0
    assert ours.send(b"again")


def test_the_end_of_a_peer_is_said_after_what_it_sent() -> None:
    ours, theirs = connected()
    assert ours.send(b"last")
    ours.close()
    assert theirs.receive() == (b"last", -1)
    for use in (theirs.receive, lambda: theirs.send(b"x")):
        with pytest.raises(Broken, match=f"process {os.getpid()} of this host has hung up"):
            use()
    with pytest.raises(Broken):
        ours.receive()


@pytest.mark.parametrize("name", ["", "axon-ps-", "axon-ps-" + "0" * 31, "/tmp/.X11-unix/X0", "axon-ps-" + "g" * 32])
def test_other_sockets_are_not_connected_to(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the name of a socket of axon_ps"):
        PeerSocket.connect(name)


def test_who_is_not_there_is_said_so() -> None:
    listener = Listener()
    name = listener.name
    assert f"@{name}" in names()
    listener.close()
    listener.close()
    assert name not in names()
    with pytest.raises(Unreachable, match="cannot be reached: Connection refused"):
        PeerSocket.connect(name)
    assert listener.next_peer() is None


def test_a_crowd_that_nobody_accepts_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_socket, "_BACKLOG", 1)
    listener = Listener()
    waiting = []
    with pytest.raises(Unreachable, match="cannot be reached"):
        while len(waiting) < 100:
            waiting.append(PeerSocket.connect(listener.name))
    assert 0 < len(waiting) < 10
    listener.close()


def test_a_process_of_another_user_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel says it; `test_other_users` has two real users."""
    listener = Listener()
    ours = PeerSocket.connect(listener.name)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert listener.next_peer() is None
    monkeypatch.undo()
    with pytest.raises(Broken):
        ours.receive()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(Unreachable, match=r"runs as user \d+, and this one as user 4321"):
        PeerSocket.connect(listener.name)
    listener.close()


def test_a_process_of_another_process_namespace_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        size = 12

        @staticmethod
        def unpack(raw: bytes) -> tuple[int, int, int]:
            return 0, os.geteuid(), 0

    listener = Listener()
    monkeypatch.setattr(peer_socket, "_PEER_CREDENTIALS", Elsewhere)
    with pytest.raises(Unreachable, match="another process namespace"):
        PeerSocket.connect(listener.name)
    listener.close()


def test_sockets_end_with_their_objects() -> None:
    gc.collect()  # of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = connected()
    del ours, theirs
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


KILLED = """
import sys
from axon_ps.host.peer_socket import Listener, PeerSocket
listener = Listener()
ours = PeerSocket.connect(listener.name)
print(listener.name, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_nothing_and_its_peers_notice() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        ours = PeerSocket.connect(name)
        assert ours.pid == process.pid
        process.kill()
        process.wait(30)
    with pytest.raises(Broken):
        ours.receive()
    assert name not in names()


FORKING = """
import os
from axon_ps.errors import Misuse
from axon_ps.host import fork
from axon_ps.host.peer_socket import Listener, PeerSocket
fork.opened()
listener = Listener()
ours = PeerSocket.connect(listener.name)
theirs = listener.next_peer()
sockets = lambda: sum("socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                      if os.path.islink(f"/proc/self/fd/{fd}"))
before = sockets()
if (child := os.fork()) == 0:
    try:
        Listener()
    except Misuse:
        os._exit(before - sockets())
    os._exit(77)
_, status = os.waitpid(child, 0)
assert theirs.send(b"still here") and ours.receive() == (b"still here", -1)
print(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_of_a_worker_has_none_of_its_sockets() -> None:
    run = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert run.stdout.strip() == "3", run.stderr


def test_the_credentials_are_those_of_the_kernel() -> None:
    ours, theirs = connected()
    raw = theirs._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    assert struct.unpack("iII", raw)[:2] == (os.getpid(), os.geteuid())
    ours.close()
