"""Segments, futexes and the memory of other processes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from axon_ps.errors import Broken, Busy, InvalidRequest, Unreachable
from axon_ps.host import futex, process_memory
from axon_ps.host.peer_process import PeerProcess
from axon_ps.host.shared_memory import Segment, SegmentAddress, available_bytes, move_mapping, pack_text, unpack_text


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(10_000)
    yield made
    made.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with its standard input."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_segment_is_zeros_in_whole_pages_without_a_name(segment: Segment) -> None:
    assert segment.size_bytes == -(-10_000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert not segment.bytes().any()
    assert os.readlink(f"/proc/self/fd/{segment.fd}") == "/memfd:axon_ps (deleted)"


def test_whoever_opens_it_sees_the_same_memory(segment: Segment) -> None:
    opened = Segment.open(SegmentAddress.unpack(segment.address.pack()))
    segment.bytes()[9_999] = 7
    assert opened.bytes()[9_999] == 7
    assert opened.base() != segment.base()


def test_what_is_not_the_segment_is_not_opened(segment: Segment) -> None:
    address = segment.address
    for wrong, why in (
        ({"boot": "another"}, "another machine"),
        ({"pid": 1 << 29}, "cannot be opened"),
        ({"fd": 1 << 20}, "cannot be opened"),
        ({"inode": address.inode + 1}, "is another file here"),
        ({"size_bytes": 1 << 20}, "is another file here"),
    ):
        with pytest.raises(Unreachable, match=why):
            Segment.open(replace(address, **wrong))
    with pytest.raises(InvalidRequest, match="is not the address of a segment"):
        SegmentAddress.unpack(b"3")


def test_too_large_a_segment_says_what_it_needs() -> None:
    with pytest.raises(Busy, match=f"needs {1 << 50} bytes .* are available"):
        Segment.create(1 << 50)


def test_no_place_for_segments(tmp_path: Path) -> None:
    with pytest.raises(Busy, match="needs 4096 bytes .* of .*nowhere, and 0 bytes"):
        Segment.create(1, directory=str(tmp_path / "nowhere"))
    assert available_bytes("/proc") == 0  # a file system without blocks
    assert available_bytes() > 0


@pytest.mark.tmpfs
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a tiny tmpfs")
def test_a_small_tmpfs_holds_what_fits_and_no_more(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        small = Segment.create(40_000, directory=str(tmp_path))
        small.bytes()[:] = 1
        with pytest.raises(Busy, match="needs 40960 bytes .* and 24576 bytes .* enlarge"):
            Segment.create(40_000, directory=str(tmp_path))
        assert os.listdir(tmp_path) == []
        small.close()
        del small
        gc.collect()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_closed_segment_stays_as_long_as_its_arrays() -> None:
    made = Segment.create(4096)
    array = made.bytes()
    fd = made.fd
    made.close()
    made.close()
    array[:] = 3
    with pytest.raises(OSError):
        os.fstat(fd)


def test_memory_moves_away_from_those_who_mapped_it() -> None:
    old, new = Segment.create(8192), Segment.create(8192)
    array, stranger = old.bytes(), Segment.open(old.address).bytes()
    array[:] = 5
    move_mapping(old.base(), old.fd, new)
    assert (array == 5).all()
    stranger[:] = 9
    assert (array == 5).all()
    array[0] = 6
    assert Segment.open(new.address).bytes()[0] == 6
    old.close()
    new.close()


def test_a_sleeper_is_woken_through_another_mapping(segment: Segment) -> None:
    other = Segment.open(segment.address)
    words, theirs = segment.bytes().view(np.uint32), other.bytes().view(np.uint32)
    woken = threading.Event()

    def sleep() -> None:
        while not words[16]:
            futex.wait(segment.base() + 64, 0, 30.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    theirs[16] = 1
    futex.fence()
    futex.wake(other.base() + 64)
    assert woken.wait(10)
    thread.join()


def test_nobody_sleeps_on_a_word_that_has_changed_or_longer_than_said(segment: Segment) -> None:
    began = time.monotonic()
    futex.wait(segment.base(), 1, 30.0)
    assert time.monotonic() - began < 5
    futex.wait(segment.base(), 0, 0.02)
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


def test_memory_is_read_where_it_is() -> None:
    source = ctypes.create_string_buffer(b"twelve bytes", 12)
    target = ctypes.create_string_buffer(12)
    address = ctypes.addressof(source)
    if not process_memory.readable(address, 12):
        pytest.skip("this kernel or sandbox does not let processes read each other's memory")
    process_memory.read(os.getpid(), address, ctypes.addressof(target), 12)
    assert target.raw == b"twelve bytes"
    assert not process_memory.readable(4096, 12)
    with pytest.raises(Broken, match="cannot be read"):
        process_memory.read(os.getpid(), 4096, ctypes.addressof(target), 12)
    with pytest.raises(Broken, match="No such process"):
        process_memory.read(1 << 29, address, ctypes.addressof(target), 12)


def test_texts_fit_into_their_place() -> None:
    assert unpack_text(memoryview(pack_text("äöü", 100))) == "äöü"
    assert len(pack_text("x" * 100, 20)) == 20
