"""Shared arrays that another process maps: what becomes of them there, and which stay mapped."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest

from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host import shared_arrays as module
from axon_ps.host.leases import ReadLease, ReadLeases, address_of
from axon_ps.host.process_memory import MAX_MAPPED, LeaseReader, grant, own_handshake
from axon_ps.host.shared_arrays import MappedArrays, shared_arrays
from axon_ps.host.shared_memory import SegmentAddress
from axon_ps.types import Array

SIZE = 100_000


def lease(buffer: Array, begin: int = 0, end: int = SIZE) -> ReadLease:
    return ReadLease.unpack(grant(ReadLeases(), address_of(buffer) + begin, end - begin))


def seen_by_a_server(buffer: Array, server: LeaseReader, begin: int = 0, end: int = SIZE) -> Array:
    view = server.view(lease(buffer, begin, end))
    assert view is not None
    return view


def open_files() -> int:
    """Of shared memory; others of this process come and go with the garbage collector."""
    return sum("memfd:axon_ps" in os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path))


def test_a_server_sees_what_is_written_to_a_buffer() -> None:
    buffer, server = shared_arrays.buffer(SIZE), LeaseReader(own_handshake())
    assert (buffer.shape, buffer.dtype) == ((SIZE,), np.uint8)
    buffer[:] = 1
    view = seen_by_a_server(buffer, server, 5_000, 70_000)
    assert view.shape == (65_000,)
    buffer[5_000] = 7
    assert (view[0], view[1]) == (7, 1)


def test_what_a_server_has_mapped_changes_no_more_after_detaching() -> None:
    buffer, server = shared_arrays.buffer(SIZE), LeaseReader(own_handshake())
    buffer[:] = 1
    view = seen_by_a_server(buffer, server)
    shared_arrays.detach(address_of(buffer) + 50_000)
    assert np.all(buffer == 1)
    buffer[:] = 2
    assert np.all(view == 1)
    assert np.all(buffer == 2)
    assert shared_arrays.find(address_of(buffer), SIZE) is None
    shared_arrays.detach(address_of(buffer))  # harmless when repeated


def test_other_memory_is_in_no_buffer() -> None:
    buffer, other = shared_arrays.buffer(SIZE), np.zeros(SIZE, np.uint8)
    assert shared_arrays.find(address_of(other), SIZE) is None
    assert shared_arrays.find(address_of(buffer) + SIZE, SIZE) is None
    shared_arrays.detach(address_of(other))
    assert shared_arrays.find(address_of(buffer), SIZE) is not None


def test_a_buffer_ends_with_its_last_view_and_mappings_of_servers_stay() -> None:
    before, server = open_files(), LeaseReader(own_handshake())
    buffer = shared_arrays.buffer(SIZE)
    buffer[:] = 3
    address, part = address_of(buffer), buffer[10:20].view(np.uint16)
    view = seen_by_a_server(buffer, server)
    del buffer
    gc.collect()
    assert shared_arrays.find(address, SIZE) is not None
    del part
    gc.collect()
    assert shared_arrays.find(address, SIZE) is None
    assert np.all(view == 3)
    del view, server
    gc.collect()
    assert open_files() == before


def test_a_server_retains_the_last_buffers_of_each_worker() -> None:
    server = LeaseReader(own_handshake())
    buffers = [shared_arrays.buffer(4096) for _ in range(MAX_MAPPED + 5)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number
        assert np.all(seen_by_a_server(buffer, server, 0, 4096) == number)
    assert len(server._mapped) == MAX_MAPPED
    assert np.all(seen_by_a_server(buffers[0], server, 0, 4096) == 0)


def test_false_addresses_of_a_buffer_are_refused_or_not_mapped() -> None:
    buffer, server = shared_arrays.buffer(SIZE), LeaseReader(own_handshake())
    good = lease(buffer)
    with pytest.raises(InvalidRequest, match="were leased by process 1"):
        MappedArrays(1).view(good.segment, 0, SIZE)
    with pytest.raises(InvalidRequest, match="bytes 90000 to 190000 of a buffer of 102400"):
        server.view(replace(good, offset=90_000))
    with pytest.raises(InvalidRequest, match="is not the address of a segment"):
        server.view(replace(good, segment=b"elsewhere"))
    address = SegmentAddress.unpack(good.segment)
    for other in (replace(address, inode=address.inode + 1), replace(address, boot="another kernel")):
        assert server.view(replace(good, segment=other.pack())) is None
    assert server.view(replace(good, segment=b"")) is None


def test_without_shared_memory_a_buffer_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        @staticmethod
        def create(size_bytes: int, *, directory: str) -> object:
            raise Busy(f"a shared-memory segment needs {size_bytes} bytes")

    monkeypatch.setattr(module, "Segment", Full)
    buffer = shared_arrays.buffer(SIZE)
    assert buffer.shape == (SIZE,)
    assert shared_arrays.find(address_of(buffer), SIZE) is None
