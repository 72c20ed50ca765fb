"""Unix sockets between two processes of one host: they pass descriptors, and identify the other process.

Owns: connecting (`Listener`, `PeerSocket.connect`), checking the peer's credentials, and messages with a descriptor.
Refuses: the meaning of messages. The callers prove that the peer is the intended process: they pass a name and a secret
through a channel that has authenticated both sides (gRPC, the group's store).

Invariants:
- Before a byte is used, both sides have checked with the kernel that the peer runs as the same user, in a visible
  process namespace. Any other connection is closed.
- No call blocks. A message that was sent is readable at once. Both an empty and a full buffer are reported to the
  caller, which tries again later.
- A message carries at most one descriptor. The kernel duplicates it, so the peer really has that file.
- No file remains: names are abstract, and end with the processes. Forks of a worker have none of the sockets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import struct
import weakref

from axon_ps.errors import Broken, InvalidRequest, Unreachable
from axon_ps.host import fork

MESSAGE_BYTES = 2048
"""Most bytes of a message."""

_PREFIX = "axon-ps-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_BACKLOG = 1024
_PEER_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group
_ONE_DESCRIPTOR = struct.Struct("=i")
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _make() -> socket.socket:
    if not hasattr(socket, "SO_PEERCRED"):
        raise Unreachable("descriptors are passed between processes on Linux only")
    fork.check()
    try:
        return _register(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    except OSError as error:
        raise Unreachable(f"this process can make no socket: {error.strerror}") from error


def _register(made: socket.socket) -> socket.socket:
    made.setblocking(False)
    _sockets.add(made)
    return made


@fork.in_child
def _leave() -> object:
    """Close this fork's descriptors of its parent's connections. The parent keeps using them."""
    for each in list(_sockets):
        fd = each.detach()
        if fd >= 0:
            os.close(fd)
    return None


class PeerSocket:
    """A connection to a process of this host and user. One thread at a time may use it.

    Attributes:
        pid: the other process's id, from the kernel.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        weakref.finalize(self, connected.close).atexit = False
        pid, uid, _ = _PEER_CREDENTIALS.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        if uid != os.geteuid():
            connected.close()
            raise Unreachable(
                f"the process at the other end runs as user {uid}, and this one as user {os.geteuid()}; both must run "
                "as the same user to share memory"
            )
        if pid <= 0:
            connected.close()
            raise Unreachable("the process at the other end is in another process namespace (a container of its own)")
        self.pid = pid

    @classmethod
    def connect(cls, name: str) -> PeerSocket:
        """Connect to a `Listener` of that name.

        Raises:
            Unreachable: it is not in this network namespace, or is another user's, or is not accepted; or this process
                may open no more files.
            InvalidRequest: it is not the name of a `Listener`.
            Misuse: this process is a fork of a worker.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} is not the name of a socket of axon_ps")
        connecting = _make()
        try:
            connecting.connect(f"\0{name}")
        except OSError as error:
            connecting.close()
            raise Unreachable(
                f"socket {name} of the process at the other end cannot be reached: {error.strerror}; both processes "
                "need the same host and network namespace"
            ) from error
        return cls(connecting)

    def send(self, message: bytes, fd: int = -1) -> bool:
        """Send a message, with a descriptor if `fd` is not -1; False: the peer has not read earlier messages yet.

        Raises:
            Broken: the peer has gone.
        """
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _ONE_DESCRIPTOR.pack(fd))] if fd >= 0 else []
        try:
            self._socket.sendmsg([message], passed, socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise Broken(f"process {self.pid} of this host has hung up: {error.strerror}") from error
        return True

    def receive(self, *, descriptor: bool = True) -> tuple[bytes, int] | None:
        """Return the next message and its descriptor, -1 if it has none; None: there is no message now.

        Args:
            descriptor: whether it may have one.

        Raises:
            Broken: the peer has gone, or this process may open no more files.
            InvalidRequest: the message is longer, or has more descriptors, than is allowed.

        After an error: the connection is not usable any more. No descriptor of the message is open here.
        """
        ancillary_bytes = socket.CMSG_LEN(_ONE_DESCRIPTOR.size) if descriptor else 0
        try:
            message, found, flags, _ = self._socket.recvmsg(MESSAGE_BYTES, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Broken(f"process {self.pid} of this host has hung up: {error.strerror}") from error
        fds = [
            fd
            for level, kind, data in found
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (fd,) in _ONE_DESCRIPTOR.iter_unpack(data)
        ]
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            for fd in fds:
                os.close(fd)
            if descriptor and not fds and not flags & socket.MSG_TRUNC:
                raise Broken("this process may open no more files (ulimit -n), so it can be passed none")
            raise InvalidRequest(
                f"process {self.pid} of this host sent a message of more than {MESSAGE_BYTES} bytes or of more "
                f"descriptors than {int(descriptor)}"
            )
        if not message:
            raise Broken(f"process {self.pid} of this host has hung up")
        return message, fds[0] if fds else -1

    def fileno(self) -> int:
        """Return the descriptor for `select.poll`: readable when there is a message, or the peer has hung up."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up. A repeated call is harmless."""
        self._socket.close()


class Listener:
    """A socket to which processes of this host connect. One thread at a time may use it.

    Attributes:
        name: the name for `PeerSocket.connect`; random, and in no file system.

    Raises:
        Unreachable: there are no such sockets here, or this process may open no more files.
        Misuse: this process is a fork of a worker.
    """

    def __init__(self) -> None:
        self.name = f"{_PREFIX}{secrets.token_hex(16)}"
        listening = _make()
        try:
            listening.bind(f"\0{self.name}")
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise Unreachable(f"this process can be reached through no socket: {error.strerror}") from error
        self._socket = listening
        weakref.finalize(self, listening.close).atexit = False

    def next_peer(self) -> PeerSocket | None:
        """Return the next connection of a process of this user; None: there is none now. Others are closed."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # there is none, or no descriptor is free: then connections wait
                return None
            with contextlib.suppress(Unreachable):
                return PeerSocket(_register(accepted))

    def close(self) -> None:
        """Accept no connection any more, and close those that are pending. A repeated call is harmless."""
        self._socket.close()
