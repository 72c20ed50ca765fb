"""What another user of the machine gets of a job: nothing, and it goes on.

Two real users, by processes that give up root; so these tests run as root only, as in containers and in CI.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import axon_ps
from axon_ps.errors import Unreachable
from axon_ps.host import fork, shared_memory
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.peer_socket import Listener, PeerSocket
from axon_ps.host.shared_memory import Access
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from pausing import make_pipes, pause, paused
from test_mapped_parameters import model_of, step

VICTIM, STRANGER = 65533, 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run processes as two other users")


@contextmanager
def process_of(user: int, work: Callable[[int], None]) -> Iterator[int]:
    """A fork that is another user's; `work` gets its end of a connection, and the test has the other."""
    shared_memory.available_bytes()  # loads what another user could not load from root's home
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ours.close()
            fork._parent = 0  # it stands for a program of its own, also where this one has joined jobs before
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work(theirs.detach())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    try:
        yield ours.detach()
    finally:
        _, ended = os.waitpid(child, 0)
        assert ended == 0


def report_of(user: int, attack: Callable[[], list[str]]) -> list[str]:
    """What a process of a user found."""

    def work(connection: int) -> None:
        try:
            found = attack()
        except BaseException as error:
            found = [f"the attack itself failed: {error!r}"]
        os.write(connection, "\n".join(found).encode() + b"\n.")

    with process_of(user, work) as connection:
        raw = b""
        while not raw.endswith(b"\n."):
            raw += os.read(connection, 1 << 16)
        os.close(connection)
    return [line for line in raw.decode().split("\n") if line not in ("", ".")]


def reads(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def found_in_proc(pid: int) -> list[str]:
    """What can be read of a process: descriptors, memory, environment; and copied by a system call."""
    proc = Path(f"/proc/{pid}")
    found = [str(proc / name) for name in ("mem", "environ", "maps", "pagemap", "auxv") if reads(proc / name)]
    for folder in ("fd", "map_files", "fdinfo"):
        try:
            found += [str(each) for each in (proc / folder).iterdir()]
        except OSError:
            continue
    found += [f"{proc}/fd/{fd}" for fd in range(64) if reads(proc / "fd" / str(fd))]

    class Range(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    into = ctypes.create_string_buffer(8)
    ours, theirs = Range(ctypes.addressof(into), 8), Range(ctypes.addressof(into), 8)
    if ctypes.CDLL(None).process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) > 0:
        found.append(f"the memory of {pid}")
    try:
        pidfd = os.pidfd_open(pid)
        if ctypes.CDLL(None).syscall(438, pidfd, 0, 0) >= 0:  # pidfd_getfd
            found.append(f"a descriptor of {pid}")
        os.close(pidfd)
    except OSError:
        pass
    return found


def found_at_sockets() -> list[str]:
    """Every Unix socket of axon_ps on this machine that says or gives anything to who connects."""
    found = []
    for name in set(re.findall(r"@(axon-ps-[0-9a-f]{32})", Path("/proc/net/unix").read_text())):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(0.3)
            try:
                stranger.connect(f"\0{name}")
                stranger.send(bytes(16))
                message, passed, _, _ = stranger.recvmsg(100, 100)
            except OSError:  # refused, hung up on, or nothing comes
                continue
            if message or passed:
                found.append(f"socket {name}: {message!r} and {passed}")
        try:
            PeerSocket.connect(name)
            found.append(f"a connection to {name}")
        except Unreachable:
            pass
    return found


def found_in(folder: Path, pattern: str) -> list[str]:
    """Files below a folder that can be opened."""
    return [str(path) for path in folder.rglob(pattern) if path.is_file() and reads(path)]


def train(pipes: Path) -> Any:
    with axon_ps.World.init(timeout_s=30.0) as world:
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
        assert cluster._temporary is not None
        own = Path(cluster._temporary.name)
        assert any(own.iterdir())
        with paused(tmp_path):
            pids = [
                cluster.process(Role.SHARD).pid,
                cluster.process("coordinator").pid,
                *(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent(int(pid)) == os.getpid()),
            ]
            assert any("memfd:axon_ps" in maps_of(pid) for pid in pids)

            def attack() -> list[str]:
                found = [each for pid in pids for each in found_in_proc(pid)]
                return found + found_at_sockets() + found_in(own, "*") + found_in(Path("/dev/shm"), "*axon*")

            assert report_of(STRANGER, attack) == []
        result = worker.result()
    assert not result.error, result.error
    with pytest.raises(ProcessLookupError):
        os.kill(result.value, 0)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


@needs_root
def test_of_two_ordinary_users_neither_gets_anything_of_the_other() -> None:
    """A process of one shares memory with another of the same user, and a third user tries."""

    def share(connection: int) -> None:
        listener, (segment, memory) = Listener(), shared_memory.create(8192)
        memory[:6] = list(b"secret")
        os.write(connection, f"{listener.name} {segment.fd}\n".encode())
        while os.read(connection, 1) == b"a":  # accept who is there
            peer = listener.next_peer()
            if peer is not None:
                HostPeer(peer, Access.READ).offer(segment)
            os.write(connection, b"1" if peer is not None else b"0")

    with process_of(VICTIM, share) as connection:
        name, fd = os.read(connection, 100).decode().split()
        victim = next(
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and parent(int(pid)) == os.getpid() and uid_of(pid) == VICTIM
        )

        def connect() -> list[str]:
            """As a member that was told the name: it gets the descriptor only if the user is the same."""
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                one.settimeout(20)
                one.connect(f"\0{name}")
                os.write(connection, b"a")
                accepted = os.read(connection, 1)
                try:
                    message, passed, _, _ = one.recvmsg(100, 100)
                except ConnectionResetError:
                    message, passed = b"", []
            return [f"accepted {accepted.decode()}, {len(message)} bytes, {len(passed)} descriptors"]

        def attack() -> list[str]:
            return found_in_proc(victim) + [f"read {fd}"] * reads(Path(f"/proc/{victim}/fd/{fd}"))

        assert report_of(VICTIM, connect) == ["accepted 1, 8 bytes, 1 descriptors"]
        assert report_of(STRANGER, connect) == ["accepted 0, 0 bytes, 0 descriptors"]
        assert report_of(STRANGER, attack) == []
        os.write(connection, b"z")
        os.close(connection)


def uid_of(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


@needs_root
def test_who_is_told_a_name_of_another_users_socket_sends_nothing_there() -> None:
    """The other direction: a process that pretends to be the server, under a name that a worker was told."""
    listener = Listener()  # root's

    def connect() -> list[str]:
        try:
            PeerSocket.connect(listener.name)
        except Unreachable as error:
            return [str(error)]
        return ["connected"]

    assert report_of(STRANGER, connect) == [
        f"the process at the other end runs as user 0, and this one as user {STRANGER}; both must run as the same user "
        "to share memory"
    ]
    assert listener.next_peer() is None
    listener.close()
