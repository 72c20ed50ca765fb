"""Shared arrays: found by address, freed with the last view, revoked from other processes, detached."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from axon_ps.errors import Busy
from axon_ps.host.shared_arrays import MAX_RELEASED, SharedArrays
from axon_ps.host.shared_memory import Segment
from axon_ps.types import Array, DType


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_an_array_has_the_shape_and_type_asked_for(shape: tuple[int, ...]) -> None:
    array = SharedArrays().empty(shape, DType.BF16)
    assert array.shape == shape
    assert array.dtype == np.uint16
    assert not array.any()


def test_any_range_of_it_is_found_and_nothing_else() -> None:
    shared = SharedArrays()
    assert shared.find(4096, 4) is None
    arrays = [shared.empty((1024,), DType.F32) for _ in range(5)]
    for array in arrays:
        found = shared.find(address(array[10:]), 4000)
        assert found is not None
        assert found.base == address(array)
    assert shared.find(address(arrays[0]), 4097) is None
    assert shared.find(address(np.zeros(4)), 32) is None


def test_it_is_freed_with_its_last_view() -> None:
    shared = SharedArrays()
    array = shared.empty((4, 4), DType.I64)
    found = shared.find(address(array), 8)
    assert found is not None
    inode, fd = found.address.inode, found.address.fd
    view = array.reshape(-1)[3:]
    del array
    gc.collect()
    assert shared.released(0) == (0, [])
    del view
    gc.collect()
    assert shared.released(0) == (1, [inode])
    assert shared.find(found.base, 8) is None
    with pytest.raises(OSError):
        os.fstat(fd)


def test_revoked_memory_cannot_be_written_by_processes_that_had_mapped_it() -> None:
    shared = SharedArrays()
    array = shared.empty((100,), DType.I32)
    array[:] = 4
    before = shared.find(address(array), 400)
    assert before is not None
    old = before.address
    other = np.frombuffer(Segment.open(old).memory, np.int32)
    shared.revoke(address(array), 400)
    other[:] = 9
    assert (array == 4).all()
    after = shared.find(address(array), 400)
    assert after is not None
    assert after.address.inode != old.inode
    assert (np.frombuffer(Segment.open(after.address).memory, np.int32)[:100] == 4).all()
    assert shared.released(0) == (1, [old.inode])
    shared.revoke(address(np.zeros(3)), 12)  # not registered: nothing to do


def test_memory_that_is_freed_is_returned_at_once() -> None:
    shared = SharedArrays()
    array = shared.empty((10,), DType.F32)
    found = shared.find(address(array), 40)
    assert found is not None
    del array
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(found.address.fd)


def test_a_detached_array_is_ordinary_memory_with_its_values() -> None:
    shared = SharedArrays()
    array = shared.empty((100,), DType.I32)
    array[:] = 4
    found = shared.find(address(array), 400)
    assert found is not None
    other = np.frombuffer(Segment.open(found.address).memory, np.int32)[:100]
    shared.detach(address(array) + 40)
    assert shared.find(address(array), 4) is None
    assert shared.released(0) == (1, [found.address.inode])
    array[:50] = 5
    assert (array[50:] == 4).all()
    assert (other == 4).all()
    del array
    gc.collect()
    assert shared.released(0) == (1, [found.address.inode])


def test_of_many_released_segments_the_last_are_known() -> None:
    shared, inodes = SharedArrays(), []
    for _ in range(MAX_RELEASED + 6):
        array = shared.empty((10,), DType.F32)
        found = shared.find(address(array), 40)
        assert found is not None
        inodes.append(found.address.inode)
        del array
    assert shared.released(0) == (MAX_RELEASED + 6, inodes[6:])
    assert shared.released(MAX_RELEASED + 4) == (MAX_RELEASED + 6, inodes[-2:])
    assert shared.released(MAX_RELEASED + 6) == (MAX_RELEASED + 6, [])


def test_too_much_is_refused_with_the_numbers() -> None:
    with pytest.raises(Busy, match="needs .* bytes"):
        SharedArrays().empty((1 << 50,), DType.F32)
