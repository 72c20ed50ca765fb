"""NCCL's communicators over Unix sockets: ranks are threads or processes of one host.

Owns: the rendezvous of ranks by a unique id, and the calls. As in NCCL, the process that makes the id listens until all
ranks have joined. In a call every rank sends its data to every other, and computes the result itself.

Invariant: each socket has a thread that reads it, so sending never waits for the other side's calls.
"""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from axon_ps.types import Array

ID_BYTES = 16
JOIN_S = 600.0
"""Seconds that the process that made a unique id listens for its ranks."""

_JOIN = struct.Struct("<II")  # ranks, rank
_HEAD = struct.Struct("<BQ")  # kind, size
_COLLECTIVE, _MESSAGE = 0, 1


class Aborted(RuntimeError):
    """Raised by calls of a communicator that is aborted, here or by a peer, or whose peer is gone."""


def new_unique_id() -> bytes:
    """Make a unique id, of 128 bytes, and start its rendezvous in this process."""
    name = secrets.token_bytes(ID_BYTES)
    threading.Thread(target=_rendezvous, args=(_listen(_address(name)),), daemon=True, name="nccl-root").start()
    return name + bytes(128 - ID_BYTES)


def _address(name: bytes, rank: int | str = "root") -> str:
    return f"\0axon-ps-nccl-{name.hex()}-{rank}"


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def _rendezvous(listener: socket.socket) -> None:
    """Release the ranks of an id once all of them have joined."""
    listener.settimeout(JOIN_S)
    joined: list[socket.socket] = []
    try:
        while True:
            peer, _ = listener.accept()
            joined.append(peer)
            ranks, _ = _JOIN.unpack(_read(peer, _JOIN.size))
            if len(joined) == ranks:
                break
        for peer in joined:
            peer.sendall(b"!")
    except OSError:
        return  # some ranks did not join
    finally:
        for peer in (*joined, listener):
            peer.close()


def _read(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes.

    Raises:
        Aborted: the connection ends before.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise Aborted("a peer of the communicator is gone")
        done += count
    return bytes(data)


class _Link:
    """A socket to one peer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._received: dict[int, queue.SimpleQueue[bytes | None]] = {
            kind: queue.SimpleQueue() for kind in (_COLLECTIVE, _MESSAGE)
        }
        threading.Thread(target=self._receive, daemon=True, name="nccl-link").start()

    def send(self, kind: int, data: bytes) -> None:
        try:
            with self._sending:
                self._sock.sendall(_HEAD.pack(kind, len(data)) + data)
        except OSError as error:
            raise Aborted(f"a peer of the communicator is gone: {error}") from error

    def receive(self, kind: int) -> bytes:
        data = self._received[kind].get()
        if data is None:
            self._received[kind].put(None)  # for the next receive
            raise Aborted("the communicator was aborted, or a peer is gone")
        return data

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer has closed it
        finally:
            self._sock.close()

    def _receive(self) -> None:
        try:
            while True:
                kind, size = _HEAD.unpack(_read(self._sock, _HEAD.size))
                self._received[kind].put(_read(self._sock, size))
        except (Aborted, OSError):
            for joined in self._received.values():
                joined.put(None)


class Clique:
    """One rank's connections to all ranks of a unique id; all ranks make theirs at the same time.

    Args:
        unique_id: an id of `new_unique_id`.
        world_size: number of ranks.
        rank: this rank's position.
    """

    def __init__(self, unique_id: bytes, world_size: int, rank: int) -> None:
        self.rank, self.world_size = rank, world_size
        name = unique_id[:ID_BYTES]
        listener = _listen(_address(name, rank))
        links: dict[int, _Link] = {}
        with listener, socket.socket(socket.AF_UNIX) as root:
            root.connect(_address(name))
            root.sendall(_JOIN.pack(world_size, rank))
            _read(root, 1)
            for peer in range(rank):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(_address(name, peer))
                sock.sendall(_JOIN.pack(world_size, rank))
                links[peer] = _Link(sock)
            while len(links) < world_size - 1:
                sock, _ = listener.accept()
                _, peer = _JOIN.unpack(_read(sock, _JOIN.size))
                links[peer] = _Link(sock)
        self._links = dict(sorted(links.items()))

    def exchange(self, data: bytes) -> list[bytes]:
        """Gather the data of every rank; returns it by rank."""
        for link in self._links.values():
            link.send(_COLLECTIVE, data)
        return [data if r == self.rank else self._links[r].receive(_COLLECTIVE) for r in range(self.world_size)]

    def send(self, peer: int, data: bytes) -> None:
        """Send a message to a rank."""
        self._links[peer].send(_MESSAGE, data)

    def receive(self, peer: int) -> bytes:
        """Return the next message of a rank."""
        return self._links[peer].receive(_MESSAGE)

    def close(self) -> None:
        """Close every connection; pending calls, here or at peers, raise `Aborted`."""
        for link in self._links.values():
            link.close()


def reduced(rows: Sequence[Array], op: int) -> Array:
    """Reduce all ranks' numbers, in rank order.

    Args:
        rows: the numbers of each rank.
        op: NCCL's number of the operation, 0 to 4: sum, product, maximum, minimum, average.
    """
    n = rows[0].dtype.type(len(rows))
    combine: Any = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin, 4: np.add}[op]
    with np.errstate(all="ignore"):
        numbers = [row / n if op == 4 else row for row in rows]
        result = numbers[0]
        for number in numbers[1:]:
            result = combine(result, number)
    return np.asarray(result)
