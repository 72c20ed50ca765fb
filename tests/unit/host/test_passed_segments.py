"""Segments that two processes pass each other: what each sees, what is dropped, and what is refused."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host import host_peer, shared_memory
from axon_ps.host.host_peer import MAX_SEGMENTS, HostPeer
from axon_ps.host.leases import address_of
from axon_ps.host.peer_socket import Listener, PeerSocket
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.host.shared_memory import Access, Segment
from axon_ps.types import Array

SIZE = 100_000


def sockets() -> tuple[PeerSocket, PeerSocket]:
    listener = Listener()
    ours = PeerSocket.connect(listener.name)
    theirs = listener.next_peer()
    listener.close()
    assert theirs is not None
    return ours, theirs


@pytest.fixture
def peers() -> Iterator[tuple[HostPeer, HostPeer]]:
    """A worker, and a server that reads what it passes."""
    ours, theirs = sockets()
    worker, server = HostPeer(ours, Access.PRIVATE), HostPeer(theirs, Access.READ)
    yield worker, server
    worker.close()
    server.close()


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, HostPeer]]:
    """Somebody who sends what he likes, and a server."""
    listener = Listener()
    bare = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bare.setblocking(False)
    bare.connect(f"\0{listener.name}")
    accepted = listener.next_peer()
    listener.close()
    assert accepted is not None
    server = HostPeer(accepted, Access.READ)
    with bare:
        yield bare, server
    server.close()


def segment_of(array: Array) -> Segment:
    found = shared_arrays.find(address_of(array), array.nbytes)
    assert found is not None
    return found.segment


def send(bare: socket.socket, number: int, *fds: int) -> None:
    passed: list[Any] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    bare.sendmsg([struct.pack("<Q", number)], passed)
    for fd in fds:
        os.close(fd)


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def sealed(size_bytes: int = 4096) -> int:
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_a_server_sees_what_is_written_to_a_buffer(peers: tuple[HostPeer, HostPeer]) -> None:
    worker, server = peers
    buffer = shared_arrays.buffer(SIZE)
    buffer[:] = 1
    segment = segment_of(buffer)
    assert worker.offer(segment)
    view = server.view(segment.number, 5_000, 65_000)
    assert view.shape == (65_000,)
    buffer[5_000] = 7
    assert (view[0], view[1]) == (7, 1)
    messages = worker.messages
    assert worker.offer(segment)  # it has it
    assert worker.messages == messages


def test_a_buffer_that_ends_is_dropped_by_the_server_and_views_stay(peers: tuple[HostPeer, HostPeer]) -> None:
    worker, server = peers
    buffer = shared_arrays.buffer(SIZE)
    buffer[:] = 3
    number = segment_of(buffer).number
    assert worker.offer(segment_of(buffer))
    view = server.view(number, 0, SIZE)
    del buffer
    gc.collect()
    assert len(server) == 1
    worker.forget_closed()
    server.take()
    assert len(server) == 0
    assert np.all(view == 3)
    with pytest.raises(Broken, match=f"has passed no segment {number}, or has closed it"):
        server.view(number, 0, SIZE)


def test_a_detached_buffer_changes_no_more_at_the_server(peers: tuple[HostPeer, HostPeer]) -> None:
    worker, server = peers
    buffer = shared_arrays.buffer(SIZE)
    buffer[:] = 1
    segment = segment_of(buffer)
    assert worker.offer(segment)
    view = server.view(segment.number, 0, SIZE)
    shared_arrays.detach(address_of(buffer))
    buffer[:] = 2
    assert np.all(view == 1)
    assert not worker.offer(segment)


def test_what_lies_outside_of_a_segment_is_refused(peers: tuple[HostPeer, HostPeer]) -> None:
    worker, server = peers
    buffer = shared_arrays.buffer(SIZE)
    segment = segment_of(buffer)
    assert worker.offer(segment)
    for offset, size_bytes in ((90_000, SIZE), (1 << 63, 8), (0, 1 << 63), ((1 << 64) - 8, 16), (102_400, 1)):
        with pytest.raises(InvalidRequest, match=f"bytes {offset} to .* of segment .*; it has 102400"):
            server.view(segment.number, offset, size_bytes)
    for number in (0, segment.number + 1, 1 << 60):
        with pytest.raises(Broken, match="has passed no segment"):
            server.view(number, 0, 8)
    assert server.view(segment.number, 102_400, 0).size == 0


def test_no_more_segments_are_passed_than_the_peer_maps(
    peers: tuple[HostPeer, HostPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_peer, "MAX_SEGMENTS", 3)
    worker, server = peers
    buffers = [shared_arrays.buffer(4096) for _ in range(5)]
    assert [worker.offer(segment_of(buffer)) for buffer in buffers] == [True, True, True, False, False]
    server.take()
    buffers.pop(0)
    gc.collect()
    assert [worker.offer(segment_of(buffer)) for buffer in buffers] == [True, True, True, False]
    server.take()
    assert len(server) == 3
    assert MAX_SEGMENTS > 100


def test_a_peer_that_takes_nothing_costs_no_wait_and_is_told_all_later(peers: tuple[HostPeer, HostPeer]) -> None:
    worker, server = peers
    segments = [shared_memory.create(4096)[0] for _ in range(900)]
    offered = [worker.offer(segment) for segment in segments]
    assert offered.count(False) > 0
    first = offered.index(False)
    assert not any(offered[first:])
    segments[0].close()
    assert not worker.offer(segments[-1])
    server.take()
    assert len(server) == first
    assert worker.offer(segments[-1])
    server.take()
    assert len(server) == first  # one was closed, one came
    with pytest.raises(Broken):
        server.view(segments[0].number, 0, 1)
    for segment in segments:
        segment.close()


def test_a_hostile_peer_is_told_why_and_leaves_nothing_open(stranger: tuple[socket.socket, HostPeer]) -> None:
    bare, server = stranger
    before = open_files()
    send(bare, 1, sealed())
    assert server.view(1, 0, 4096).nbytes == 4096
    assert open_files() == before
    unsealed = os.memfd_create("stranger", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 4096)
    send(bare, 2, unsealed)
    with pytest.raises(InvalidRequest, match="not sealed against shrinking"):
        server.view(2, 0, 8)
    assert len(open_files() - before) == 0
    with pytest.raises(Broken):  # the connection has ended
        server.view(3, 0, 8)
    assert server.view(1, 0, 8).size == 8  # what was right before stays


@pytest.mark.parametrize(
    ("message", "count", "why"),
    [
        (struct.pack("<Q", 4), 2, "more descriptors than 1"),
        (struct.pack("<Q", 4), 100, "more descriptors than 1"),
        (b"x" * 3000, 0, "more than 2048 bytes"),
        (b"x" * 9, 1, "9 bytes that name no segment"),
        (b"x", 0, "1 bytes that name no segment"),
    ],
)
def test_surplus_descriptors_and_other_messages_are_refused_and_closed(
    stranger: tuple[socket.socket, HostPeer], message: bytes, count: int, why: str
) -> None:
    bare, server = stranger
    before = open_files()
    fds = [sealed() for _ in range(count)]
    passed: list[Any] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{count}i", *fds))] if fds else []
    bare.sendmsg([message], passed)
    for fd in fds:
        os.close(fd)
    with pytest.raises(InvalidRequest, match=why):
        server.view(4, 0, 8)
    assert len(open_files() - before) == 0


def test_more_than_the_machine_has_is_not_mapped(
    stranger: tuple[socket.socket, HostPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_peer, "total_bytes", lambda: 10_000)
    bare, server = stranger
    for number in range(3):
        send(bare, number, sealed())
    with pytest.raises(InvalidRequest, match="or more bytes than this machine has: 2 are mapped, with 8192 bytes"):
        server.take()


def test_a_peer_that_has_gone_is_said_so() -> None:
    ours, theirs = sockets()
    worker, server = HostPeer(ours, Access.PRIVATE), HostPeer(theirs, Access.READ)
    buffer = shared_arrays.buffer(4096)
    assert worker.offer(segment_of(buffer))
    worker.close()
    with pytest.raises(Broken, match="hung up"):
        server.view(segment_of(buffer).number + 1, 0, 8)
    assert server.view(segment_of(buffer).number, 0, 8).size == 8
    assert not server.offer(shared_memory.create(1)[0])
    server.close()
