"""Segments, futexes, and whether other processes live."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host import futex, shared_memory
from axon_ps.host.memory import available_bytes
from axon_ps.host.peer_process import PeerProcess
from axon_ps.host.shared_memory import (
    Access,
    Segment,
    base_of,
    discard_writes,
    make_private,
    move_mapping,
    pack_text,
    unpack_text,
)
from axon_ps.types import Array


@pytest.fixture
def made() -> Iterator[tuple[Segment, Array]]:
    segment, memory = shared_memory.create(10_000)
    yield segment, memory
    segment.close()


def received(segment: Segment, access: Access = Access.WRITE) -> Array:
    """As another process maps it."""
    return shared_memory.receive(os.dup(segment.fd), access)


def memfd(size_bytes: int, seals: int = 0) -> int:
    """What somebody else may pass."""
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with its standard input."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_segment_is_zeros_in_whole_pages_without_a_name(made: tuple[Segment, Array]) -> None:
    segment, memory = made
    assert segment.size_bytes == memory.nbytes == -(-10_000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert not memory.any()
    assert os.readlink(f"/proc/self/fd/{segment.fd}") == "/memfd:axon_ps (deleted)"


def test_whoever_is_passed_it_sees_the_same_memory(made: tuple[Segment, Array]) -> None:
    segment, memory = made
    other = received(segment)
    memory[9_999] = 7
    assert other[9_999] == 7
    other[0] = 3
    assert memory[0] == 3
    assert base_of(other) != base_of(memory)


def test_nobody_can_make_it_shorter_or_longer(made: tuple[Segment, Array]) -> None:
    segment, _ = made
    for size_bytes in (0, segment.size_bytes - 1, segment.size_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_others_only_read_they_cannot_write(made: tuple[Segment, Array]) -> None:
    segment, memory = shared_memory.create(10_000, read_only=True)
    with pytest.raises(Busy, match="Operation not permitted"):
        received(segment, Access.WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"mine", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    private, reading = received(segment, Access.PRIVATE), received(segment, Access.READ)
    private[5000] = 9
    memory[:4096] = 1
    assert (private[5000], private[0], reading[5000], reading[0], memory[5000]) == (9, 1, 0, 1, 0)
    with pytest.raises(ValueError, match="read-only"):
        reading[0] = 2
    discard_writes(private)
    assert private[5000] == 0
    segment.close()


@pytest.mark.parametrize(
    ("passed", "why"),
    [
        (lambda: memfd(4096), "not sealed against shrinking"),
        (lambda: memfd(4096, fcntl.F_SEAL_GROW), "not sealed against shrinking"),
        (lambda: memfd_with_holes(1 << 30), "has 1073741824 bytes, and memory for 0 of them"),
        (lambda: os.memfd_create("stranger", os.MFD_CLOEXEC), "not sealed against shrinking"),
        (lambda: os.open("/proc/self/environ", os.O_RDONLY), "no memory"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "no memory"),
        (lambda: os.open(".", os.O_RDONLY), "no memory"),
    ],
    ids=["no seals", "other seals", "holes", "never sealed", "a file", "a device", "a folder"],
)
def test_what_could_end_a_process_or_is_no_memory_is_refused_and_closed(passed: Callable[[], int], why: str) -> None:
    fd = passed()
    with pytest.raises(InvalidRequest, match=why):
        shared_memory.receive(fd, Access.READ)
    with pytest.raises(OSError):
        os.fstat(fd)


def memfd_with_holes(size_bytes: int) -> int:
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_a_mapping_takes_no_descriptor_and_ends_with_its_last_view() -> None:
    before = set(os.listdir("/proc/self/fd"))
    segment, memory = shared_memory.create(1 << 20)
    other = received(segment)
    segment.close()
    assert set(os.listdir("/proc/self/fd")) == before
    where = f"\n{base_of(other):x}-"
    view = other[100:200].view(np.uint16)
    del other
    assert where in Path("/proc/self/maps").read_text()
    del view
    assert where not in Path("/proc/self/maps").read_text()
    assert memory.nbytes == 1 << 20


def test_too_large_a_segment_says_what_it_needs() -> None:
    with pytest.raises(Busy, match=f"needs {1 << 50} bytes .* are available"):
        shared_memory.create(1 << 50)
    assert 0 < available_bytes() <= shared_memory.total_bytes()


def test_a_closed_segment_stays_as_long_as_its_arrays(made: tuple[Segment, Array]) -> None:
    segment, memory = made
    fd, closed, opened = segment.fd, Segment.closed, Segment.open
    segment.close()
    segment.close()
    memory[:] = 3
    assert (Segment.closed, Segment.open, segment.fd) == (closed + 1, opened - 1, -1)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_memory_moves_away_from_those_who_mapped_it() -> None:
    old, array = shared_memory.create(8192)
    stranger = received(old)
    array[:] = 5
    new = move_mapping(base_of(array), old)
    assert (array == 5).all()
    stranger[:] = 9
    assert (array == 5).all()
    array[0] = 6
    assert received(new)[0] == 6
    assert (old.fd, new.number > old.number) == (-1, True)
    new.close()


def test_memory_made_private_is_seen_by_nobody_else() -> None:
    segment, array = shared_memory.create(8192)
    array[:] = 5
    other = received(segment)
    make_private(base_of(array), segment)
    array[:] = 6
    assert (other == 5).all()
    assert segment.fd == -1


def test_a_sleeper_is_woken_through_another_mapping(made: tuple[Segment, Array]) -> None:
    segment, memory = made
    other = received(segment)
    words, theirs = memory.view(np.uint32), other.view(np.uint32)
    woken = threading.Event()

    def sleep() -> None:
        while not words[16]:
            futex.wait(base_of(memory) + 64, 0, 30.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    theirs[16] = 1
    futex.fence()
    futex.wake(base_of(other) + 64)
    assert woken.wait(10)
    thread.join()


def test_nobody_sleeps_on_a_word_that_has_changed_or_longer_than_said(made: tuple[Segment, Array]) -> None:
    base = base_of(made[1])
    began = time.monotonic()
    futex.wait(base, 1, 30.0)
    assert time.monotonic() - began < 5
    futex.wait(base, 0, 0.02)
    assert 0.02 <= time.monotonic() - began < 5
    futex.settle()


def test_a_process_that_ended_is_not_alive_though_nobody_reaped_it(child: subprocess.Popen[bytes]) -> None:
    peer = PeerProcess(child.pid)
    assert peer.alive()
    assert not peer.ends(0.01)
    child.kill()
    assert peer.ends(10)
    assert not peer.alive()
    peer.close()
    peer.close()
    assert not peer.alive()  # without the handle it goes by /proc


def test_without_process_handles_it_goes_by_proc(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refused)
    peer = PeerProcess(child.pid)
    assert peer.alive()
    child.kill()
    assert peer.ends(10)


def test_texts_fit_into_their_place() -> None:
    assert unpack_text(memoryview(pack_text("äöü", 100))) == "äöü"
    assert len(pack_text("x" * 100, 20)) == 20
