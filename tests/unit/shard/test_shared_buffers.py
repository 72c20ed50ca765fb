"""Gradient buffers that servers map: where they are found, what becomes of them, and what a server retains."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host.leases import address_of
from axon_ps.shard.same_host import shared_buffers
from axon_ps.shard.same_host.shared_buffers import MAX_MAPPED, MappedBuffers, detach, find, shared_buffer
from axon_ps.types import Array
from axon_ps.wire.v1 import memory_pb2

SIZE = 100_000


def seen_by_a_server(buffer: Array, server: MappedBuffers, begin: int = 0, end: int = SIZE) -> Array:
    place = find(address_of(buffer) + begin, end - begin)
    assert place is not None
    view = server.view("worker", os.getpid(), *place, end - begin)
    assert view is not None
    return view


def open_files() -> int:
    """Of shared memory; others of this process come and go with the garbage collector."""
    return sum("memfd:axon_ps" in os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path))


def test_a_server_sees_what_is_written_to_a_buffer() -> None:
    buffer, server = shared_buffer(SIZE), MappedBuffers()
    assert (buffer.shape, buffer.dtype) == ((SIZE,), np.uint8)
    buffer[:] = 1
    view = seen_by_a_server(buffer, server, 5_000, 70_000)
    assert view.shape == (65_000,)
    buffer[5_000] = 7
    assert (view[0], view[1]) == (7, 1)


def test_what_a_server_has_mapped_changes_no_more_after_detaching() -> None:
    buffer, server = shared_buffer(SIZE), MappedBuffers()
    buffer[:] = 1
    view = seen_by_a_server(buffer, server)
    detach(address_of(buffer) + 50_000)
    assert np.all(buffer == 1)
    buffer[:] = 2
    assert np.all(view == 1)
    assert np.all(buffer == 2)
    assert find(address_of(buffer), SIZE) is None
    detach(address_of(buffer))  # harmless when repeated


def test_other_memory_is_in_no_buffer() -> None:
    buffer, other = shared_buffer(SIZE), np.zeros(SIZE, np.uint8)
    assert find(address_of(other), SIZE) is None
    assert find(address_of(buffer) + SIZE, SIZE) is None
    detach(address_of(other))
    assert find(address_of(buffer), SIZE) is not None


def test_a_buffer_ends_with_its_last_view_and_mappings_of_servers_stay() -> None:
    before, server = open_files(), MappedBuffers()
    buffer = shared_buffer(SIZE)
    buffer[:] = 3
    address, part = address_of(buffer), buffer[10:20].view(np.uint16)
    view = seen_by_a_server(buffer, server)
    del buffer
    gc.collect()
    assert find(address, SIZE) is not None
    del part
    gc.collect()
    assert find(address, SIZE) is None
    assert np.all(view == 3)
    del view, server
    gc.collect()
    assert open_files() == before


def test_a_server_retains_the_last_buffers_of_each_worker() -> None:
    server = MappedBuffers()
    buffers = [shared_buffer(4096) for _ in range(MAX_MAPPED + 5)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number
        assert np.all(seen_by_a_server(buffer, server, 0, 4096) == number)
    assert len(server._known["worker"]) == MAX_MAPPED
    assert np.all(seen_by_a_server(buffers[0], server, 0, 4096) == 0)
    server.retain({"another"})
    assert not server._known


def test_false_addresses_of_a_buffer_are_refused_or_not_mapped() -> None:
    buffer, server = shared_buffer(SIZE), MappedBuffers()
    place = find(address_of(buffer), SIZE)
    assert place is not None
    mapping, _ = place
    with pytest.raises(InvalidRequest, match="were leased by process 1"):
        server.view("worker", 1, mapping, 0, SIZE)
    with pytest.raises(InvalidRequest, match="bytes 90000 to 190000 of a buffer of 102400"):
        server.view("worker", os.getpid(), mapping, 90_000, SIZE)
    other = memory_pb2.Mapping()
    other.CopyFrom(mapping)
    other.inode += 1
    assert server.view("worker", os.getpid(), other, 0, SIZE) is None
    other.CopyFrom(mapping)
    other.boot = "another kernel"
    assert server.view("worker", os.getpid(), other, 0, SIZE) is None


def test_without_shared_memory_a_buffer_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        @staticmethod
        def create(size_bytes: int) -> object:
            raise Busy(f"a shared-memory segment needs {size_bytes} bytes")

    monkeypatch.setattr(shared_buffers, "Segment", Full)
    buffer = shared_buffer(SIZE)
    assert buffer.shape == (SIZE,)
    assert find(address_of(buffer), SIZE) is None
