"""What a process of another user tries, as a program: USER CONNECTION FUNCTION ARGUMENTS, the last as JSON.

It has joined no job, and imports what it needs before it gives up root, whose files its user could not read.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from axon_ps.errors import Unreachable
from axon_ps.host import shared_memory
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.peer_socket import Listener, PeerSocket
from axon_ps.host.private_memory import make_memory_private
from axon_ps.host.shared_memory import Access


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


def uid_of(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def report(connection: int, attack: str, *args: Any) -> None:
    """Make an attack, and say what it found."""
    try:
        found = globals()[attack](*args)
    except BaseException as error:
        found = [f"the attack itself failed: {error!r}"]
    os.write(connection, "\n".join(found).encode() + b"\n.")


def everything(pids: list[int], own: str) -> list[str]:
    """All that there is of a job on this machine."""
    found = [each for pid in pids for each in found_in_proc(pid)]
    return found + found_at_sockets() + found_in(Path(own), "*") + found_in(Path("/dev/shm"), "*axon*")


def attack(victim: int, fd: str) -> list[str]:
    """A process, and a descriptor of it."""
    return found_in_proc(victim) + [f"read {fd}"] * reads(Path(f"/proc/{victim}/fd/{fd}"))


def keep_private(connection: int, private: bool) -> None:
    """A service of that user's, which does what it must with its own descriptors."""
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as `exec` does; a change of user is undone by it
    if private:
        make_memory_private()
    assert str(connection) in os.listdir("/proc/self/fd")
    file = os.memfd_create("own")
    Path(f"/proc/self/fd/{file}").write_text("own")
    assert os.pread(file, 3, 0) == b"own"
    os.write(connection, b"r")
    os.read(connection, 1)


def connect(name: str) -> list[str]:
    """A socket whose name it was told."""
    try:
        PeerSocket.connect(name)
    except Unreachable as error:
        return [str(error)]
    return ["connected"]


def connect_as_told(connection: int, name: str) -> None:
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
    os.write(connection, f"accepted {accepted.decode()}, {len(message)} bytes, {len(passed)} descriptors".encode())


def share(connection: int) -> None:
    """Share memory with whoever of the same user connects, each time that it is told to look."""
    listener, (segment, memory) = Listener(), shared_memory.create(8192)
    memory[:6] = list(b"secret")
    os.write(connection, f"{listener.name} {segment.fd}\n".encode())
    while os.read(connection, 1) == b"a":  # accept who is there
        peer = listener.next_peer()
        if peer is not None:
            HostPeer(peer, Access.READ).offer(segment)
        os.write(connection, b"1" if peer is not None else b"0")


def main(user: int, connection: int, function: str, *args: Any) -> None:
    """Give up root, and work."""
    shared_memory.available_bytes()  # loads what it could not load later
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    globals()[function](connection, *args)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *json.loads(sys.argv[4]))
